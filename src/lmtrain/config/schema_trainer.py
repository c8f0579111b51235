"""The typed config of the trainer: devices, strategies, precision, intervals. See schema.py."""

from dataclasses import dataclass
from typing import Annotated

from lmtrain.config.constraints import (
    MACHINE,
    MODEL,
    RATE,
    SHOWN,
    TRAJECTORY,
    VALIDATION,
    at_least,
    choice,
    not_negative,
)
from lmtrain.config.lightning_arguments import LightningConfig

PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true", "fp8")
STRATEGIES = ("auto", "ddp", "fsdp", "fsdp_tp", "deepspeed", "ddp_find_unused_parameters_true")
FP8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")  # torchao's names


@dataclass(kw_only=True)
class FsdpConfig:
    reshard_after_forward: Annotated[bool, MACHINE]
    cpu_offload: Annotated[bool, MACHINE]
    copy_per_node: Annotated[bool, MACHINE]
    reduce_each_micro_batch: Annotated[bool, MACHINE]
    sharded_checkpoint: Annotated[bool, MACHINE]
    tensor_parallel_size: Annotated[int, MACHINE]  # fsdp_tp only


@dataclass(kw_only=True)
class DeepSpeedConfig:
    stage: Annotated[int, MACHINE]
    offload_optimizer: Annotated[str | None, MACHINE]  # cpu or nvme
    offload_parameters: Annotated[str | None, MACHINE]
    nvme_path: Annotated[str, MACHINE]
    config: Annotated[str | None, MACHINE]


@dataclass(kw_only=True)
class TrainerConfig(LightningConfig):
    max_steps: Annotated[int | None, RATE, at_least(1)]
    max_epochs: Annotated[int | None, RATE, at_least(1)]
    accelerator: Annotated[str, MACHINE, choice("auto", "cpu", "gpu", "cuda")]
    devices: Annotated[int | str, MACHINE]
    num_nodes: Annotated[int, MACHINE, at_least(1)]
    max_restarts: Annotated[int, SHOWN, not_negative]
    strategy: Annotated[str, MACHINE, choice(*STRATEGIES)]
    fsdp: FsdpConfig
    deepspeed: DeepSpeedConfig
    precision: Annotated[str, MODEL, choice(*PRECISIONS)]  # a reference is computed in it too
    fp8_recipe: Annotated[str, TRAJECTORY, choice(*FP8_RECIPES)]  # of precision=fp8
    val_check_interval: Annotated[int | None, SHOWN, at_least(1)]
    val_before_training: Annotated[bool, SHOWN]
    limit_val_batches: Annotated[int | None, VALIDATION, at_least(1)]
    log_every_n_steps: Annotated[int, SHOWN, at_least(1)]
    save_every_n_steps: Annotated[int | None, SHOWN, at_least(1)]
    gradient_clip_val: Annotated[float | None, TRAJECTORY]
    max_bad_steps: Annotated[int, RATE, at_least(1)]
    spike_factor: Annotated[float | None, RATE]
    spike_window: Annotated[int, RATE, at_least(1)]
    float32_matmul_precision: Annotated[str, MACHINE, choice("highest", "high", "medium")]
    deterministic: Annotated[bool | str, MACHINE, choice("warn")]
    compile: Annotated[bool | str, MACHINE, choice("auto")]
    activation_checkpointing: Annotated[bool | str, MACHINE, choice("auto")]
    num_threads: Annotated[int | None, MACHINE, at_least(1)]
