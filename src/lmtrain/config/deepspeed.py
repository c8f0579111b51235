"""DeepSpeed's config: made of the options in trainer.deepspeed, or a user's own file. Imports no torch."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmtrain.config.schema import Config, DeepSpeedConfig, TrainerConfig
from lmtrain.errors import UserError

# What a file may say and the run's config says in its own words, which hold.
OVERRULED = {
    "train_batch_size": "data.global_batch_size", "train_micro_batch_size_per_gpu": "data.micro_batch_size",
    "gradient_accumulation_steps": "data.global_batch_size and data.micro_batch_size",
    "gradient_clipping": "trainer.gradient_clip_val", "optimizer": "optimizer.*", "scheduler": "schedule.*",
    "fp16": "trainer.precision", "bf16": "trainer.precision", "amp": "trainer.precision",
    "torch_autocast": "trainer.precision", "zero_allow_untested_optimizer": "optimizer.*",
    "zero_force_ds_cpu_optimizer": "optimizer.*",
}  # fmt: skip


def engine_config(t: TrainerConfig) -> dict[str, Any]:
    """What DeepSpeed's engine is told.

    Args:
        t: its `auto` values resolved.

    Raises:
        UserError: trainer.deepspeed.config can't be read, or holds what DeepSpeed does not know.
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
    """What trainer.deepspeed.config says and the run does otherwise, each with the key that holds."""
    t = c.trainer
    if t.strategy != "deepspeed" or t.deepspeed.config is None:
        return []
    kinds = {"fp16": ("16-mixed", "16-true"), "bf16": ("bf16-mixed", "bf16-true")}
    agreed = {"train_batch_size": c.data.global_batch_size, "gradient_clipping": t.gradient_clip_val or 0.0,
              "train_micro_batch_size_per_gpu": c.data.micro_batch_size}  # fmt: skip
    found = []
    for name, value in _read(t.deepspeed.config).items():
        off = isinstance(value, dict) and value.get("enabled") is False
        same = value in ("auto", agreed.get(name, _ours(t).get(name))) or t.precision in kinds.get(name, ())
        if name in OVERRULED and not same and not off:
            found.append(f"{name} ({OVERRULED[name]} holds)")
    return found


def _ours(t: TrainerConfig) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,  # for its throughput messages only: the loss is weighted by tokens here
        "gradient_accumulation_steps": 1,
        "gradient_clipping": t.gradient_clip_val or 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": t.precision == "bf16-true"},
    }


def adopt_file(t: TrainerConfig) -> None:
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


def check_options(d: DeepSpeedConfig) -> None:
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


def check_frozen_copy(t: TrainerConfig) -> None:
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


def _read(path: str) -> dict[str, Any]:
    key = f"trainer.deepspeed.config={path}"
    try:
        config = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{key} can't be read: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{key} holds no JSON object")
    auto = next(_autos({name: value for name, value in config.items() if name not in OVERRULED}), None)
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
