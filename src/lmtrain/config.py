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

from lmtrain import cli
from lmtrain import overrides as explain
from lmtrain.checks import check_values
from lmtrain.errors import UserError
from lmtrain.schema import Config
from lmtrain.strategies.rules import check_devices, ranks_per_part


def folders_of(config_dir: str | None, config_name: str) -> tuple[list[Path], list[str]]:
    """Where configs are looked for, first the root's folder; and the override that tells Hydra of the others.

    A `config_dir` adds options to lmtrain's own; if it has a <config_name>.yaml, as a run's folder has, that is the
    root.
    """
    if config_dir is not None and not Path(config_dir).is_dir():
        raise UserError(f"--config-dir {config_dir}: no such folder")
    folders = [cli.conf_dir(), *([Path(config_dir).resolve()] if config_dir else [])]
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
    with initialize_config_dir(config_dir=str(folders[0]), version_base="1.3", job_name="lmtrain"):
        try:
            composed = hydra_compose(config_name, overrides=[*search, *overrides], return_hydra_config=for_sweep)
        except OverrideParseException as error:
            raise UserError(explain.unreadable(error.override)) from None
        except MissingConfigException as error:
            raise UserError(explain.missing_config(error, folders, overrides)) from None
        # Hydra raises ValueError where a group is set to a number or null.
        except (ConfigCompositionException, HydraException, OmegaConfBaseException, ValueError) as error:
            again = lambda kept: hydra_compose(config_name, overrides=[*search, *kept])  # noqa: E731
            raise UserError(explain.refused(error, folders, overrides, again)) from None

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
    check_values(config)
    batch_split(config.data.global_batch_size, config.data.micro_batch_size, parts=1)
    return config


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


def horizon(max_steps: int | None, max_epochs: int | None, rows: int, global_batch_size: int) -> int:
    """Optimizer steps of the whole run: the first reached of max_steps and max_epochs; the last may be shorter."""
    by_epochs = None if max_epochs is None else -(-rows * max_epochs // global_batch_size)
    steps = min(s for s in (max_steps, by_epochs) if s is not None)
    if steps < 1:
        raise UserError("the run has no steps: the training data has no rows")
    return steps


def to_plain(config: Config) -> dict[str, Any]:
    """The config as plain containers, what config.yaml holds; fields without a meaning for a variant are left out."""
    plain = dataclasses.asdict(config)
    for section in ("objective", "model", "data", "tokenizer", "peft", "optimizer", "schedule"):
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
    """config.yaml's text: plain YAML, enough to run again with `--config-dir <run> run.dir=<another>`."""
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
