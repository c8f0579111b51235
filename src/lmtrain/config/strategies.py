"""Compatibility checks for strategies and precisions, and DeepSpeed's config. Imports neither torch nor lightning.

DeepSpeed's config is built from the options in trainer.deepspeed or read from a user's file.
"""

import json
import os
import re
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lmtrain.config.aliases import DEEPSPEED as OVERRULED
from lmtrain.config.override_text import leaves_of
from lmtrain.config.schema import FP8, Config, DeepSpeedConfig, TrainerConfig
from lmtrain.errors import UserError

SHARING = ("fsdp", "fsdp_tp", "deepspeed")  # shard parameters, gradients or optimizer state over the devices


def torch_is_at_least(major: int, minor: int) -> bool:
    return tuple(map(int, version("torch").split(".")[:2])) >= (major, minor)


def outside_fp8(precision: str) -> str:
    """Returns the precision of everything outside the fp8 layers: bf16-mixed for fp8, else `precision` itself."""
    return "bf16-mixed" if precision == FP8 else precision


def spell_out(t: TrainerConfig) -> None:
    """Replaces Lightning's compound strategy names, such as deepspeed_stage_3_offload, by the equivalent keys."""
    if t.strategy == "ddp_find_unused_parameters_false":
        t.strategy = "ddp"
    found = re.fullmatch(r"deepspeed_stage_([123])(_offload)?|deepspeed_stage_(3)_offload_(nvme)", t.strategy)
    if found is None:
        return
    t.strategy, d = "deepspeed", t.deepspeed
    d.stage = int(found[1] or found[3])
    place = found[4] or ("cpu" if found[2] else None)
    if place is not None:
        d.offload_optimizer = place
        d.offload_parameters = place if d.stage == 3 else None


def ranks_per_part(t: TrainerConfig) -> int:
    """Returns how many ranks read the same rows: the size of a tensor-parallel or context-parallel group."""
    return tensor_parallel(t) * context_parallel(t)


def tensor_parallel(t: TrainerConfig) -> int:
    """Returns the tensor-parallel size: how many ranks share each layer."""
    return t.fsdp.tensor_parallel_size if t.strategy == "fsdp_tp" else 1


def context_parallel(t: TrainerConfig) -> int:
    """Returns the context-parallel size: how many ranks share each row."""
    return t.fsdp.context_parallel_size if t.strategy == "fsdp" else 1


def check_strategy(c: Config) -> None:
    """Raises UserError, with an alternative, for the first setting incompatible with trainer.strategy.

    Pairs of settings that don't go together are listed in clashes.yaml.
    """
    t, stored = c.trainer, c.peft.quantization
    if t.strategy == "deepspeed":
        _check_options(t.deepspeed)
    if t.strategy == "fsdp_tp":
        heads = ("num_attention_heads", "num_key_value_heads")  # models/split.py checks the model's layers
        _check_heads(c, "trainer.fsdp.tensor_parallel_size", tensor_parallel(t), heads)
    if context_parallel(t) > 1:
        _check_context_parallel(c)
    if t.strategy == "fsdp" and stored is not None and not torch_is_at_least(2, 13):
        found = f"peft.quantization={stored} with trainer.strategy=fsdp needs torch 2.13 (here {version('torch')})"
        raise UserError(f"{found}: upgrade torch, or set trainer.strategy=ddp")


def check_devices(t: TrainerConfig) -> None:
    """Raises UserError if the tensor- or context-parallel size doesn't divide the devices of a node (not auto)."""
    size, devices = ranks_per_part(t), int(t.devices)
    if devices % size:
        splits_layers = t.strategy == "fsdp_tp"
        key = f"trainer.fsdp.{'tensor' if splits_layers else 'context'}_parallel_size"
        fits = [f"{key}={d}" for d in range(2, devices + 1) if devices % d == 0]
        if not fits:
            fits = [f"trainer.devices={size}"]
        elif splits_layers:
            fits.append("trainer.strategy=fsdp")
        raise UserError(f"{key}={size} does not divide trainer.devices={devices} of a node: set {' or '.join(fits)}")


def _check_heads(c: Config, key: str, size: int, names: Sequence[str]) -> None:
    """Raises UserError if heads can't be divided among the devices of a group."""
    for name in names:
        heads = getattr(c.model, name, None)
        if heads is not None and heads % size:
            found = f"{key}={size} does not divide model.{name}={heads}"
            raise UserError(f"{found}: each device of a group computes attention of whole heads. Change one of the two")


def _check_context_parallel(c: Config) -> None:
    """Raises UserError if the config alone rules out context parallelism; models/context.py checks the model."""
    size, key = c.trainer.fsdp.context_parallel_size, "trainer.fsdp.context_parallel_size"
    _check_heads(c, key, size, ("num_attention_heads",))
    lengths = {"data.seq_len": c.data.seq_len, "data.curriculum.start_length": c.data.curriculum.start_length}
    for name, length in lengths.items():
        if length is not None and length % size and c.data.packing != "off":
            found = f"{key}={size} does not divide {name}={length}"
            raise UserError(f"{found}: each device has equally many tokens. Set {name}={-(-length // size) * size}")


def engine_config(t: TrainerConfig) -> dict[str, Any]:
    """Returns the config dict for DeepSpeed's engine.

    Args:
        t: the trainer's config, with its `auto` values resolved.

    Raises:
        UserError: trainer.deepspeed.config can't be read, or holds values that DeepSpeed doesn't accept.
    """
    if t.deepspeed.config is not None:
        said = _read(t.deepspeed.config)
        return {name: value for name, value in said.items() if name not in OVERRULED} | _ours(t)
    d, on_cuda = t.deepspeed, t.accelerator == "cuda"
    zero: dict[str, Any] = {"stage": d.stage, "overlap_comm": on_cuda}
    for key, place in (("offload_optimizer", d.offload_optimizer), ("offload_param", d.offload_parameters)):
        if place is not None:
            zero[key] = {"device": place, "pin_memory": on_cuda}
            zero[key] |= {"nvme_path": d.nvme_path} if place == "nvme" else {}
    return {"zero_optimization": zero} | _ours(t)


def overruled(c: Config) -> list[str]:
    """Returns the ignored fields of trainer.deepspeed.config that differ from the run, with the keys used instead."""
    t = c.trainer
    if t.strategy != "deepspeed" or t.deepspeed.config is None:
        return []
    kinds = {"fp16": ("16-mixed", "16-true"), "bf16": ("bf16-mixed", "bf16-true")}
    sizes = {"train_batch_size": c.data.global_batch_size, "train_micro_batch_size_per_gpu": c.data.micro_batch_size}
    agreed = _ours(t) | sizes
    found = []
    for name, value in _read(t.deepspeed.config).items():
        off = isinstance(value, dict) and value.get("enabled") is False
        same = value in ("auto", agreed.get(name)) or t.precision in kinds.get(name, ())
        if name in OVERRULED and not same and not off:
            found.append(f"{name} ({OVERRULED[name]} holds)")
    return found


def _ours(t: TrainerConfig) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # for its throughput messages only: lmtrain weights the loss by tokens
        "gradient_accumulation_steps": 1,
        "gradient_clipping": t.gradient_clip_val or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": t.precision == "bf16-true"},
    }


def adopt_file(t: TrainerConfig) -> None:
    """Copies stage and offload settings from trainer.deepspeed.config to the options, and makes its path absolute.

    The plan, the checks and config.yaml then describe what actually runs.

    Raises:
        UserError: see `engine_config` and `_check_options`; or nvme_path is not a writable folder.
    """
    d = t.deepspeed
    if d.config is not None:
        d.config = str(Path(d.config).expanduser().absolute())
        zero = engine_config(t)["zero_optimization"]
        d.stage = zero["stage"]
        d.offload_optimizer = _device(zero, "offload_optimizer")
        d.offload_parameters = _device(zero, "offload_param")
        on_nvme = [zero[key] for key in ("offload_optimizer", "offload_param") if _device(zero, key) == "nvme"]
        paths = [offload.get("nvme_path") for offload in on_nvme]
        d.nvme_path = str(next(filter(None, paths), d.nvme_path))
        _check_options(d)
    if "nvme" in (d.offload_optimizer, d.offload_parameters) and not os.access(d.nvme_path, os.W_OK | os.X_OK):
        raise UserError(f"trainer.deepspeed.nvme_path={d.nvme_path} is not writable: name a folder on the NVMe disk")


def _check_options(d: DeepSpeedConfig) -> None:
    """Raises UserError for invalid or incompatible options."""
    for name, place in (("offload_optimizer", d.offload_optimizer), ("offload_parameters", d.offload_parameters)):
        if place not in (None, "cpu", "nvme"):
            raise UserError(f"trainer.deepspeed.{name}={place}: null, cpu or nvme is needed")
        if d.stage != 3 and (place == "nvme" or (place and name == "offload_parameters")):
            raise UserError(f"trainer.deepspeed.{name}={place} needs trainer.deepspeed.stage=3")


def check_frozen_copy(t: TrainerConfig) -> None:
    """Raises UserError if the initial parameters can't be swapped in for the trained ones (reference=frozen_copy)."""
    zero = engine_config(t)["zero_optimization"] if t.strategy == "deepspeed" else {}
    on_nvme = _device(zero, "offload_param") == "nvme"
    if on_nvme or zero.get("zero_hpz_partition_size", 1) > 1:
        what = "parameters that lie on NVMe" if on_nvme else "zero_hpz_partition_size, which keeps parameters twice"
        raise UserError(f"objective.reference=frozen_copy does not go with {what}: set objective.reference=precomputed")


def _device(zero: dict[str, Any], key: str) -> str | None:
    device = (zero.get(key) or {}).get("device", "none")
    return None if device == "none" else device


def _read(path: str) -> dict[str, Any]:
    key = f"trainer.deepspeed.config={path}"
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{key} can't be read: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{key} holds no JSON object")
    read = {name: value for name, value in config.items() if name not in OVERRULED}
    auto = next((name for name, value in leaves_of(read) if value == "auto"), None)  # transformers' Trainer fills it in
    if auto is not None:
        raise UserError(f'{key}: {auto} is "auto", which DeepSpeed does not know: give a value or take it out')
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage") not in (1, 2, 3):
        raise UserError(f"{key}: zero_optimization.stage has to be 1, 2 or 3; without ZeRO set trainer.strategy=ddp")
    return config
