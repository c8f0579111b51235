"""A port for the ranks of a test to meet at."""

import random
import socket


def free_port() -> int:
    """Below those that the system gives to whoever asks for any: nobody else takes it before the ranks do."""
    while True:
        port = random.SystemRandom().randint(15000, 24999)  # runs in this process seed the other
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
