"""How long OpenMP's threads spin at a barrier; read once by its runtime, when torch is loaded.

libgomp's default, 300,000 rounds (milliseconds), burns what another program on the machine needs, and what the thread
that is waited for needs too: beside one busy process on two cores a step took 17 times as long.
"""

import os
from collections.abc import MutableMapping

ROUNDS = "1000"  # tens of microseconds; what libgomp takes itself where it knows of more threads than cores
_OF_THE_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit(environ: MutableMapping[str, str] = os.environ) -> None:
    """Before torch is imported: for this process and those it starts, unless the user has chosen for himself."""
    if not any(name in environ for name in _OF_THE_USER):
        environ["GOMP_SPINCOUNT"] = ROUNDS
