"""Estimates of a run's cost from its config alone: the model is on the meta device, no data is read or allocated."""

import copy
import itertools
import math
import operator
import os
from dataclasses import dataclass
from typing import Any

import torch
import yaml
from rich import box
from rich.table import Table
from transformers import PreTrainedModel

from lmtrain import errors, terminal
from lmtrain.adapters.finetune import build_trainable_model
from lmtrain.config.batch import split_over, step_sizes
from lmtrain.config.schema import Config
from lmtrain.config.strategies import adopt_file, check_strategy
from lmtrain.data import tokenizers
from lmtrain.distributed import devices
from lmtrain.errors import UserError
from lmtrain.models import flops
from lmtrain.models.build import build_model
from lmtrain.run.plan_costs import HEADROOM, gib
from lmtrain.terminal import si, time_in_words


@dataclass(frozen=True)
class Change:
    """Overrides that reduce a run's memory, and approximately how many times as long a step then takes."""

    overrides: tuple[str, ...]
    slower: float


FSDP, ZERO = "trainer.strategy=fsdp", "trainer.strategy=deepspeed"
# Ways to distribute a run over its devices, with the duration of a step relative to that with ddp.
STRATEGIES = {
    "ddp": Change(("trainer.strategy=ddp",), 1.0),
    "fsdp": Change((FSDP,), 1.1),
    "fsdp, offload": Change((FSDP, "trainer.fsdp.cpu_offload=true"), 3.0),
    "fsdp_tp": Change(("trainer.strategy=fsdp_tp",), 1.3),
    "deepspeed 2": Change((ZERO, "trainer.deepspeed.stage=2"), 1.05),
    "deepspeed 3": Change((ZERO, "trainer.deepspeed.stage=3"), 1.2),
}
CHECKPOINTING, EIGHT_BIT, SMALLER_BATCH = 1.33, 1.02, 1.03  # relative too; the last per halving of the micro-batch


class Vocabulary:
    """A stand-in for a tokenizer that has only its size, which is all that a model's shapes depend on."""

    eos_token_id = 0

    def __init__(self, size: int, added: list[str]) -> None:
        self.size, self.added = size, added

    def __len__(self) -> int:
        return self.size + len(self.added)

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return [self.size + i for i in range(len(tokens))]


@dataclass(frozen=True)
class Device:
    """The device that a run has to fit on."""

    words: str
    bytes: float
    peak: float | None  # FLOP/s in bf16


def device_of(config: Config) -> Device:
    """Returns the device that estimate.device names, or this machine's. Raises UserError for an unknown name."""
    asked = config.estimate.device
    if asked is None:
        if torch.cuda.is_available():
            found = torch.cuda.get_device_properties(0)
            return Device(found.name, found.total_memory, flops.peak_flops(torch.device("cuda", 0), "bf16-mixed"))
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return Device("this machine's CPU", size, None)
    name = asked.lower().replace(" ", "").replace("-", "_")
    known = flops.DEVICES["memory"]
    if name in known:
        size, chip = known[name]
        return Device(asked, size * 2**30, flops.DEVICES["teraflops"].get(chip, 0) * 1e12 or None)
    try:
        return Device(f"{float(asked):g} GiB", float(asked) * 2**30, None)
    except ValueError:
        raise UserError(f"estimate.device={asked}: {', '.join(known)}, or GiB (estimate.device=24)") from None


def resolve(config: Config) -> None:
    """Resolves `auto` in config.trainer for the estimated device; devices=auto is one, unless it is this machine's."""
    t = config.trainer
    here = config.estimate.device is None
    if t.accelerator in ("auto", "gpu"):
        t.accelerator = "cuda" if not here or torch.cuda.is_available() else "cpu"
    if t.devices == "auto":
        t.devices = torch.cuda.device_count() if here and t.accelerator == "cuda" else 1
    t.devices = int(t.devices)
    if t.precision == "auto":
        t.precision = "bf16-mixed" if t.accelerator == "cuda" else devices.best_precision(t.accelerator)
    if t.strategy == "auto":
        t.strategy = "ddp"
    if t.strategy == "deepspeed":
        adopt_file(t)
    if t.activation_checkpointing == "auto":
        t.activation_checkpointing = False


def vocabulary(config: Config) -> Vocabulary:
    """Returns the vocabulary size of the run's tokenizer. Raises UserError if only the data determines it."""
    t = config.tokenizer
    added = list(t.add_tokens or [])
    if t.kind in ("bpe", "char"):
        size = (t.vocab_size if t.kind == "bpe" else None) or config.model.vocab_size
        if size is None:
            raise UserError(f"tokenizer={t.kind}: its size depends on data that isn't read here: set model.vocab_size")
        return Vocabulary(size, added)
    try:
        return Vocabulary(len(tokenizers.load_or_train(t, lambda _: iter(()), tokenizers.identity(t))), [])
    except UserError:
        size = 50257 if (t.name_or_path or "").rpartition("/")[2] == "gpt2" else config.model.vocab_size
        if size is None:
            raise
        return Vocabulary(size, added)


def build(config: Config, tokens: int | None = None) -> PreTrainedModel:
    """Builds the model on the meta device; `tokens` is its tokenizer's vocabulary size, if known."""
    with torch.device("meta"):
        return build_trainable_model(config, vocabulary(config) if tokens is None else Vocabulary(tokens, []))


def memory(model: PreTrainedModel, config: Config, others: int | None = None) -> dict[str, int]:
    """Returns the bytes on one device by part, with the frozen copy and other models that the objective may keep.

    others: the parameters of the other models, which take time to count; None: they are counted.
    """
    card = None if config.estimate.device is None else int(device_of(config).bytes)
    parts = flops.memory_estimate(model, config, card)
    if config.objective.reference_in_use() in ("auto", "frozen_copy") and config.peft.method == "none":
        parts["reference"] = parts["gradients"]
    others = count_others(config) if others is None else others
    return parts | ({"other models": 4 * others} if others else {})


def count_others(config: Config) -> int:
    """Returns the number of parameters of the objective's other models."""
    others = config.objective.other_models(config)
    with torch.device("meta"):
        return sum(build_model(o, len(vocabulary(config)), None, config.data.seq_len).num_parameters() for o in others)


def checkpoint_bytes(model: PreTrainedModel, config: Config) -> int:
    """Returns the size of a checkpoint: the trained weights, their optimizer state and their average."""
    whole = copy.deepcopy(config)
    whole.trainer.strategy = "ddp"
    parts = flops.memory_estimate(model, whole)
    return parts["gradients"] + parts["optimizer"] + parts.get("average", 0)


def changed(config: Config, overrides: tuple[str, ...]) -> Config | None:
    """Returns a copy of the config with these overrides, or None if the combination is refused."""
    found = copy.deepcopy(config)
    for override in overrides:
        key, _, value = override.partition("=")
        section, _, name = ("optimizer.name" if key == "optimizer" else key).rpartition(".")
        setattr(operator.attrgetter(section)(found), name, yaml.safe_load(value))
    try:
        check_strategy(found)
        split_over(found, int(found.trainer.devices) * found.trainer.num_nodes)
    except UserError:
        return None
    return found


def by_strategy(model: PreTrainedModel, config: Config) -> dict[str, dict[str, int]]:
    """Returns the memory by part under each strategy that is compatible with the config."""
    found = {name: changed(config, way.overrides) for name, way in STRATEGIES.items()}
    others = count_others(config)
    return {name: memory(model, other, others) for name, other in found.items() if other is not None}


def ways_to_fit(model: PreTrainedModel, config: Config, room: float) -> list[Change]:
    """Returns up to three changes that fit a device into `room` bytes, fastest first, without superfluous overrides."""
    fitting: list[Change] = []
    others = count_others(config)
    for change in sorted(map(_together, itertools.product(*_choices(config))), key=operator.attrgetter("slower")):
        if any(_kinds(other) <= _kinds(change) for other in fitting):
            continue
        other = changed(config, change.overrides)
        if other is not None and sum(memory(model, other, others).values()) <= room:
            fitting.append(change)
        if len(fitting) == 3:
            break
    return fitting


def _kinds(change: Change) -> set[str]:
    """Returns the overrides, ignoring the size of the micro-batch: larger ones are faster and come first."""
    return {o.partition("=")[0] if o.startswith("data.micro_batch_size") else o for o in change.overrides}


def _together(changes: tuple[Change, ...]) -> Change:
    overrides = tuple(o for change in changes for o in change.overrides)
    return Change(overrides, math.prod(change.slower for change in changes))


def _choices(config: Config) -> list[list[Change]]:
    """Returns, for each setting that can be changed, the choices: to leave it, or one of the possible changes."""
    t, size = config.trainer, config.data.micro_batch_size
    sizes: list[Change] = []
    while size % 2 == 0:
        size //= 2
        sizes.append(Change((f"data.micro_batch_size={size}",), SMALLER_BATCH ** (len(sizes) + 1)))
    strategies: list[Change] = []
    if t.strategy == "ddp":
        several = int(t.devices) * t.num_nodes > 1
        strategies = [w for name, w in STRATEGIES.items() if name != "ddp" and (several or "offload" in name)]
    saved = [] if t.activation_checkpointing else [Change(("trainer.activation_checkpointing=true",), CHECKPOINTING)]
    optimizers = [Change(("optimizer=adamw_8bit",), EIGHT_BIT)] if config.optimizer.name == "adamw" else []
    return [[Change((), 1.0), *choices] for choices in (sizes, strategies, saved, optimizers)]


def estimate(config: Config) -> int:
    """Prints parameters, FLOPs, sizes, memory under each strategy, time, and what would make the run fit."""
    terminal.quiet_libraries()
    device = device_of(config)
    resolve(config)
    split_over(config, int(config.trainer.devices) * config.trainer.num_nodes)  # raises the same errors as a run
    model = build(config)
    console = terminal.console()
    console.print(terminal.facts(rows(model, config, device)))
    room = device.bytes * (1 - HEADROOM)
    chosen = sum(memory(model, config).values())
    console.print(memory_table(by_strategy(model, config), room))
    if chosen <= room:
        console.print(f"fits: {gib(chosen)} of {gib(room)} on {device.words}, strategy={config.trainer.strategy}")
        return errors.FINISHED
    ways = ways_to_fit(model, config, room)
    console.print(f"does not fit: {gib(chosen)} on {device.words}, where {gib(room)} can be used")
    for way in ways:
        console.print(f"  {' '.join(way.overrides)}   (a step takes {way.slower:.2f} times as long)", soft_wrap=True)
    if not ways:
        console.print("  no strategy, smaller micro-batch or 8-bit optimizer makes it fit: more devices, a shorter "
                      "data.seq_len, a smaller model or peft=lora would")  # fmt: skip
    return errors.FINISHED


def rows(model: Any, config: Config, device: Device) -> list[tuple[str, str]]:
    """Returns (name, text) pairs about everything that does not depend on the strategy."""
    c, t = config, config.trainer
    total, trained, tables = flops.parameter_counts(model)
    per_token = flops.flops_per_token(model, c.data.seq_len)
    row = c.objective.row_tokens(c.data, model)
    tokens = step_sizes(c.data).before(t.max_steps) * row if t.max_steps is not None else None
    world = int(t.devices) * t.num_nodes
    kept = c.checkpoint.keep_last + c.checkpoint.keep_best
    if c.checkpoint.keep_every and t.save_every_n_steps and t.max_steps:
        kept += t.max_steps // math.lcm(c.checkpoint.keep_every, t.save_every_n_steps)
    saved = checkpoint_bytes(model, c)
    width = 2 if model.config.get_text_config().vocab_size <= 2**16 else 4
    compute, bins = f"{si(per_token, 'FLOP')} a token", f"{width} bytes a token"
    if tokens:
        compute += f", {si(per_token * tokens, 'FLOP')} in all"
        bins += f", {si(width * tokens, 'B')} for {si(tokens)} different tokens"
    return [
        ("model", f"{c.model.name}: {total:,} parameters ({si(trained)} trained, {si(tables)} in embeddings)"),
        ("devices", f"{world} x {device.words}, {gib(device.bytes)} each; {t.precision}, {c.optimizer.name}"),
        ("step", f"{c.data.global_batch_size:,} rows x {row:,} = {c.data.global_batch_size * row:,} tokens"),
        ("compute", compute),
        ("checkpoint", f"{gib(saved)}; up to {kept} kept: {gib(kept * saved)}"),
        ("bins", bins),
        ("time", describe_time(c, device, tokens, per_token, world)),
    ]


def describe_time(c: Config, device: Device, tokens: int | None, per_token: float, world: int) -> str:
    """Describes how long the run takes, and the speed that this assumes."""
    speed, by = c.estimate.tokens_per_s, "estimate.tokens_per_s"
    if speed is None and device.peak is not None:
        speed = c.estimate.mfu * device.peak * world / per_token
        by = f"{c.estimate.mfu:.0%} of the peak, {speed:,.0f} tokens/s"
    if tokens is None:
        return "set trainer.max_steps: the number of steps of an epoch depends on the data, which is not read here"
    if speed is None:
        return "not known for this device: set estimate.tokens_per_s to what a short run reaches"
    return f"{time_in_words(tokens / speed)} ({by})"


def memory_table(found: dict[str, dict[str, int]], room: float) -> Table:
    """Builds a table with a row per strategy: the memory of a device by part, and whether it fits."""
    most = max((sum(memory.values()) for memory in found.values()), default=0)
    unit, digits, name = (2**30, 1, "GiB") if most >= 2**32 else (2**20, 0, "MiB")
    table = Table(title=f"memory of a device, {name}", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    parts = list(dict.fromkeys(name for memory in found.values() for name in memory))
    table.add_column("strategy", no_wrap=True)
    short = {"parameters": "weights", "gradients": "grads", "optimizer": "optim.", "activations": "activ."}
    for name in [*parts, "all"]:
        table.add_column(short.get(name, name), justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for strategy, memory in found.items():
        size = sum(memory.values())
        sizes = [f"{number / unit:,.{digits}f}" for number in (*(memory.get(part, 0) for part in parts), size)]
        table.add_row(strategy, *sizes, "fits" if size <= room else "too large")
    return table
