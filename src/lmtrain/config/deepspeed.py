"""DeepSpeed's config: made of the options in trainer.deepspeed, or a user's own file. Imports no torch."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmtrain.config.schema_trainer import DeepSpeed, Trainer
from lmtrain.errors import UserError

# What a file must not say, beside what `_ours` sets: the run's config has its own words for it.
NOT_IN_A_FILE = ("optimizer", "scheduler", "train_batch_size", "fp16", "amp", "torch_autocast")


def engine_config(t: Trainer) -> dict[str, Any]:
    """What DeepSpeed's engine is told.

    Args:
        t: its `auto` values resolved.

    Raises:
        UserError: trainer.deepspeed.config can't be read, or says what the run's config says.
    """
    if t.deepspeed.config is not None:
        return _read(t.deepspeed.config, _ours(t)) | _ours(t)
    d, on_cuda = t.deepspeed, t.accelerator == "cuda"
    zero: dict[str, Any] = {"stage": d.stage, "overlap_comm": on_cuda}
    for key, place in (("offload_optimizer", d.offload_optimizer), ("offload_param", d.offload_parameters)):
        if place is not None:
            zero[key] = {"device": place, "pin_memory": on_cuda}
            zero[key] |= {"nvme_path": d.nvme_path} if place == "nvme" else {}
    return {"zero_optimization": zero} | _ours(t)


def _ours(t: Trainer) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # for its throughput messages only: the loss is weighted by tokens here
        "gradient_accumulation_steps": 1,
        "gradient_clipping": t.gradient_clip_val or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": t.precision == "bf16-true"},
    }


def adopt_file(t: Trainer) -> None:
    """Puts what trainer.deepspeed.config says of stage and offload in the options' places, its path absolute.

    So the plan, the checks and config.yaml speak of what runs.

    Raises:
        UserError: see `engine_config` and `check_options`; or parameters go to a folder that isn't there.
    """
    d = t.deepspeed
    if d.config is not None:
        d.config = str(Path(d.config).expanduser().absolute())
        zero = engine_config(t)["zero_optimization"]
        d.stage = zero["stage"]
        d.offload_optimizer, d.offload_parameters = (
            _device(zero, key) for key in ("offload_optimizer", "offload_param")
        )
        paths = [
            zero[key].get("nvme_path") for key in zero if key.startswith("offload_") and _device(zero, key) == "nvme"
        ]
        d.nvme_path = str(next(iter(paths), d.nvme_path))
        check_options(d)
    if "nvme" in (d.offload_optimizer, d.offload_parameters) and not os.access(d.nvme_path, os.W_OK | os.X_OK):
        raise UserError(
            f"trainer.deepspeed.nvme_path={d.nvme_path} is not a folder that can be written to: set it to one on the "
            f"NVMe disk"
        )


def check_options(d: DeepSpeed) -> None:
    """Raises UserError for options that don't go together."""
    if d.stage not in (1, 2, 3):
        raise UserError(f"trainer.deepspeed.stage={d.stage}: 1, 2 or 3 is needed")
    for name, place in (("offload_optimizer", d.offload_optimizer), ("offload_parameters", d.offload_parameters)):
        if place not in (None, "cpu", "nvme"):
            raise UserError(f"trainer.deepspeed.{name}={place}: null, cpu or nvme is needed")
        if place == "nvme" and d.stage != 3:
            raise UserError(f"trainer.deepspeed.{name}=nvme needs trainer.deepspeed.stage=3, or set it to cpu")
    if d.offload_parameters is not None and d.stage != 3:
        raise UserError("trainer.deepspeed.offload_parameters needs trainer.deepspeed.stage=3")


def check_frozen_copy(t: Trainer) -> None:
    """Raises UserError where a model's first values can't be put in the place of the trained ones."""
    zero = engine_config(t)["zero_optimization"] if t.strategy == "deepspeed" else {}
    obstacles = []
    if _device(zero, "offload_param") == "nvme":
        obstacles.append("parameters that lie on NVMe")
    if zero.get("zero_hpz_partition_size", 1) > 1:
        obstacles.append("zero_hpz_partition_size, which keeps parameters twice")
    if obstacles:
        raise UserError(
            f"objective.reference=frozen_copy does not go with {obstacles[0]}: set objective.reference=precomputed"
        )


def _device(zero: dict[str, Any], key: str) -> str | None:
    device = (zero.get(key) or {}).get("device", "none")
    return None if device == "none" else device


def _read(path: str, ours: dict[str, Any]) -> dict[str, Any]:
    key = f"trainer.deepspeed.config={path}"
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{key} can't be read: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{key} holds no JSON object")
    for name in [name for name in ("fp16", "bf16", "amp") if (config.get(name) or {}).get("enabled") is False]:
        del config[name]
    twice = sorted(
        name for name, value in config.items() if name in NOT_IN_A_FILE or (name in ours and value != ours[name])
    )
    if twice:
        raise UserError(
            f"{key} sets {', '.join(twice)}: take it out of the file, the run's own config says it (data.*, "
            f"optimizer.*, schedule.*, trainer.precision, trainer.gradient_clip_val)"
        )
    auto = next(_autos(config), None)
    if auto is not None:
        raise UserError(f'{key}: {auto} is "auto", which DeepSpeed does not know: give a value or take it out')
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage") not in (1, 2, 3):
        raise UserError(f"{key}: zero_optimization.stage has to be 1, 2 or 3; without ZeRO set trainer.strategy=ddp")
    return config


def _autos(value: Any, name: str = "") -> Iterator[str]:
    """Names of values left to transformers' Trainer."""
    if value == "auto":
        yield name
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _autos(inner, f"{name}.{key}".lstrip("."))
