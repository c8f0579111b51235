"""The overrides that a sweep tries: every combination (grid), or what Optuna proposes from the trials so far."""

import itertools
import warnings
from dataclasses import replace
from typing import Any

from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from lmtrain.config.config_files import hydra_over
from lmtrain.config.defaults import conf_dir
from lmtrain.config.overrides import parse_all
from lmtrain.config.schema import SweepConfig
from lmtrain.errors import UserError, needing
from lmtrain.sweeps.trials import Trial

_RANDOM = 8  # random trials before TPE begins to learn; failed ones don't count
VALUES = 10_000  # most values of one key; each is composed and checked before the first trial


def parse(overrides: list[str]) -> list[Override]:
    """Parses overrides; `glob(*)` expands to the options in conf/."""
    with hydra_over([conf_dir()]) as hydra:
        return [replace(word.override, config_loader=hydra.config_loader) for word in parse_all(overrides, sweep=True)]


def choices(override: Override) -> list[str]:
    """Returns `key=value` for each value of a swept key, or for the two ends of an interval."""
    key = override.get_key_element()
    if override.is_interval_sweep():
        interval: Any = override.value()
        return [f"{key}={interval.start}", f"{key}={interval.end}"]
    try:
        values = list(itertools.islice(override.sweep_string_iterator(), VALUES + 1))
    except HydraException as error:
        raise UserError(f"{override.input_line}: {error}") from None
    if not 0 < len(values) <= VALUES:
        found = "no value" if not values else f"more than {VALUES:,} values"
        raise UserError(f"{override.input_line}: a sweep needs values to choose from, and this has {found}")
    return [f"{key}={value}" for value in values]


def combinations(swept: list[Override]) -> list[list[str]]:
    """Returns the different combinations of a grid; the last key varies fastest."""
    for override in swept:
        if override.is_interval_sweep():
            raise UserError(f"{override.input_line}: an interval is for Optuna: add sweep=optuna, or list values")
    return [list(combination) for combination in dict.fromkeys(itertools.product(*map(choices, swept)))]


def check_optuna(swept: list[Override], sweep: SweepConfig) -> None:
    """Raises UserError if an Optuna search with these settings can't start."""
    if not swept:
        raise UserError("sweep=optuna has nothing to search: add keys, such as 'optimizer.lr=interval(1e-4,1e-2)'")
    with needing("optuna", "sweep=optuna"):
        distributions(swept)


def distributions(swept: list[Override]) -> dict[str, Any]:
    """Returns Optuna's distribution for each key: numerical for an interval, categorical for a list of values."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, Any] = {}
    for override in swept:
        key = override.get_key_element()
        if not override.is_interval_sweep():
            found[key] = CategoricalDistribution([c.partition("=")[2] for c in choices(override)])
            continue
        interval: Any = override.value()
        low, high, log = interval.start, interval.end, "log" in interval.tags
        try:
            whole = isinstance(low, int) and isinstance(high, int)
            found[key] = (IntDistribution if whole else FloatDistribution)(low, high, log=log)
        except ValueError as error:
            raise UserError(f"{override.input_line}: {error}") from None
    return found


def propose(space: dict[str, Any], sweep: SweepConfig, mode: str, trials: list[Trial]) -> list[str]:
    """Returns the next trial's overrides, as a function of only the trials so far and the seed.

    An interrupted sweep therefore continues as if it had not been interrupted. The study is rebuilt from the trials
    each time, so that no second file has to agree with trials.jsonl. A trial without a finite score counts as failed
    in Optuna, which then learns nothing from it.

    Args:
        space: from `distributions`.
        mode: min or max.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    seed = (sweep.seed or 0) + len(trials)
    with warnings.catch_warnings():  # constant_liar is marked experimental
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler: optuna.samplers.BaseSampler = optuna.samplers.RandomSampler(seed=seed)
        if sweep.sampler == "tpe":
            sampler = optuna.samplers.TPESampler(n_startup_trials=_RANDOM, seed=seed, constant_liar=sweep.jobs > 1)
        study = optuna.create_study(sampler=sampler, direction="maximize" if mode == "max" else "minimize")
        for trial in trials:
            _tell(study, trial, space)
        chosen = study.ask(space).params
    return [f"{key}={chosen[key]}" for key in space]


def _tell(study: Any, trial: Trial, space: dict[str, Any]) -> None:
    """Adds a trial to the study, unless its values lie outside the current search space."""
    import optuna

    texts = dict(o.split("=", 1) for o in trial.overrides)
    if texts.keys() != space.keys():
        return
    states = optuna.trial.TrialState
    state = {"finished": states.COMPLETE, "running": states.RUNNING}.get(trial.status, states.FAIL)
    if state == states.COMPLETE and trial.score is None:
        state = states.FAIL
    kinds = {optuna.distributions.IntDistribution: int, optuna.distributions.FloatDistribution: float}
    try:
        params = {key: kinds.get(type(space[key]), str)(text) for key, text in texts.items()}
        score = trial.score if state == states.COMPLETE else None
        row = optuna.trial.create_trial(params=params, distributions=space, value=score, state=state)
    except ValueError:
        return
    study.add_trial(row)
