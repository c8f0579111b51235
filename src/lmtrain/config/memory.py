"""Rules between the keys of a memory (memory.*), and which layers it is read after. Imports no torch."""

import dataclasses
import re

from lmtrain.config.objectives import CausalLMConfig
from lmtrain.config.schema import Config, MemoryConfig
from lmtrain.errors import UserError


def check_memory(c: Config) -> None:
    """Raises UserError where keys of the memory don't go together, or with the method of training."""
    m, method = c.memory, c.peft.method
    if m.num_chapters is None:
        if method == "memory":
            raise UserError("peft.method=memory needs a memory: choose peft=memory, or set memory=bank too")
        return
    missing = [f.name for f in dataclasses.fields(MemoryConfig) if getattr(m, f.name) is None]
    if missing:
        raise UserError(f"memory.{missing[0]} has no value: set memory.{missing[0]}=..., or memory=none for no memory")
    assert m.memory_dim is not None and m.num_heads is not None and m.top_k is not None  # noqa: PT018
    if m.router != "soft" and m.top_k > m.num_chapters:
        raise UserError(
            f"memory.top_k={m.top_k} of memory.num_chapters={m.num_chapters}: a token can't read more chapters than "
            f"there are; set memory.top_k={m.num_chapters} or less"
        )
    if m.memory_dim % m.num_heads:
        fits = min((d for d in range(1, m.memory_dim + 1) if m.memory_dim % d == 0), key=lambda d: abs(d - m.num_heads))  # type: ignore[operator]
        raise UserError(
            f"memory.memory_dim={m.memory_dim} does not divide into memory.num_heads={m.num_heads}: set "
            f"memory.num_heads={fits} or memory.memory_dim={m.num_heads * max(1, round(m.memory_dim / m.num_heads))}"
        )
    _check_text(m.layers)
    if method == "memory" and c.tokenizer.add_tokens:
        raise UserError(
            "tokenizer.add_tokens with peft=memory: the rows of new tokens are part of the frozen base and would stay "
            "as they are drawn; choose peft=memory_lora, which trains them"
        )
    if c.export.merge:
        raise UserError("export.merge=true: a memory can't be merged into its base; leave it out (docs/memory.md)")
    if c.trainer.strategy == "fsdp_tp":
        raise UserError("trainer.strategy=fsdp_tp can't split a memory: set trainer.strategy=fsdp")


def trains_base(c: Config) -> bool:
    """Whether an entry {name: base} of optimizer.groups asks for the base to be trained beside memory and adapter."""
    named = any(entry.get("name") == "base" and not entry.get("pattern") for entry in c.optimizer.groups)
    return named and c.peft.method != "none"


def check_base(c: Config) -> None:
    """Raises UserError where the base is to be trained and can't be, or would be left out of the export."""
    if not trains_base(c):
        return
    if c.memory.num_chapters is None:
        raise UserError(
            "optimizer.groups: {name: base} with peft.method=lora and no memory: the export would be the adapter "
            "alone, without the trained base; leave the entry out, or train the whole model (peft=none)"
        )
    if c.peft.quantization is not None:
        raise UserError(
            f"optimizer.groups: {{name: base}} with peft.quantization={c.peft.quantization}: quantised weights can't "
            f"be trained; leave the entry out, or set peft.quantization=null"
        )


def check_router(c: Config) -> None:
    """Raises UserError where the routers' losses can't be those of whole steps."""
    if c.router.scope == "step" and not isinstance(c.objective, CausalLMConfig):
        raise UserError(
            f"router.scope=step with objective={c.objective.name}: only causal_lm and sft read each micro-batch "
            f"once, with the routers' losses; set router.scope=micro_batch"
        )
    if c.router.scope == "step" and c.data.packing == "off":
        raise UserError(
            "router.scope=step with data.packing=off: rows are filled up to the longest of their micro-batch, so the "
            "losses would depend on the split of a step; set router.scope=micro_batch, or another data.packing"
        )


def _check_text(layers: object) -> None:
    is_list = isinstance(layers, list) and layers and all(isinstance(i, int) and i >= 0 for i in layers)
    if not is_list and not (isinstance(layers, str) and re.fullmatch(r"every_[1-9]\d*", layers)):
        raise UserError(f"memory.layers={layers}: every_4 say, or a list of layers counted from 0, such as [3,7]")


def chosen_layers(layers: object, depth: int) -> tuple[int, ...]:
    """The numbers, counted from 0, of the decoder layers that memory.layers names in a model of `depth` layers.

    Raises:
        UserError: there is no such layer.
    """
    if isinstance(layers, str):
        step = int(layers.removeprefix("every_"))
        found = tuple(range(step - 1, depth, step))
        if not found:
            raise UserError(
                f"memory.layers={layers}: the model has only {depth} layers; set memory.layers=[{depth - 1}]"
            )
        return found
    assert isinstance(layers, list)
    beyond = [index for index in layers if index >= depth]
    if beyond:
        raise UserError(
            f"memory.layers={layers}: there is no layer {beyond[0]}; the model has {depth}, 0 to {depth - 1}"
        )
    return tuple(sorted(set(layers)))
