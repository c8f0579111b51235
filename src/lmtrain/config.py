"""Composes the config, checks it and holds the rules that tie fields together. Imports neither torch nor lightning."""

import dataclasses
import difflib
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lmtrain import cli
from lmtrain import overrides as explain
from lmtrain.errors import UserError
from lmtrain.optim.schedules import check_schedule
from lmtrain.schema import Config

PRECISIONS = ("auto", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "64-true")
STRATEGIES = ("auto", "ddp")
# `_target_` builds any class it names, so only these packages are open unless run.allow_target says more.
TARGET_PACKAGES = ("lmtrain", "torch", "lightning", "transformers", "torchmetrics", "peft")


def compose(overrides: list[str], config_dir: str | None = None, config_name: str = "config") -> DictConfig:
    """The config tree for these overrides; a wrong one raises UserError naming the nearest valid key or option."""
    if config_dir is not None and not Path(config_dir).is_dir():
        raise UserError(f"--config-dir {config_dir}: no such folder")
    folders = [cli.conf_dir(), *([Path(config_dir).resolve()] if config_dir else [])]
    search = [f"hydra.searchpath=[file://{folder}]" for folder in folders[1:]]
    explain.refuse_hydra_keys(overrides)
    with initialize_config_dir(config_dir=str(folders[0]), version_base="1.3", job_name="lmtrain"):
        try:
            composed = hydra_compose(config_name, overrides=[*search, *overrides])
        except OverrideParseException as error:
            raise UserError(explain.unreadable(error.override)) from None
        except MissingConfigException as error:
            raise UserError(explain.missing_config(error, folders, overrides)) from None
        # Hydra raises ValueError where a group is set to a number or null.
        except (ConfigCompositionException, HydraException, OmegaConfBaseException, ValueError) as error:
            compose_again = functools.partial(hydra_compose, config_name)
            message = explain.refused(
                error, folders, overrides, lambda kept: compose_again(overrides=[*search, *kept])
            )
            raise UserError(message) from None

    _one_warmup(composed, overrides)
    return composed


def _one_warmup(composed: DictConfig, overrides: list[str]) -> None:
    """Steps and ratio are two ways to say one thing: setting one on the command line takes the other's default away."""
    steps, ratio = (any(o.startswith(f"schedule.warmup_{k}=") for o in overrides) for k in ("steps", "ratio"))
    if steps and not ratio:
        composed.schedule.warmup_ratio = None
    if ratio and not steps:
        composed.schedule.warmup_steps = None


def to_yaml(composed: DictConfig) -> str:
    """The composed tree as plain YAML, interpolations resolved."""
    return OmegaConf.to_yaml(composed, resolve=True)


def check(composed: DictConfig | Mapping[str, Any]) -> Config:
    """The typed config, every rule applied; UserError says which key is wrong and what would be right."""
    try:
        tree = OmegaConf.create(OmegaConf.to_container(OmegaConf.create(composed), resolve=True))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise UserError(f"{_first_line(error)} (in the config)") from None
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), tree))
    except OmegaConfBaseException as error:
        raise UserError(explain.wrong_type(error, tree)) from None
    assert isinstance(config, Config)
    _check_choices(config)
    _check_ranges(config)
    _check_targets(config)
    batch_split(config.data.global_batch_size, config.data.micro_batch_size, world_size=1)
    return config


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def _choice(key: str, value: Any, options: tuple[str, ...]) -> None:
    if value not in options:
        near = difflib.get_close_matches(str(value), options, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{key}={value} is not known{hint} (options: {', '.join(options)})")


def _check_choices(c: Config) -> None:
    _choice("objective.name", c.objective.name, ("causal_lm",))
    _choice("run.schedule_on_resume", c.run.schedule_on_resume, ("keep", "rescale"))
    _choice("model.init", c.model.init, ("scratch", "pretrained"))
    _choice("data.source", c.data.source, ("hub", "files", "python_stdlib", "bins"))
    _choice("data.format", c.data.format, ("auto", "text", "jsonl", "json", "parquet", "arrow"))
    _choice("data.sample_by", c.data.sample_by, ("document", "paragraph", "line"))
    _choice("tokenizer.kind", c.tokenizer.kind, ("hub", "bpe", "bytes", "char"))
    short = {"bf16": "bf16-mixed", "fp16": "16-mixed", "16": "16-mixed", "fp32": "32-true", "32": "32-true"}
    if c.trainer.precision in short:
        raise UserError(f"trainer.precision={c.trainer.precision}: write {short[c.trainer.precision]}")
    _choice("trainer.precision", c.trainer.precision, PRECISIONS)
    _choice("trainer.strategy", c.trainer.strategy, STRATEGIES)
    _choice("trainer.accelerator", c.trainer.accelerator, ("auto", "cpu", "gpu", "cuda", "mps"))
    _choice("callbacks.early_stopping.mode", c.callbacks.early_stopping.mode, ("min", "max"))
    _choice("checkpoint.mode", c.checkpoint.mode, ("min", "max"))
    _choice("callbacks.progress.style", c.callbacks.progress.style, ("auto", "rich", "plain", "none"))
    _choice("export.dtype", c.export.dtype, ("float32", "bfloat16", "float16"))
    for key, value in {
        "trainer.compile": c.trainer.compile,
        "trainer.activation_checkpointing": c.trainer.activation_checkpointing,
    }.items():
        if isinstance(value, str):
            _choice(key, value, ("auto",))
    if isinstance(c.trainer.devices, str) and not c.trainer.devices.isdigit():
        _choice("trainer.devices", c.trainer.devices, ("auto",))


def _check_ranges(c: Config) -> None:
    at_least_one = {
        "data.seq_len": c.data.seq_len,
        "data.global_batch_size": c.data.global_batch_size,
        "data.micro_batch_size": c.data.micro_batch_size,
        "data.shard_tokens": c.data.shard_tokens,
        "trainer.max_steps": c.trainer.max_steps,
        "trainer.max_epochs": c.trainer.max_epochs,
        "trainer.val_check_interval": c.trainer.val_check_interval,
        "trainer.limit_val_batches": c.trainer.limit_val_batches,
        "trainer.save_every_n_steps": c.trainer.save_every_n_steps,
        "trainer.log_every_n_steps": c.trainer.log_every_n_steps,
        "trainer.num_nodes": c.trainer.num_nodes,
        "trainer.num_threads": c.trainer.num_threads,
        "model.vocab_multiple_of": c.model.vocab_multiple_of,
        "callbacks.early_stopping.patience": c.callbacks.early_stopping.patience,
        "checkpoint.keep_every": c.checkpoint.keep_every,
        "trainer.max_bad_steps": c.trainer.max_bad_steps,
        "trainer.spike_window": c.trainer.spike_window,
        "checkpoint.keep_last": c.checkpoint.keep_last,
    }
    for key, value in at_least_one.items():
        if value is not None and value < 1:
            raise UserError(f"{key}={value}: at least 1 is needed")
    not_negative: dict[str, float | None] = {
        "data.num_workers": c.data.num_workers,
        "data.min_length": c.data.min_length,
        "checkpoint.keep_best": c.checkpoint.keep_best,
        "optimizer.lr": c.optimizer.lr,
        "optimizer.weight_decay": c.optimizer.weight_decay,
        "trainer.gradient_clip_val": c.trainer.gradient_clip_val,
        "callbacks.samples.temperature": c.callbacks.samples.temperature,
        "seed": c.seed,
    }
    for key, number in not_negative.items():
        if number is not None and not number >= 0:
            raise UserError(f"{key}={number}: must not be negative")
    for key, share in {"model.dropout": c.model.dropout, "data.val_fraction": c.data.val_fraction}.items():
        if not 0 <= share < 1:
            raise UserError(f"{key}={share}: a share from 0 up to (not including) 1 is needed")
    if c.trainer.max_steps is None and c.trainer.max_epochs is None:
        raise UserError("the run would never end: set trainer.max_steps or trainer.max_epochs")
    time_limit_seconds(c.run.time_limit)
    check_schedule(c.schedule)
    if c.run.name is not None and not re.fullmatch(r"[A-Za-z0-9._+-]+(/[A-Za-z0-9._+-]+)*", c.run.name):
        raise UserError(f"run.name={c.run.name!r}: use letters, digits, '.', '_', '-', '+' and '/' only")


def _check_targets(c: Config) -> None:
    allowed = (*TARGET_PACKAGES, *(c.run.allow_target or []))
    for callback in c.callbacks.extra:
        target = str(callback.get("_target_", ""))
        if not target:
            raise UserError(f"callbacks.extra: {callback} names no _target_ (package.module.Class)")
        if target.split(".")[0] not in allowed and not any(target.startswith(f"{a}.") for a in allowed):
            raise UserError(
                f"callbacks.extra: _target_={target} is outside the known packages ({', '.join(allowed)}); "
                f"if you trust it: run.allow_target=[{target.split('.')[0]}]"
            )


@dataclass(frozen=True)
class BatchSplit:
    """How a global batch is laid out: rows = world_size x accumulation x micro_batch_size."""

    global_batch_size: int
    micro_batch_size: int
    world_size: int

    @property
    def accumulation(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.world_size)

    def __str__(self) -> str:
        devices = f"{self.world_size} device{'s' if self.world_size > 1 else ''}"
        return (
            f"{self.global_batch_size} rows = {devices} x {self.accumulation} micro-batch"
            f"{'es' if self.accumulation > 1 else ''} x {self.micro_batch_size} rows"
        )


def batch_split(global_batch_size: int, micro_batch_size: int, world_size: int) -> BatchSplit:
    """The split of a global batch; UserError with the nearest one that works where it doesn't divide."""
    if global_batch_size % (micro_batch_size * world_size) == 0:
        return BatchSplit(global_batch_size, micro_batch_size, world_size)
    unit = micro_batch_size * world_size
    nearest = max(1, round(global_batch_size / unit)) * unit
    fixes = [f"data.global_batch_size={nearest}"]
    if global_batch_size % world_size == 0:
        per_rank = global_batch_size // world_size
        divisors = [d for d in range(1, per_rank + 1) if per_rank % d == 0]
        fixes.insert(0, f"data.micro_batch_size={min(divisors, key=lambda d: (abs(d - micro_batch_size), d))}")
    raise UserError(
        f"data.global_batch_size={global_batch_size} does not split into {world_size} device(s) x "
        f"data.micro_batch_size={micro_batch_size}: set {' or '.join(fixes)}"
    )


def horizon(max_steps: int | None, max_epochs: int | None, rows: int, global_batch_size: int) -> int:
    """Optimizer steps of the whole run: the first reached of max_steps and max_epochs; the last may be shorter."""
    by_epochs = None if max_epochs is None else -(-rows * max_epochs // global_batch_size)
    steps = min(s for s in (max_steps, by_epochs) if s is not None)
    if steps < 1:
        raise UserError("the run has no steps: the training data has no rows")
    return steps


def time_limit_seconds(text: str | None) -> float | None:
    """HH:MM:SS, MM:SS or seconds as seconds."""
    if text is None:
        return None
    parts = text.split(":")
    if len(parts) > 3 or not all(re.fullmatch(r"\d+", p) for p in parts):
        raise UserError(f"run.time_limit={text!r}: write HH:MM:SS, such as 11:50:00")
    return float(sum(int(p) * 60**i for i, p in enumerate(reversed(parts))))


def to_plain(config: Config) -> dict[str, Any]:
    """The config as plain containers, what config.yaml holds; fields without a meaning for a variant are left out."""
    plain = dataclasses.asdict(config)
    for section in ("model", "tokenizer", "optimizer", "schedule"):
        cls = next(f.type for f in dataclasses.fields(Config) if f.name == section)
        absent = [
            f.name
            for f in dataclasses.fields(cls)  # type: ignore[arg-type]
            if f.default is None and plain[section][f.name] is None
        ]
        for name in absent:
            del plain[section][name]
    return plain


def dump(config: Config) -> str:
    """config.yaml's text: plain YAML, enough to run again with `--config-dir <run> --config-name config`."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def load(path: Path) -> Config:
    """The config a run was started with."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; is {path.parent} a run folder?") from None
    except (OSError, yaml.YAMLError) as error:
        raise UserError(f"{path} can't be read: {error}") from None
    return check(tree)
