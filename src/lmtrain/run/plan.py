"""The output shown before training: the plan, notes on its settings, and the first row as the model will see it."""

import io
import os
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Column, Table
from rich.text import Text

from lmtrain import terminal
from lmtrain.adapters import trainable
from lmtrain.config.batch import split_over, step_sizes
from lmtrain.config.effect import TRIAL
from lmtrain.data.loaders import seen_rows
from lmtrain.data.text import repeats
from lmtrain.data.text.windows import Windows
from lmtrain.files import write_atomic
from lmtrain.models import description
from lmtrain.optim.groups import table_rows
from lmtrain.run import plan_costs, updates
from lmtrain.run.advice import advice
from lmtrain.run.build import Run
from lmtrain.run.features import features_on
from lmtrain.run.first_row import clipped, first_row
from lmtrain.secrets import shown
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
    """Returns the rows (title, text) that each part of the run gives of itself."""
    c, model = run.config, run.objective.model.model
    start = resumed_from or ("from scratch" if c.model.init == "scratch" else "pretrained weights")
    found = [
        *description.plan_rows(model, c),
        *trainable.plan_rows(model, c),
        *run.corpus.plan_rows(c),
        *length_rows(run, done),
        *run.objective.plan_rows(),
        ("validation", describe_validation(run)),
        *plan_costs.plan_rows(run),
        *(row for feature in features_on(c) for row in feature.plan_rows(model, c)),
        ("schedule", f"{c.schedule.name}, peak lr {c.optimizer.lr:g}, {c.optimizer.name}"),
        ("run", str(run.dir.path)),
        ("start", start),
    ]
    return [(title, text) for title, text in found if text]


def length_rows(run: Run, done: int) -> list[tuple[str, str]]:
    """Returns the rows on the tokens of a step, the length of the run, and its time from step `done` on."""
    c, corpus = run.config, run.corpus
    sizes, rows_before = step_sizes(c.data), run.metrics.numbers.rows_before
    per_row = corpus.epoch_tokens / len(corpus.train)
    tokens_per_step = round(per_row * sizes.last)
    tokens = round(per_row * rows_before(run.total_steps))
    split = f"{split_over(c, run.trainer.world_size)}{describe_joined(run)}"
    steps = counted(run.total_steps, "step") + (f" x {tokens_per_step:,}" if len(sizes.values) == 1 else "")
    passes = f"{tokens / corpus.epoch_tokens:.2f} {'epochs' if corpus.repeats else 'windows'}"
    return [
        ("batch", f"{split} = {tokens_per_step:,} tokens a step{updates.describe_examples(c, corpus)}"),
        ("length", f"{steps} = {si(tokens)} tokens = {passes} of {si(corpus.epoch_tokens)}"),
        ("time", plan_costs.describe_time(run, tokens - per_row * rows_before(done))),
    ]


def describe_joined(run: Run) -> str:
    """Describes how many tokens short padded rows may have in a forward pass, if that lets them be more."""
    tokens, size = run.datamodule.joined_tokens, run.config.data.micro_batch_size
    lengths = getattr(run.datamodule.train_rows, "lengths", None)
    if tokens is None or lengths is None or 2 * size > min(run.config.data.global_batch_size, tokens / lengths.min()):
        return ""
    return f" (of short ones more, up to {tokens:,} tokens)"


def describe_validation(run: Run) -> str:
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
