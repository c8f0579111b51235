"""The `lmtrain inspect` command: counts, lengths, and decoded rows with their loss mask, of prepared data."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lmtrain import errors, terminal
from lmtrain.config.schema import Config
from lmtrain.data.corpus import Corpus, build_corpus
from lmtrain.data.examples.documents import Examples
from lmtrain.data.examples.row_counts import Counts, bad_lines, remark_lines, too_many_lost, too_many_untrained
from lmtrain.data.examples.rows import PackedRows
from lmtrain.data.text.windows import IGNORE, Windows
from lmtrain.errors import UserError
from lmtrain.reports.report_page import document, rendered, write_page
from lmtrain.reports.token_view import TokenPiece, has_colour, legend, marked, pieces

_PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
_HEADLINE = ("examples", "documents", "tokens", "learned")  # facts that the page begins with, if they are there
_BINS, _BAR = 16, 48  # of the histogram: number of bars, and length of the longest in characters


@dataclass
class Sample:
    """The decoded tokens of a row; `left_out` tokens between `head` and `tail` are omitted."""

    title: str
    head: list[TokenPiece]
    left_out: int
    tail: list[TokenPiece]


@dataclass
class Inspection:
    split: str
    rows: list[tuple[str, str]]  # facts about the split's rows: (name, value)
    lengths: np.ndarray | None  # int64 [n], tokens of each document or example; None if borders are unknown
    learned: np.ndarray | None  # int64 [n], learned tokens of each example; None if all are
    unit: str  # what `lengths` measures: document, piece or example
    samples: list[Sample]

    def percentiles(self) -> tuple[list[str], list[list[str]]]:
        """Returns the header and the lines of a table of length percentiles."""
        assert self.lengths is not None
        columns = {f"tokens of {self.unit}s": self.lengths}
        if self.learned is not None:
            columns["learned ones"] = self.learned
        named = {0: "shortest", 50: "median", 100: "longest"}
        found = [np.percentile(values, _PERCENTILES, method="inverted_cdf") for values in columns.values()]
        names = [named.get(p, f"{p} %") for p in _PERCENTILES]
        lines = [[name, *(f"{int(n):,}" for n in numbers)] for name, *numbers in zip(names, *found, strict=True)]
        return ["", *columns], [*lines, ["mean", *(f"{values.mean():,.1f}" for values in columns.values())]]

    def histogram(self) -> list[tuple[int, int, int]]:
        """Returns (shortest, longest, count) of each bar."""
        assert self.lengths is not None
        low, high = int(self.lengths.min()), int(self.lengths.max())
        width = -(-(high - low + 1) // _BINS)
        starts = range(low, high + 1, width)
        counts = np.bincount((self.lengths - low) // width, minlength=len(starts))
        return [(s, min(s + width - 1, high), int(n)) for s, n in zip(starts, counts, strict=True)]


def inspect(config: Config) -> int:
    """Prints row counts, lengths and decoded sample rows, and writes them to inspect.html if set."""
    terminal.quiet_libraries()
    found = look(config)
    show(found, terminal.console())
    if config.inspect.html is not None:
        print(f"written: {write_page(page(found), config.inspect.html)}")
    return errors.FINISHED


def look(config: Config) -> Inspection:
    """Prepares the data of `config` (or finds it in the cache) and collects statistics of the split inspect.split.

    Any number of rows without a learned token is accepted and counted, since finding them may be the user's aim.

    Raises:
        UserError: the data can't be prepared, or has no such split.
    """
    allowed, config.data.max_untrained = config.data.max_untrained, None
    corpus = build_corpus(config)
    config.data.max_untrained = allowed
    split = config.inspect.split
    if corpus.stream is not None and split == "train":
        raise UserError("only training reads on in a stream (data.ring_bytes): see its beginning by inspect.split=val")
    rows = corpus.train if split == "train" else corpus.val
    if rows is None:
        raise UserError(f"there is no validation split: {corpus.how_to_validate(config.data)}")
    lengths, learned = _lengths(rows)
    return Inspection(
        split,
        [("data", corpus.words[0]), *_row_facts(corpus, rows, config), *(("note", n) for n in corpus.notes)],
        lengths,
        learned,
        "document" if isinstance(rows, Windows) else "piece" if config.data.rows == "text" else "example",
        _samples(corpus.tokenizer, rows, config),
    )


def _row_facts(corpus: Corpus, rows: Any, config: Config) -> list[tuple[str, str]]:
    """Returns the facts about a split's rows as (name, value) lines."""
    split = config.inspect.split
    known = corpus.splits[split]
    if config.data.rows == "text":
        facts = [("documents", known.get("documents")), ("tokens", known["tokens"]), ("bytes", known.get("bytes"))]
        there = [(name, f"{number:,}") for name, number in facts if number is not None]
        return [(f"rows of {config.data.seq_len:,} tokens", f"{len(rows):,}"), *there]
    # Examples: what became of the rows,
    counts = Counts(**known)
    facts = [("rows in the data", counts.rows), ("examples", counts.examples), ("tokens", counts.tokens),
             ("truncated", counts.shortened), ("dropped: too long", counts.dropped),
             ("left out: no learned token", counts.untrained),
             ("left out: bad", sum(counts.bad.values()))]  # fmt: skip
    lines = [(name, f"{number:,}") for name, number in facts]
    if _learns(rows):
        lines.insert(3, ("learned", f"{counts.trained:,} ({counts.trained / max(1, counts.tokens):.1%})"))
    if counts.untrained_at is not None:
        lines.append(("first without a learned token", f"{counts.untrained_at}: {counts.untrained_text}"))
    if counts.assistant_first:
        lines.append(("began with the assistant", f"{counts.assistant_first:,}, whose first turns were dropped"))
    lines += bad_lines(counts)
    lines += [("note", line) for line in remark_lines(counts)]
    # how they are laid out, and whether training refuses them.
    if isinstance(rows, PackedRows):
        packing = rows.packing
        lines.append(("packed", f"{len(packing):,} rows of {packing.capacity:,}, {packing.utilisation:.1%} full"))
    else:
        lines.append(("rows", corpus.words[-1]))
    if too_many_untrained(counts, config.data, rows.examples.group):
        allowed = f"more than data.max_untrained={config.data.max_untrained} of the rows have no learned token"
        lines.append(("training refuses this", allowed))
    if lost := too_many_lost(counts, config.data):
        lines.append(("training refuses this", f"more than data.max_untrained={config.data.max_untrained}: {lost}"))
    return lines


def _lengths(rows: Any) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Returns tokens and learned tokens of each example; for text, tokens of each document (if known) and None."""
    if isinstance(rows, Windows):
        if any(shard.docs is None for shard in rows.shards):
            return None, None
        return Examples(rows.shards).lengths, None  # those of documents, also of ones that go on in another shard
    return rows.examples.lengths, rows.examples.learned() if _learns(rows) else None


def _learns(rows: Any) -> bool:
    """Returns whether tokens of the rows are trained on; those of prompts (objective=grpo) are only given."""
    return bool(getattr(rows, "learns", True))


def _samples(tokenizer: Any, rows: Any, config: Config) -> list[Sample]:
    """Returns inspect.samples evenly spaced rows; packed examples are shown one by one, pairs with both answers."""
    group = getattr(rows, "group", 1)
    number = len(rows) if isinstance(rows, Windows) else len(rows.examples) // group
    wanted = min(config.inspect.samples, number)
    found = []
    for index in (k * number // wanted for k in range(wanted)):
        if isinstance(rows, Windows):
            batch = rows.read(np.array([[0, index]]))
            found.append(_sample(tokenizer, f"row {index + 1:,} of {number:,}", row_mask(batch), config))
            continue
        for i in range(group * index, group * (index + 1)):
            title = rows.title(i) if hasattr(rows, "title") else f"example {i + 1:,} of {number:,}"
            ids, learned = rows.examples.read(i)
            found.append(_sample(tokenizer, title, (ids, learned & _learns(rows)), config))
    return found


def row_mask(batch: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns a micro-batch's first row without padding: token ids int64 [T], and which are learned, bool [T]."""
    ids = batch["input_ids"][0].numpy()
    learned = np.zeros(len(ids), dtype=bool)
    if "labels" in batch:
        learned[1:] = batch["labels"][0, :-1].numpy() != IGNORE
    else:
        scored = batch["scored"].numpy()
        scored = scored[scored < len(ids)]
        learned[scored] = True
        if "cu_seqlens" not in batch:  # one answer per row, padded after its last scored token
            return ids[: scored[-1] + 1], learned[: scored[-1] + 1]
    seen = min(len(ids), int(batch["seen"])) if "seen" in batch else len(ids)
    return ids[:seen], learned[:seen]


def _sample(tokenizer: Any, title: str, row: tuple[np.ndarray, np.ndarray], config: Config) -> Sample:
    ids, learned = row
    half = -(-config.inspect.tokens // 2)
    words = f"{title}: {len(ids):,} tokens, {int(learned.sum()):,} learned"
    if len(ids) <= 2 * half:
        return Sample(words, pieces(tokenizer, ids.tolist(), learned.tolist()), 0, [])
    head, tail = ((ids[part].tolist(), learned[part].tolist()) for part in (slice(half), slice(-half, None)))
    return Sample(words, pieces(tokenizer, *head), len(ids) - 2 * half, pieces(tokenizer, *tail))


def show(found: Inspection, console: Console) -> None:
    """Prints the inspection, in colour if the console supports it."""
    facts = terminal.facts((name, Text(terminal.visible(value))) for name, value in found.rows)
    console.print(Panel(facts, title=f"{found.split} split", title_align="left"))
    if found.lengths is not None:
        _show_lengths(found, console)
    colour = has_colour(console)
    for sample in found.samples:
        body = marked(sample.head, colour)
        if sample.left_out:
            body.append(f"\n... {sample.left_out:,} tokens ...\n", style="italic")
            body.append(marked(sample.tail, colour))
        console.print(Panel(body, title=Text(sample.title), title_align="left"))
    if found.samples:
        console.print(legend(colour))


def _show_lengths(found: Inspection, console: Console) -> None:
    header, lines = found.percentiles()
    table = Table(*header, box=None, padding=(0, 2), header_style="dim")
    for column in table.columns[1:]:
        column.justify = "right"
    for line in lines:
        table.add_row(*line)
    console.print(table)
    bars = found.histogram()
    most = max(number for _, _, number in bars)
    wide = len(f"{bars[-1][1]:,}")
    for low, high, number in bars:
        bar = "█" * -(-_BAR * number // most)
        console.print(Text(f"  {low:>{wide},} - {high:>{wide},} {bar} {number:,}", no_wrap=True))
    console.print()


def page(found: Inspection) -> str:
    """Builds a self-contained HTML page that loads no other files and follows the reader's light or dark mode."""
    bars, facts = found.histogram() if found.lengths is not None else [], dict(found.rows)
    lengths = {"percentiles": found.percentiles(), "most": max(bar[2] for bar in bars)} if bars else {}
    headline = [(_shortened(facts[name]), name) for name in _HEADLINE if name in facts]
    body = rendered("inspect.html", found=found, bars=bars, headline=headline, **lengths)
    return document(f"{found.split} split", body)


def _shortened(number: str) -> str:
    """Returns a number that is too long for a narrow window with a prefix, 306 M say."""
    digits = number.replace(",", "")
    return terminal.si(int(digits)) if digits.isdigit() and int(digits) >= 1_000_000 else number
