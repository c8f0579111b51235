"""Numbers of the machine, for the records: memory of this process, and a GPU's load where NVML tells."""

import functools
import importlib.util
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from lmtrain import terminal
from lmtrain.errors import first_line
from lmtrain.objectives.parts import Definition

MACHINE = {
    "host_memory_gib": Definition(
        "GiB", "rank 0, now", "resident memory of the process (outside Linux the most there was)"
    ),
    "gpu_utilization": Definition("share", "rank 0's GPU, now", "time in which a kernel ran, as NVML has it"),
    "gpu_watts": Definition("W", "rank 0's GPU, now", "power drawn, as NVML has it"),
}

_PAGES = Path("/proc/self/statm")


def machine_numbers(device: torch.device) -> dict[str, float]:
    """host_memory_gib: resident, of this process. On CUDA gpu_utilization (0 to 1) and gpu_watts, with nvidia-ml-py.

    What NVML can't read on this device (parts of a GPU under MIG, virtual GPUs) is left out, and that is said once.
    """
    numbers = {"host_memory_gib": round(resident_bytes() / 2**30, 3)}
    if device.type == "cuda" and has_nvml():
        for name, read in _NVML.items():
            try:
                if name not in _unread:
                    numbers[name] = read(device)
            except Exception as error:  # NVML's share no base class with torch's
                _unread.add(name)
                terminal.console().print(f"note: {name} is left out of the records: {first_line(error)}")
    return numbers


_NVML: dict[str, Callable[[torch.device], float]] = {
    "gpu_utilization": lambda device: torch.cuda.utilization(device) / 100,
    "gpu_watts": lambda device: torch.cuda.power_draw(device) / 1000,
}
_unread: set[str] = set()  # what this process has failed to read


@functools.cache
def has_nvml() -> bool:
    """Whether the package that reads NVML is installed."""
    return importlib.util.find_spec("pynvml") is not None


def resident_bytes() -> int:
    """Now on Linux; elsewhere the most there was."""
    if _PAGES.exists():
        return int(_PAGES.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return peak_resident_bytes()


def peak_resident_bytes() -> int:
    """The most this process held; the system counts KiB, macOS bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
