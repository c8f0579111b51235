"""The two ends of the wire of reward=code, in two threads of this process, which takes milliseconds."""

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

from lmtrain.rewards.code_values import Peer


@contextlib.contextmanager
def served(answer: str) -> Iterator[tuple[Peer, dict[str, Any]]]:
    """Yields the end of the tests and the answer's namespace, which a thread serves at the other end."""
    ends = socket.socketpair()
    wires = [end.makefile("rwb") for end in ends]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    exec(answer, namespace)  # noqa: S102
    serving = Peer(wires[0], namespace)

    def serve() -> None:
        with contextlib.suppress(SystemExit, OSError, ValueError):
            while True:
                serving.answer(*serving.receive()[1:])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield Peer(wires[1]), namespace
    finally:
        for end in ends:
            end.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        for closed in (*wires, *ends):
            with contextlib.suppress(OSError):
                closed.close()
