"""Asks early, in the background, what inductor has to know of this CPU and its compiler before it compiles."""

import contextlib
import functools
import os
import threading

from lmtrain.config.schema import Config


def probe_early(config: Config) -> None:
    """Starts inductor's probes of the CPU in a thread, once per process, if blocks will be compiled for it.

    Inductor compiles ten small programs to learn which vector instructions work, a fifth of the time to a first step
    that has to be compiled (benchmarks/RESULTS.md). Here they run beside reading data and building the model. Inductor
    keeps each under a lock in its cache, so that a step that comes before they are done waits for the rest only.
    """
    if config.trainer.compile and config.trainer.accelerator == "cpu":
        _start()


@functools.cache
def _start() -> None:
    # Imported before the thread starts: torch's modules import each other in circles, which two threads must not enter.
    import torch._inductor.codecache
    import torch._inductor.cpp_builder
    import torch._inductor.cpu_vec_isa  # noqa: F401

    threading.Thread(target=_probe, name="inductor's probes", daemon=True).start()


def _probe() -> None:
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    # On Linux the priority of a thread is its own, and that of the compilers it starts: steps are timed meanwhile.
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + 10)
    with contextlib.suppress(Exception):  # the first compiled step asks again, and shows what is wrong
        pick_vec_isa()
