"""A description of the machine, and a check that it is idle enough for measurements."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import torch

import lmtrain

BUSY = 0.3  # load average over a minute; on two cores, a third of one core already affects every measurement


def machine() -> str:
    """Returns the processor and its cores, or the GPU, without host names."""
    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name(0)}, {os.cpu_count()} CPU cores"
    return f"{_processor()}, {os.cpu_count()} cores"


def setting() -> str:
    """Returns the line below every table."""
    return f"{machine()}, torch {torch.__version__}, python {platform.python_version()}"


def versions() -> dict[str, str]:
    """Returns package versions; lmtrain's comes from the source, so it need not be installed."""
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
