"""The machine in words, and whether it is quiet enough to measure on."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch

import lmtrain

BUSY = 0.3  # load average over a minute; with two cores, a third of one busy shows in every number


def machine() -> str:
    """Processor and cores, or the GPU; no names of hosts."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name(0)}, {os.cpu_count()} CPU cores"
    return f"{_processor()}, {os.cpu_count()} cores"


def setting() -> str:
    """The line under every table."""
    return f"{machine()}, torch {torch.__version__}, python {platform.python_version()}"


def versions() -> dict[str, str]:
    """lmtrain's own is the code's: it need not be installed."""
    return {"lmtrain": lmtrain.__version__} | {name: version(name) for name in ("torch", "lightning", "transformers")}


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def warn_if_busy() -> None:
    if hasattr(os, "getloadavg") and os.getloadavg()[0] > BUSY:
        print(
            f"warning: load average {os.getloadavg()[0]:.1f}: something else is running, and these numbers will not "
            f"be worth much; wait until it is below {BUSY}",
            flush=True,
        )
