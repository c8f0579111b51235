"""A local stand-in for the Hugging Face Hub, available if a checkout of it lies next to the repository."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import REPO

HUB = REPO.parent / "shared" / "hub"


@contextlib.contextmanager
def serving(home: Path) -> Iterator[dict[str, str]]:
    """Serves within the block; yields the environment for a process that uses it, with an empty HF_HOME."""
    if not (HUB / "serve.py").exists():
        pytest.skip(f"needs the loopback hub, which is not in {HUB}")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    alias = "datasets/Salesforce/wikitext=local/wikitext-standin"
    server = subprocess.Popen([sys.executable, str(HUB / "serve.py"), "--port", str(port), "--alias", alias, "-q"])
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            if time.monotonic() > deadline or server.poll() is not None:
                pytest.fail("the loopback hub did not start")
            time.sleep(0.05)
        environ = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
        yield {**environ, "HF_ENDPOINT": f"http://127.0.0.1:{port}", "HF_HOME": str(home)}
    finally:
        server.terminate()
        server.wait()
