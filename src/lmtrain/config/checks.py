"""Rules between keys of the config; constraints on single keys are in schema.py. Imports no torch."""

import dataclasses
import re
from typing import Any

from lmtrain.config.batch import check_growth, nearest_divisor
from lmtrain.config.constraints import choice
from lmtrain.config.keys import check_constraints
from lmtrain.config.options import CausalLMConfig, WarmupStableDecayConfig
from lmtrain.config.schema import BUDGETS, Config, MemoryConfig, ScheduleConfig
from lmtrain.config.schema_data import ANSWERS
from lmtrain.config.strategies import check_strategy, spell_out
from lmtrain.config.targets import check_allowed, check_names
from lmtrain.errors import UserError
from lmtrain.files import CHECKPOINT

# The names in text_metrics.NAMED, a module that imports torch; bertscore:<encoder> is accepted as well.
TEXT_METRICS = ("bleu", "rouge", "rouge1", "rouge2", "exact_match")


def check_values(c: Config) -> None:
    """Raises UserError for the first value that is out of range, not among its choices, unsafe, or inconsistent."""
    _check_trainer(c)
    check_constraints(c)
    _check_budget(c)
    _check_run(c)
    _check_positions(c)
    check_growth(c)
    _check_fim(c)
    _check_names(c)
    _check_peft(c)
    _check_memory(c)
    _check_router(c)
    _check_base(c)
    c.objective.check(c)
    _check_pairs(c)
    _check_targets(c)
    check_strategy(c)
    _check_stream(c)


def _check_budget(c: Config) -> None:
    found = [f"budget.{name}={getattr(c.budget, name):g}" for name in BUDGETS if getattr(c.budget, name) is not None]
    if len(found) > 1:
        raise UserError(f"{' and '.join(found)}: one of them says how long the run is; leave the other out")


def _check_trainer(c: Config) -> None:
    short = {"bf16": "bf16-mixed", "fp16": "16-mixed", "16": "16-mixed", "fp32": "32-true", "32": "32-true"}
    t = c.trainer
    spell_out(t)
    if t.precision in short:
        raise UserError(f"trainer.precision={t.precision}: write {short[t.precision]}")
    if t.accelerator == "mps":
        raise UserError(
            "trainer.accelerator=mps: losses and metrics are summed in fp64, which Apple GPUs do not have; "
            "set trainer.accelerator=cpu"
        )
    if isinstance(t.devices, str) and not t.devices.isdigit():
        choice("auto")("trainer.devices", t.devices)
    if t.devices != "auto" and int(t.devices) < 1:
        raise UserError(f"trainer.devices={t.devices}: a number from 1 up, or auto, is needed")
    clip = t.gradient_clip_val
    if clip is not None and not clip > 0:
        raise UserError(f"trainer.gradient_clip_val={clip} would leave no gradient: null turns clipping off")


def _check_run(c: Config) -> None:
    if c.trainer.max_steps is None and c.trainer.max_epochs is None:
        raise UserError("the run would never end: set trainer.max_steps or trainer.max_epochs")
    time_limit_seconds(c.run.time_limit)
    _check_schedule(c.schedule)
    if c.run.cooldown_from is not None:
        _settle_cooldown(c, c.run.cooldown_from)


def _settle_cooldown(c: Config, checkpoint: str) -> None:
    """Applies run.cooldown_from: the learning rate decays from the checkpoint's step to the end of this run.

    Raises:
        UserError: the schedule has no decay phase, the checkpoint's name has no step, run.resume is set as well, or
            the run ends before that step.
    """
    key, name = f"run.cooldown_from={checkpoint}", re.split(r"[/\\]", checkpoint.rstrip("/\\"))[-1]
    named = CHECKPOINT.fullmatch(name)
    if named is None:
        raise UserError(
            f"{key}: name a checkpoint by its step, such as outputs/long/checkpoints/step_00004000, "
            "because links to checkpoints change"
        )
    if not isinstance(c.schedule, WarmupStableDecayConfig):
        raise UserError(f"{key} needs a schedule whose decay can begin at that step: set schedule=wsd")
    if c.run.resume not in (None, "auto"):
        raise UserError(f"{key} and run.resume={c.run.resume} both say where to begin: leave one of them out")
    step, last = int(named[1]), c.trainer.max_steps
    if last is not None and last <= step:
        raise UserError(f"{key}: trainer.max_steps={last} is not beyond that step; set the step at which to end")
    c.schedule.decay_from, c.run.schedule_on_resume = step, "rescale"


def _check_schedule(schedule: ScheduleConfig) -> None:
    """Raises UserError if the warmup is set twice, or set for range_test, which has none."""
    steps, ratio = schedule.warmup_steps, schedule.warmup_ratio
    if steps is not None and ratio is not None:
        raise UserError(f"schedule.warmup_steps={steps} and schedule.warmup_ratio={ratio} set it: make one null")
    if schedule.name == "range_test" and (steps or ratio):
        raise UserError("schedule.name=range_test has no warmup: schedule.warmup_steps=0 and no warmup_ratio")


def _check_positions(c: Config) -> None:
    """Raises UserError if rows exceed the model's positions. Model building checks it too, but after preparing data."""
    positions = c.model.max_position_embeddings
    if c.objective.rows != c.data.rows:
        return  # data for another objective, which is reported when the data is opened
    if c.model.init == "scratch" and positions is not None and c.data.seq_len > positions >= 1:
        raise UserError(
            f"data.seq_len={c.data.seq_len} exceeds model.max_position_embeddings={positions}: lower the first or "
            f"raise the second"
        )


def _check_peft(c: Config) -> None:
    p = c.peft
    if p.method == "none":
        return
    if c.model.init != "pretrained":
        raise UserError(
            f"peft.method={p.method} adapts a pretrained model: set model=pretrained model.name_or_path=<name or "
            f"folder>, or train all of this one with peft=none"
        )
    if p.method == "memory":
        return
    _check_given("peft", p, "r", "alpha", "dropout", "bias")
    if not re.fullmatch(r"pissa_niter_[1-9]\d*", str(p.init_weights)):
        choice("default", "gaussian", "orthogonal", "pissa", "olora")("peft.init_weights", str(p.init_weights))
    moves_base = str(p.init_weights).startswith(("pissa", "olora"))
    if moves_base and (p.quantization is not None or p.use_dora):
        other = "peft.use_dora=true" if p.use_dora else f"peft.quantization={p.quantization}"
        raise UserError(
            f"peft.init_weights={p.init_weights} moves part of the base into the adapter, which does not go with "
            f"{other}: set peft.init_weights=default"
        )


def _check_names(c: Config) -> None:
    """Raises UserError for required keys without a value."""
    if c.data.rows == "text" and not c.data.text_column:
        raise UserError(f"data.text_column={c.data.text_column}: a name or a list of names, [a,b], is needed")
    if c.data.rows != "text":
        _check_given("data", c.data, "train_on", "on_too_long", "on_bad_row", "packing")


def check_pretrained_name(init: str | None, name: str | None) -> None:
    """Raises UserError if a pretrained model has no name. Checked first, since other keys follow from the name."""
    if init == "pretrained" and not name:
        raise UserError("model.init=pretrained needs a model: set model.name_or_path to a hub name or a folder")


def _check_given(section: str, options: Any, *names: str) -> None:
    for name in names:
        if getattr(options, name) is None:
            raise UserError(f"{section}.{name} has no value: set {section}.{name}=...")


def _check_fim(c: Config) -> None:
    d = c.data
    if not d.fim.rate:
        return
    others = {"data.packing": d.packing not in (None, "concat"), "data.curriculum.by": d.curriculum.by == "length"}
    for key, is_set in others.items():
        if is_set:
            raise UserError(
                f"data.fim.rate={d.fim.rate} rearranges documents inside rows of data.seq_len tokens, which {key} "
                f"cuts otherwise: set {key}=null or data.fim.rate=0"
            )


def _check_pairs(c: Config) -> None:
    d = c.data
    if d.rows == "pairs":
        choice(*ANSWERS)("data.train_on", d.train_on)
        choice("truncate_left", "truncate_right", "drop", "raise")("data.on_too_long", d.on_too_long)
        choice("off")("data.packing", d.packing)


def _check_targets(c: Config) -> None:
    samples = c.callbacks.samples
    if samples.metrics and not samples.every_n_validations:
        raise UserError(
            "callbacks.samples.metrics compares what the model writes with the data, and with "
            "callbacks.samples.every_n_validations=0 it writes nothing: set that to 1 or more"
        )
    for key, entries in {
        "callbacks.extra": c.callbacks.extra,
        "callbacks.samples.metrics": samples.metrics,
        "evaluate.metrics": c.evaluate.metrics,
    }.items():
        for entry in entries:
            if isinstance(entry, str):
                _check_metric(key, entry)
            else:
                check_names(key, entry, c.run.allow_target)
    if "." in c.data.source:
        _check_source(c.data.source, c.run.allow_target)
    if "." in c.data.rows:
        check_allowed("data.rows", c.data.rows, c.run.allow_target)
    mode = (c.logger.get("wandb") or {}).get("mode", "online")
    choice("online", "offline", "disabled", "shared")("logger.wandb.mode", mode)


def _check_source(source: str, allow_target: list[str]) -> None:
    """Raises UserError unless a data source's class is one of lmtrain's or in a package of run.allow_target."""
    check_allowed("data.source", source, allow_target)
    own = ("lmtrain.data.sources.sums", "lmtrain.data.sources.stories")
    if not any(source.startswith(f"{package}.") for package in (*allow_target, *own)):
        raise UserError(f"data.source={source}: name a class of your own package, and run.allow_target=[that]")


def _check_metric(key: str, name: str) -> None:
    """Raises UserError for a name that is not a text metric."""
    if name in ("bertscore", "bertscore:"):
        raise UserError(f"{key}: bertscore needs an encoder, {key}=['bertscore:roberta-large'] or a folder")
    if not name.startswith("bertscore:"):
        choice(*TEXT_METRICS)(key, name)


def time_limit_seconds(text: str | None) -> float | None:
    """Parses SLURM's time formats into seconds: minutes, MM:SS, HH:MM:SS, days-HH, days-HH:MM, days-HH:MM:SS."""
    if text is None:
        return None
    if re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text) is None:
        raise UserError(f"run.time_limit={text!r}: write HH:MM:SS such as 11:50:00, or minutes, MM:SS or days-HH:MM")
    days, _, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    units = (3600, 60, 1) if days or len(parts) == 3 else (60, 1)
    seconds = sum(unit * part for unit, part in zip(units, parts, strict=False))
    return float(86400 * int(days or 0) + seconds)


def _check_stream(c: Config) -> None:
    """Raises UserError for the first setting that is incompatible with data.ring_bytes."""
    d, t = c.data, c.trainer
    if d.ring_bytes is None:
        return
    here = f"data.ring_bytes={d.ring_bytes}"
    if d.rows != "text" or d.source not in ("hub", "files"):
        held = d.rows if d.rows != "text" else f"data.source={d.source}"
        raise UserError(
            f"{here} streams text of files or of the hub, and this data is {held}: set data.ring_bytes=null, or choose "
            f"data=text data.path=folder, data=jsonl, data=c4, ..."
        )
    if not d.streaming:
        raise UserError(f"{here} goes with data.streaming=true: set that too, or data.ring_bytes=null")
    _check_given("data", d, "ring_shard_tokens", "ring_window", "ring_val_tokens", "ring_patience")
    if t.max_steps is None or t.max_epochs is not None:
        raise UserError(
            f"{here}: how many rows a stream has isn't known, so the run ends by steps: set trainer.max_steps=... and "
            f"trainer.max_epochs=null"
        )
    if c.tokenizer.kind == "char":
        raise UserError(f"{here}: tokenizer=char is made from all of the text: choose tokenizer=bytes, bpe or gpt2")
    wrong = {
        "data.num_samples": (d.num_samples, "null"),
        "data.val_path": (d.val_path, "null, and data.val_sets to validate on more than the stream's head"),
        "data.val_train_rows": (d.val_train_rows, "0"),
        "data.document_start": (d.document_start, "null"),
        "data.packing": (d.packing, "null"),
        "data.curriculum.by": (d.curriculum.by, "null"),
        "data.fim.rate": (d.fim.rate, "0"),
        "data.batch_warmup.start_size": (d.batch_warmup.start_size, "null"),
        "trainer.overfit_batches": (t.overfit_batches, "0"),
    }
    for key, (value, instead) in wrong.items():
        if value:
            raise UserError(f"{key}={value} doesn't go with a stream ({here}): set {key}={instead}")


def _check_memory(c: Config) -> None:
    """Raises UserError if keys of the memory are incompatible with each other or with other settings."""
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
        fits = nearest_divisor(m.memory_dim, m.num_heads)
        raise UserError(
            f"memory.memory_dim={m.memory_dim} does not divide into memory.num_heads={m.num_heads}: set "
            f"memory.num_heads={fits} or memory.memory_dim={m.num_heads * max(1, round(m.memory_dim / m.num_heads))}"
        )
    _check_memory_layers(m.layers)
    if method == "memory" and c.tokenizer.add_tokens:
        raise UserError(
            "tokenizer.add_tokens with peft=memory: the embedding rows of new tokens are part of the frozen base "
            "and would keep their random initial values; choose peft=memory_lora, which trains them"
        )
    if c.export.merge:
        raise UserError("export.merge=true: a memory can't be merged into its base; leave it out (docs/memory.md)")
    if c.trainer.strategy == "fsdp_tp":
        raise UserError("trainer.strategy=fsdp_tp can't split a memory: set trainer.strategy=fsdp")


def trains_base(c: Config) -> bool:
    """Returns whether optimizer.groups has an entry {name: base}, which trains the base besides memory and adapter."""
    named = any(entry.get("name") == "base" and not entry.get("pattern") for entry in c.optimizer.groups)
    return named and c.peft.method != "none"


def _check_base(c: Config) -> None:
    """Raises UserError if the base is to be trained but is quantized or would be missing from the export."""
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


def _check_router(c: Config) -> None:
    """Raises UserError if router losses can't be computed over whole steps (router.scope=step)."""
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


def _check_memory_layers(layers: object) -> None:
    is_list = isinstance(layers, list) and layers and all(isinstance(i, int) and i >= 0 for i in layers)
    if not is_list and not (isinstance(layers, str) and re.fullmatch(r"every_[1-9]\d*", layers)):
        raise UserError(f"memory.layers={layers}: every_4 say, or a list of layers counted from 0, such as [3,7]")


def chosen_layers(layers: object, depth: int) -> tuple[int, ...]:
    """Returns the indices (from 0) of the decoder layers that memory.layers selects in a model with `depth` layers.

    Raises:
        UserError: there is no such layer.
    """
    if isinstance(layers, str):
        step = int(layers.removeprefix("every_"))
        found = tuple(range(step - 1, depth, step))
        if not found:
            raise UserError(f"memory.layers={layers}: the model has {depth} layers; set memory.layers=[{depth - 1}]")
        return found
    assert isinstance(layers, list)
    beyond = [index for index in layers if index >= depth]
    if beyond:
        raise UserError(f"memory.layers={layers}: no layer {beyond[0]}; the model has {depth}, 0 to {depth - 1}")
    return tuple(sorted(set(layers)))
