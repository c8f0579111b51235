"""Attaching a memory to a run's model: its settings from the config, its size, what is frozen, and a first check."""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lmtrain.adapters.memory import MemorySettings, attach_memory, decoder_layers, memory_blocks
from lmtrain.adapters.memory_export import load_memory, settings_in
from lmtrain.config.checks import chosen_layers
from lmtrain.config.options import LoadedModelConfig
from lmtrain.config.schema import Config, MemoryConfig, ModelConfig
from lmtrain.errors import RunError, UserError
from lmtrain.models.blocks import evaluating, switched
from lmtrain.models.feature import Feature
from lmtrain.models.folder import is_exported

BYTES = 16  # per trained fp32 parameter: its value, its gradient, AdamW's two moments


class Memory(Feature):
    """The feature of a run whose model has a memory."""

    def is_on(self, config: Config) -> bool:
        return config.memory.num_chapters is not None

    def plan_rows(self, model: PreTrainedModel, config: Config) -> list[tuple[str, str]]:
        return [("memory", describe_memory(found)) for found in [memory_of(model)] if found]


def attach(model: PreTrainedModel, config: Config) -> None:
    """Attaches the memory of `config.memory` to the model; with peft.method=memory all else is frozen.

    Its initial values come from the export that model.name_or_path names, if that has a memory; otherwise they depend
    on the seed alone. The state of the global random generator is preserved.

    Raises:
        UserError: a layer doesn't exist, a bank doesn't fit, the model's layers can't be found, or an export's memory
            has another shape.
        RunError: the new memory changes the model's output.
    """
    settings = settings_of(config.memory, model)
    exported = _exported(config.model)
    if exported is not None:
        _check_same(settings, settings_in(exported), exported)
    _check_size(settings, model, config.trainer.accelerator)
    if config.peft.method == "memory":
        model.requires_grad_(False)
    with torch.random.fork_rng([]):
        torch.manual_seed(config.seed)
        attach_memory(model, settings)
    for block in memory_blocks(model):
        block.to(model.device)
    if settings.share_bank:
        model.base_model.memory_bank.to(model.device)
    model.train()
    if exported is None:
        check_start(model)
    elif model.device.type != "meta":
        load_memory(model, exported)


def check_chosen(config: Config) -> None:
    """Raises UserError if the pretrained model has a memory and the run has none, which would drop it."""
    exported = _exported(config.model)
    if exported is not None and config.memory.num_chapters is None:
        found = f"model.name_or_path={exported} has a memory: to go on training it set peft=memory (the base is frozen)"
        raise UserError(f"{found}, peft=memory_lora, or memory=bank (all), with the memory.* it was trained with")


def _exported(model: ModelConfig) -> Path | None:
    """Returns the folder of the pretrained model if it has a memory, else None."""
    if not isinstance(model, LoadedModelConfig) or not model.name_or_path:
        return None
    folder = Path(model.name_or_path)
    return folder if is_exported(folder) else None


def _check_same(wanted: MemorySettings, there: MemorySettings, folder: Path) -> None:
    # Router noise affects training only; all other settings determine what the model computes.
    for field in dataclasses.fields(MemorySettings):
        new, old = getattr(wanted, field.name), getattr(there, field.name)
        if new != old and field.name != "router_noise":
            old = str(list(old)).replace(" ", "") if isinstance(old, tuple) else old
            found = f"memory.{field.name} of the memory in {folder} is {old}"
            raise UserError(f"{found}: set memory.{field.name}={old}, or begin a new one on its base")


def settings_of(cfg: MemoryConfig, model: PreTrainedModel) -> MemorySettings:
    """Returns the memory settings for this model, with layer numbers and top_k resolved.

    Raises:
        UserError: a layer doesn't exist, or the model's layers can't be found.
    """
    try:
        depth = len(decoder_layers(model))
    except (ValueError, AttributeError) as error:
        raise UserError(f"memory: {error}, so no memory can stand between its layers: choose another model") from None
    values: dict[str, Any] = {name: getattr(cfg, name) for name in MemoryConfig.__dataclass_fields__}
    values["layers"] = chosen_layers(cfg.layers, depth)
    values["router_noise"] = float(values["router_noise"])
    if cfg.router == "soft":
        values["top_k"] = cfg.num_chapters
    return MemorySettings(**values)


def _check_size(s: MemorySettings, model: PreTrainedModel, accelerator: str) -> None:
    banks = 1 if s.share_bank else len(s.layers)
    needed = banks * 2 * s.num_chapters * s.chapter_size * s.memory_dim * BYTES
    if accelerator == "cuda" and torch.cuda.is_available():
        there = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        keys = f"memory.num_chapters={s.num_chapters}, memory.chapter_size={s.chapter_size}"
        found = f"the memory needs {needed / 2**30:,.1f} GiB to be trained, and there are {there / 2**30:,.1f} GiB"
        shared = "" if s.share_bank else ", or set memory.share_bank=true"
        raise UserError(f"{found}: lower one of {keys}, memory.memory_dim={s.memory_dim} ({banks} bank(s)){shared}")


@torch.no_grad()
def check_start(model: PreTrainedModel) -> None:
    """Raises RunError unless the model with its new memory gives bit for bit the same output as without it."""
    if model.device.type == "meta":
        return
    ids = torch.arange(8, device=model.device).remainder(model.config.get_text_config().vocab_size)[None]
    with evaluating(model):
        found = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        with without_memory(model):
            expected = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    if not torch.equal(found, expected):
        raise RunError("the new memory changes the model before it is trained: please report this with config.yaml")


def memory_of(model: nn.Module) -> MemorySettings | None:
    """Returns the settings of the model's memory, or None if it has none."""
    blocks = memory_blocks(model)
    return blocks[0].settings if blocks else None


def has_been_trained(model: nn.Module) -> bool:
    """Returns whether any output gate differs from its initial value, zero."""
    return any(bool(block.gate.any()) for block in memory_blocks(model))


def without_memory(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Disables the model's memory within the context."""
    return switched(memory_blocks(model), "enabled", False)


def describe_memory(s: MemorySettings) -> str:
    """Describes the memory in one line, for the plan."""
    chosen = "all chapters" if s.router == "soft" else f"{s.top_k} chapters a token ({s.router})"
    banks = "one bank" if s.share_bank else f"{len(s.layers)} banks"
    return (
        f"{banks} of {s.num_chapters:,} chapters x {s.chapter_size:,} slots, width {s.memory_dim}, "
        f"{s.num_heads} heads, {chosen}, read after layers {', '.join(map(str, s.layers))} (from 0)"
    )
