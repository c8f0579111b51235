"""Builds a run's callbacks in the order they run, and checks that the metrics they monitor exist."""

import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
from rich.console import Console

from lmtrain.callbacks import foreign
from lmtrain.callbacks.average import WeightAverage
from lmtrain.callbacks.checkpoints import Checkpoints
from lmtrain.callbacks.metrics import Metrics, WriteRecords
from lmtrain.callbacks.progress import PlainLines, RichBar
from lmtrain.callbacks.rollouts import Rollouts
from lmtrain.callbacks.routing import Routing
from lmtrain.callbacks.samples import Samples
from lmtrain.callbacks.stopping import BadSteps, Preemption
from lmtrain.callbacks.stream import FeedStream
from lmtrain.callbacks.time_budget import Forecast, Length, TimeBudget
from lmtrain.callbacks.validation import EarlyStopping, Validation
from lmtrain.config.batch import logged_every
from lmtrain.config.effect import TRIAL
from lmtrain.config.options import WarmupStableDecayConfig
from lmtrain.config.schema import CheckpointConfig, Config, EarlyStoppingConfig
from lmtrain.config.targets import build_target
from lmtrain.data.corpus import Corpus
from lmtrain.data.stream.ring import StreamRows
from lmtrain.data.val_sets import ValSet
from lmtrain.distributed import process_group as world
from lmtrain.distributed.stop_signals import StopRequest
from lmtrain.errors import UserError
from lmtrain.models import dial
from lmtrain.objectives.base import Objective
from lmtrain.objectives.grpo_options import GRPOOptions
from lmtrain.run_folder.folder import RunDir

_PAUSES = 60  # seconds: ranks also wait for the pauses between read attempts


def check_monitors(
    config: Config, corpus: Corpus, objective: Objective, samples: Samples | None, val_sets: dict[str, ValSet]
) -> None:
    """Checks the metrics of checkpoint.monitor and of early stopping.

    Raises:
        UserError: a metric is not reported by every validation, or its worst value would count as the best.
    """
    stopping = config.callbacks.early_stopping
    if stopping.enabled and corpus.val is None and not val_sets:
        raise UserError(
            f"callbacks.early_stopping.enabled=true needs a validation split: {corpus.how_to_validate(config.data)}"
        )
    scores = samples.text_metrics.names() if samples is not None else []
    own = [*_reported(objective, corpus.val_bytes_per_token), *scores] if corpus.val is not None else []
    known = [f"val/{name}" for name in own]
    for name, set_ in val_sets.items():
        known += [f"val/{name}/{number}" for number in _reported(objective, set_.bytes_per_token)]
    watching: dict[str, CheckpointConfig | EarlyStoppingConfig] = {"checkpoint": config.checkpoint}
    if stopping.enabled:
        watching["callbacks.early_stopping"] = stopping
    every = config.callbacks.samples.every_n_validations
    for section, cfg in watching.items():
        key, name = f"{section}.monitor", cfg.monitor
        if every > 1 and name in [f"val/{score}" for score in scores]:
            raise UserError(f"{key}={name} is needed at every validation: set callbacks.samples.every_n_validations=1")
        if known and name not in known and not config.callbacks.extra:  # extra callbacks may log others
            raise UserError(f"{key}={name}: this run's validations report {', '.join(known)}")
        _check_direction(section, name, cfg.mode)


_MORE_IS_BETTER = re.compile(
    r"val/([^/]+/)?(reward|reward/.+|rewards/accuracy|rewards/margin|exact_match|bleu|rouge[12]?|bertscore)"
)
_LESS_IS_BETTER = re.compile(r"val/([^/]+/)?(loss|perplexity|bits_per_byte)")


def _check_direction(section: str, name: str, mode: str) -> None:
    """Raises UserError if the worst value of a metric would count as the best."""
    wrong = _MORE_IS_BETTER.fullmatch(name) if mode == "min" else _LESS_IS_BETTER.fullmatch(name)
    if wrong is not None and (mode == "min" or section == "checkpoint"):  # to stop where the loss rises is of use
        better, right = ("more", "max") if mode == "min" else ("less", "min")
        raise UserError(
            f"{section}.monitor={name} with {section}.mode={mode} takes the worst value for the best, as {better} of "
            f"it is better: set {section}.mode={right}"
        )


def _reported(objective: Objective, bytes_per_token: float | None) -> list[str]:
    """Returns the names of the metrics that the validation of one set reports."""
    names = objective.validation_names()
    if not objective.loss_is_nll:
        return names
    return [*names, "perplexity", *(["bits_per_byte"] if bytes_per_token else [])]


_NAMES_A_PLACE = re.compile(r"(dir|path|root|folder)s?$")  # argument names: dirpath, save_dir, ...
_LEADS_OUT = re.compile(r"^([/~]|file:)|(^|/)\.\.(/|$)")


def build_callbacks(
    config: Config,
    run_dir: RunDir,
    metrics: Metrics,
    samples: Samples | None,
    feed: FeedStream | None,
    preemption: Preemption,
    console: Console,
    length: Length,
    scored_on: Callable[[str], str | None],
    ranking: str,
) -> list[pl.Callback]:
    """Builds the callbacks in running order: metrics, the user's, validation, samples, progress, record, checkpoint."""
    cb, t, options = config.callbacks, config.trainer, config.objective
    average = WeightAverage(cb.ema) if cb.ema.enabled else None
    validation = Validation(metrics, samples, average, config, length.steps)
    monitored = scored_on(config.checkpoint.monitor)
    checkpoints = Checkpoints(run_dir.checkpoints, metrics, config, length.steps, monitored, ranking)
    bar = progress_bar(config, console, length.steps)
    parts = [part for part in (validation, checkpoints, bar, feed) if part is not None]  # told when the length changes
    if bar is not None:
        metrics.listeners.append(bar.listen)
    callbacks: list[pl.Callback | None] = [
        metrics,
        Routing(metrics.records, config.router.warn_after_steps, config.memory.router_noise),
        Rollouts(metrics, run_dir, options, config.data, console) if isinstance(options, GRPOOptions) else None,
        BadSteps(run_dir.path, t.max_bad_steps, logged_every(t, length.steps)),
        *_users_callbacks(config),  # before the validation, as in Lightning: what they do to the weights is judged
        average,
        validation,
        _forecast(config, metrics, length, console),
        early_stopping(cb.early_stopping, scored_on) if cb.early_stopping.enabled else None,
        samples,
        bar,
        feed,  # may request a stop
        TimeBudget(config, length, console, parts, samples) if config.budget.minutes is not None else None,
        # Comes after all that log: some Lightning callbacks log an extra time when they see that a stop was requested.
        preemption,
        WriteRecords(metrics.records),
        checkpoints,
    ]
    return [callback for callback in callbacks if callback is not None]


def _forecast(config: Config, metrics: Metrics, length: Length, console: Console) -> Forecast | None:
    """Builds the callback that forecasts the final loss, for a run that is like those it was fitted to."""
    schedule, minutes, epochs = config.schedule, config.budget.minutes, config.trainer.max_epochs
    if minutes is None or not dial.is_measured(config) or not isinstance(schedule, WarmupStableDecayConfig):
        return None
    if (schedule.decay_ratio, schedule.decay_shape) != dial.LR_DECAY or schedule.decay_from is not None:
        return None
    epoch_steps = length.at_most / epochs if epochs is not None else math.inf
    # The fit has no runs with more weight decay, with another dropout, or with a model too large for a repeated text.
    decay, repeats = config.optimizer.weight_decay, length.steps / epoch_steps
    too_much = decay > 1.1 * dial.weight_decay(config.optimizer.lr, epoch_steps)
    if too_much or config.model.dropout != dial.dropout(repeats):
        return None
    tokens = epoch_steps * config.data.global_batch_size * config.data.seq_len
    if repeats > 1 and config.model.num_hidden_layers > dial.fed_by(tokens)[-1]:  # type: ignore[attr-defined]
        return None
    return Forecast(metrics, schedule, minutes, console, decayed=decay > 0)


def _users_callbacks(config: Config) -> list[pl.Callback]:
    entries = map(foreign.fitted, config.callbacks.extra)
    allowed, refused = config.run.allow_target, foreign.REFUSED
    return [build_target(e, "callbacks.extra", pl.Callback, allowed, refused=refused) for e in entries]


def outside(config: Config, run_dir: RunDir, callbacks: list[pl.Callback]) -> list[str]:
    """Returns a note on each path outside the run's folder and the cache that the user's loggers and callbacks name."""
    roots = [run_dir.path, Path(config.data.cache_dir).expanduser()]
    named = [(f"logger.{name}", options) for name, options in config.logger.items()]
    named += [
        (f"callbacks.extra, {type(c).__name__}", vars(c)) for c in callbacks
        if not type(c).__module__.startswith("lmtrain.")
    ]  # fmt: skip
    return [
        f"{who}: {argument} is {place}, outside the run's folder: what is written there is not part of the run, and "
        f"nothing in it is removed with it"
        for who, arguments in named
        for argument, place in _outside(arguments, roots)
    ]


def _outside(arguments: Any, roots: Sequence[Path], key: str = "") -> Iterator[tuple[str, Path]]:
    """Yields the name and path of each argument that is a path below none of `roots`."""
    if isinstance(arguments, dict | list):
        for name, inner in arguments.items() if isinstance(arguments, dict) else enumerate(arguments):
            yield from _outside(inner, roots, str(name))
    elif isinstance(arguments, str | Path) and key != "_target_" and str(arguments):
        text = str(arguments).removeprefix("file:")
        if _LEADS_OUT.search(text) or _NAMES_A_PLACE.search(key):
            place = Path(text).expanduser().resolve()
            if "://" not in text and not any(place.is_relative_to(root.resolve()) for root in roots):
                yield key, place


def early_stopping(cfg: EarlyStoppingConfig, scored_on: Callable[[str], str | None]) -> EarlyStopping:
    threshold, worse = cfg.stop_at, np.float32(-np.inf if cfg.mode == "max" else np.inf)
    if threshold is not None:  # Lightning's has to be passed and ours only reached; scores are fp32
        threshold = float(np.nextafter(np.float32(threshold), worse))
    return EarlyStopping(
        monitor=cfg.monitor,
        mode=cfg.mode,
        patience=cfg.patience,
        min_delta=cfg.threshold,
        stopping_threshold=threshold,
        check_on_train_epoch_end=False,
        scored_on=scored_on(cfg.monitor),
    )


def build_feed(
    config: Config, run_dir: RunDir, corpus: Corpus, stop: StopRequest, total_steps: int
) -> FeedStream | None:
    """Builds the callback that feeds a stream, and an empty ring for it in the run's folder; None without a stream."""
    if corpus.stream is None:
        return None
    assert isinstance(corpus.train, StreamRows)
    check_patience(config)
    corpus.train.folder = run_dir.ring
    world.from_first(lambda: _make_empty(run_dir.ring))
    return FeedStream(corpus.stream, corpus.train, stop, total_steps, config.data.ring_patience or 0.0)


def check_patience(config: Config) -> None:
    """Raises UserError if the other ranks would time out while rank 0 still retries reading."""
    patience = config.data.ring_patience or 0.0
    longest = config.trainer.rank_timeout - _PAUSES
    if world.size() > 1 and patience > longest:
        raise UserError(
            f"data.ring_patience={patience:g}: the ranks wait for the one that reads, and give up after trainer."
            f"rank_timeout={config.trainer.rank_timeout} seconds: set data.ring_patience={max(0, longest)} or less, or "
            f"trainer.rank_timeout={math.ceil(patience) + _PAUSES}"
        )


def _make_empty(folder: Path) -> None:
    """Empties the folder: what a killed run left in it is produced again from its checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def progress_bar(config: Config, console: Console, total_steps: int) -> RichBar | PlainLines | None:
    style = config.callbacks.progress.style
    if style == "auto":
        style = "rich" if console.is_terminal else "plain"
    if style == "rich":
        return RichBar(console, total_steps, config.headline())
    if style == "plain":
        # A trial of a sweep prints only its validations.
        every = math.inf if os.environ.get(TRIAL) == "1" else config.callbacks.progress.plain_every_seconds
        return PlainLines(console, total_steps, every, config.headline())
    return None
