"""The first row as the model will see it, shown before training: with the question, and what is learned of it."""

from typing import Any

import numpy as np
from rich.text import Text

from lmtrain.config.batch import step_sizes
from lmtrain.data.loaders import rows_of_step
from lmtrain.reports.inspection import row_mask
from lmtrain.reports.token_view import has_colour, legend, marked, pieces
from lmtrain.run.build import Run
from lmtrain.terminal import visible

_SHOWN = 160  # tokens of the first row of text that are shown
_AROUND = 320  # characters before the first token that is trained on, and as many from it on, that are shown
_TRIED = 64  # rows of the first step among which one with such a token is looked for
_LINES = 2  # lines of the first row that are shown in a log
_BEFORE = 4  # lines of a conversation in a log before that of the first token that is trained on: the question


def first_row(run: Run) -> tuple[Text, Text, int | None]:
    """Returns a decoded part of the first row, its title, and where the first token trained on stands in it.

    Documents, or the tokens trained on, are marked. Of conversations, it is the first row with such a token, and shown
    is what surrounds it: the question and the answer.
    """
    c = run.config
    rows = rows_of_step(run.corpus.train, 0, sizes=step_sizes(c.data), seed=c.seed)
    read = run.corpus.train
    title = Text("first training row  ")
    if not run.corpus.repeats and run.corpus.val is not None:  # the training rows are not read yet
        read, rows = run.corpus.val, np.zeros((1, 2), dtype=np.int64)
        title = Text("first validation row  ")
    tokenizer = run.corpus.tokenizer
    if c.data.rows == "text":
        text = documents(tokenizer, read.read(rows[:1])["input_ids"][0, :_SHOWN].tolist())
        return text, title.append("(│ ends a document)"), None
    tried = (row_mask(read.read(rows[i : i + 1])) for i in range(min(_TRIED, len(rows))))
    ids, learned = next((row for row in tried if row[1].any()), row_mask(read.read(rows[:1])))
    at, colour = int(learned.argmax()), has_colour(run.console)
    start = max(0, at - _AROUND)  # a token has a character or more
    part = slice(start, at + _AROUND)
    found = pieces(tokenizer, ids[part].tolist(), learned[part].tolist())
    first = next((i for i, piece in enumerate(found) if piece.learned), 0)
    begins = first - _fitting([piece.text for piece in reversed(found[:first])])
    ends = first + _fitting([piece.text for piece in found[first:]])
    before, after = marked(found[begins:first], colour), marked(found[begins:ends], colour)
    cut = Text("... " if start or begins else "")
    shown = cut + after + Text(" ..." if start + len(ids[part]) < len(ids) or ends < len(found) else "")
    return shown, title + legend(colour), len(cut) + len(before)


def _fitting(texts: list[str]) -> int:
    """Returns how many of the texts, from the first on, have _AROUND characters together, and one at least."""
    lengths = np.cumsum([len(text) for text in texts])
    return max(min(1, len(texts)), int(np.searchsorted(lengths, _AROUND, side="right")))


def documents(tokenizer: Any, ids: list[int]) -> Text:
    """Decodes the tokens, with a bar after each document."""
    text, piece = Text(), list[int]()
    for token in ids:
        piece.append(token)
        if token == tokenizer.eos_token_id:
            text.append(visible(tokenizer.decode(piece)))
            text.append("│", style="bold red")
            piece = []
    text.append(visible(tokenizer.decode(piece)))
    return text


def clipped(text: Text, learned_at: int | None) -> Text:
    """Returns the lines around the first that is trained on, or the first ones, for a log; plan.txt holds all of it."""
    lines = text.split("\n", allow_blank=True)
    first = 0 if learned_at is None else max(0, text.plain[:learned_at].count("\n") - _BEFORE)
    last = _LINES if learned_at is None else first + _BEFORE + 1
    parts = [Text("...")] * (first > 0) + list(lines[first:last]) + [Text("...")] * (last < len(lines))
    return Text("\n").join(parts)
