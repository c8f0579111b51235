"""The output shown before training: the plan, notes on its settings, and the first row as the model will see it."""

import io
import os
from collections.abc import Collection
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from lmtrain import terminal
from lmtrain.adapters.trainable import adapter_of, describe_adapter
from lmtrain.callbacks.step_numbers import has_nvml
from lmtrain.checkpoints import retention
from lmtrain.config import effect
from lmtrain.config.batch import Stages, row_lengths, split_over, step_sizes
from lmtrain.config.effect import TRIAL
from lmtrain.config.override_text import typed_keys
from lmtrain.config.schema import Config
from lmtrain.config.strategies import outside_fp8, overruled
from lmtrain.data.chat.templates import leaves_out_bos
from lmtrain.data.loaders import seen_rows
from lmtrain.data.text import repeats
from lmtrain.data.text.windows import Windows
from lmtrain.data.val_sets import count
from lmtrain.distributed import devices, ranks
from lmtrain.files import write_atomic
from lmtrain.models import dial, flops, wrapper
from lmtrain.models.blocks import decoder_blocks
from lmtrain.models.mixers import by_rows
from lmtrain.optim.groups import table_rows
from lmtrain.optim.skipping import can_skip
from lmtrain.run import plan_costs, updates
from lmtrain.run.build import Run
from lmtrain.run.features import features_on
from lmtrain.run.first_row import clipped, first_row
from lmtrain.secrets import shown
from lmtrain.strategies import sharding
from lmtrain.terminal import counted, si


def show(run: Run, resumed_from: str | None, done: int, notes: list[str]) -> None:
    """Prints the plan, the parameter groups and the decoded first row; `done` is the number of steps trained before."""
    table = terminal.facts((name, shown(value)) for name, value in plan_rows(run, resumed_from, done))
    parts: list[Any] = [table, Text(), groups_table(run)]
    parts += [Text(f"note: {shown(note)}", style="yellow") for note in [*notes, *advice(run)]]
    text, legend, learned_at = first_row(run)
    panels = [Panel(Group(*parts), title="plan", title_align="left"), Panel(text, title=legend, title_align="left")]
    if os.environ.get(TRIAL):
        length = [run.config.model.name, counted(run.total_steps, "step"), *([resumed_from] if resumed_from else [])]
        run.console.print(f"{', '.join(length)}; its plan: {run.dir.plan}", soft_wrap=True, highlight=False)
    elif run.console.is_terminal:
        run.console.print(*panels, sep="\n")
    else:
        run.console.print(panels[0], Panel(clipped(text, learned_at), title=legend, title_align="left"), sep="\n")
    if run.trainer.is_global_zero:
        write_atomic(run.dir.plan, as_text(panels))


def as_text(panels: list[Panel]) -> str:
    """Renders the panels as plain text, 120 columns wide."""
    file = io.StringIO()
    terminal.console(file=file, width=120, color_system=None, force_terminal=False).print(*panels, sep="\n")
    return file.getvalue()


def plan_rows(run: Run, resumed_from: str | None, done: int) -> list[tuple[str, str]]:
    c, corpus = run.config, run.corpus
    model = run.objective.model.model
    total, trainable, embedding = flops.parameter_counts(model)
    split = split_over(c, run.trainer.world_size)
    per_row, sizes = corpus.epoch_tokens / len(corpus.train), step_sizes(c.data)
    rows = run.metrics.numbers.rows_before(run.total_steps)
    tokens_per_step, tokens = round(per_row * sizes.last), round(per_row * rows)
    compute, per_token = flops_in_all(run), flops.flops_per_token(model, c.data.seq_len)
    return [
        ("model", f"{c.model.name}: {si(total)} parameters ({si(trainable)} trained, {si(embedding)} in embeddings)"),
        *(("left out", wrapper.kept_words(found)) for found in [wrapper.wrapper_of(model)] if found),
        *(("adapter", describe_adapter(found, c.peft)) for found in [adapter_of(model)] if found),
        *(("attention", f"the model's own: {why}") for why in [getattr(model, "own_attention_because", None)] if why),
        *(("mixers", f"{n} layers read each packed document as a row of its own") for n in [by_rows(model)] if n),
        ("data", "\n".join([*corpus.words, *corpus.notes])),
        ("tokenizer", f"{c.tokenizer.kind}, {len(corpus.tokenizer):,} tokens"),
        ("batch", f"{split}{joined_words(run)} = {tokens_per_step:,} tokens a step"
                  f"{updates.examples_words(c, corpus)}"),
        *growth_rows(c),
        ("length", f"{counted(run.total_steps, 'step')}{f' x {tokens_per_step:,}' if len(sizes.values) == 1 else ''}"
                   f" = {si(tokens)} tokens = {tokens / corpus.epoch_tokens:.2f} "
                   f"{'epochs' if corpus.stream is None else 'windows'} of {si(corpus.epoch_tokens)}"),
        ("time", plan_costs.time_words(run, tokens - per_row * run.metrics.numbers.rows_before(done), per_token)),
        *run.objective.plan_rows(),
        ("validation", validation_words(run)),
        *([("average", average_words(c))] if c.callbacks.ema.enabled else []),
        *([("early stopping", stopping_words(c))] if c.callbacks.early_stopping.enabled else []),
        ("compute", f"{si(per_token, 'FLOP')} a token, {si(compute, 'FLOP')} in all"),
        *plan_costs.memory_rows(model, c),
        ("precision", f"{c.trainer.precision}{instead_words(c)}{devices.speedup_words(c)} on "
                      f"{run.trainer.world_size} x {devices.device_name(c.trainer.accelerator)}{matmul_words(c)}"
                      f"{compile_words(run)}{checkpointing_words(c)}"),
        *(row for feature in features_on(c) for row in feature.plan_rows(model, c)),
        *(("no GPU", why) for why in [devices.why_not_used()] if why),
        ("schedule", f"{c.schedule.name}, peak lr {c.optimizer.lr:g}, {c.optimizer.name}"),
        ("run", str(run.dir.path)),
        ("start", resumed_from or ("from scratch" if c.model.init == "scratch" else "pretrained weights")),
    ]  # fmt: skip


def joined_words(run: Run) -> str:
    """Describes how many tokens short padded rows may have in a forward pass, if that lets them be more."""
    tokens, size = run.datamodule.joined_tokens, run.config.data.micro_batch_size
    lengths = getattr(run.datamodule.train_rows, "lengths", None)
    if tokens is None or lengths is None or 2 * size > min(run.config.data.global_batch_size, tokens / lengths.min()):
        return ""
    return f" (of short ones more, up to {tokens:,} tokens)"


def growth_rows(c: Config) -> list[tuple[str, str]]:
    """Returns the plan's rows on what grows early in the run (row length, rows per step), and when."""
    lengths, sizes, found = row_lengths(c.data), step_sizes(c.data), []
    if lengths is not None:
        found.append(("row length", f"{lengths.in_words()}: tokens; the tokens per step stay the same"))
    if len(sizes.values) > 1:
        scaling = {"none": "the schedule's", "sqrt": "times (rows / {0})^(1/2)", "linear": "times rows / {0}"}
        rate = scaling[c.data.batch_warmup.lr_scaling].format(sizes.last)
        found.append(("rows a step", f"{sizes.in_words()}; their learning rate: {rate}"))
    return found


def flops_in_all(run: Run) -> float:
    """Returns the FLOPs of the whole run, with fewer for attention over shorter rows."""
    c, model = run.config, run.objective.model.model
    tokens_per_row = run.corpus.epoch_tokens / len(run.corpus.train)
    lengths, rows_before = row_lengths(c.data) or Stages.constant(c.data.seq_len), run.metrics.numbers.rows_before
    ends = [min(end, run.total_steps) for end in [*lengths.starts[1:], run.total_steps]]
    return sum(
        flops.flops_per_token(model, length) * tokens_per_row * (rows_before(end) - rows_before(min(start, end)))
        for start, end, length in zip(lengths.starts, ends, lengths.values, strict=True)
    )


def compile_words(run: Run) -> str:
    """Describes what torch.compile is applied to, or why it is not, on a GPU or in a CPU run with budget.minutes."""
    t = run.config.trainer
    if t.compile:
        return f", compiled: {len(decoder_blocks(run.objective.model.model))} blocks and the loss"
    why = devices.why_not_compiled(t)
    if t.accelerator != "cuda" and (why is None or run.config.budget.minutes is None):
        return ""
    return f", not compiled: {why or 'trainer.compile=false'}"


def matmul_words(c: Config) -> str:
    words = {"high": ", fp32 products in TF32", "medium": ", fp32 products in bf16"}
    return words.get(c.trainer.float32_matmul_precision, "")


def instead_words(c: Config) -> str:
    """Names the precision that replaces an unsupported one; Lightning's own warning about it is not shown."""
    replaced = c.trainer.precision == "16-mixed" and c.trainer.accelerator == "cpu"
    return ", computed as bf16-mixed (Lightning has no 16-mixed on a CPU)," if replaced else ""


def average_words(c: Config) -> str:
    """Describes the weight averaging of callbacks.ema."""
    ema = c.callbacks.ema
    since = f" from step {ema.update_starting_at_step:,} on" if ema.update_starting_at_step else ""
    steps = "every step" if ema.update_every_n_steps == 1 else f"every {ema.update_every_n_steps:,} steps"
    return (
        f"of the weights, decay {ema.decay:g}, {steps}{since}: validated and exported; training itself "
        "continues from the plain weights"
    )


def stopping_words(c: Config) -> str:
    """Describes when early stopping ends the run."""
    es = c.callbacks.early_stopping
    by = f" by more than {es.threshold:g}" if es.threshold else ""
    reached = "" if es.stop_at is None else f"when {es.monitor} reaches {es.stop_at:g}, or "
    return f"{reached}when {es.monitor} ({es.mode}) has not improved{by} for {es.patience} validations"


def validation_words(run: Run) -> str:
    """Describes how many of the validation rows are used, and when."""
    c, rows, sets = run.config, run.corpus.val, list(run.datamodule.val_sets)
    if not sets:
        return "none"
    every = c.trainer.val_check_interval or run.total_steps
    first = "before the first step, " if c.trainer.val_before_training else ""
    when = f"{first}every {counted(every, 'step')} and after the last"
    if rows is None:
        return f"of {' and '.join(sets)}, {when}"
    seen = seen_rows(rows, c.data.micro_batch_size, c.trainer.limit_val_batches)
    return f"{seen:,} of {counted(len(rows), 'row')}, {when}{_seen_in_training(run)}"


def _seen_in_training(run: Run) -> str:
    """Describes the share of the validation text that the training text also contains, if it is at least 1 %."""
    train, val, token = run.corpus.train, run.corpus.val, run.corpus.val_bytes_per_token
    if not isinstance(train, Windows) or not isinstance(val, Windows) or not token:
        return ""
    share = repeats.share_seen(train.shards, val.shards, max(8, round(repeats.PIECE / token)))
    if share < 0.01:
        return ""
    return f"; {share:.0%} of it stands in the training text word for word ({repeats.PIECE} bytes or more)"


def groups_table(run: Run) -> Table:
    right = [Column(header, justify="right") for header in ("tensors", "parameters", "lr", "weight decay")]
    table = Table("parameter group", *right, box=None, padding=(0, 2), header_style="dim")
    for name, tensors, parameters, lr, decay in table_rows(run.objective._optimizer.param_groups):
        table.add_row(name, f"{tensors:,}", f"{parameters:,}", f"{lr:g}", f"{decay:g}")
    return table


_COMPILING_PAYS = 1e13  # FLOPs, one or two minutes on a CPU: longer runs gain from compiling


def for_size(run: Run, epochs: float) -> list[str]:
    """Returns notes on a model too large for its text, and on compiling in a long run on a CPU."""
    c, model, notes = run.config, run.objective.model.model, []
    total, _, embedding = flops.parameter_counts(model)
    tokens = run.corpus.epoch_tokens
    if c.model.init == "scratch" and c.data.rows == "text" and epochs > 1 and total - embedding > dial.FED * tokens:
        smaller = "choose a smaller model"
        if c.model.name == dial.NAME:
            smaller = f"{dial.KEY}={dial.fed_by(tokens)[-1]} is what this text is enough for"
        notes.append(
            f"{si(total - embedding)} weights in layers for {si(tokens)} tokens of text, seen {epochs:.1f} times, are"
            f" too many: it will memorize them; {smaller}, or bring more text"
        )
    t = c.trainer
    gains = devices.gains_on_cpu(c) and not t.compile and "trainer.compile" not in typed_keys(ranks.typed())
    pays = "trainer.compile=true compiles the blocks in 10 to 30 s; after that a step takes 0.6 to 0.85 times as long"
    if gains and t.accelerator == "cpu" and flops_in_all(run) > _COMPILING_PAYS:
        notes.append(devices.why_not_compiled(t) or pays)
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
    return [
        f"{epochs:.0f} passes over the training data: expect overfitting ({remedy}trainer.max_epochs=4 ends earlier; "
        f"callbacks.early_stopping.enabled=true stops when it sets in)"
    ]


def for_budget(c: Config, steps: int, ended_by: str | None) -> list[str]:
    """Returns notes on the number of steps that a budget chose, and on epochs that end the run before its minutes."""
    if c.budget.chosen is None:
        return []
    budget = f"budget.{c.budget.chosen}={getattr(c.budget, c.budget.chosen):g}"
    if c.budget.minutes is None:
        return [f"{budget} chose {counted(steps, 'step')}"]
    notes = [
        f"{budget} chose {counted(steps, 'step')} from the measured time of a few steps on this machine; during "
        f"training the number is adjusted to the time that is left"
    ]
    if ended_by == "data.mixture":
        notes.append("the run ends before that, where every source of data.mixture was seen its max_epochs times")
    elif ended_by is not None:
        notes.append(
            f"the data is small for {budget}: the run ends after {c.trainer.max_epochs} passes over it, because "
            f"further passes rarely help (trainer.max_epochs=40, for example, decides the length instead of the budget)"
        )
    return notes


def advice(run: Run) -> list[str]:
    """Returns the notes that a practitioner would make on the plan."""
    c, corpus, tokenizer, notes = run.config, run.corpus, run.corpus.tokenizer, []
    epochs = run.metrics.numbers.rows_before(run.total_steps) / len(corpus.train)
    if corpus.stream is None:
        notes += for_repeats(c, epochs, run.total_steps)
    notes += for_size(run, epochs)
    if unheard := overruled(c):
        notes.append(f"{c.trainer.deepspeed.config}: the run's own config overrides {', '.join(unheard)}")
    notes += for_budget(c, run.total_steps, run.ended_by)
    notes += updates.advice(c, run.total_steps)
    notes += for_mixtures(corpus.train, run.total_steps)
    r = c.router
    if not run.objective.model.router_losses.kinds and (r.load_balance or r.deviation or r.z_loss):
        notes.append("router.*: this model has neither a mixture of experts nor a memory, so none is balanced")
    notes += effect.inference_note(ranks.typed(), c, ranks.proposed())
    notes += unlikely(c, run.total_steps, os.cpu_count() or 1, typed_keys(ranks.typed()))
    on_every_rank = sharding.why_on_every_rank(c)
    if run.trainer.world_size > 1 and on_every_rank is not None:
        notes.append(f"each of {run.trainer.world_size} ranks builds the whole model in host memory: {on_every_rank}")
    if c.trainer.accelerator == "cuda":
        notes += [*for_gpus(run), *not_measured()]
    sets, monitor = run.datamodule.val_sets, c.checkpoint.monitor
    if not sets:
        notes.append(f"no validation split: no val/loss, no best checkpoint ({corpus.how_to_validate(c.data)})")
    elif run.ranking == retention.LAST:
        name = monitor.split("/")[1] if monitor.count("/") > 1 else ""
        rows = sets[name if name in sets else ""]
        notes.append(
            f"validation has {counted(count(rows), 'row')}: small differences of {monitor} are noise, so the last "
            "checkpoint is taken for the best (checkpoint.min_val_rows=0 chooses by score anyway; data.val_path can "
            "name a larger validation set)"
        )
    if c.data.rows != "text" and leaves_out_bos(tokenizer):
        notes.append(
            f"the chat template doesn't write {tokenizer.bos_token}, which the tokenizer puts before plain "
            f"text: the model is trained without it, but llama.cpp (GGUF) begins every chat with it (docs/sft.md)"
        )
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
    c, model, notes = run.config, run.objective.model, []
    if c.trainer.strategy != "deepspeed" and not can_skip(run.objective._optimizer):
        notes.append(
            f"each step waits for the GPU once, to check whether {c.optimizer.name} has to skip a bad update "
            "(adamw, muon, lion and adafactor skip it without waiting)"
        )
    packed = c.data.isolate_documents or c.data.packing not in (None, "off") or c.objective.name == "dpo"
    if packed and c.model.attention == "slices":
        notes.append(
            "model.attention=slices copies the borders of documents from the GPU, so the CPU waits for it in "
            "every micro-batch: model.attention=auto doesn't"
        )
    elif packed and model.attention_dropout > 0:
        notes.append(
            "with dropout on attention weights (model.dropout), packed documents are isolated by a mask over "
            "whole rows, which is slower: with model.dropout=0 flash attention computes only within documents"
        )
    if model.has_router and not outside_fp8(c.trainer.precision).startswith("bf16"):
        notes.append(
            f"in {c.trainer.precision} the experts are computed one after the other, and each layer waits for the "
            "GPU: trainer.precision=bf16-mixed computes them all at once"
        )
    return [*notes, *(note for feature in features_on(c) for note in feature.notes(c))]


def checkpointing_words(c: Config) -> str:
    """Describes which activations blocks keep for the backward pass under activation checkpointing."""
    kept = {
        True: "",
        "selective": " (selective: results of matrix products and attention are kept)",
        "offload": " (in host memory)",
    }
    how = c.trainer.activation_checkpointing
    return f", activation checkpointing{kept[how]}" if how else ""


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
        notes.append(
            f"schedule.warmup_steps={warmup:,} of {total_steps:,} steps: the peak lr {c.optimizer.lr:g} is not reached "
            f"before the end (schedule.warmup_ratio=0.02)"
        )
    every = c.trainer.val_check_interval
    if every is not None and every > total_steps and "trainer.val_check_interval" in typed:
        notes.append(f"trainer.val_check_interval={every:,} exceeds the run: it validates once, after the last step")
    if c.data.num_workers > cores:
        notes.append(
            f"data.num_workers={c.data.num_workers} on {cores} cores: workers have to share cores and slow each "
            f"other down (set {cores} or fewer)"
        )
    return notes
