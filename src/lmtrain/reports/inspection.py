"""Statistics and samples of prepared data for `lmtrain inspect`: counts, lengths, decoded rows with the loss mask.

Also decoded tokens for people: their borders, the mask in colour, the chapters of a memory that they read.
"""

import colorsys
import functools
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

from lmtrain import errors, terminal
from lmtrain.adapters.memory import memory_blocks
from lmtrain.config import trust
from lmtrain.config.schema import Config
from lmtrain.data.corpus import Corpus, build_corpus
from lmtrain.data.examples.row_counts import Counts, bad_lines, remark_lines, too_many_lost, too_many_untrained
from lmtrain.data.examples.rows import PackedRows
from lmtrain.data.text.windows import IGNORE, Windows
from lmtrain.errors import UserError
from lmtrain.models.attention import generation_mode
from lmtrain.run_folder import trained
from lmtrain.terminal import visible

_PERCENTILES = (0, 5, 25, 50, 75, 95, 99, 100)
_BINS, _BAR = 16, 48  # of the histogram: bars, and characters of the longest


@dataclass(frozen=True)
class TokenPiece:
    """A token's text; of several tokens where only together they are a character."""

    text: str
    ids: tuple[int, ...]
    learned: bool
    special: bool


@dataclass
class Sample:
    """A row's tokens; `left_out` of them stand where the first of `head` pieces end."""

    title: str
    head: list[TokenPiece]
    left_out: int
    tail: list[TokenPiece]


@dataclass
class Inspection:
    split: str
    rows: list[tuple[str, str]]  # what became of the split's rows: (what, how many)
    lengths: np.ndarray | None  # int64 [n], tokens of each document or example; None where borders are not known
    learned: np.ndarray | None  # int64 [n], learned tokens of each example; None where all are
    unit: str  # what has a length: document, example
    samples: list[Sample]

    def percentiles(self) -> tuple[list[str], list[list[str]]]:
        """A table: its header and its lines."""
        assert self.lengths is not None
        columns = {f"tokens of {self.unit}s": self.lengths}
        if self.learned is not None:
            columns["learned ones"] = self.learned
        named = {0: "shortest", 50: "median", 100: "longest"}
        found = [np.percentile(values, _PERCENTILES, method="inverted_cdf") for values in columns.values()]
        lines = [
            [named.get(p, f"{p} %"), *(f"{int(numbers[i]):,}" for numbers in found)] for i, p in enumerate(_PERCENTILES)
        ]
        return ["", *columns], [*lines, ["mean", *(f"{values.mean():,.1f}" for values in columns.values())]]

    def histogram(self) -> list[tuple[int, int, int]]:
        """(shortest, longest, how many) of each bar."""
        assert self.lengths is not None
        low, high = int(self.lengths.min()), int(self.lengths.max())
        width = -(-(high - low + 1) // _BINS)
        starts = range(low, high + 1, width)
        counts = np.bincount((self.lengths - low) // width, minlength=len(starts))
        return [(s, min(s + width - 1, high), int(n)) for s, n in zip(starts, counts, strict=True)]


def inspect(config: Config) -> int:
    """Prints what became of the rows, how long they are, and some of them token by token; writes inspect.html."""
    terminal.quiet_libraries()
    text = config.inspect.text
    if text is None:
        if config.run_dir is not None:
            raise UserError("run_dir is read with inspect.text only: the chapters of a memory that a text reads")
        return _shown(config, functools.partial(show, look(config)))
    if config.run_dir is None:
        raise UserError("inspect.text: which model? set run_dir to a run or an export with a memory")
    model, tokenizer = trained.load(config.run_dir, "best", trust.granted(config))
    ids = tokenizer(text)["input_ids"]
    if not ids:
        raise UserError("inspect.text is empty: give some words")
    return _shown(config, functools.partial(_show_chapters, tokenizer, chapters_read(model, ids), ids))


def _shown(config: Config, print_to: Callable[[Console], None]) -> int:
    """Prints on the screen, and into the page of inspect.html what a screen in colour would show."""
    terminal.status.stop()
    print_to(terminal.console())
    if config.inspect.html is not None:
        file = Path(config.inspect.html).expanduser().absolute()
        colours = {"color_system": "truecolor", "force_terminal": True, "no_color": False}
        page = terminal.console(file=io.StringIO(), record=True, width=terminal.LOG_WIDTH, **colours)
        print_to(page)
        try:
            page.save_html(str(file), inline_styles=True)
        except OSError as error:
            raise UserError(f"inspect.html={config.inspect.html} can't be written: {errors.reason(error)}") from None
        print(f"written: {file}")
    return errors.FINISHED


def look(config: Config) -> Inspection:
    """Prepares the data of `config`, or finds it, and looks into the split that inspect.split names.

    Rows without a learned token are counted and not refused, however many: they are what one may be looking for.

    Raises:
        UserError: the data can't be prepared, or has no such split.
    """
    allowed, config.data.max_untrained = config.data.max_untrained, None
    corpus = build_corpus(config)
    config.data.max_untrained = allowed
    split = config.inspect.split
    if corpus.stream is not None and split == "train":
        raise UserError("only training reads on in a stream (data.ring_bytes): look at its head, inspect.split=val")
    rows = corpus.train if split == "train" else corpus.val
    if rows is None:
        raise UserError(f"there is no validation split: {corpus.how_to_validate(config.data)}")
    lengths, learned = _lengths(rows)
    return Inspection(
        split,
        [("data", corpus.words[0]), *_row_facts(corpus, rows, config), *(("not read", n) for n in corpus.notes)],
        lengths,
        learned,
        "document" if isinstance(rows, Windows) else "piece" if config.data.rows == "text" else "example",
        _samples(corpus.tokenizer, rows, config),
    )


def _row_facts(corpus: Corpus, rows: Any, config: Config) -> list[tuple[str, str]]:
    """What became of a split's rows, one (what, how many) a line."""
    split = config.inspect.split
    known = corpus.splits[split]
    if config.data.rows == "text":
        facts = [("documents", known.get("documents")), ("tokens", known["tokens"]), ("bytes", known.get("bytes"))]
        return [(f"rows of {config.data.seq_len:,} tokens", f"{len(rows):,}")] + [
            (name, f"{number:,}") for name, number in facts if number is not None
        ]
    counts = Counts(**known)
    facts = [("rows in the data", counts.rows), ("examples", counts.examples), ("tokens", counts.tokens),
             ("truncated or split", counts.shortened), ("dropped: too long", counts.dropped),
             ("left out: no learned token", counts.untrained),
             ("left out: bad", sum(counts.bad.values()))]  # fmt: skip
    lines = [(name, f"{number:,}") for name, number in facts]
    lines.insert(3, ("learned", f"{counts.trained:,} ({counts.trained / max(1, counts.tokens):.1%})"))
    if counts.untrained_at is not None:
        lines.append(("first without a learned token", f"{counts.untrained_at}: {counts.untrained_text}"))
    if counts.assistant_first:
        lines.append(("began with the assistant", f"{counts.assistant_first:,}, whose first turns were dropped"))
    lines += bad_lines(counts)
    lines += [("note", line) for line in remark_lines(counts)]
    if isinstance(rows, PackedRows):
        packing = rows.packing
        lines.append(("packed", f"{len(packing):,} rows of {packing.capacity:,}, {packing.utilisation:.1%} full"))
    else:
        lines.append(("rows", corpus.words[-1]))
    if too_many_untrained(counts, config.data):
        allowed = f"more than data.max_untrained={config.data.max_untrained} of the rows have no learned token"
        lines.append(("training refuses this", allowed))
    if lost := too_many_lost(counts, config.data):
        lines.append(("training refuses this", f"more than data.max_untrained={config.data.max_untrained}: {lost}"))
    return lines


def _lengths(rows: Any) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Tokens, and learned tokens, of each example; of text the tokens of each document."""
    if isinstance(rows, Windows):
        if any(shard.docs is None for shard in rows.shards):
            return None, None
        ends = [shard.document_ends(1, shard.tokens + 1) for shard in rows.shards]
        return np.concatenate([np.diff(e, prepend=0) for e in ends]), None
    return rows.examples.lengths, rows.examples.learned()


def _samples(tokenizer: Any, rows: Any, config: Config) -> list[Sample]:
    """inspect.samples rows, evenly spread: examples one by one though they may be packed; both answers of a pair."""
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
            found.append(_sample(tokenizer, title, rows.examples.read(i), config))
    return found


def row_mask(batch: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The first row of a micro-batch: its token ids int64 [T], and which are learned, bool [T]; without padding."""
    ids = batch["input_ids"][0].numpy()
    learned = np.zeros(len(ids), dtype=bool)
    if "labels" in batch:
        learned[1:] = batch["labels"][0, :-1].numpy() != IGNORE
    else:
        scored = batch["scored"].numpy()
        scored = scored[scored < len(ids)]
        learned[scored] = True
        if "cu_seqlens" not in batch:  # an answer a row, padded after what is scored
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
    """Prints it, in colour where the console has any."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in found.rows:
        table.add_row(name, Text(visible(value)))
    console.print(Panel(table, title=f"{found.split} split", title_align="left"))
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


LEARNED = ("black on #9be09b", "black on #79cf79")  # neighbouring tokens take turns
GIVEN = ("", "dim")
OPEN, CLOSE, BORDER = "⟦", "⟧", "╎"  # what stands for colour where there is none
_LONGEST_CHARACTER = 4  # tokens that one character can be spread over: it has at most as many bytes


def pieces(tokenizer: Any, ids: Sequence[int], learned: Sequence[bool]) -> list[TokenPiece]:
    """The tokens' texts, which joined are the text of all."""
    special = set(tokenizer.all_special_ids)
    found: list[TokenPiece] = []
    waiting: list[int] = []
    for at, token in enumerate(ids):
        waiting.append(token)
        text = _decode_after(tokenizer, found[-1].ids if found else (), waiting)
        is_special = token in special or tokenizer.added_tokens_decoder.get(token) is not None
        more = at + 1 < len(ids) and learned[at + 1] == learned[at] and len(waiting) < _LONGEST_CHARACTER
        if text.endswith("\ufffd") and more and not is_special:
            continue
        found.append(TokenPiece(text, tuple(waiting), bool(learned[at]), is_special))
        waiting = []
    return found


def _decode_after(tokenizer: Any, before: tuple[int, ...], ids: list[int]) -> str:
    """The text of `ids` where they follow `before`: some tokenizers leave out the space a text begins with."""
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    context = tokenizer.decode(list(before), **options) if before else ""
    whole = tokenizer.decode([*before, *ids], **options)
    return whole[len(context) :] if whole.startswith(context) else tokenizer.decode(ids, **options)


def has_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def marked(shown: Sequence[TokenPiece], colour: bool) -> Text:
    """The pieces in a row, learned ones on green; without colour in ⟦ ⟧, with ╎ between tokens."""
    text, before = Text(), False
    for number, piece in enumerate(shown):
        words = visible(piece.text).replace("\n", "↵\n")
        if colour:
            style = (LEARNED if piece.learned else GIVEN)[number % 2]
            text.append(words, style=f"{style} bold".strip() if piece.special else style)
            continue
        if piece.learned != before:
            text.append(OPEN if piece.learned else CLOSE)
        elif number:
            text.append(BORDER)
        text.append(words)
        before = piece.learned
    if before and not colour:
        text.append(CLOSE)
    return text


def legend(colour: bool) -> Text:
    """What `marked` shows, in a few words."""
    if not colour:
        return Text(f"{OPEN}learned{CLOSE} given, {BORDER} between tokens, ↵ ends a line")
    words = Text(" learned ", style=LEARNED[0])
    return words.append(" given, token by token; ", "default").append("bold", "bold").append(": special, ↵ ends a line")


_TURN = 137.5 / 360  # between the hues of neighbouring chapters: the golden angle keeps all of them apart


@torch.no_grad()
def chapters_read(model: PreTrainedModel, ids: list[int]) -> dict[int, list[list[int]]]:
    """By number of decoder layer, for each token the chapters it reads, likeliest first.

    Raises:
        UserError: the model has no memory.
    """
    blocks = memory_blocks(model)
    if not blocks:
        raise UserError(
            "inspect.text shows the chapters that tokens read, and this model has no memory (docs/memory.md)"
        )
    model.eval()
    with generation_mode(model):
        model.base_model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    found = [block.route(block.last_router_logits)[0].tolist() for block in blocks]
    return dict(zip(blocks[0].settings.layers, found, strict=True))


def _show_chapters(tokenizer: Any, read: dict[int, list[list[int]]], ids: list[int], console: Console) -> None:
    """Prints the text once a layer, each token in the colour of its first chapter."""
    words = [piece.text for token in ids for piece in pieces(tokenizer, [token], [False])]
    for layer, chapters in read.items():
        body = Text()
        for word, chosen in zip(words, chapters, strict=True):
            body.append(visible(word).replace("\n", "↵\n"), style=_style_of(chosen[0]) if has_colour(console) else "")
            body.append(f"[{','.join(map(str, chosen))}] ", style="dim")
        console.print(Panel(body, title=Text(f"after layer {layer}: token[chapters]"), title_align="left"))


def _style_of(chapter: int) -> str:
    """A light colour of the chapter's own behind the text."""
    parts = colorsys.hls_to_rgb(chapter * _TURN % 1, 0.78, 0.8)
    return "black on #" + "".join(f"{int(255 * part):02x}" for part in parts)
