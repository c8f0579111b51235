"""Builds a run's objects from its config, in order: data, model, optimizer, objective, callbacks, loggers, trainer.

Nothing else in lmtrain instantiates these.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from rich.console import Console

from lmtrain.adapters.finetune import build_trainable_model, starting_weights
from lmtrain.callbacks.metrics import Metrics
from lmtrain.callbacks.records import Records
from lmtrain.callbacks.samples import Samples
from lmtrain.callbacks.step_numbers import StepNumbers
from lmtrain.callbacks.stopping import Preemption
from lmtrain.callbacks.time_budget import ENDLESS, Length
from lmtrain.checkpoints import retention
from lmtrain.checkpoints.checkpoint_io import FolderCheckpointIO
from lmtrain.config.batch import check_reached, horizon, logged_every, rate_factor, row_lengths, step_sizes
from lmtrain.config.checks import time_limit_seconds
from lmtrain.config.fingerprint import Fingerprint, fingerprint
from lmtrain.config.options import over_layers
from lmtrain.config.schema import Config
from lmtrain.config.schema_data import DataConfig
from lmtrain.config.strategies import SHARING
from lmtrain.config.targets import building, find_class
from lmtrain.data.corpus import Corpus, build_corpus, fit_to_model
from lmtrain.data.loaders import check_descriptors, first_rows, rows_used, seen_rows
from lmtrain.data.modules import TokenDataModule, module_class
from lmtrain.data.order import Rows
from lmtrain.data.val_sets import ValSet, build_val_sets, count, measured_on, scored_on
from lmtrain.distributed import devices, ranks
from lmtrain.distributed import process_group as world
from lmtrain.distributed.stop_signals import StopRequest
from lmtrain.errors import UserError
from lmtrain.models.blocks import compile_model, enable_activation_checkpointing
from lmtrain.models.language_model import LanguageModel
from lmtrain.objectives.base import Objective
from lmtrain.optim.optimizers import build_optimizer
from lmtrain.optim.schedules import build_schedule
from lmtrain.optim.skipping import StepGuard
from lmtrain.run.build_callbacks import build_callbacks, build_feed, check_monitors
from lmtrain.run.features import contents_of_features, features_on
from lmtrain.run.loggers import build_loggers
from lmtrain.run_folder.folder import RunDir
from lmtrain.strategies import lightning_private, sharding
from lmtrain.strategies.choose import build_strategy, for_lightning
from lmtrain.terminal import quiet_libraries

Schedule = Callable[[int, int], float]

_JOINED_ON_CPU = 1024  # tokens; beyond, a CPU's caches are too small: benchmarks/RESULTS.md, "Short rows"


@dataclass
class Run:
    """All objects of a run, built from its config."""

    config: Config
    dir: RunDir
    console: Console
    corpus: Corpus
    objective: Objective
    datamodule: TokenDataModule
    metrics: Metrics
    preemption: Preemption
    trainer: pl.Trainer
    scored_on: str | None  # names the rows that checkpoint.monitor is measured on
    ranking: str  # min, max or last, see `ranking`

    @property
    def total_steps(self) -> int:
        """The number of steps of the run as currently planned; a time budget may change it."""
        return self.objective.total_steps

    @property
    def ended_by(self) -> str | None:
        """The key whose epochs, and not the clock, end a run with a time budget, or None; see `out_of_epochs`."""
        return out_of_epochs(self.config, self.total_steps, rows_to_train(self.config, self.corpus))


def build(config: Config, run_dir: RunDir, console: Console, started: float) -> Run:
    """Builds every object of a run; raises UserError for mistakes that only the data or the model reveal."""
    quiet_libraries()
    for feature in features_on(config):
        feature.check_machine(config)
    corpus = world.together(lambda: build_corpus(config))
    rows = rows_to_train(config, corpus)
    total_steps = horizon(config.trainer.max_steps, config.trainer.max_epochs, len(rows), step_sizes(config.data))
    check_reached(config, total_steps)
    check_mixture(config, rows, total_steps)
    stop = StopRequest(time_limit_seconds(config.run.time_limit), started)
    val_sets = world.together(lambda: build_val_sets(config, corpus))
    corpus.notes += [f"data.val_sets.{name}: {note}" for name, set_ in val_sets.items() for note in set_.notes]
    objective = build_objective(config, corpus, total_steps, stop)
    model, more = objective.model, [s.rows for s in val_sets.values()]
    fit_to_model(config, corpus, model.unpacked_because, model.lengths.limit, more)
    most = total_steps if config.budget.minutes is None else at_most(config, rows_to_train(config, corpus))
    datamodule = build_datamodule(config, corpus, most, val_sets)
    if model.has_router:
        datamodule.joined_tokens = None  # the balance of experts is judged within a micro-batch
    bytes_per_token = {"": corpus.val_bytes_per_token, **{n: s.bytes_per_token for n, s in val_sets.items()}}
    numbers = StepNumbers(config.data, rows_to_train(config, corpus), config.trainer.max_epochs)
    metrics = Metrics(Records(run_dir.metrics), config, objective.model.model, numbers, bytes_per_token, total_steps)
    writes = config.callbacks.samples.every_n_validations > 0 and corpus.val is not None
    writes = writes and not config.objective.scalar_head
    samples = Samples(run_dir.samples, config, corpus, console, metrics.clock) if writes else None
    check_monitors(config, corpus, objective, samples, val_sets)
    feed = build_feed(config, run_dir, corpus, stop, total_steps)
    preemption = Preemption(stop)
    rows_of = functools.partial(scored_on, config, corpus, val_sets)
    validated = sum(seen_rows(rows, config.data.micro_batch_size, config.trainer.limit_val_batches)
                    for rows in datamodule.val_sets.values())  # fmt: skip
    ranked = ranking(config, corpus, val_sets)
    length = Length(total_steps, most, validated)
    callbacks = build_callbacks(config, run_dir, metrics, samples, feed, preemption, console, length, rows_of, ranked)
    trainer = build_trainer(config, run_dir, callbacks, metrics.records, total_steps)
    monitored = rows_of(config.checkpoint.monitor)
    return Run(config, run_dir, console, corpus, objective, datamodule, metrics, preemption, trainer, monitored, ranked)


def at_most(config: Config, rows: Rows) -> int:
    """Returns the most steps of a run with a time budget: until trainer.max_epochs or a mixture ends it, or ENDLESS."""
    mixture = getattr(rows, "mixture", None)
    used_up = ENDLESS if mixture is None or mixture.end is None else mixture.step_sizes.step_of(mixture.end)
    return min(used_up, _steps_of_epochs(config, rows))


def _steps_of_epochs(config: Config, rows: Rows) -> int:
    epochs = config.trainer.max_epochs
    return ENDLESS if epochs is None else horizon(None, epochs, len(rows), step_sizes(config.data))


def out_of_epochs(config: Config, steps: int, rows: Rows) -> str | None:
    """Returns the key whose epochs, and not the clock, end a run with a time budget after `steps` steps, or None."""
    if config.budget.minutes is None or steps != at_most(config, rows):
        return None
    return "trainer.max_epochs" if steps == _steps_of_epochs(config, rows) else "data.mixture"


def ranking(config: Config, corpus: Corpus, val_sets: dict[str, ValSet]) -> str:
    """Returns how checkpoint.monitor ranks checkpoints: min, max, or LAST if it is measured on too few rows."""
    rows, _ = measured_on(corpus, val_sets, config.checkpoint.monitor)
    few = rows is not None and count(rows) < config.checkpoint.min_val_rows
    return retention.LAST if few else config.checkpoint.mode


def rows_to_train(config: Config, corpus: Corpus) -> Rows:
    """Returns all training rows, or those of trainer.overfit_batches steps if that is set."""
    if not config.trainer.overfit_batches:
        return corpus.train
    return first_rows(corpus.train, rows_used(config, len(corpus.train)))


def check_mixture(config: Config, rows: Rows, total_steps: int) -> None:
    """Raises UserError where the sources of a mixture are used up before the run ends."""
    mixture = getattr(rows, "mixture", None)
    if mixture is None or mixture.end is None:
        return
    sizes = mixture.step_sizes
    steps = sizes.step_of(mixture.end)
    needed = len(rows) * config.trainer.max_epochs if config.trainer.max_epochs is not None else math.inf
    if min(sizes.before(total_steps), needed) > mixture.end:
        raise UserError(
            f"data.mixture: every source that has a weight is used up after {steps:,} of {total_steps:,} steps (each "
            f"was seen max_epochs times): set trainer.max_steps={steps}, or raise or leave out a max_epochs"
        )


def build_datamodule(
    config: Config, corpus: Corpus, total_steps: int, val_sets: dict[str, ValSet] | None = None
) -> TokenDataModule:
    check_descriptors(config.data.num_workers)
    return module_class(config).for_run(
        rows_to_train(config, corpus),
        corpus.val,
        seed=config.seed,
        sizes=step_sizes(config.data),
        micro_batch_size=config.data.micro_batch_size,
        joined_tokens=joined_tokens(config),
        total_steps=total_steps,
        max_epochs=config.trainer.max_epochs,
        limit_val_batches=config.trainer.limit_val_batches,
        num_workers=config.data.num_workers,
        val_sets={name: val_set.rows for name, val_set in (val_sets or {}).items()},
        lengths=row_lengths(config.data),
    )


def joined_tokens(config: Config) -> int:
    """Returns how many tokens short padded rows may have together in a forward pass.

    They are no more than full rows have, so that joining needs no memory that the run doesn't need anyway.
    """
    most = config.data.micro_batch_size * config.data.seq_len
    return min(most, _JOINED_ON_CPU) if config.trainer.accelerator == "cpu" else most


def build_objective(config: Config, corpus: Corpus, total_steps: int, stop: StopRequest | None = None) -> Objective:
    tokenizer = corpus.tokenizer
    pl.seed_everything(config.seed, verbose=False)
    model = sharding.build(config, lambda: build_language_model(config, tokenizer, sharding.reads_files(config)))
    hf_model = model.model
    for feature in features_on(config):
        feature.change_model(hf_model, config)
    if config.trainer.activation_checkpointing:
        enable_activation_checkpointing(hf_model, config.trainer.activation_checkpointing)
    if config.trainer.compile:
        compile_model(hf_model, changing_lengths=config.data.rows != "text" or config.data.packing == "off")
    allowed = config.run.allow_target
    make_optimizer = lambda model: build_optimizer(model.named_parameters(), config.optimizer, allowed)  # noqa: E731
    target = config.objective._target_
    cls = find_class(target, "objective", Objective, allowed)  # type: ignore[type-abstract]
    with building("objective", target):
        objective = cls(
            model,
            make_optimizer,
            scaled_by_rows(config.data, build_schedule(config.schedule, total_steps, allowed)),
            seed=config.seed,
            total_steps=total_steps,
            gradient_clip_val=config.trainer.gradient_clip_val,
            guard=StepGuard(config.trainer.spike_factor, config.trainer.spike_window),
            fingerprint=world.from_first(lambda: run_fingerprint(config, corpus, hf_model)),
            stop=stop,
        )
        cls.settle_model(config, hf_model, tokenizer)
        objective.prepare(config, corpus)
    return objective


def scaled_by_rows(data: DataConfig, schedule: Schedule) -> Schedule:
    """Returns the schedule, its factor multiplied by that of data.batch_warmup.lr_scaling for steps of fewer rows."""
    sizes, scaling = step_sizes(data), data.batch_warmup.lr_scaling
    return lambda step, total_steps: schedule(step, total_steps) * rate_factor(sizes, scaling, step)


def build_language_model(config: Config, tokenizer: Any, in_files: bool = False) -> LanguageModel:
    router = replace(config.router, over_layers=over_layers(config))
    return LanguageModel(build_trainable_model(config, tokenizer, in_files), config.objective, router)


def run_fingerprint(config: Config, corpus: Corpus, hf_model: Any) -> Fingerprint:
    """Returns the fingerprint: what a resumed run must share with the original one to continue it exactly."""
    architecture = {k: v for k, v in hf_model.config.to_dict().items() if k != "_name_or_path"}
    contents = {
        "data": corpus.fingerprint,
        "tokenizer": corpus.tokenizer_hash,
        "model": {k: v for k, v in architecture.items() if k != "transformers_version"},
        **starting_weights(config, hf_model),
        **contents_of_features(hf_model, config),
    }
    found = fingerprint(config, contents)
    found["keys"]["router.over_layers"] = over_layers(config)  # with auto resolved
    return found


def build_profiler(name: str | None, run_dir: RunDir) -> Profiler | None:
    """Builds Lightning's profiler `name`, if any; it writes its report or trace to profile* in the run's folder."""
    makers = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
    return makers[name](dirpath=run_dir.path, filename="profile") if name is not None else None


def build_trainer(
    config: Config, run_dir: RunDir, callbacks: list[pl.Callback], records: Records | None, total_steps: int
) -> pl.Trainer:
    """Builds Lightning's Trainer; without `records` it logs and saves nothing."""
    t = config.trainer
    devices.set_matmul_precision(t)
    precision, plugins = for_lightning(config)
    # How a rank finds the others: by variables that the elastic launcher, torchrun or ranks.py have set. It is set
    # explicitly, else Lightning takes any process of a SLURM job for a rank and saves in its signal handler.
    environment = LightningEnvironment() if ranks.find() is None else TorchElasticEnvironment()
    trainer = pl.Trainer(
        accelerator=t.accelerator,
        devices=t.devices,
        num_nodes=t.num_nodes,
        strategy=build_strategy(t),
        precision=precision,  # type: ignore[arg-type]
        max_steps=total_steps,
        max_epochs=-1,
        # The Validation callback decides when to validate; this keeps Lightning's own trigger from firing.
        val_check_interval=2**62,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # the loader already gives each rank its share
        enable_checkpointing=records is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False if records is None else build_loggers(config.logger, run_dir, records),
        log_every_n_steps=logged_every(t, total_steps),
        callbacks=callbacks,
        plugins=[FolderCheckpointIO(background=config.checkpoint.async_save), environment, *plugins],
        default_root_dir=Path(run_dir.path),
        benchmark=t.benchmark,
        deterministic=t.deterministic or None,  # type: ignore[arg-type]
        detect_anomaly=t.detect_anomaly,
        profiler=build_profiler(t.profiler, run_dir),
        # Tensors gathered in inference mode could not be used in training.
        inference_mode=t.inference_mode and t.strategy not in SHARING,
    )
    lightning_private.broadcast_no_sigterm(trainer)
    lightning_private.leave_signals_alone(trainer)
    return trainer
