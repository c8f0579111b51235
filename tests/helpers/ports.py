"""A free port for the rendezvous of a test's ranks."""

import random
import socket


def free_port() -> int:
    """Returns a free port below the ephemeral range, so that no other process is given it before the ranks bind it."""
    while True:
        port = random.SystemRandom().randint(15000, 24999)  # runs in this process seed the global generator
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
