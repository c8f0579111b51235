"""The plan of a sweep: what it was asked to do, composed and checked before any trial starts."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from lmtrain.config import compose as config
from lmtrain.config import effect, environment, trust
from lmtrain.config.config_files import composed_files, file_of
from lmtrain.config.keys import flat
from lmtrain.config.schema import Config
from lmtrain.errors import UserError
from lmtrain.files import absolute
from lmtrain.sweeps import search


@dataclass
class SweepPlan:
    """The plan of a sweep: the `fixed` overrides are the same in every trial, the `swept` ones differ."""

    verb: str
    typed: list[str]
    hydra_overrides: list[str]  # the overrides of hydra.*
    config_dir: str | None
    config_name: str
    fixed: list[str]
    swept: list[Override]
    config: Config  # of the first trial
    folder: Path

    @property
    def flags(self) -> list[str]:
        folder = [] if self.config_dir is None else ["--config-dir", self.config_dir]
        name = [] if self.config_name == "config" else ["--config-name", self.config_name]
        return [*folder, *name, *environment.flags()]


def make(verb: str, typed: list[str], config_dir: str | None, config_name: str) -> SweepPlan:
    """Plans a sweep, composing and checking a trial for each value of each swept key.

    Raises:
        UserError: any of these trials is refused.
    """
    parsed = search.parse(typed)
    _refuse(parsed)
    of_hydra = [o.input_line or "" for o in parsed if o.key_or_group.startswith(("hydra.", "hydra/"))]
    swept = [o for o in parsed if o.is_sweep_override()]
    fixed = [o.input_line or "" for o in parsed if not o.is_sweep_override() and o.input_line not in of_hydra]

    own = config.compose(of_hydra, for_sweep=True)

    foreign: trust.Foreign | None = None

    def compose(words: list[str]) -> DictConfig:
        tree = config.compose([*words, *of_hydra], config_dir, config_name, for_sweep=True, foreign=foreign)
        _refuse_hydras(tree, own)
        return tree

    tree = compose([*fixed, *(search.choices(o)[0] for o in swept)])
    if tree.sweep.method == "optuna" and not tree.sweep.space and not swept:
        raise UserError("sweep=optuna: type the keys to search, 'optimizer.lr=tag(log,interval(1e-5,1e-3))'")
    if not swept:  # the search space in the config, without the keys that the command line sets
        taken = {o.key_or_group for o in parsed}
        # Left unresolved, because each trial resolves its own interpolations.
        written: Any = OmegaConf.to_container(tree.sweep.space, resolve=False)
        space = [f"{key}={text}" for key, text in written.items() if key not in taken]
        swept = search.parse(space)
        if config_dir is not None:
            file = file_of("sweep.space", written, composed_files([*fixed, *of_hydra], config_dir, config_name))
            foreign = trust.Foreign(file or Path(config_dir), [*fixed, *of_hydra])
    checked = _check(fixed, swept, compose)
    first = checked[0]
    foreign = trust.JUDGED
    default, varied = effect.default_in(compose(trust.of_typed(fixed))), [o.key_or_group for o in swept]
    words = [*fixed, *(f"{key}=" for key in varied)]
    # A swept key has no effect if no trial reads it, even if one of its values is the default.
    refuse_without_effect(verb, words, checked, lambda key: varied if key in varied else default(key))
    folder = Path(first.sweep.root) / first.sweep.name if first.sweep.name else Path(tree.hydra.sweep.dir)
    of_trials = [o for o in fixed if not o.startswith(("sweep=", "sweep."))]
    folder = absolute(folder)
    return SweepPlan(verb, typed, of_hydra, config_dir, config_name, of_trials, swept, first, folder)


def _refuse_hydras(tree: DictConfig, own: DictConfig) -> None:
    """Raises UserError if a file sets a key of `hydra` from which a launcher, a callback or a logger is built."""
    found, typed = (dict(flat(OmegaConf.to_container(t.hydra, resolve=False))) for t in (tree, own))
    for key in ("callbacks", "env", "hydra_logging", "job_logging", "launcher", "sweeper", "job.env_set"):
        if found.get(key) != typed.get(key):
            raise UserError(f"hydra.{key} is set by a file of --config-dir, and counts only where you type it")


def refuse_without_effect(verb: str, words: list[str], configs: list[Config], default: Callable[[str], Any]) -> None:
    """Raises UserError for the first typed key that has no effect in any of the trials or stages.

    Args:
        default: returns the value that a key has if it is not typed.
    """
    found = [effect.without_effect(verb, words, config, default) for config in configs]
    for message in found[0]:
        if all(message in others for others in found):
            raise UserError(message)


def _refuse(parsed: list[Override]) -> None:
    """Raises UserError for overrides that put all trials in one folder, or that set or sweep the sweeper itself."""
    for override in parsed:
        key = override.key_or_group
        if key in ("run.name", "run.dir"):
            raise UserError(f"{key}: each trial of a sweep has a folder of its own; name the sweep: sweep.name=...")
        if key.startswith(("hydra/sweeper", "hydra.sweeper")):
            raise UserError(f"{key} has no effect: a sweep is set by sweep=grid or sweep=optuna")
        if key.startswith(("sweep", "hydra")) and override.is_sweep_override():
            raise UserError(f"{override.input_line}: settings of the sweep itself have one value each")


def _check(fixed: list[str], swept: list[Override], compose: Callable[[list[str]], DictConfig]) -> list[Config]:
    """Composes and checks a trial for each value of each swept key; returns their configs."""
    values = [search.choices(o) for o in swept]
    first = [v[0] for v in values]
    jobs = [first, *([*first[:i], v, *first[i + 1 :]] for i, vs in enumerate(values) for v in vs[1:])]
    trees = (compose([*fixed, *job]) for job in jobs)
    checked = [config.check(OmegaConf.masked_copy(t, [str(k) for k in t if k != "hydra"])) for t in trees]
    if checked[0].sweep.method == "grid":
        search.combinations(swept)
    else:
        search.check_optuna(swept, checked[0].sweep)
    return checked
