"""trainer.strategy=deepspeed: ZeRO stages 1 to 3 (Rajbhandari et al. 2020, arXiv:1910.02054) by DeepSpeed's engine.

The engine wraps the language model, not the LightningModule. Its forward, backward and step are called for each
micro-batch, as in its documentation; ZeRO-3 counts micro-batches by these calls. Parameters stay fp32 and autocast
chooses the precision, as under every other strategy. Checkpoints consist of the same files as those of one device.
"""

import copy
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lmtrain.adapters.trainable import without_frozen
from lmtrain.config.schema import TrainerConfig
from lmtrain.config.strategies import engine_config
from lmtrain.distributed import process_group as world
from lmtrain.distributed.dtensor import full_shape
from lmtrain.errors import UserError, needing
from lmtrain.models.blocks import decoder_blocks
from lmtrain.strategies.lightning_private import process_group_backend, say_moved
from lmtrain.strategies.placement import MapsCheckpoints, Placement
from lmtrain.strategies.sharding import RELEASE, outside, spread

ON_CPU = "LMTRAIN_DEEPSPEED_ON_CPU"  # environment variable of tests: DeepSpeed runs on a CPU, slowly


class DeepSpeedStrategy(Placement, MapsCheckpoints, DDPStrategy):
    """A strategy that takes ranks, process group and data from DDP, and handles parameters with DeepSpeed's engine."""

    steps_itself = True

    engine: Any

    def __init__(self, t: TrainerConfig) -> None:
        if t.accelerator == "cpu" and ON_CPU not in os.environ:
            raise UserError("trainer.strategy=deepspeed needs CUDA devices: trainer.strategy=fsdp shards on CPUs")
        with needing("deepspeed", "trainer.strategy=deepspeed"):
            import deepspeed  # noqa: F401
        super().__init__()
        # DeepSpeed calls collectives by their deprecated names at every step.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
        self.config, self.stage = engine_config(t), t.deepspeed.stage
        _check_known(self.config, t.deepspeed.config)
        if "nvme" in (t.deepspeed.offload_optimizer, t.deepspeed.offload_parameters):
            _check_nvme()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def configure_ddp(self) -> None:
        """Does nothing, because the engine replaces DistributedDataParallel."""

    def place(self, objective: Any) -> None:
        """Distributes the first rank's weights to all ranks: full copies, or shards under ZeRO-3."""
        self.precision_plugin.convert_module(objective)
        if self.stage < 3:
            spread(objective.modules(), self.root_device)
            return
        connect(process_group_backend(self), self.root_device)
        model = objective.model
        partition(model, decoder_blocks(model.model), self.root_device, self.config)

    def model_to_device(self) -> None:
        """Only records the device in the module; `place` has moved the parameters."""
        assert self.lightning_module is not None
        say_moved(self.lightning_module, self.root_device)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        import deepspeed

        connect(process_group_backend(self), self.root_device)
        module: Any = self.lightning_module
        model = module.model
        (optimizer,) = self.optimizers
        # Kept, because ZeRO replaces the optimizer's parameters by flat partitions.
        self.trained = [p for group in optimizer.param_groups for p in group["params"]]
        self.groups = optimizer.state_dict()["param_groups"]
        if self.stage == 3:
            for parameter in model.model.get_output_embeddings().parameters():
                # The loss reads it outside the module that owns it.
                deepspeed.zero.register_external_parameter(model, parameter)
        self.engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=self.trained,
            config=self.config,
            dist_init_required=False,
        )
        world.equal_patience()
        module.call_model = self._through_engine(model, model.forward)
        model.log_probs = self._through_engine(model, model.log_probs)
        if self.stage == 3:
            setattr(model, RELEASE, self.engine.optimizer.empty_partition_cache)

    def _through_engine(self, model: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps `method` of the model so that it runs as the forward of the engine, the only method the engine calls.

        The engine disables CUDA's autocast around its forward (it has its own mixed precision), so the wrapper enters
        autocast again.
        """

        def in_precision(*args: Any, **kwargs: Any) -> Any:
            with self.precision_plugin.forward_context():
                return method(*args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            model.forward = in_precision
            try:
                return self.engine(*args, **kwargs)
            finally:
                del model.forward

        return call

    def sync_gradients(self, model: nn.Module, last: bool) -> None:
        self.engine.set_gradient_accumulation_boundary(last)

    def backward(self, closure_loss: Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> Tensor:
        self.engine.backward(closure_loss)
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        result = closure()
        self.engine.step()
        return result

    def grad_norm(self) -> Tensor:
        return torch.as_tensor(self.engine.get_global_grad_norm(), dtype=torch.float32, device=self.root_device)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_fp32_param

        module = self.lightning_module
        assert module is not None
        whole: dict[str, Tensor] = {}
        seen: dict[int, Tensor] = {}
        for name, tensor in without_frozen(module, module.state_dict(keep_vars=True)).items():
            if id(tensor) not in seen:
                full = safe_get_full_fp32_param(tensor) if isinstance(tensor, nn.Parameter) else tensor
                seen[id(tensor)] = full.detach().to("cpu", copy=True) if self.is_global_zero else tensor
            whole[name] = seen[id(tensor)]
        return whole if self.is_global_zero else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Returns the state dict that torch's optimizer would have on one device, on rank 0; {} on other ranks."""
        from deepspeed.utils import safe_get_full_optimizer_state

        flat: dict[str, Any] = next(iter(optimizer.state.values()), {})
        self._link_states()
        state: dict[int, dict[str, Any]] = {}
        for index, parameter in enumerate(self.trained):
            full = {k: safe_get_full_optimizer_state(parameter, k) for k, v in flat.items() if k != "step"}
            if self.is_global_zero and flat:
                state[index] = {k: v.detach().to("cpu", copy=True).view(full_shape(parameter)) for k, v in full.items()}
                state[index] |= {"step": flat["step"].detach().cpu().clone()} if "step" in flat else {}
        groups = [
            {key: kept["params"] if key == "params" else group[key] for key in kept}
            for group, kept in zip(optimizer.param_groups, self.groups, strict=True)
        ]
        return {"state": state, "param_groups": groups} if self.is_global_zero else {}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        from deepspeed import zero
        from deepspeed.utils import safe_set_full_fp32_param

        module = self.lightning_module
        assert module is not None
        own = module.state_dict(keep_vars=True)
        for name, value in checkpoint["state_dict"].items():
            if isinstance(own[name], nn.Parameter):
                # First the parameter used in the forward, then the fp32 copy that the optimizer updates.
                with zero.GatheredParameters([own[name]], modifier_rank=0, enabled=self.stage == 3):
                    own[name].data.copy_(value)
                safe_set_full_fp32_param(own[name], value.to(self.root_device, torch.float32, copy=True))
            else:
                own[name].copy_(value)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        (optimizer,), (saved,) = self.optimizers, checkpoint["optimizer_states"]
        zero = self.engine.optimizer
        flat = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        first = next(iter(saved["state"].values()))
        for i, piece in enumerate(flat):  # ZeRO creates the state at the first step, which is too late here
            swapped = self.stage == 3 and zero._swappable_optimizer_subgroup(i)  # a piece on NVMe is empty
            if swapped:
                zero._optimizer_states_and_gradient_swap_in(i)
            empty = {k: v.clone() if k == "step" else torch.zeros_like(piece) for k, v in first.items()}
            optimizer.state[piece] = empty
            if swapped:
                zero._optimizer_states_and_gradient_swap_out(i)
        self._link_states()
        for index, parameter in enumerate(self.trained):
            for key, value in saved["state"][index].items():
                if key != "step":
                    safe_set_full_optimizer_state(parameter, value.to(self.root_device, copy=True), key)

    def _link_states(self) -> None:
        """Links parameters to their optimizer state. DeepSpeed itself does it when only the first group has stepped and
        the other groups have no state yet."""
        if self.stage < 3:
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()


def _check_known(config: dict[str, Any], file: str | None) -> None:
    """Raises UserError for keys and values that DeepSpeed refuses."""
    from deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
    from pydantic import ValidationError

    try:
        DeepSpeedConfig(copy.deepcopy(config))
    except (DeepSpeedConfigError, ValidationError, AssertionError) as error:
        words = error
        if isinstance(error, ValidationError):
            words = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise UserError(f"DeepSpeed refuses trainer.deepspeed{f'.config={file}' if file else ''}: {words}") from None


def _check_nvme() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        found = "offloading to nvme needs DeepSpeed's async_io, and libaio was not found"
        folders = "name its folders in CPATH, LIBRARY_PATH and LD_LIBRARY_PATH"
        raise UserError(f"{found}: apt install libaio-dev g++, or {folders}, or offload to cpu")


def connect(backend: str, device: torch.device) -> None:
    """Makes DeepSpeed use the existing process group, or creates one."""
    import deepspeed

    if device.type == "cpu":  # skip its own collectives, which take a minute to compile: gloo's suffice
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)


def partition(model: nn.Module, blocks: Sequence[nn.Module], device: torch.device, config: dict[str, Any]) -> None:
    """Turns each parameter into this rank's shard of the first rank's value, and copies the first rank's buffers.

    The other ranks may have the model on the meta device: none of them ever holds more than its shards and one block,
    and the first rank frees what it has distributed. Parameters remain the same objects, so an optimizer that was built
    on them stays valid.

    Args:
        blocks: modules of `model` that share no parameters with the rest of it.
        device: this rank's device.
        config: DeepSpeed's config, which says where offloaded shards are kept.
    """
    import deepspeed

    first: Any = None  # the first ZeRO parameter, whose methods convert the others
    for group in [*(list(block.modules()) for block in blocks), outside(model, blocks)]:
        spread(group, device)
        parameters = [p for module in group for p in module.parameters(recurse=False)]
        if first is None and parameters:
            first = parameters[0]
            deepspeed.zero.Init(module=nn.ParameterList([first]), config_dict_or_path=config)
        for parameter in parameters:
            first.convert_to_zero_parameters(param_list=[parameter])  # no-op if it is one already
