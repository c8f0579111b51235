"""Rows that tasks have encoded: each task the training rows of its files, and one process the folder of all of them.

A task can't know which rows are held out, so it encodes all of them. Per source it writes a line of JSON for each row,
and its token ids and loss mask into files of numbers. Validation rows are few, and are encoded as without tasks.
"""

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from lmtrain.data.chat.turns import BadRow, Remark
from lmtrain.data.examples.row_format import Encoded, Example
from lmtrain.data.sources.choose import MixturePart
from lmtrain.data.sources.pieces import enough, is_held_out
from lmtrain.data.store.parts import parts_in

Row = tuple[int, str, Any]  # the number of its source, where it is, and the row, or a message why it can't be read


class _Read(NamedTuple):
    """How rows were read (RowColumns), of which the plan needs only the words."""

    words: str


def write_rows(folder: Path, rows: Iterable[tuple[Row, Encoded | BadRow]], sources: int) -> None:
    """Writes what became of the rows of a share of each source."""
    with contextlib.ExitStack() as opened:
        files = [
            tuple(opened.enter_context(open(folder / f"{number}.{suffix}", "wb")) for suffix in ("rows", "ids", "mask"))
            for number in range(sources)
        ]
        for (source, where, _), encoded in rows:
            lines, ids, mask = files[source]
            lines.write(json.dumps([where, _plain(encoded, ids, mask)]).encode() + b"\n")


def write_formats(folder: Path, formats: dict[Any, Any]) -> None:
    """Writes in which formats the rows were read."""
    (folder / "formats.json").write_text(json.dumps([reading.words for reading in formats.values()]))


def _plain(encoded: Encoded | BadRow, ids: BinaryIO, mask: BinaryIO) -> dict[str, Any]:
    if isinstance(encoded, BadRow):
        return {"bad": [encoded.where, encoded.reason, encoded.skip]}
    for tokens, trained, *_ in encoded.examples:
        ids.write(np.array(tokens, "<i8").tobytes())
        mask.write(np.array(trained, "u1").tobytes())
    sizes = [[len(tokens), *label] for tokens, _, *label in encoded.examples]
    return {**asdict(encoded), "examples": sizes}


def recall_formats(folder: Path, formats: dict[Any, Any]) -> None:
    """Adds the formats in which all tasks have read rows."""
    for part in parts_in(folder):
        words = json.loads((part / "formats.json").read_text())
        formats.update({("read by a task", word): _Read(word) for word in words})


def read_rows(folder: Path, parts: Sequence[MixturePart]) -> Iterator[tuple[Row, Encoded | BadRow]]:
    """Yields the training rows of all sources, in their order, with what became of them."""
    for number, part in enumerate(parts):
        cfg, index = part.cfg, 0
        share = 0.0
        if cfg.val_fraction and part.source.records("val") is None:
            few = math.ceil(cfg.min_val_rows / cfg.val_fraction)
            there = sum(_count(one / f"{number}.rows") for one in parts_in(folder))
            share = enough(cfg.val_fraction, min(there, few), cfg.min_val_rows)
        for one in parts_in(folder):
            for where, encoded in _rows_of(one, number):
                if not is_held_out(index, share):
                    yield (number, where, None), encoded
                index += 1


def _count(path: Path) -> int:
    with open(path, "rb") as file:
        return sum(1 for _ in file)


def _rows_of(folder: Path, source: int) -> Iterator[tuple[str, Encoded | BadRow]]:
    with (
        open(folder / f"{source}.rows", "rb") as lines,
        open(folder / f"{source}.ids", "rb") as ids,
        open(folder / f"{source}.mask", "rb") as mask,
    ):
        for line in lines:
            where, row = json.loads(line)
            if "bad" in row:
                yield where, BadRow(*row["bad"])
                continue
            examples: list[Example] = []
            for size, *label in row.pop("examples"):
                tokens = np.frombuffer(ids.read(8 * size), "<i8").tolist()
                trained = np.frombuffer(mask.read(size), "u1").astype(bool).tolist()
                examples.append((tokens, trained, *label))
            remarks = [Remark(**remark) for remark in row.pop("remarks")]
            yield where, Encoded(**row, examples=examples, remarks=remarks)
