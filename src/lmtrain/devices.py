"""What `auto` means on this machine: accelerator, number of devices, precision, compile."""

import os
import platform

import torch

from lmtrain.errors import UserError
from lmtrain.schema import Config
from lmtrain.strategies.rules import SHARING
from lmtrain.strategies.zero_config import adopt_file


def resolve_auto(config: Config) -> None:
    """Replaces what config.trainer leaves to this machine, or to a file, by what it is: config.yaml says what ran."""
    t = config.trainer
    if t.accelerator in ("auto", "gpu", "cuda"):
        if t.accelerator != "auto" and not torch.cuda.is_available():
            raise UserError(
                f"trainer.accelerator={t.accelerator}, but torch {torch.__version__} sees no CUDA device here: "
                f"set trainer.accelerator=cpu, or install a CUDA build of torch"
            )
        t.accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if t.devices == "auto":
        t.devices = torch.cuda.device_count() if t.accelerator == "cuda" else 1
    t.devices = int(t.devices)
    if t.accelerator == "cuda" and t.devices > torch.cuda.device_count():
        raise UserError(f"trainer.devices={t.devices}, but this machine has {torch.cuda.device_count()}")
    if t.precision == "auto":
        t.precision = best_precision(t.accelerator)
        if t.strategy in SHARING and t.precision == "16-mixed":
            t.precision = "32-true"  # parts have no gradient scaler
    if t.strategy == "deepspeed":
        adopt_file(t)
    if t.compile == "auto":
        t.compile = t.accelerator == "cuda"
    if t.activation_checkpointing == "auto":
        t.activation_checkpointing = False


def best_precision(accelerator: str) -> str:
    """bf16-mixed where the hardware multiplies bf16 natively, else 32-true (on CUDA without bf16: 16-mixed)."""
    if accelerator == "cuda":
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed"
    return "bf16-mixed" if accelerator == "cpu" and cpu_multiplies_bf16() else "32-true"


def cpu_multiplies_bf16() -> bool:
    """Whether this CPU has bf16 dot products (AVX512-BF16 or AMX)."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("amx"))


def set_threads(num_threads: int | None, processes: int) -> None:
    """CPU threads of this process: as asked, else this machine's cores shared out over its processes."""
    if num_threads is None and processes > 1:
        num_threads = max(1, (os.cpu_count() or 1) // processes)
    if num_threads is not None:
        torch.set_num_threads(num_threads)


def device_name(accelerator: str) -> str:
    """What people call the device."""
    if accelerator == "cuda":
        return torch.cuda.get_device_name(0)
    count = torch.get_num_threads()
    return f"CPU ({platform.machine()}, {count} thread{'s' if count > 1 else ''})"
