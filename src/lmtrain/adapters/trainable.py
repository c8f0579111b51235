"""Which parameters a checkpoint holds if some are frozen, and how the frozen ones are identified.

peft is not imported here, since that takes seconds and every objective imports this file.
"""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lmtrain.adapters.memory import memory_blocks
from lmtrain.config.schema import Config, PeftConfig
from lmtrain.data.store.contents import Facts
from lmtrain.distributed.dtensor import full_shape, like
from lmtrain.errors import UserError
from lmtrain.models.blocks import switched
from lmtrain.models.feature import ADDED
from lmtrain.models.weight_files import some_of

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

NAME = "default"  # peft's name for the adapter, which is part of its parameters' names
ATTRIBUTE = "lmtrain_adapter"


@dataclass
class Adapter:
    """The adapter of a model that has peft's layers in it."""

    peft: "PeftModel"  # wraps the model
    start: dict[str, Tensor]  # initial A and B subtracted from the base (PiSSA, OLoRA), by parameter name; else empty

    @property
    def config(self) -> "LoraConfig":
        return self.peft.peft_config[NAME]


def adapter_of(model: nn.Module) -> Adapter | None:
    """Returns the adapter that `lora.attach` put into the model, or None."""
    return model.__dict__.get(ATTRIBUTE)


@contextmanager
def disabled(model: nn.Module) -> Iterator[None]:
    """Disables LoRA and memory within the context, so that the model is its base: a reference model without a copy.

    Raises:
        UserError: the adapter's initialization changed the base's weights.
    """
    adapter = adapter_of(model)
    if adapter is not None and adapter.start:
        raise UserError("the base model can't be recovered: peft.init_weights=pissa or olora moved its weights")
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "_disable_adapters")]
    # Not peft's disable_adapter, which also freezes the adapter temporarily; a sharded model would keep it frozen.
    with switched(layers, "_disable_adapters", True), switched(memory_blocks(model), "enabled", False):
        yield


def plan_rows(model: nn.Module, config: Config) -> list[tuple[str, str]]:
    """Returns the plan's row on the adapter, if there is one."""
    adapter = adapter_of(model)
    return [("adapter", describe_adapter(adapter, config.peft))] if adapter is not None else []


def describe_adapter(adapter: Adapter, cfg: PeftConfig) -> str:
    """Describes the adapter in one line, for the plan."""
    config = adapter.config
    kinds = [word for word, on in (("rsLoRA", config.use_rslora), ("DoRA", config.use_dora)) if on]
    words = f"{' + '.join(kinds) or 'LoRA'} r={config.r}, alpha={config.lora_alpha:g}, dropout={config.lora_dropout:g}"
    tuner = adapter.peft.base_model
    on = {name.rpartition(".")[2] for name in tuner.targeted_module_names}
    on |= {".".join(name.split(".")[-2:]) for name in tuner.targeted_parameter_names}  # experts and routers
    words += f", on {', '.join(sorted(on))}"
    if cfg.quantization:
        words += f", base in {cfg.quantization}{' (double)' if cfg.double_quant else ''}"
    return f"{words}, continues {cfg.adapter} (trainable)" if cfg.adapter else words


def trainable_names(module: nn.Module) -> set[str] | None:
    """Returns the names of the trained parameters, or None if nothing is frozen and checkpoints hold everything."""
    parameters = list(module.named_parameters(remove_duplicate=False))
    if all(p.requires_grad for _, p in parameters):
        return None
    return {name for name, p in parameters if p.requires_grad}


def base_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the base model's parameters, without LoRA, memory, trained copies of modules, and replaced originals."""
    others = (*ADDED, "modules_to_save", ".original_module.")
    return (p for n, p in model.named_parameters() if not any(part in n for part in others))


def without_frozen(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns `state` without the frozen tensors of `module`, which can be reloaded and may be 1,000 times as large."""
    names = trainable_names(module)
    return state if names is None else {name: tensor for name, tensor in state.items() if name in names}


def check_weights(module: nn.Module, saved: Mapping[str, Any]) -> None:
    """Raises UserError unless a checkpoint holds the parameters that `module` trains, and no others if some are frozen.

    Their shapes must match as well.
    """
    names, parameters = trainable_names(module), module.named_parameters(remove_duplicate=False)
    trained = {name: p for name, p in parameters if names is None or name in names}
    differences = {"lacks": trained.keys() - saved.keys(), "holds": set() if names is None else saved.keys() - names}
    parts = [f"{word} {min(these)} ({len(these)} in all)" for word, these in differences.items() if these]
    if parts:
        found = f"the checkpoint's trained parameters are not this run's: it {' and '.join(parts)}"
        raise UserError(f"{found}. Use the model.* and peft.* settings it was written with (config.yaml of its run)")
    for name, parameter in trained.items():
        shape = list(saved[name].shape) if isinstance(saved[name], Tensor) else type(saved[name]).__name__
        expected = list(full_shape(parameter))
        if shape != expected:
            found = f"the checkpoint's {name} is {shape} where this run's model has {expected}"
            raise UserError(f"{found}: another model's, or damaged")


def base_identity(model: PreTrainedModel, name_or_path: str, whole: Facts | None) -> str:
    """Returns a hub commit, or 16 hex digits of a SHA-256 of a folder's weight files, which doesn't depend on its path.

    Args:
        whole: cache of the files' full hashes, valid until a file changes. None: hashes sizes and some blocks only.
    """
    path = Path(name_or_path).expanduser()
    if not path.is_dir():
        return str(getattr(model.config, "_commit_hash", None) or name_or_path)
    files = sorted(p for p in path.iterdir() if p.suffix in (".safetensors", ".bin"))
    parts = map(some_of, files) if whole is None else (bytes.fromhex(d) for d in whole.digests(files).values())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def adapter_identity(name: str) -> str:
    """Returns 16 hex digits of the SHA-256 of an adapter's weights in a folder, or `name` for one on the hub."""
    file = Path(name).expanduser() / "adapter_model.safetensors"
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16] if file.is_file() else name


@torch.no_grad()
def restore_start(model: PreTrainedModel, start: dict[str, Tensor]) -> None:
    """Changes the base to the one from which `start` was subtracted, if this run's `Adapter.start` differs.

    The decomposition (PiSSA, OLoRA) gives other last bits on another machine.

    Args:
        start: `Adapter.start` of the run that wrote the checkpoint.
    """
    adapter = adapter_of(model)
    if adapter is None or not start or all(torch.equal(start[n], t) for n, t in adapter.start.items()):
        return
    for name, module in model.named_modules():
        a, b = f"{name}.lora_A.{NAME}.weight", f"{name}.lora_B.{NAME}.weight"
        if a in start:
            change = adapter.start[b] @ adapter.start[a] - start[b] @ start[a]  # [out, in]
            layer: Any = module
            change = layer.scaling[NAME] * (change.T if layer.fan_in_fan_out else change)
            weight = layer.get_base_layer().weight
            weight += like(change.to(weight.dtype).to(weight.device), weight)
    adapter.start = {name: tensor.clone() for name, tensor in start.items()}  # may be memory-mapped from a checkpoint
