"""Builds the Lightning strategy that trainer.strategy names."""

from lightning.pytorch.strategies import Strategy

from lmtrain.config.schema import TrainerConfig
from lmtrain.config.strategies import outside_fp8
from lmtrain.strategies.ddp import DDPStrategy


def build_strategy(t: TrainerConfig) -> str | Strategy:
    """The strategy of a config whose `auto` values are resolved.

    Raises:
        UserError: deepspeed without the package, without CUDA, or with options it can't use.
    """
    processes = int(t.devices) * t.num_nodes
    if (t.strategy == "auto" or t.strategy.startswith("ddp")) and processes > 1:
        return DDPStrategy(find_unused_parameters=t.strategy.endswith("_true"))
    if t.strategy == "fsdp":
        from lmtrain.strategies.fsdp import FSDPStrategy

        return FSDPStrategy(t.fsdp, outside_fp8(t.precision), processes, t.accelerator)
    if t.strategy == "fsdp_tp":
        from lmtrain.strategies.tensor_parallel import TensorParallelStrategy

        return TensorParallelStrategy(t.fsdp, t.precision, processes, t.accelerator)
    if t.strategy == "deepspeed":
        from lmtrain.strategies.deepspeed import DeepSpeedStrategy, refuse_on_cpu

        refuse_on_cpu(t.accelerator)
        return DeepSpeedStrategy(t)
    return t.strategy
