"""`make env` shows pip's output, and when pip fails its own error message comes last, before make's."""

import os
import subprocess
from pathlib import Path

import pytest

from support import REPO


@pytest.mark.slow
def test_a_failing_pip_ends_it_with_its_own_message(tmp_path: Path) -> None:
    # Under `make test-all` these variables make an inner make call itself "make[1]".
    outer_make = {"MAKELEVEL", "MAKEFLAGS", "MFLAGS"}
    environ = {name: value for name, value in os.environ.items() if name not in outer_make} | {"PIP_NO_INDEX": "1"}
    done = subprocess.run(
        ["make", "env", f"VENV={tmp_path}/venv"], cwd=REPO, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "pip install" in done.stdout
    assert "ERROR: No matching distribution found" in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("make: ***")
    assert not (tmp_path / "venv" / ".installed").exists(), "the next make tries again"


def test_no_pip_is_silenced() -> None:
    lines = [line for line in (REPO / "Makefile").read_text().splitlines() if "pip install" in line and "\t" in line]
    assert len(lines) == 4
    assert not [line for line in lines if "--quiet" in line or "--progress-bar off" in line or "|" in line]
