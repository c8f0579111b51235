"""Composes the config, checks it and holds the rules that tie fields together. Imports neither torch nor lightning."""

import dataclasses
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

from lmtrain.config import effect, explain, sections
from lmtrain.config.checks import check_pretrained_name, check_values
from lmtrain.config.folders import conf_dir
from lmtrain.config.growth import Stages
from lmtrain.config.quoting import mended
from lmtrain.config.schema import Config
from lmtrain.config.strategies import check_devices, ranks_per_part
from lmtrain.config.stream import leave_out_ring
from lmtrain.errors import UserError


def folders_of(config_dir: str | None, config_name: str) -> tuple[list[Path], list[str]]:
    """Where configs are looked for, first the root's folder; and the override that tells Hydra of the others.

    A `config_dir` adds options to lmtrain's own; if it has a <config_name>.yaml, as a run's folder has, that is the
    root.
    """
    if config_dir is not None and not Path(config_dir).is_dir():
        raise UserError(f"--config-dir {config_dir}: no such folder")
    folders = [conf_dir(), *([Path(config_dir).resolve()] if config_dir else [])]
    if (folders[-1] / f"{config_name}.yaml").is_file():
        folders.reverse()
    return folders, [f"hydra.searchpath=[file://{folder}]" for folder in folders[1:]]


def compose(
    overrides: list[str], config_dir: str | None = None, config_name: str = "config", *, for_sweep: bool = False
) -> DictConfig:
    """The config tree for these overrides; a wrong one raises UserError naming the nearest valid key or option.

    For a sweep it holds Hydra's own node too, and the keys that only a sweep reads are let through.
    """
    folders, search = folders_of(config_dir, config_name)
    if not for_sweep:
        explain.refuse_sweep_keys(overrides)
    effect.check_suffix(overrides)
    explain.refuse_deleted_groups(overrides, folders)
    overrides = [mended(override) for override in overrides]
    with initialize_config_dir(config_dir=str(folders[0]), version_base="1.3", job_name="lmtrain"):
        try:
            named = lambda groups: str(hydra_compose(config_name, overrides=[*search, *groups]).objective.name)  # noqa: E731
            overrides = effect.for_text(overrides, named)
            composed = hydra_compose(config_name, overrides=[*search, *overrides], return_hydra_config=for_sweep)
        except OverrideParseException as error:
            raise UserError(explain.unreadable(error.override)) from None
        except MissingConfigException as error:
            raise UserError(explain.missing_config(error, folders, overrides)) from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:  # of a folder of the user's, such as a run's
            raise UserError(f"a config can't be read: {_one_line(error)}") from None
        # Hydra raises ValueError where a group is set to a number or null.
        except (ConfigCompositionException, HydraException, OmegaConfBaseException, ValueError) as error:
            again = lambda kept: hydra_compose(config_name, overrides=[*search, *kept])  # noqa: E731
            raise UserError(explain.refused(error, folders, overrides, again)) from None

    source = effect.inferred_source(overrides, composed)
    if source is not None:
        return compose([f"data={source}", *overrides], config_dir, config_name, for_sweep=for_sweep)
    _refuse_gone(composed, overrides)
    _one_warmup(composed, overrides)
    _switched_on(composed, overrides)
    return composed


def _refuse_gone(composed: DictConfig, overrides: list[str]) -> None:
    """Raises UserError for a key that only a config.yaml of an earlier version may still have (`sections.complete`)."""
    typed = {o.lstrip("+").partition("=")[0] for o in overrides}
    if sections.GONE in typed and "_target_" not in composed.optimizer:
        raise UserError(explain.unknown_key(sections.GONE, ()))


def _one_warmup(composed: DictConfig, overrides: list[str]) -> None:
    """Steps and ratio are two ways to say one thing: setting one on the command line takes the other's default away."""
    steps, ratio = (any(o.startswith(f"schedule.warmup_{k}=") for o in overrides) for k in ("steps", "ratio"))
    if steps and not ratio:
        composed.schedule.warmup_ratio = None
    if ratio and not steps:
        composed.schedule.warmup_steps = None


def _switched_on(composed: DictConfig, overrides: list[str]) -> None:
    """Setting a key of early stopping or of the average on the command line turns it on, unless it is turned off."""
    named = {o.lstrip("+").partition("=")[0] for o in overrides}
    for section in ("early_stopping", "ema"):
        prefix = f"callbacks.{section}."
        if f"{prefix}enabled" not in named and any(name.startswith(prefix) for name in named):
            composed.callbacks[section].enabled = True


def to_yaml(composed: DictConfig) -> str:
    """The composed tree as plain YAML, interpolations resolved."""
    return OmegaConf.to_yaml(composed, resolve=True)


def check(composed: DictConfig | Mapping[str, Any]) -> Config:
    """The typed config, every rule applied; UserError says which key is wrong and what would be right."""
    try:
        tree = OmegaConf.create(OmegaConf.to_container(OmegaConf.create(composed), resolve=True))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise UserError(f"{_first_line(error)} (in the config)") from None
    assert isinstance(tree, DictConfig)
    init, name = (OmegaConf.select(tree, f"model.{key}") for key in ("init", "name_or_path"))
    check_pretrained_name(init, name)  # before data.seq_len, which such a model doesn't bring
    sections.complete(tree)
    found = sections.classes(tree)
    try:
        schema = sections.schema_of(found)
        merged = OmegaConf.merge(schema, tree)
        missing = {key.split(".")[0] for key in OmegaConf.missing_keys(merged)}
        config = OmegaConf.to_object(OmegaConf.merge(schema, _defaults_of(missing), tree) if missing else merged)
    except OmegaConfBaseException as error:
        raise UserError(explain.wrong_type(error, tree, sections.names_of(found))) from None
    assert isinstance(config, Config)
    check_values(config)
    if config.data.rows == "text" and config.data.packing == "concat":
        config.data.packing = None  # what it has always meant there
    leave_out_ring(config.data)
    apply_fast_dev_run(config)
    batch_split(config.data.global_batch_size, config.data.micro_batch_size, parts=1)
    return config


def _defaults_of(groups: set[str]) -> dict[str, Any]:
    """The defaults of these groups of conf/: the config.yaml of an earlier version lacks the keys that came later."""
    files = {group: conf_dir() / group / "default.yaml" for group in groups}
    return {g: yaml.safe_load(f.read_text(encoding="utf-8")) for g, f in files.items() if f.is_file()}


def apply_fast_dev_run(config: Config) -> None:
    """Makes of trainer.fast_dev_run, true or a number of steps, the keys that mean it here."""
    steps = int(config.trainer.fast_dev_run)
    if steps < 1:
        return
    t = config.trainer
    t.max_steps, t.max_epochs, t.limit_val_batches, t.val_check_interval, t.log_every_n_steps = (
        steps,
        None,
        steps,
        steps,
        1,
    )
    config.logger, config.export.enabled, config.callbacks.samples.every_n_validations = {}, False, 0


def _one_line(error: Exception) -> str:
    """What a YAML error says, over several lines with the place in the file."""
    return " ".join(str(error).split())


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


@dataclass(frozen=True)
class BatchSplit:
    """How a global batch is laid out: rows = parts x accumulation x micro_batch_size."""

    global_batch_size: int
    micro_batch_size: int
    parts: int  # devices, or groups of devices that read the same rows
    devices_per_part: int = 1

    @property
    def accumulation(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.parts)

    def __str__(self) -> str:
        word = "device" if self.devices_per_part == 1 else "group"
        readers = f"{self.parts} {word}{'s' if self.parts > 1 else ''}"
        if self.devices_per_part > 1:
            readers += f" of {self.devices_per_part} devices"
        return (
            f"{self.global_batch_size} rows = {readers} x {self.accumulation} micro-batch"
            f"{'es' if self.accumulation > 1 else ''} x {self.micro_batch_size} rows"
        )


def split_over(config: Config, processes: int) -> BatchSplit:
    """How a global batch is laid out over so many processes, whose number is known by now.

    Raises:
        UserError: see `batch_split`; devices that don't form whole tensor-parallel groups.
    """
    check_devices(config.trainer)
    together = ranks_per_part(config.trainer)
    return batch_split(config.data.global_batch_size, config.data.micro_batch_size, processes // together, together)


def batch_split(global_batch_size: int, micro_batch_size: int, parts: int, devices_per_part: int = 1) -> BatchSplit:
    """The split of a global batch; UserError with the nearest one that works where it doesn't divide."""
    unit = micro_batch_size * parts
    if global_batch_size % unit == 0:
        return BatchSplit(global_batch_size, micro_batch_size, parts, devices_per_part)
    nearest = max(1, round(global_batch_size / unit)) * unit
    fixes = [f"data.global_batch_size={nearest}"]
    if global_batch_size % parts == 0:
        per_part = global_batch_size // parts
        divisors = [d for d in range(1, per_part + 1) if per_part % d == 0]
        fixes.insert(0, f"data.micro_batch_size={min(divisors, key=lambda d: (abs(d - micro_batch_size), d))}")
    raise UserError(
        f"data.global_batch_size={global_batch_size} does not split into {parts} "
        f"{'device(s)' if devices_per_part == 1 else f'group(s) of {devices_per_part} devices'} x "
        f"data.micro_batch_size={micro_batch_size}: set {' or '.join(fixes)}"
    )


def horizon(max_steps: int | None, max_epochs: int | None, rows: int, sizes: Stages) -> int:
    """Optimizer steps of the whole run: the first reached of max_steps and max_epochs; the last may be shorter."""
    by_epochs = None if max_epochs is None else sizes.steps_for(rows * max_epochs)
    steps = min(s for s in (max_steps, by_epochs) if s is not None)
    if steps < 1:
        raise UserError("the run has no steps: the training data has no rows")
    return steps


def to_plain(config: Config) -> dict[str, Any]:
    """The config as plain containers, what config.yaml holds; fields without a meaning for a variant are left out."""
    plain = dataclasses.asdict(config)
    for section in ("objective", "model", "data", "tokenizer", "peft", "memory", "optimizer", "schedule"):
        absent = [
            f.name
            for f in dataclasses.fields(getattr(config, section))
            if f.default is None and plain[section][f.name] is None
        ]
        for name in absent:
            del plain[section][name]
    return plain


def dump(config: Config) -> str:
    """config.yaml's text: plain YAML, enough to run again with `--config-dir <run> run.dir=<another>`."""
    return yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)


def read(path: Path) -> dict[str, Any]:
    """The plain YAML of a run's config.yaml."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; is {path.parent} a run folder?") from None
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} can't be read: {_one_line(error)}") from None
    if not isinstance(tree, dict):
        raise UserError(f"{path} can't be read: it holds no keys")
    return tree


def load(path: Path) -> Config:
    """The config a run was started with."""
    return check(read(path))
