"""Rules between keys of the config; constraints on single keys are in schema.py. Imports no torch."""

import dataclasses
import inspect
import re
from typing import Any

from lmtrain.config import safe_yaml
from lmtrain.config.batch import check_growth, nearest_divisor
from lmtrain.config.constraints import choice
from lmtrain.config.keys import check_constraints, value_of
from lmtrain.config.options import WarmupStableDecayConfig
from lmtrain.config.override_text import written
from lmtrain.config.schema import Config, MemoryConfig
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
    check_clashes(c)
    time_limit_seconds(c.run.time_limit)
    if c.run.cooldown_from is not None:
        _settle_cooldown(c, c.run.cooldown_from)
    _check_positions(c)
    check_growth(c)
    _check_names(c)
    _check_peft(c)
    _check_memory(c)
    _check_base(c)
    c.objective.check(c)
    _check_targets(c)
    check_strategy(c)


_CLASHES: list[dict[str, Any]] = safe_yaml.table(__file__, "clashes.yaml")


def check_clashes(c: Config) -> None:
    """Raises UserError for the first settings of clashes.yaml that do not go together."""
    for group in _CLASHES:
        has = _found(c, group["with"])
        for clash in group["not"] if has else ():
            when = clash["when"] if isinstance(clash["when"], list) else [clash["when"]]
            found = next(filter(None, (_found(c, settings) for settings in when)), None)
            if found:
                said = {**group, **clash}
                instead = f"Set {said['set']}" if "set" in said else "Leave one of the two out"
                why = f"{' with '.join(found)} does not go with {' and '.join(has)}: {said['because']}"
                raise UserError(f"{why}. {instead}")


def _found(c: Config, settings: dict[str, Any]) -> list[str]:
    """Returns the settings as the user would type them if the config has all of them, else nothing."""
    found = {key: _value(c, key) for key in settings}
    if not all(_is_one_of(value, settings[key]) for key, value in found.items()):
        return []
    typed = {key.removesuffix(".name"): getattr(value, "name", value) for key, value in found.items()}
    return [f"{key}={written(value, str)}" for key, value in typed.items()]


def _value(c: Config, key: str) -> Any:
    """Returns the value of a dotted key; None if this config has no such key."""
    value: Any = c
    for name in key.split("."):
        value = getattr(value, name, None)
    return value


def _is_one_of(value: Any, wanted: Any) -> bool:
    """Returns whether a value is one of those that clashes.yaml describes by `wanted`."""
    if wanted == "given":
        return bool(value)
    if isinstance(wanted, dict):
        return not _is_one_of(value, wanted["except"])
    names = [cls.__name__ for cls in inspect.getmro(type(value))] if dataclasses.is_dataclass(value) else [value]
    return any(name in (wanted if isinstance(wanted, list) else [wanted]) for name in names)


def _check_trainer(c: Config) -> None:
    short = {"bf16": "bf16-mixed", "fp16": "16-mixed", "16": "16-mixed", "fp32": "32-true", "32": "32-true"}
    t = c.trainer
    spell_out(t)
    if t.precision in short:
        raise UserError(f"trainer.precision={t.precision}: write {short[t.precision]}")
    if t.accelerator == "mps":
        raise UserError("trainer.accelerator=mps: Apple GPUs lack fp64 for sums of losses; set trainer.accelerator=cpu")
    if isinstance(t.devices, str) and not t.devices.isdigit():
        choice("auto")("trainer.devices", t.devices)
    if t.devices != "auto" and int(t.devices) < 1:
        raise UserError(f"trainer.devices={t.devices}: a number from 1 up, or auto, is needed")
    clip = t.gradient_clip_val
    if clip is not None and not clip > 0:
        raise UserError(f"trainer.gradient_clip_val={clip} would leave no gradient: null turns clipping off")


def _settle_cooldown(c: Config, checkpoint: str) -> None:
    """Applies run.cooldown_from: the learning rate decays from the checkpoint's step to the end of this run.

    Raises:
        UserError: the checkpoint's name has no step, or the run ends before that step.
    """
    key, name = f"run.cooldown_from={checkpoint}", re.split(r"[/\\]", checkpoint.rstrip("/\\"))[-1]
    named = CHECKPOINT.fullmatch(name)
    if named is None:  # links to checkpoints change
        raise UserError(f"{key}: name a checkpoint by its step, such as outputs/long/checkpoints/step_00004000")
    step, last = int(named[1]), c.trainer.max_steps
    if last is not None and last <= step:
        raise UserError(f"{key}: trainer.max_steps={last} is not beyond that step; set the step at which to end")
    assert isinstance(c.schedule, WarmupStableDecayConfig)  # see clashes.yaml
    c.schedule.decay_from, c.run.schedule_on_resume = step, "rescale"


def _check_positions(c: Config) -> None:
    """Raises UserError if rows exceed the model's positions. Model building checks it too, but after preparing data."""
    positions = c.model.max_position_embeddings
    if c.run_dir is not None or c.objective.rows != c.data.rows:
        return  # the model is that of the run; data for another objective is reported when it is opened
    if c.model.init == "scratch" and positions is not None and c.data.seq_len > positions >= 1:
        found = f"data.seq_len={c.data.seq_len} exceeds model.max_position_embeddings={positions}"
        raise UserError(f"{found}: lower the first or raise the second")


def _check_peft(c: Config) -> None:
    p = c.peft
    if p.method in ("none", "memory"):
        return
    _check_given("peft", p, "r", "alpha", "dropout", "bias")
    if not re.fullmatch(r"pissa_niter_[1-9]\d*", str(p.init_weights)):
        choice("default", "gaussian", "orthogonal", "pissa", "olora")("peft.init_weights", str(p.init_weights))
    moves_base = str(p.init_weights).startswith(("pissa", "olora"))
    if moves_base and (p.quantization is not None or p.use_dora):
        other = "peft.use_dora=true" if p.use_dora else f"peft.quantization={p.quantization}"
        found = f"peft.init_weights={p.init_weights} moves part of the base into the adapter"
        raise UserError(f"{found}, which does not go with {other}: set peft.init_weights=default")


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


def _check_targets(c: Config) -> None:
    for key in ("callbacks.extra", "callbacks.samples.metrics", "evaluate.metrics"):
        for entry in value_of(c, key):
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
    own = ("lmtrain.data.sources.sums",)
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


def _check_memory(c: Config) -> None:
    """Raises UserError if keys of the memory are incompatible with each other or with other settings."""
    m = c.memory
    if m.num_chapters is None:
        return
    missing = [f.name for f in dataclasses.fields(MemoryConfig) if getattr(m, f.name) is None]
    if missing:
        raise UserError(f"memory.{missing[0]} has no value: set memory.{missing[0]}=..., or memory=none for no memory")
    assert m.memory_dim is not None and m.num_heads is not None and m.top_k is not None  # noqa: PT018
    if m.router != "soft" and m.top_k > m.num_chapters:
        found = f"memory.top_k={m.top_k} of memory.num_chapters={m.num_chapters}"
        raise UserError(f"{found}: a token can't read more; set memory.top_k={m.num_chapters} or less")
    if m.memory_dim % m.num_heads:
        fits = nearest_divisor(m.memory_dim, m.num_heads)
        width = m.num_heads * max(1, round(m.memory_dim / m.num_heads))
        found = f"memory.memory_dim={m.memory_dim} does not divide into memory.num_heads={m.num_heads}"
        raise UserError(f"{found}: set memory.num_heads={fits} or memory.memory_dim={width}")
    _check_memory_layers(m.layers)


def trains_base(c: Config) -> bool:
    """Returns whether optimizer.groups has an entry {name: base}, which trains the base besides memory and adapter."""
    named = any(entry.get("name") == "base" and not entry.get("pattern") for entry in c.optimizer.groups)
    return named and c.peft.method != "none"


def _check_base(c: Config) -> None:
    """Raises UserError if the base is to be trained but is quantized or would be missing from the export."""
    if not trains_base(c):
        return
    if c.memory.num_chapters is None:
        found = "optimizer.groups: {name: base} with peft.method=lora: the export would be the adapter alone"
        raise UserError(f"{found}; leave the entry out, or train the whole model (peft=none)")
    if c.peft.quantization is not None:
        found = f"optimizer.groups: {{name: base}} with peft.quantization={c.peft.quantization}"
        raise UserError(f"{found}: quantised weights can't be trained; leave one of the two out")


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
