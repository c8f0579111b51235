"""Builds a run's callbacks in the order in which they run: those of every run, and those of its features."""

from typing import Any, NamedTuple

import lightning.pytorch as pl

from lmtrain.callbacks import extra
from lmtrain.callbacks.checkpoints import Checkpoints
from lmtrain.callbacks.length import DependsOnLength
from lmtrain.callbacks.metrics import Metrics, WriteRecords
from lmtrain.callbacks.parts import Parts, Phase
from lmtrain.callbacks.progress import progress_bar
from lmtrain.callbacks.records import Records
from lmtrain.callbacks.routing import Routing
from lmtrain.callbacks.samples import Samples
from lmtrain.callbacks.step_numbers import StepNumbers
from lmtrain.callbacks.stopping import BadSteps, Preemption
from lmtrain.callbacks.validation import Validation
from lmtrain.config.batch import logged_every
from lmtrain.run.data import RunData
from lmtrain.run.features import features_on
from lmtrain.run.monitors import check_monitors


class Callbacks(NamedTuple):
    """The callbacks of a run in the order in which they run, and two of them that the run asks."""

    in_order: list[pl.Callback]
    metrics: Metrics
    preemption: Preemption


def build_callbacks(parts: Parts, data: RunData) -> Callbacks:
    """Builds all callbacks of a run; raises UserError for a metric to monitor that no validation reports."""
    config, objective, steps = parts.config, parts.objective, parts.length.steps
    t = config.trainer

    # What is measured, and the texts that a validation writes.
    numbers = StepNumbers(config.data, data.train_rows, t.max_epochs)
    bytes_per_token = {name: val_set.bytes_per_token for name, val_set in data.validated.items()}
    records = Records(parts.run_dir.metrics)
    metrics = parts.metrics = Metrics(records, config, objective.model.model, numbers, bytes_per_token, steps)
    parts.samples = _samples(parts)
    check_monitors(config, data, objective, parts.samples)

    # What depends on the length of the run, which a time budget changes.
    validation = parts.validation = Validation(metrics, parts.samples, config, steps)
    scored_on = parts.scored_on(config.checkpoint.monitor)
    checkpoints = Checkpoints(parts.run_dir.checkpoints, metrics, config, steps, scored_on, parts.ranking)
    bar = progress_bar(config, parts.console, steps)
    if bar is not None:
        metrics.listeners.append(bar.listen)

    # A callback that has nothing to do costs 20 us a step.
    routes = bool(objective.model.router_losses.kinds)
    routing = Routing(records, config.router.warn_after_steps, config.memory.router_noise) if routes else None
    preemption = Preemption(objective.stop)
    placed: list[tuple[Phase, pl.Callback | None]] = [
        (Phase.MEASURES, metrics),
        (Phase.MEASURES, routing),
        (Phase.GIVES_UP, BadSteps(parts.run_dir.path, t.max_bad_steps, logged_every(t, steps))),
        *((Phase.YOURS, callback) for callback in extra.build_extra(config)),
        (Phase.VALIDATES, validation),
        (Phase.SHOWS, parts.samples),
        (Phase.SHOWS, bar),
        (Phase.STOPS, preemption),
        (Phase.WRITES, WriteRecords(records)),
        (Phase.SAVES, checkpoints),
    ]
    for feature in features_on(config):
        built: list[Any] = [callback for _, callback in placed]
        parts.depend_on_length = [callback for callback in built if isinstance(callback, DependsOnLength)]
        placed += feature.callbacks(parts)
    placed.sort(key=lambda one: one[0])
    return Callbacks([callback for _, callback in placed if callback is not None], metrics, preemption)


def _samples(parts: Parts) -> Samples | None:
    """Builds the callback that writes texts, for a model that writes any and a run that validates."""
    config, corpus = parts.config, parts.corpus
    if config.callbacks.samples.every_n_validations == 0 or corpus.val is None or config.objective.scalar_head:
        return None
    return Samples(parts.run_dir.samples, config, corpus, parts.console, parts.metrics.clock)
