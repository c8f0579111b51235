"""The notes of the plan: what an experienced user would say about these settings, data and machine."""

import os
from collections.abc import Collection
from typing import Any

from lmtrain.callbacks.step_numbers import has_nvml
from lmtrain.checkpoints import retention
from lmtrain.config.schema import Config
from lmtrain.config.strategies import outside_fp8, overruled
from lmtrain.data.chat.templates import leaves_out_bos
from lmtrain.data.corpus import PadsAnswers
from lmtrain.data.val_sets import count
from lmtrain.distributed import devices
from lmtrain.models import dial, flops
from lmtrain.optim.skipping import can_skip
from lmtrain.run import updates
from lmtrain.run.build import Run
from lmtrain.run.features import features_on
from lmtrain.run.plan_costs import flops_in_all
from lmtrain.strategies import sharding
from lmtrain.terminal import counted, si


def advice(run: Run) -> list[str]:
    """Returns the notes that a practitioner would make on the plan."""
    c, corpus = run.config, run.corpus
    notes: list[str] = []

    # On the length of the run, beside its data and its model.
    epochs = run.metrics.numbers.rows_before(run.total_steps) / len(corpus.train)
    if corpus.repeats:
        notes += for_repeats(c, epochs, run.total_steps)
    notes += for_size(run, epochs)
    # On settings.
    if unheard := overruled(c):
        notes.append(f"{c.trainer.deepspeed.config}: the run's own config overrides {', '.join(unheard)}")
    notes += [note for feature in features_on(c) for note in feature.advice(run)]
    notes += updates.advice(c, run.total_steps)
    notes += for_mixtures(corpus.train, run.total_steps)
    r = c.router
    if not run.objective.model.router_losses.kinds and (r.load_balance or r.deviation or r.z_loss):
        notes.append("router.*: this model has neither a mixture of experts nor a memory, so none is balanced")
    notes += c.command.notes
    notes += unlikely(c, run.total_steps, os.cpu_count() or 1, c.command.typed)
    # On the machine.
    on_every_rank = sharding.why_on_every_rank(c)
    if run.trainer.world_size > 1 and on_every_rank is not None:
        notes.append(f"each of {run.trainer.world_size} ranks builds the whole model in host memory: {on_every_rank}")
    if c.trainer.accelerator == "cuda":
        notes += [*for_gpus(run), *not_measured()]
    # On the data.
    sets, monitor = run.datamodule.val_sets, c.checkpoint.monitor
    if not sets:
        notes.append(f"no validation split: no val/loss, no best checkpoint ({corpus.how_to_validate(c.data)})")
    elif run.data.ranking == retention.LAST:
        name = monitor.split("/")[1] if monitor.count("/") > 1 else ""
        rows = sets[name if name in sets else ""]
        few = f"validation has {counted(count(rows), 'row')}: small differences of {monitor} are noise"
        notes.append(f"{few}, so the last checkpoint is taken for the best (checkpoint.min_val_rows=0: by score)")
    if c.data.rows != "text" and leaves_out_bos(corpus.tokenizer):
        found = f"the chat template doesn't write {corpus.tokenizer.bos_token}, as the tokenizer does before plain text"
        notes.append(f"{found}: llama.cpp (GGUF) begins every chat with it, training doesn't (docs/sft.md)")
    return notes


def for_repeats(c: Config, epochs: float, steps: int) -> list[str]:
    """Returns notes on training for many epochs on the same data."""
    found = {"optimizer.weight_decay": c.optimizer.weight_decay, "model.dropout": c.model.dropout}
    best = dial.regularization(c.optimizer.lr, steps, epochs) if dial.is_measured(c) else {}
    missing = [f"{key}={value:g}" for key, value in best.items() if found[key] < value / 2]
    if best and not missing:
        used = " and ".join(f"{key}={value:g}" for key, value in found.items() if value)
        return [f"{epochs:.2g} epochs over the training data, with {used} against memorizing it"]
    if epochs <= dial.FEW_EPOCHS:
        return []
    remedy = f"less with {' and '.join(missing)}; " if missing else ""
    ends = "trainer.max_epochs=4 ends earlier; callbacks.early_stopping.enabled=true stops when it sets in"
    return [f"{epochs:.0f} passes over the training data: expect overfitting ({remedy}{ends})"]


_COMPILING_PAYS = 1e13  # FLOPs, one or two minutes on a CPU: longer runs gain from compiling


def for_size(run: Run, epochs: float) -> list[str]:
    """Returns notes on a model too large for its text, and on compiling in a long run on a CPU."""
    c, model = run.config, run.objective.model.model
    notes = []
    total, _, embedding = flops.parameter_counts(model)
    tokens = run.corpus.epoch_tokens
    if c.model.init == "scratch" and c.data.rows == "text" and epochs > 1 and total - embedding > dial.FED * tokens:
        smaller = "choose a smaller model"
        if c.model.name == dial.NAME:
            smaller = f"{dial.KEY}={dial.fed_by(tokens)[-1]} is what this text is enough for"
        found = f"{si(total - embedding)} weights in layers for {si(tokens)} tokens of text, seen {epochs:.1f} times"
        notes.append(f"{found}, are too many: it will memorize them; {smaller}, or bring more text")
    t = c.trainer
    gains = devices.gains_on_cpu(c) and not t.compile and "trainer.compile" not in c.command.typed
    pays = "trainer.compile=true compiles the blocks in 10 to 30 s; after that a step takes 0.6 to 0.85 times as long"
    if gains and t.accelerator == "cpu" and flops_in_all(run) > _COMPILING_PAYS:
        notes.append(devices.why_not_compiled(t) or pays)
    return notes


def for_mixtures(rows: Any, total_steps: int) -> list[str]:
    """Returns notes on a mixture: weight changes after the end of the run, and sources repeated for many epochs."""
    mixture = getattr(rows, "mixture", None)
    if mixture is None:
        return []
    notes = [
        f"data.mixture: the weights of step {step:,} are not reached: the run has {total_steps:,} steps"
        for step in mixture.changes
        if step >= total_steps
    ]
    given = mixture.rows_given(mixture.step_sizes.before(total_steps))
    passes = [(source.name, n / source.rows) for source, n in zip(mixture.sources, given, strict=True)]
    often = ", ".join(f"{name} {number:.0f} times" for name, number in passes if number > 8)
    if often:
        notes.append(f"sources repeated within the run: {often}; max_epochs of a source in data.mixture limits this")
    return notes


def for_gpus(run: Run) -> list[str]:
    """Returns notes on settings that slow down training on a GPU, and on what to set instead."""
    c, model = run.config, run.objective.model
    notes = []
    if c.trainer.strategy != "deepspeed" and not can_skip(run.objective._optimizer):
        found = f"each step waits for the GPU once, to check whether {c.optimizer.name} has to skip a bad update"
        notes.append(f"{found} (adamw, muon, lion and adafactor skip it without waiting)")
    rows: Any = run.corpus.train
    packed = c.data.isolate_documents or c.data.packing not in (None, "off")
    packed = packed or (isinstance(rows, PadsAnswers) and not rows.padded)
    if packed and c.model.attention == "slices":
        notes.append("model.attention=slices waits for the GPU in every micro-batch: model.attention=auto doesn't")
    elif packed and model.attention_dropout > 0:
        slower = "packed documents are isolated by a mask over whole rows, which is slower"
        notes.append(f"with dropout on attention weights {slower}: set model.dropout=0")
    if model.has_router and not outside_fp8(c.trainer.precision).startswith("bf16"):
        found = f"in {c.trainer.precision} the experts are computed one after the other"
        notes.append(f"{found}: trainer.precision=bf16-mixed computes them all at once")
    return notes


def not_measured() -> list[str]:
    """Returns a note on the GPU metrics that are not logged because the NVML package is not installed."""
    return [] if has_nvml() else ['gpu_utilization and gpu_watts are not logged: pip install "lmtrain[nvml]"']


def unlikely(c: Config, total_steps: int, cores: int, typed: Collection[str]) -> list[str]:
    """Returns notes on values that are valid but rarely intended; `typed` holds the command line's keys."""
    notes = []
    if c.optimizer.lr == 0:
        notes.append("optimizer.lr=0: nothing will be learned")
    warmup = c.schedule.warmup_steps or 0
    if warmup >= total_steps:
        peak = f"the peak lr {c.optimizer.lr:g} is not reached before the end (schedule.warmup_ratio=0.02)"
        notes.append(f"schedule.warmup_steps={warmup:,} of {total_steps:,} steps: {peak}")
    every = c.trainer.val_check_interval
    if every is not None and every > total_steps and "trainer.val_check_interval" in typed:
        notes.append(f"trainer.val_check_interval={every:,} exceeds the run: it validates once, after the last step")
    if c.data.num_workers > cores:
        workers = f"data.num_workers={c.data.num_workers} on {cores} cores"
        notes.append(f"{workers}: workers slow each other down (set {cores} or fewer)")
    return notes
