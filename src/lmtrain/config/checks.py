"""Rules between keys of the config; constraints on one key stand with it in schema.py. Imports no torch."""

import re
from typing import Any

from lmtrain.config.constraints import choice
from lmtrain.config.growth import check_growth
from lmtrain.config.keys import check_constraints
from lmtrain.config.memory import check_base, check_memory, check_router
from lmtrain.config.precision import check_fp8
from lmtrain.config.schedule import check_schedule
from lmtrain.config.schema import Config
from lmtrain.config.strategies import check_strategy, spell_out
from lmtrain.config.stream import check_stream
from lmtrain.config.targets import check_allowed, check_names
from lmtrain.errors import UserError

# Those of text_metrics.NAMED, which imports torch; bertscore:<encoder> beside them.
TEXT_METRICS = ("bleu", "rouge", "rouge1", "rouge2", "exact_match")


def check_values(c: Config) -> None:
    """Raises UserError for the first value that is not among its choices, out of its range, or unsafe."""
    _check_trainer(c)
    check_constraints(c)
    _check_run(c)
    _check_positions(c)
    check_growth(c)
    _check_fim(c)
    _check_names(c)
    _check_peft(c)
    check_memory(c)
    check_router(c)
    check_base(c)
    c.objective.check(c)
    _check_pairs(c)
    _check_targets(c)
    check_fp8(c)
    check_strategy(c)
    check_stream(c)


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
    check_schedule(c.schedule)


def _check_positions(c: Config) -> None:
    """Also checked when the model is built; here before any data is prepared."""
    positions = c.model.max_position_embeddings
    if c.objective.rows != c.data.rows:
        return  # data for another objective: that is said where the data is opened
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
    needed = {"r": "at least 1 is needed", "alpha": "at least 1 is needed", "dropout": "a share is needed",
              "bias": "none, all or lora_only is needed"}  # fmt: skip
    for name, what in needed.items():
        if getattr(p, name) is None:
            raise UserError(f"peft.{name}=None: {what}")
    begins = ("default", "gaussian", "orthogonal", "pissa", "olora")
    if not re.fullmatch(r"pissa_niter_[1-9]\d*", str(p.init_weights)):
        choice(*begins)("peft.init_weights", str(p.init_weights))
    moves_base = str(p.init_weights).startswith(("pissa", "olora"))
    if moves_base and (p.quantization is not None or p.use_dora):
        other = "peft.use_dora=true" if p.use_dora else f"peft.quantization={p.quantization}"
        raise UserError(
            f"peft.init_weights={p.init_weights} moves part of the base into the adapter, which does not go with "
            f"{other}: set peft.init_weights=default"
        )


def _check_names(c: Config) -> None:
    """Names that have to be given."""
    check_pretrained_name(c.model.init, getattr(c.model, "name_or_path", None))
    if c.data.rows == "text" and not c.data.text_column:
        raise UserError(f"data.text_column={c.data.text_column}: a name or a list of names, [a,b], is needed")
    if c.data.rows != "text":
        for name in ("train_on", "on_too_long", "on_bad_row", "packing"):
            if getattr(c.data, name) is None:
                raise UserError(f"data.{name} has no value: set data.{name}=...")


def check_pretrained_name(init: str | None, name: str | None) -> None:
    """Asked first of all: other keys of such a model follow from its name."""
    if init == "pretrained" and not name:
        raise UserError("model.init=pretrained needs a model: set model.name_or_path to a hub name or a folder")


def _check_fim(c: Config) -> None:
    d = c.data
    if not d.fim.rate:
        return
    others = {"data.packing": d.packing not in (None, "concat"), "data.curriculum.by": d.curriculum.by == "length"}
    for key, is_set in others.items():
        if is_set:
            raise UserError(
                f"data.fim.rate={d.fim.rate} rearranges the documents of rows of data.seq_len tokens, which {key} cuts "
                f"otherwise: set {key}=null or data.fim.rate=0"
            )


def _check_pairs(c: Config) -> None:
    d = c.data
    if d.rows == "pairs":
        choice("assistant", "last_assistant", "completion")("data.train_on", d.train_on)
        choice("truncate_left", "truncate_right", "drop", "raise")("data.on_too_long", d.on_too_long)
        choice("off")("data.packing", d.packing)


def _check_targets(c: Config) -> None:
    samples = c.callbacks.samples
    evaluated = c.evaluate.metrics
    _check_metrics("callbacks.samples.metrics", samples.metrics)
    _check_metrics("evaluate.metrics", evaluated)
    if samples.metrics and not samples.every_n_validations:
        raise UserError(
            "callbacks.samples.metrics compares what the model writes with the data, and with "
            "callbacks.samples.every_n_validations=0 it writes nothing: set that to 1 or more"
        )
    for key, entries in {
        "callbacks.extra": c.callbacks.extra,
        "callbacks.samples.metrics": [m for m in samples.metrics if not isinstance(m, str)],
        "evaluate.metrics": [m for m in evaluated if not isinstance(m, str)],
    }.items():
        for entry in entries:
            check_names(key, entry, c.run.allow_target)
    if "." in c.data.source:
        _check_source(c.data.source, c.run.allow_target)
    if "." in c.data.rows:
        check_allowed("data.rows", c.data.rows, c.run.allow_target)
    mode = (c.logger.get("wandb") or {}).get("mode", "online")
    choice("online", "offline", "disabled", "shared")("logger.wandb.mode", mode)


def _check_source(source: str, allow_target: list[str]) -> None:
    """UserError for a class that is of no opened package: the known ones have no source of data."""
    check_allowed("data.source", source, allow_target)
    if not any(source.startswith(f"{package}.") for package in allow_target):
        raise UserError(
            f"data.source={source}: name a class of a package of yours, and open it: run.allow_target=[...]"
        )


def _check_metrics(key: str, metrics: list[Any]) -> None:
    """UserError for a name that is none of the text metrics."""
    for metric in metrics:
        if metric == "bertscore" or metric == "bertscore:":
            raise UserError(f"{key}: bertscore needs an encoder, {key}=['bertscore:roberta-large'] or a folder")
        if isinstance(metric, str) and not metric.startswith("bertscore:"):
            choice(*TEXT_METRICS)(key, metric)


_TIME = r"(?:(?P<days>\d+)-)?(?P<rest>\d+(?::\d+){0,2})"


def time_limit_seconds(text: str | None) -> float | None:
    """SLURM's forms as seconds: minutes, MM:SS, HH:MM:SS, days-HH, days-HH:MM, days-HH:MM:SS."""
    if text is None:
        return None
    found = re.fullmatch(_TIME, text)
    if found is None:
        raise UserError(
            f"run.time_limit={text!r}: write it as SLURM does: HH:MM:SS such as 11:50:00, minutes, MM:SS or days-HH:MM"
        )
    parts = [int(p) for p in found["rest"].split(":")]
    if found["days"] is not None:
        hours, minutes, seconds = [*parts, 0, 0][:3]
        hours += 24 * int(found["days"])
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return float(3600 * hours + 60 * minutes + seconds)
