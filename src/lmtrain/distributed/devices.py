"""Device settings: what `auto` means on this machine (accelerator, devices, precision, compile); sums over ranks."""

import importlib.util
import os
import platform
import shutil
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
import torch
import torch.distributed
from torch import Tensor

from lmtrain.config.proposers import width_of
from lmtrain.config.schema import Config, TrainerConfig
from lmtrain.config.strategies import SHARING, adopt_file, ranks_per_part
from lmtrain.distributed import precision, ranks, spinning
from lmtrain.errors import UserError


def readers(config: Config) -> int:
    """Returns how many devices, or groups of devices, will read different rows; leaves the `auto` values unresolved.

    The precision, for one, is chosen by the rows that a forward pass has, which may follow from this number.
    """
    layout, t = ranks.find(), config.trainer
    if layout is not None:
        return max(1, layout.per_node * layout.nodes // ranks_per_part(t))
    here = t.devices
    if here == "auto":
        here = torch.cuda.device_count() if t.accelerator != "cpu" and torch.cuda.is_available() else 1
    return max(1, int(here) * t.num_nodes // ranks_per_part(t))


def resolve_auto(config: Config) -> None:
    """Resolves the `auto` values in config.trainer and reads its DeepSpeed file, so that config.yaml says what ran."""
    t = config.trainer
    if t.accelerator in ("auto", "gpu", "cuda"):
        if t.accelerator != "auto" and not torch.cuda.is_available():
            advice = why_not_used() or "set trainer.accelerator=cpu, or install a CUDA build of torch"
            raise UserError(f"trainer.accelerator={t.accelerator}, torch {torch.__version__} sees no CUDA: {advice}")
        t.accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    # How many devices,
    if t.devices == "auto":
        t.devices = torch.cuda.device_count() if t.accelerator == "cuda" else 1
    t.devices = int(t.devices)
    if t.accelerator == "cuda" and t.devices > torch.cuda.device_count():
        raise UserError(f"trainer.devices={t.devices}, but this machine has {torch.cuda.device_count()}")
    # in which precision,
    if t.precision == "auto":
        t.precision = best_precision(t.accelerator, *_products_of(config))
        if t.strategy in SHARING and t.precision == "16-mixed":
            t.precision = "32-true"  # sharded training has no gradient scaler
    if t.strategy == "deepspeed":
        adopt_file(t)
    # compiled or not,
    obstacle = why_not_compiled(t)
    if t.compile == "auto":
        pays_off = (config.budget.minutes or 0) >= _LONG_MINUTES and t.devices == 1 and gains_on_cpu(config)
        t.compile = obstacle is None and (t.accelerator == "cuda" or pays_off)
    elif t.compile and obstacle is not None and t.strategy != "deepspeed":
        raise UserError(f"trainer.compile=true: {obstacle}; trainer.compile=false trains without, slower")
    # and with which activations kept.
    if t.activation_checkpointing == "auto":
        t.activation_checkpointing = False
    if t.activation_checkpointing == "offload" and t.accelerator != "cuda":
        found = "trainer.activation_checkpointing=offload moves activations from a GPU to the host"
        raise UserError(f"{found}: on a CPU set trainer.activation_checkpointing=true")


def why_not_used() -> str | None:
    """Returns why a GPU can't be used, if its driver is too old for torch's CUDA; None if no reason is known."""
    if torch.version.cuda is None or torch.cuda.is_available():
        return None
    try:
        torch.cuda.init()
    except RuntimeError as error:
        if "driver" in str(error) and "too old" in str(error):
            found = f"the NVIDIA driver is too old for this torch, which is built with CUDA {torch.version.cuda}"
            return f"{found}: update it, or install a torch of an older CUDA (nvidia-smi shows the newest that fits)"
    return None


_LONG_MINUTES = 3  # on a CPU, compiling takes 10 to 30 s the first time and saves up to a third of each step


def gains_on_cpu(config: Config) -> bool:
    """Returns whether compiled blocks are faster on a CPU: measured to be so for Llama and LFM2, but not for GPT-2."""
    return getattr(config.model, "family", None) != "gpt2"


def why_not_compiled(t: TrainerConfig) -> str | None:
    """Returns what prevents compiling blocks with these settings on this machine, or None."""
    if t.strategy == "deepspeed" and t.deepspeed.stage == 3:
        return "ZeRO-3 gathers parameters in the middle of a block, which would break up the compiled graph"
    if t.accelerator != "cuda":
        compilers = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
        there = any(map(shutil.which, compilers))
        return None if there else f"there is no C++ compiler ({', '.join(compilers)}): apt install g++, or set CXX"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install triton)"
    compilers = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    if not any(map(shutil.which, compilers)):
        return f"there is no C compiler for Triton ({', '.join(compilers)}): apt install gcc, or set CC"
    major, minor = torch.cuda.get_device_capability()
    if major < 7:
        return f"Triton needs a GPU of compute capability 7.0 or newer (here {major}.{minor})"
    return None


_WORTH_IT = 1.05  # how many times as fast bf16 has to be on a CPU: fp32 is more exact


def best_precision(
    accelerator: str, width: int = precision.WIDTH, tokens: int = precision.TOKENS, cache: Path | None = None
) -> str:
    """Returns the precision for trainer.precision=auto.

    On CUDA that is bf16-mixed if the hardware multiplies bf16 natively, else 16-mixed. On a CPU it is the faster one of
    bf16-mixed and 32-true for products of this width and number of tokens; `cache` keeps what is measured for that.
    """
    if accelerator == "cuda":
        return "bf16-mixed" if torch.cuda.is_bf16_supported(including_emulation=False) else "16-mixed"
    if accelerator != "cpu" or not cpu_multiplies_bf16():
        return "32-true"
    return "bf16-mixed" if precision.speedup_of_bf16(width, tokens, cache) > _WORTH_IT else "32-true"


def _products_of(config: Config) -> tuple[int, int, Path]:
    """Returns the model's width (or a usual one, for a model of the hub), tokens of a forward pass, and the cache."""
    width = getattr(config.model, "hidden_size", None) or width_of(getattr(config.model, "name_or_path", None) or "")
    tokens = config.data.micro_batch_size * config.data.seq_len
    return width or precision.WIDTH, tokens, Path(config.data.cache_dir).expanduser()


def speedup_words(config: Config) -> str:
    """Returns how much faster the precision of a run on a CPU is than the other, if it was measured."""
    if config.trainer.accelerator != "cpu" or config.trainer.precision not in ("32-true", "bf16-mixed"):
        return ""
    faster = precision.kept(*_products_of(config))
    if faster is None:
        return ""
    of_bf16 = config.trainer.precision == "bf16-mixed"
    return f" ({faster if of_bf16 else 1 / faster:.2f} times as fast as {'32-true' if of_bf16 else 'bf16-mixed'} here)"


def cpu_multiplies_bf16() -> bool:
    """Returns whether this CPU has bf16 dot products (AVX512-BF16 or AMX)."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("amx"))


def set_threads(num_threads: int | None, processes: int) -> None:
    """Sets the number of CPU threads of this process; by default, several processes divide the machine's cores."""
    if num_threads is None and processes > 1:
        num_threads = max(1, (os.cpu_count() or 1) // processes)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    spinning.use_threads(torch.get_num_threads())


def device_name(accelerator: str) -> str:
    """Returns a human-readable name of the device."""
    if accelerator == "cuda":
        return torch.cuda.get_device_name(0)
    count = torch.get_num_threads()
    return f"CPU ({platform.machine()}, {count} thread{'s' if count > 1 else ''})"


class DataParallel(NamedTuple):
    """The position of a rank among the ranks that read different rows."""

    size: int  # number of parts that the rows of a step are split into
    rank: int  # index of the part that this rank reads
    copies: int  # number of ranks that compute the same tokens of that part
    slices: int = 1  # number of ranks that share each row of that part, each holding a slice of the tokens


def data_parallel(trainer: pl.Trainer | None) -> DataParallel:
    """Returns the position of this rank. Neighbouring ranks form a group, as in the strategy's device mesh."""
    if trainer is None:
        return DataParallel(1, 0, 1)
    copies = getattr(trainer.strategy, "tensor_parallel_size", 1)
    slices = getattr(trainer.strategy, "context_parallel_size", 1)
    together = copies * slices
    return DataParallel(trainer.world_size // together, trainer.global_rank // together, copies, slices)


def trainer_steps(trainer: pl.Trainer, epoch: int) -> int:
    """Returns how many steps a Trainer trains: max_steps, else max_epochs times the steps of an `epoch`, or one."""
    if trainer.max_steps > 0:
        return trainer.max_steps
    return epoch * max(1, trainer.max_epochs or 1)


def total(trainer: pl.Trainer, sums: Tensor) -> Tensor:
    """Returns sums (floating point) over all rows, given those over this rank's rows; every rank must call it."""
    if trainer.world_size == 1:
        return sums
    summed = sums.clone()
    torch.distributed.all_reduce(summed)  # Lightning's reduce would add a barrier before it
    return summed / data_parallel(trainer).copies


def agreed(trainer: pl.Trainer, counts: Tensor, asked: bool) -> tuple[Tensor, bool]:
    """Returns a step's `counts` summed over all rows, and whether any rank was asked to stop; every rank must call it.

    The hosts wait for each other, but not for their devices.

    Args:
        counts: over this rank's rows, int64 [n] in host memory, like the returned ones.
        asked: whether this rank was asked to stop.
    """
    if trainer.world_size == 1:
        return counts, asked
    # Under a user's own Trainer, Lightning makes an NCCL-only group, which can't reduce tensors in host memory.
    has_hosts = "cpu:" in torch.distributed.get_backend_config()
    summed = torch.cat([counts, torch.tensor([int(asked)], dtype=torch.int64)])
    summed = summed.to("cpu" if has_hosts else trainer.strategy.root_device)
    torch.distributed.all_reduce(summed)
    *total, stops = summed.tolist()
    return torch.tensor(total, dtype=torch.int64) // data_parallel(trainer).copies, stops > 0
