"""What a user reads before training: the plan of the run and the first row as the model will see it."""

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lmtrain import devices
from lmtrain.config import split_over
from lmtrain.inspection import row_mask
from lmtrain.models import flops
from lmtrain.models.trainable import adapter_of, describe_adapter
from lmtrain.optim.groups import table_rows
from lmtrain.strategies import loading
from lmtrain.token_view import has_colour, legend, marked, pieces, visible

if TYPE_CHECKING:
    from lmtrain.build import Run

_SHOWN = 160  # tokens of the first row
_SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def si(value: float, unit: str = "") -> str:
    """1234567 -> '1.23 M'."""
    for size, letter in _SI:
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}".strip()


def gib(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**28 else f"{value / 2**20:.0f} MiB"


def show(run: "Run", resumed_from: str | None, notes: list[str]) -> None:
    """Prints the plan, the parameter groups and the decoded first row."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in plan_rows(run, resumed_from):
        table.add_row(name, value)
    parts: list[Any] = [table, Text(), groups_table(run)]
    parts += [Text(f"note: {note}", style="yellow") for note in [*notes, *advice(run)]]
    run.console.print(Panel(Group(*parts), title="plan", title_align="left"))
    text, legend = first_row(run)
    run.console.print(Panel(text, title=legend, title_align="left"))


def plan_rows(run: "Run", resumed_from: str | None) -> list[tuple[str, str]]:
    c, corpus = run.config, run.corpus
    model = run.objective.model.model
    total, trainable, embedding = flops.parameter_counts(model)
    split = split_over(c, run.trainer.world_size)
    tokens_per_step = round(corpus.epoch_tokens / len(corpus.train) * c.data.global_batch_size)
    tokens = run.total_steps * tokens_per_step
    per_token = flops.flops_per_token(model, c.data.seq_len)
    memory = flops.memory_estimate(model, c)
    val = validation_words(run)
    rows = [
        ("model", f"{c.model.name}: {si(total)} parameters ({si(trainable)} trained, {si(embedding)} in embeddings)"),
        *(("adapter", describe_adapter(found, c.peft)) for found in [adapter_of(model)] if found),
        ("data", "\n".join(corpus.words)),
        ("tokenizer", f"{c.tokenizer.kind}, {len(corpus.tokenizer):,} tokens"),
        ("batch", f"{split} = {tokens_per_step:,} tokens a step"),
        ("length", f"{run.total_steps:,} steps x {tokens_per_step:,} = {si(tokens)} tokens"
                   f" = {tokens / corpus.epoch_tokens:.2f} epochs of {si(corpus.epoch_tokens)}"),
        *run.objective.plan_rows(),
        ("validation", val),
        ("compute", f"{si(per_token, 'FLOP')} a token, {si(per_token * tokens, 'FLOP')} in all"),
        ("memory", f"about {gib(sum(memory.values()))} a device: "
                   + ", ".join(f"{name} {gib(size)}" for name, size in memory.items())),
        ("precision", f"{c.trainer.precision} on {run.trainer.world_size} x "
                      f"{devices.device_name(c.trainer.accelerator)}{', compiled' if c.trainer.compile else ''}"
                      f"{', activation checkpointing' if c.trainer.activation_checkpointing else ''}"),
        ("schedule", f"{c.schedule.name}, peak lr {c.optimizer.lr:g}, {c.optimizer.name}"),
        ("run", str(run.dir.path)),
        ("start", resumed_from or ("from scratch" if c.model.init == "scratch" else "pretrained weights")),
    ]  # fmt: skip
    return rows


def validation_words(run: "Run") -> str:
    """How many of how many rows, and when."""
    c, rows = run.config, run.corpus.val
    if rows is None:
        return "none"
    limit = c.trainer.limit_val_batches
    seen = len(rows) if limit is None else min(len(rows), limit * c.data.micro_batch_size)
    every = c.trainer.val_check_interval or run.total_steps
    return f"{seen:,} of {len(rows):,} rows, every {every:,} steps and after the last"


def groups_table(run: "Run") -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for header, justify in (("parameter group", "left"), ("tensors", "right"), ("parameters", "right"),
                            ("lr", "right"), ("weight decay", "right")):  # fmt: skip
        table.add_column(header, justify=justify)  # type: ignore[arg-type]
    for name, tensors, parameters, lr, decay in table_rows(run.objective._optimizer.param_groups):
        table.add_row(name, f"{tensors:,}", f"{parameters:,}", f"{lr:g}", f"{decay:g}")
    return table


def advice(run: "Run") -> list[str]:
    """What a practitioner would say, looking at the plan."""
    c, corpus, notes = run.config, run.corpus, []
    epochs = run.total_steps * c.data.global_batch_size / len(corpus.train)
    if epochs > 8:
        notes.append(
            f"{epochs:.0f} passes over the training data: expect overfitting "
            f"(trainer.max_epochs=4 ends earlier; callbacks.early_stopping.enabled=true stops when it sets in)"
        )
    on_every_rank = loading.why_on_every_rank(c)
    if run.trainer.world_size > 1 and on_every_rank is not None:
        notes.append(f"each of {run.trainer.world_size} ranks builds the whole model in host memory: {on_every_rank}")
    if corpus.val is None:
        notes.append(
            "there is no validation split: no val/loss, no best checkpoint (data.val_fraction=0.01 holds one out)"
        )
    return notes


def first_row(run: "Run") -> tuple[Text, Text]:
    """A decoded part of the first row, and what it shows: text with its documents, or answers with what is learned."""
    from lmtrain.data.order import step_rows

    c = run.config
    rows = step_rows(0, rows=len(run.corpus.train), global_batch_size=c.data.global_batch_size, seed=c.seed)
    batch, tokenizer = run.corpus.train.read(rows[:1]), run.corpus.tokenizer
    title = Text("first training row  ")
    if c.objective.name == "causal_lm":
        return documents(tokenizer, batch["input_ids"][0, :_SHOWN].tolist()), title.append("(│ ends a document)")
    ids, learned = row_mask(batch)
    # From where a learned token is seen with what comes before it.
    start = max(0, int(learned.argmax()) - _SHOWN // 2)
    part, colour = slice(start, start + _SHOWN), has_colour(run.console)
    shown = marked(pieces(tokenizer, ids[part].tolist(), learned[part].tolist()), colour)
    return Text("... " if start else "") + shown, title + legend(colour)


def documents(tokenizer: Any, ids: list[int]) -> Text:
    """The decoded tokens, with a bar where a document ends."""
    text, piece = Text(), list[int]()
    for token in ids:
        piece.append(token)
        if token == tokenizer.eos_token_id:
            text.append(visible(tokenizer.decode(piece)))
            text.append("│", style="bold red")
            piece = []
    text.append(visible(tokenizer.decode(piece)))
    return text
