"""Starts gloo ranks, and starts them once more if native code has ended one."""

import os
import re
import subprocess
import warnings
from collections.abc import Callable, Mapping

import forked

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run_ranks(
    args: list[str], env: Mapping[str, str] | None = None, clear: Callable[[], None] = lambda: None
) -> subprocess.CompletedProcess[str]:
    """Returns the result of `python ARGS`, with forked ranks; `clear` removes what a failed first attempt left.

    Once in several hundred launches glibc aborted a rank because of a broken heap ("unaligned tcache chunk"), in native
    code below gloo; valgrind and glibc's own checks found nothing. It is reported as a warning and tried once more.
    """
    done = forked.run_python(args, env or os.environ)
    if re.search(r"exitcode +: -(6|11)\b|ended by SIG(ABRT|SEGV)\b", done.stderr):  # torchrun's wording, lmtrain's
        warnings.warn(f"a rank was ended by a signal of its own: {done.stderr[-5000:]}", stacklevel=2)
        clear()
        done = forked.run_python(args, env or os.environ)
    return done
