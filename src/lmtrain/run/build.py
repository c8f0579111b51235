"""Builds a run's objects from its config, in order: data, model with its objective, callbacks, trainer.

Nothing else in lmtrain instantiates these.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from lightning.pytorch.profilers import AdvancedProfiler, PassThroughProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from rich.console import Console

from lmtrain.adapters.finetune import build_trainable_model, starting_weights
from lmtrain.callbacks.metrics import Metrics
from lmtrain.callbacks.parts import Parts
from lmtrain.callbacks.records import Records
from lmtrain.checkpoints.checkpoint_io import FolderCheckpointIO
from lmtrain.config.batch import logged_every, row_lengths, step_sizes
from lmtrain.config.checks import time_limit_seconds
from lmtrain.config.fingerprint import Fingerprint, fingerprint
from lmtrain.config.options import over_layers
from lmtrain.config.schema import Config
from lmtrain.config.strategies import SHARING
from lmtrain.config.targets import building, find_class
from lmtrain.data.corpus import Corpus
from lmtrain.data.loaders import check_descriptors
from lmtrain.data.modules import TokenDataModule, module_class
from lmtrain.data.val_sets import ValSet
from lmtrain.distributed import process_group as world
from lmtrain.distributed import ranks
from lmtrain.distributed.stop_signals import StopRequest
from lmtrain.models.blocks import compile_model, enable_activation_checkpointing
from lmtrain.models.language_model import LanguageModel
from lmtrain.objectives.base import Objective
from lmtrain.optim.optimizers import build_optimizer
from lmtrain.optim.schedules import build_schedule
from lmtrain.optim.skipping import StepGuard
from lmtrain.run.build_callbacks import Callbacks, build_callbacks
from lmtrain.run.data import RunData, build_data, out_of_epochs, rows_to_train
from lmtrain.run.features import contents_of_features, features_on
from lmtrain.run.loggers import build_loggers
from lmtrain.run_folder.folder import RunDir
from lmtrain.strategies import lightning_private, sharding
from lmtrain.strategies.choose import build_strategy, for_lightning
from lmtrain.terminal import quiet_libraries

_JOINED_ON_CPU = 1024  # tokens; beyond, a CPU's caches are too small: benchmarks/RESULTS.md, "Short rows"


@dataclass
class Run:
    """All objects of a run, built from its config."""

    config: Config
    dir: RunDir
    console: Console
    data: RunData
    objective: Objective
    datamodule: TokenDataModule
    callbacks: Callbacks
    trainer: pl.Trainer

    @property
    def corpus(self) -> Corpus:
        return self.data.corpus

    @property
    def metrics(self) -> Metrics:
        return self.callbacks.metrics

    @property
    def scored_on(self) -> str | None:
        """A name for the rows that checkpoint.monitor is measured on."""
        return self.data.scored_on(self.config.checkpoint.monitor)

    @property
    def total_steps(self) -> int:
        """The number of steps of the run as currently planned; a time budget may change it."""
        return self.objective.total_steps

    @property
    def ended_by(self) -> str | None:
        """The key whose epochs, and not the clock, end a run with a time budget, or None; see `out_of_epochs`."""
        return out_of_epochs(self.config, self.total_steps, self.data.train_rows)


def build(config: Config, run_dir: RunDir, console: Console, started: float) -> Run:
    """Builds every object of a run; raises UserError for mistakes that only the data or the model reveal."""
    quiet_libraries()
    for feature in features_on(config):
        feature.check_machine(config)
    data = build_data(config)
    stop = StopRequest(time_limit_seconds(config.run.time_limit), started)
    objective = build_objective(config, data.corpus, data.total_steps, stop)
    data.fit_to(objective.model)
    # The balance of experts is judged within a micro-batch, which is then that of the config.
    joins = not objective.model.has_router
    datamodule = build_datamodule(config, data.corpus, data.length.at_most, data.val_sets, joins=joins)
    parts = Parts(config, run_dir, console, data.corpus, objective, data.length, data.scored_on, data.ranking)
    callbacks = build_callbacks(parts, data)
    trainer = build_trainer(config, run_dir, callbacks.in_order, callbacks.metrics.records, data.total_steps)
    return Run(config, run_dir, console, data, objective, datamodule, callbacks, trainer)


def build_datamodule(
    config: Config, corpus: Corpus, total_steps: int, val_sets: dict[str, ValSet] | None = None, joins: bool = True
) -> TokenDataModule:
    """Builds the loaders of a run; `joins` says whether micro-batches of short padded rows may be joined."""
    check_descriptors(config.data.num_workers)
    return module_class(config).for_run(
        rows_to_train(config, corpus),
        corpus.val,
        seed=config.seed,
        sizes=step_sizes(config.data),
        micro_batch_size=config.data.micro_batch_size,
        joined_tokens=joined_tokens(config) if joins else None,
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
    # The model, from the seed's random numbers, as it is trained.
    pl.seed_everything(config.seed, verbose=False)
    model = sharding.build(config, lambda: build_language_model(config, tokenizer, sharding.reads_files(config)))
    hf_model = model.model
    for feature in features_on(config):
        feature.change_model(hf_model, config)
    if config.trainer.activation_checkpointing:
        enable_activation_checkpointing(hf_model, config.trainer.activation_checkpointing)
    if config.trainer.compile:
        compile_model(hf_model, changing_lengths=config.data.rows != "text" or config.data.packing == "off")
    # Its objective, with what makes the optimizer and the learning rate.
    allowed = config.run.allow_target
    make_optimizer = lambda model: build_optimizer(model.named_parameters(), config.optimizer, allowed)  # noqa: E731
    target = config.objective._target_
    cls = find_class(target, "objective", Objective, allowed)  # type: ignore[type-abstract]
    with building("objective", target):
        objective = cls(
            model,
            make_optimizer,
            build_schedule(config.schedule, total_steps, allowed),
            seed=config.seed,
            total_steps=total_steps,
            gradient_clip_val=config.trainer.gradient_clip_val,
            guard=StepGuard(),
            fingerprint=world.from_first(lambda: run_fingerprint(config, corpus, hf_model)),
            stop=stop,
        )
        cls.settle_model(config, hf_model, tokenizer)
        objective.prepare(config, corpus)
    return objective


def build_language_model(config: Config, tokenizer: Any, in_files: bool = False) -> LanguageModel:
    router = replace(config.router, over_layers=over_layers(config))
    return LanguageModel(build_trainable_model(config, tokenizer, in_files), router)


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


class NoProfiler(PassThroughProfiler):
    """Profiles nothing, as Lightning's own default, but without a generator for each of a step's hundred actions."""

    _nothing: ClassVar[AbstractContextManager[Any]] = nullcontext()

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        return self._nothing


def build_profiler(name: str | None, run_dir: RunDir) -> Profiler:
    """Builds Lightning's profiler `name`, if any; it writes its report or trace to profile* in the run's folder."""
    makers = {"simple": SimpleProfiler, "advanced": AdvancedProfiler, "pytorch": PyTorchProfiler}
    return makers[name](dirpath=run_dir.path, filename="profile") if name is not None else NoProfiler()


def build_trainer(
    config: Config, run_dir: RunDir, callbacks: list[pl.Callback], records: Records | None, total_steps: int
) -> pl.Trainer:
    """Builds Lightning's Trainer; without `records` it logs and saves nothing."""
    t = config.trainer
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
