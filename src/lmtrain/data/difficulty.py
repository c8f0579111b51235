"""How hard rows are, by their length, rarity or compression, and the order of rows from easy to hard.

Competence-based curricula (Platanios et al. 2019) take rarity: the mean of -log(frequency) over a row's tokens.
"""

import itertools
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lmtrain.data.order import Rows
from lmtrain.data.store import row_numbers
from lmtrain.data.store.cache import build_once
from lmtrain.data.store.progress import RowProgress
from lmtrain.data.text.windows import IGNORE
from lmtrain.errors import UserError

_SCORES = "scores.npy"
Score = Callable[[np.ndarray], np.ndarray]  # rows int64 [n] -> fp32 [n], the harder the larger


class Stretch(NamedTuple):
    """Tokens of a row that see each other, int64 [T], and what follows each: targets int64 [T], IGNORE if unlearned."""

    ids: np.ndarray
    targets: np.ndarray

    @property
    def text_ids(self) -> np.ndarray:
        """All of its tokens: in a window of text the last target is in no input."""
        return self.ids if self.targets[-1] == IGNORE else np.append(self.ids, self.targets[-1])


def stretches(rows: Rows, row: int) -> list[Stretch]:
    """What a row of the first epoch holds.

    Raises:
        UserError: rows of a format that gives neither labels nor examples.
    """
    batch = rows.read(np.array([[0, row]]))
    if "labels" in batch:
        ids, labels = batch["input_ids"][0].numpy(), batch["labels"][0].numpy()
        length = int(batch["seen"]) if "seen" in batch else len(ids)  # what follows is padding
        starts = batch["cu_seqlens"].numpy() if "cu_seqlens" in batch else np.zeros(1, dtype=np.int64)
        cuts = [*starts[starts < length].tolist(), length]
        return [Stretch(ids[a:b], labels[a:b]) for a, b in itertools.pairwise(cuts)]
    examples: Any = getattr(rows, "examples", None)
    if examples is None:
        raise UserError(
            f"data.curriculum.by=difficulty: {type(rows).__name__} gives no labels, so what its rows hold isn't known: "
            f"set data.curriculum.by=null"
        )
    group = getattr(rows, "group", 1)
    both = [examples.read(row * group + i) for i in range(group)]
    return [Stretch(ids, np.append(np.where(learned[1:], ids[1:], IGNORE), IGNORE)) for ids, learned in both]


def lengths(rows: Rows) -> Score:
    """Tokens of each row."""
    return _each(lambda row: sum(len(s.text_ids) for s in stretches(rows, row)))


def compression(rows: Rows, tokenizer: Any) -> Score:
    """Bytes of each row's decoded text once zlib has compressed it, over its bytes before."""

    def score(row: int) -> float:
        text = "".join(tokenizer.decode(s.text_ids.tolist()) for s in stretches(rows, row)).encode()
        return len(zlib.compress(text)) / max(1, len(text))

    return _each(score)


def rarity(rows: Rows, chosen: np.ndarray, vocab_size: int, progress: RowProgress) -> Score:
    """The mean of -log(frequency) over the learned tokens of each row, counted in the rows `chosen`."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    progress.start("tokens of rows", len(chosen), doing="count")
    for part in row_numbers.in_parts(chosen):
        learned = np.concatenate([_learned(rows, row) for row in part.tolist()])
        counts += np.bincount(learned, minlength=vocab_size)
        progress.advance(len(part), 0)
    with np.errstate(divide="ignore"):  # of tokens that are in none of these rows nothing is asked
        surprise = -np.log(counts / max(1, counts.sum()))

    def score(row: int) -> float:
        learned = _learned(rows, row)
        return float(surprise[learned].mean()) if len(learned) else 0.0

    return _each(score)


def _learned(rows: Rows, row: int) -> np.ndarray:
    targets = np.concatenate([s.targets for s in stretches(rows, row)])
    return targets[targets != IGNORE]


def _each(score: Callable[[int], float]) -> Score:
    return lambda chosen: np.array([score(row) for row in chosen.tolist()], dtype=np.float32)


def scored_once(
    folder: Path, chosen: np.ndarray, make_score: Callable[[RowProgress], Score], progress: RowProgress
) -> np.ndarray:
    """The scores of the rows `chosen`, fp32 [n], kept in `folder`: found there, or computed into it.

    Safe to call from several processes at once (one computes, the others wait) and to kill at any moment: what was
    scored lies in <folder>.parts, and the next call goes on from there.

    Raises:
        UserError: the folder can't be written, a file in it can't be read, a score is no number.
    """

    def is_complete(folder: Path) -> bool:
        return (folder / _SCORES).exists()

    def build(temporary: Path) -> None:
        score = make_score(progress)
        progress.start("rows", len(chosen), doing="score")
        parts = row_numbers.parts_of(folder)
        np.save(
            temporary / _SCORES, row_numbers.compute(parts, chosen, lambda rows: _checked(score(rows), rows), progress)
        )

    if not is_complete(folder):
        build_once(folder, is_complete, build, progress.say)
        shutil.rmtree(row_numbers.parts_of(folder), ignore_errors=True)
    return row_numbers.load(folder / _SCORES)


def _checked(scores: np.ndarray, rows: np.ndarray) -> np.ndarray:
    wrong = np.flatnonzero(~np.isfinite(scores))
    if len(wrong):
        raise UserError(
            f"data.curriculum: the score of row {rows[wrong[0]]:,} is {scores[wrong[0]]}, which is no place in an "
            f"order: does data.curriculum.model give such losses elsewhere too?"
        )
    return scores


def easy_first(chosen: np.ndarray, scores: np.ndarray, buckets: int) -> np.ndarray:
    """The rows `chosen`, int64 [n], by buckets of equally many from the easiest to the hardest; within one as before.

    Equal scores are told apart by the place in `chosen`.
    """
    bucket = np.empty(len(chosen), dtype=np.int64)
    bucket[np.argsort(scores, kind="stable")] = np.arange(len(chosen)) * buckets // len(chosen)
    return chosen[np.argsort(bucket, kind="stable")]
