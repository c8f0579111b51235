"""Numbers of the machine, for the records: memory of this process, and a GPU's load where NVML tells."""

import functools
import importlib.util
import os
import resource
import sys
from pathlib import Path

import torch

_PAGES = Path("/proc/self/statm")


def machine_numbers(device: torch.device) -> dict[str, float]:
    """host_memory_gib: resident, of this process. On CUDA gpu_utilization (0 to 1) and gpu_watts, with nvidia-ml-py."""
    numbers = {"host_memory_gib": round(resident_bytes() / 2**30, 3)}
    if device.type == "cuda" and has_nvml():
        numbers["gpu_utilization"] = torch.cuda.utilization(device) / 100
        numbers["gpu_watts"] = torch.cuda.power_draw(device) / 1000
    return numbers


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
