"""Starts ranks of torch's gloo, once more where native code has ended one."""

import re
import subprocess
import warnings
from collections.abc import Callable, Mapping


def run_ranks(
    command: list[str], env: Mapping[str, str] | None = None, clear: Callable[[], None] = lambda: None
) -> subprocess.CompletedProcess[str]:
    """What the command gave; `clear` removes what a first try has left.

    Once in several hundred launches glibc ended a rank over a broken heap ("unaligned tcache chunk"), in native code
    under gloo; valgrind and glibc's own checks found nothing. Said, and tried once more.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    if re.search(r"exitcode +: -(6|11)\b|ended by SIG(ABRT|SEGV)\b", done.stderr):  # torchrun's words, lmtrain's
        warnings.warn(f"a rank was ended by a signal of its own: {done.stderr[-5000:]}", stacklevel=2)
        clear()
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    return done
