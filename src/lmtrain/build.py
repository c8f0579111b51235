"""From config to objects, in one order: data, model, optimizer, objective, callbacks, loggers, trainer.

Nothing else in lmtrain instantiates these.
"""

import hashlib
import json
import logging
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.plugins.environments import ClusterEnvironment, LightningEnvironment, TorchElasticEnvironment
from rich.console import Console

from lmtrain import ranks, world
from lmtrain.callbacks.bad_steps import BadSteps
from lmtrain.callbacks.checkpoints import Checkpoints
from lmtrain.callbacks.metrics import Metrics
from lmtrain.callbacks.preemption import Preemption
from lmtrain.callbacks.progress import PlainLines, RichBar
from lmtrain.callbacks.samples import Samples
from lmtrain.callbacks.validation import Validation
from lmtrain.checkpoint_io import FolderCheckpointIO
from lmtrain.checks import time_limit_seconds
from lmtrain.config import horizon
from lmtrain.corpus import Corpus, build_corpus
from lmtrain.data.modules import TokenDataModule
from lmtrain.data.tokenizers import tokenizer_hash
from lmtrain.errors import UserError
from lmtrain.loggers import build_loggers
from lmtrain.models import flops
from lmtrain.models.finetune import build_trainable_model, frozen_identity
from lmtrain.models.language_model import LanguageModel, compile_model, enable_activation_checkpointing
from lmtrain.objectives.base import Objective
from lmtrain.objectives.causal_lm import CausalLM
from lmtrain.objectives.dpo import DPO
from lmtrain.objectives.guard import StepGuard
from lmtrain.objectives.sft import SFT
from lmtrain.optim.optimizers import build_optimizer
from lmtrain.precision import AdapterHalfPrecision
from lmtrain.prompts import prompts_of
from lmtrain.run_dir import RunDir
from lmtrain.schema import Config
from lmtrain.strategies import loading
from lmtrain.strategies.choose import build_strategy
from lmtrain.strategies.rules import SHARING
from lmtrain.targets import build_target


@dataclass
class Run:
    """Everything a run needs, built."""

    config: Config
    dir: RunDir
    console: Console
    corpus: Corpus
    objective: Objective
    datamodule: TokenDataModule
    metrics: Metrics
    preemption: Preemption
    trainer: pl.Trainer
    total_steps: int


def build(config: Config, run_dir: RunDir, console: Console, started: float) -> Run:
    """Builds every object of a run; UserError for what only data or model can tell."""
    quiet_libraries()
    corpus = world.together(lambda: build_corpus(config))
    total_steps = horizon(
        config.trainer.max_steps, config.trainer.max_epochs, len(corpus.train), config.data.global_batch_size
    )
    objective = build_objective(config, corpus, total_steps)
    datamodule = build_datamodule(config, corpus, total_steps)
    metrics = build_metrics(config, run_dir, corpus, objective)
    samples = build_samples(config, run_dir, corpus, console)
    check_monitors(config, corpus, objective, samples)
    preemption = Preemption(time_limit_seconds(config.run.time_limit), started)
    callbacks = build_callbacks(config, run_dir, metrics, samples, preemption, console, total_steps)
    trainer = build_trainer(config, run_dir, callbacks, total_steps)
    return Run(config, run_dir, console, corpus, objective, datamodule, metrics, preemption, trainer, total_steps)


def quiet_libraries() -> None:
    """Lightning's and transformers' tips and progress bars: what matters is said by the plan, once."""
    libraries = ("lightning.pytorch", "lightning.fabric", "lightning", "transformers", "datasets", "httpx")
    for name in (*libraries, "bitsandbytes"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    # Saving a model imports DeepSpeed where it is installed, and it sets its logger's level itself.
    logging.getLogger("DeepSpeed").addFilter(_is_error)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def build_datamodule(config: Config, corpus: Corpus, total_steps: int) -> TokenDataModule:
    return TokenDataModule(
        corpus.train,
        corpus.val,
        seed=config.seed,
        global_batch_size=config.data.global_batch_size,
        micro_batch_size=config.data.micro_batch_size,
        total_steps=total_steps,
        max_epochs=config.trainer.max_epochs,
        limit_val_batches=config.trainer.limit_val_batches,
        num_workers=config.data.num_workers,
    )


def build_objective(config: Config, corpus: Corpus, total_steps: int) -> Objective:
    tokenizer = corpus.tokenizer
    pl.seed_everything(config.seed, verbose=False)
    model = loading.build(config, lambda: LanguageModel(build_trainable_model(config, tokenizer), config.objective))
    hf_model = model.model
    if config.trainer.activation_checkpointing:
        enable_activation_checkpointing(hf_model)
    if config.trainer.compile:
        compile_model(hf_model)
    make_optimizer = lambda model: build_optimizer(model.named_parameters(), config.optimizer)  # noqa: E731
    objective = {"causal_lm": CausalLM, "sft": SFT, "dpo": DPO}[config.objective.name](
        model,
        make_optimizer,
        config.schedule,
        seed=config.seed,
        total_steps=total_steps,
        gradient_clip_val=config.trainer.gradient_clip_val,
        guard=StepGuard(config.trainer.spike_factor, config.trainer.spike_window),
        fingerprint=world.from_first(lambda: fingerprint(config, corpus, hf_model)),
    )
    if isinstance(objective, SFT) and config.objective.neftune_alpha:
        objective.add_embedding_noise(config.objective.neftune_alpha)
    if isinstance(objective, DPO):
        objective.prepare(config, corpus.fingerprint)
    return objective


def fingerprint(config: Config, corpus: Corpus, hf_model: Any) -> dict[str, Any]:
    """What a resumed run must share with its beginning to continue it exactly, in plain values."""
    architecture = {k: v for k, v in hf_model.config.to_dict().items() if k != "_name_or_path"}
    return {
        "data": corpus.fingerprint,
        "tokenizer": tokenizer_hash(corpus.tokenizer),
        "model": hashlib.sha256(json.dumps(architecture, sort_keys=True, default=str).encode()).hexdigest()[:16],
        **frozen_identity(config, hf_model),
        "data.seq_len": config.data.seq_len,
        "data.global_batch_size": config.data.global_batch_size,
        "data.isolate_documents": config.data.isolate_documents,
        "optimizer": config.optimizer.name,
        "seed": config.seed,
    }


def build_metrics(config: Config, run_dir: RunDir, corpus: Corpus, objective: Objective) -> Metrics:
    hf_model = objective.model.model
    device = torch.device(config.trainer.accelerator)
    return Metrics(
        run_dir.metrics,
        log_every_n_steps=config.trainer.log_every_n_steps,
        bytes_per_token=corpus.val_bytes_per_token,
        flops_per_token=flops.flops_per_token(hf_model, config.data.seq_len),
        peak=flops.peak_flops(device, config.trainer.precision),
    )


def build_samples(config: Config, run_dir: RunDir, corpus: Corpus, console: Console) -> Samples | None:
    cfg = config.callbacks.samples
    if cfg.every_n_validations == 0 or corpus.val is None:
        return None
    prompts = prompts_of(config, corpus)
    return Samples(run_dir.samples, corpus.tokenizer, prompts, corpus.end_ids, cfg, console, config.seed)


def check_monitors(config: Config, corpus: Corpus, objective: Objective, samples: Samples | None) -> None:
    """Raises UserError where the best checkpoint, or early stopping, would wait for a number that never comes."""
    stopping = config.callbacks.early_stopping
    if stopping.enabled and corpus.val is None:
        raise UserError(
            "callbacks.early_stopping.enabled=true, but there is no validation split: hold one out with "
            "data.val_fraction=0.01, or name one with data.val_path or data.val_split"
        )
    names = objective.validation_names()
    if objective.loss_is_nll:
        names = [*names, "perplexity", *(["bits_per_byte"] if corpus.val_bytes_per_token else [])]
    scores = samples.text_metrics.names() if samples is not None else []
    known = [f"val/{name}" for name in [*names, *scores]]
    monitors = {"checkpoint.monitor": config.checkpoint.monitor}
    if stopping.enabled and not config.callbacks.extra:  # a user's callback may log other numbers
        monitors["callbacks.early_stopping.monitor"] = stopping.monitor
    every = config.callbacks.samples.every_n_validations
    for key, name in monitors.items():
        if every > 1 and name in [f"val/{score}" for score in scores]:
            raise UserError(f"{key}={name} is needed at every validation: set callbacks.samples.every_n_validations=1")
        if corpus.val is not None and name not in known:
            raise UserError(f"{key}={name}: this run's validations report {', '.join(known)}")


def build_callbacks(
    config: Config,
    run_dir: RunDir,
    metrics: Metrics,
    samples: Samples | None,
    preemption: Preemption,
    console: Console,
    total_steps: int,
) -> list[pl.Callback]:
    """In the order they run: numbers, validation, stopping, samples, the screen, a user's own, the checkpoint last."""
    cb, t = config.callbacks, config.trainer
    validation = Validation(metrics, samples, every_n_steps=t.val_check_interval, total_steps=total_steps)
    bad_steps = BadSteps(run_dir.path, t.max_bad_steps, t.log_every_n_steps)
    callbacks: list[pl.Callback] = [metrics, bad_steps, validation, preemption]
    if cb.early_stopping.enabled:
        es = cb.early_stopping
        callbacks.append(
            EarlyStopping(
                monitor=es.monitor,
                mode=es.mode,
                patience=es.patience,
                min_delta=es.threshold,
                check_on_train_epoch_end=False,
            )
        )
    if samples is not None:
        callbacks.append(samples)
    bar = progress_bar(config, console, total_steps)
    if bar is not None:
        metrics.listeners.append(bar.listen)
        callbacks.append(bar)
    callbacks += [build_target(entry) for entry in cb.extra]
    callbacks.append(
        Checkpoints(
            run_dir.checkpoints,
            metrics,
            config.checkpoint,
            every_n_steps=t.save_every_n_steps,
            total_steps=total_steps,
        )
    )
    return callbacks


def progress_bar(config: Config, console: Console, total_steps: int) -> RichBar | PlainLines | None:
    style = config.callbacks.progress.style
    if style == "auto":
        style = "rich" if console.is_terminal else "plain"
    if style == "rich":
        return RichBar(console, total_steps)
    if style == "plain":
        return PlainLines(console, total_steps, config.callbacks.progress.plain_every_seconds)
    return None


def cluster_environment() -> ClusterEnvironment:
    """Where a rank finds the others: in the variables that the elastic launcher, torchrun or ranks.py have set."""
    return TorchElasticEnvironment() if ranks.find() is not None else LightningEnvironment()


def build_trainer(config: Config, run_dir: RunDir, callbacks: list[pl.Callback], total_steps: int) -> pl.Trainer:
    t = config.trainer
    half = t.precision in ("bf16-true", "16-true") and config.peft.method != "none"
    plugins = [AdapterHalfPrecision(t.precision)] if half else []  # type: ignore[arg-type]
    trainer = pl.Trainer(
        accelerator=t.accelerator,
        devices=t.devices,
        num_nodes=t.num_nodes,
        strategy=build_strategy(t),
        precision=None if plugins else t.precision,  # type: ignore[arg-type]
        max_steps=total_steps,
        max_epochs=-1,
        # The Validation callback says when; this keeps Lightning's own trigger from firing.
        val_check_interval=2**62,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,  # the loader already gives each rank its share
        enable_checkpointing=True,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=build_loggers(config, run_dir),
        log_every_n_steps=2**62,  # the Metrics callback feeds the loggers
        callbacks=callbacks,
        # Named, or Lightning takes any process of a SLURM job for a rank, and saves inside its signal handler.
        plugins=[FolderCheckpointIO(background=config.checkpoint.async_save), cluster_environment(), *plugins],
        default_root_dir=Path(run_dir.path),
        benchmark=False,
        inference_mode=t.strategy not in SHARING,  # tensors gathered in it could not be used in training
    )
    # Lightning broadcasts every step whether rank 0 got a SIGTERM; here that rides in the count of tokens.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    # Its handler runs a collective wherever a rank happens to be: Preemption's takes its place.
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    return trainer
