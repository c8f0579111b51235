"""trainer.strategy=deepspeed: ZeRO stages 1 to 3 (Rajbhandari et al. 2020, arXiv:1910.02054) by DeepSpeed's engine.

The engine wraps the language model, not the LightningModule: its forward, backward and step are called as its
documentation does for each micro-batch, which is what ZeRO-3 counts micro-batches by. Parameters stay fp32 and autocast
does the rest, as under every other strategy. Checkpoints are the very files one device writes.
"""

import copy
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from lmtrain.adapters.trainable import trainable_names
from lmtrain.checkpoints import store
from lmtrain.config.deepspeed import engine_config
from lmtrain.config.schema import TrainerConfig
from lmtrain.distributed import process_group as world
from lmtrain.distributed.dtensor import full_shape
from lmtrain.errors import UserError
from lmtrain.models.blocks import decoder_blocks
from lmtrain.strategies.lightning_private import process_group_backend, say_moved
from lmtrain.strategies.placement import Placement
from lmtrain.strategies.sharding import RELEASE, outside, spread

ON_CPU = "LMTRAIN_DEEPSPEED_ON_CPU"  # set in tests: DeepSpeed runs on a CPU, slowly


class DeepSpeedStrategy(Placement, DDPStrategy):
    """Takes ranks, process group and data from DDP; the engine does what concerns parameters."""

    steps_itself = True

    engine: Any

    def __init__(self, t: TrainerConfig) -> None:
        try:
            import deepspeed  # noqa: F401
        except ImportError as error:
            raise UserError(
                f'trainer.strategy=deepspeed needs deepspeed ({error}): pip install "lmtrain[deepspeed]"'
            ) from None
        super().__init__()
        # New names of collectives, which DeepSpeed calls by their old ones at every step.
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
        self.config, self.stage = engine_config(t), t.deepspeed.stage
        _check_known(self.config, t.deepspeed.config)
        if "nvme" in (t.deepspeed.offload_optimizer, t.deepspeed.offload_parameters):
            _check_nvme()

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    def configure_ddp(self) -> None:
        """The engine takes DDP's place."""

    def place(self, objective: Any) -> None:
        """Puts the first rank's weights on all: whole, or under ZeRO-3 in parts."""
        self.precision_plugin.convert_module(objective)
        if self.stage < 3:
            spread(objective.modules(), self.root_device)
            return
        self._connect()
        model = objective.model
        partition(model, decoder_blocks(model.model), self.root_device, self.config)

    def _connect(self) -> None:
        connect(process_group_backend(self), self.root_device)

    def model_to_device(self) -> None:
        """Done by `place`."""
        assert self.lightning_module is not None
        say_moved(self.lightning_module, self.root_device)

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        import deepspeed

        self._connect()
        module: Any = self.lightning_module
        (optimizer,) = self.optimizers
        # ZeRO puts flat partitions in the place of the optimizer's parameters.
        self.groups = [list(group["params"]) for group in optimizer.param_groups]
        self.keys = [[key for key in group if key != "params"] for group in optimizer.param_groups]
        if self.stage == 3:
            for parameter in module.model.model.get_output_embeddings().parameters():
                # The loss reads it outside of its own module.
                deepspeed.zero.register_external_parameter(module.model, parameter)
        trained = [p for group in self.groups for p in group]
        self.engine, *_ = deepspeed.initialize(
            model=module.model,
            optimizer=optimizer,
            model_parameters=trained,
            config=self.config,
            dist_init_required=False,
        )
        world.equal_patience()
        model = module.model
        module.call_model = self._through_engine(model, model.forward)
        model.log_probs = self._through_engine(model, model.log_probs)
        if self.stage == 3:
            setattr(model, RELEASE, self.engine.optimizer.empty_partition_cache)

    def _through_engine(self, model: nn.Module, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method` of the model, called as the engine, which knows one forward, calls that.

        The engine switches CUDA's autocast off around it (it has a mixed precision of its own), so it is entered again.
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
        names = trainable_names(module)
        whole: dict[str, Tensor] = {}
        seen: dict[int, Tensor] = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            if names is not None and name not in names:
                continue
            if id(tensor) not in seen:
                full = safe_get_full_fp32_param(tensor) if isinstance(tensor, nn.Parameter) else tensor
                seen[id(tensor)] = full.detach().to("cpu", copy=True) if self.is_global_zero else tensor
            whole[name] = seen[id(tensor)]
        return whole if self.is_global_zero else {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As torch's optimizer on one device would give it."""
        from deepspeed.utils import safe_get_full_optimizer_state

        if isinstance(optimizer, LightningOptimizer):
            optimizer = optimizer.optimizer
        flat: dict[str, Any] = next(iter(optimizer.state.values()), {})
        self._link_states()
        state: dict[int, dict[str, Any]] = {}
        for index, parameter in enumerate(p for group in self.groups for p in group):
            full = {k: safe_get_full_optimizer_state(parameter, k) for k, v in flat.items() if k != "step"}
            if self.is_global_zero and flat:
                state[index] = {k: v.detach().to("cpu", copy=True).view(full_shape(parameter)) for k, v in full.items()}
                state[index] |= {"step": flat["step"].detach().cpu().clone()} if "step" in flat else {}
        starts = [sum(map(len, self.groups[:i])) for i in range(len(self.groups))]
        groups = [
            {key: group[key] for key in keys} | {"params": list(range(start, start + len(params)))}
            for group, keys, start, params in zip(optimizer.param_groups, self.keys, starts, self.groups, strict=True)
        ]
        return {"state": state, "param_groups": groups} if self.is_global_zero else {}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return store.load(Path(checkpoint_path), mmap=True)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        from deepspeed import zero
        from deepspeed.utils import safe_set_full_fp32_param

        module = self.lightning_module
        assert module is not None
        own = module.state_dict(keep_vars=True)
        for name, value in checkpoint["state_dict"].items():
            if isinstance(own[name], nn.Parameter):
                # What is computed with, then what the optimizer steps on.
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
        for i, piece in enumerate(flat):  # ZeRO makes the state at the first step, here it has to be there before
            swapped = self.stage == 3 and zero._swappable_optimizer_subgroup(i)  # a piece on NVMe has no elements
            if swapped:
                zero._optimizer_states_and_gradient_swap_in(i)
            empty = {k: v.clone() if k == "step" else torch.zeros_like(piece) for k, v in first.items()}
            optimizer.state[piece] = empty
            if swapped:
                zero._optimizer_states_and_gradient_swap_out(i)
        self._link_states()
        for index, parameter in enumerate(p for group in self.groups for p in group):
            for key, value in saved["state"][index].items():
                if key != "step":
                    safe_set_full_optimizer_state(parameter, value.to(self.root_device, copy=True), key)

    def _link_states(self) -> None:
        """Lets parameters find their optimizer state. DeepSpeed does it when the first group has stepped, and then
        the other groups have none yet."""
        if self.stage < 3:
            self.engine.optimizer._hp_optimizer_states_linked = False
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()


def refuse_on_cpu(accelerator: str) -> None:
    if accelerator == "cpu" and ON_CPU not in os.environ:
        raise UserError(
            "trainer.strategy=deepspeed needs CUDA devices: on a CPU set trainer.strategy=fsdp, which shards the same"
        )


def _check_known(config: dict[str, Any], file: str | None) -> None:
    """Raises UserError for keys and values DeepSpeed refuses."""
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
        raise UserError(
            "offloading to nvme needs DeepSpeed's async_io, which is compiled when it is first used, and libaio was "
            "not found: apt install libaio-dev g++ (or dnf install libaio-devel gcc-c++). One somewhere else is found "
            "with CPATH=<its headers> LIBRARY_PATH=<its folder> LD_LIBRARY_PATH=<its folder>. Or offload to cpu"
        )


def connect(backend: str, device: torch.device) -> None:
    """Lets DeepSpeed talk through the process group that is there, or makes one."""
    import deepspeed

    if device.type == "cpu":  # it would compile collectives of its own, for a minute: gloo's do
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not deepspeed.comm.is_initialized():
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)


def partition(model: nn.Module, blocks: Sequence[nn.Module], device: torch.device, config: dict[str, Any]) -> None:
    """Makes each parameter this rank's part of the first rank's value, and each buffer the first rank's value.

    The other ranks may have the model on the meta device: none ever holds more than its parts and one block, and the
    first frees what it has given away. Parameters stay the objects they are, so an optimizer of them goes on.

    Args:
        blocks: modules of `model` that share no parameters with the rest of it.
        device: of this rank.
        config: DeepSpeed's, with where parts lie if they are offloaded.
    """
    import deepspeed

    first: Any = None  # knows how to make others what it is
    for group in [*(list(block.modules()) for block in blocks), outside(model, blocks)]:
        spread(group, device)
        parameters = [p for module in group for p in module.parameters(recurse=False)]
        if first is None and parameters:
            first = parameters[0]
            deepspeed.zero.Init(module=nn.ParameterList([first]), config_dict_or_path=config)
        for parameter in parameters:
            first.convert_to_zero_parameters(param_list=[parameter])  # does nothing with what is one already
