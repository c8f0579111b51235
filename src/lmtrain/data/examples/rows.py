"""Rows of examples: one example each, padded to the longest of its micro-batch, or several packed into seq_len."""

import numpy as np
import torch

from lmtrain.config.schema import Config
from lmtrain.data.borders import documents_at
from lmtrain.data.examples.packing import Packing, pack
from lmtrain.data.examples.store import Examples
from lmtrain.data.modules import Rows
from lmtrain.data.text.windows import IGNORE
from lmtrain.errors import UserError

_MULTIPLE = 8  # padded rows are as long as the longest, rounded up to what matrix units like


class PaddedRows:
    """Row i is example i. Loaders put rows of near lengths into one micro-batch (`lengths`), so little is padding.

    No mask is needed: padding follows the example, and tokens never attend to later ones.
    """

    def __init__(self, examples: Examples, *, by_length: bool = False) -> None:
        """by_length: rows from short to long, for validation, where the order of rows means nothing."""
        self.examples = examples
        self.order = np.argsort(examples.lengths, kind="stable") if by_length else np.arange(len(examples))
        self.lengths = examples.lengths[self.order]

    def __len__(self) -> int:
        return len(self.examples)

    def read(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """A micro-batch from (epoch, row) pairs [B, 2].

        Returns:
            input_ids int64 [B, T]; labels int64 [B, T], shifted: labels[b, t] is token t + 1 where that is learned,
            else IGNORE; learned int64 [n]: where in the B * T flattened tokens there is a label, so that logits are
            made there alone; seen int64 []: tokens that are no padding.
        """
        parts = [self.examples.read(int(self.order[row])) for _, row in rows]
        longest = max(len(ids) for ids, _ in parts)
        batch = _blank(len(parts), -(-longest // _MULTIPLE) * _MULTIPLE)
        for b, (ids, trained) in enumerate(parts):
            _lay(batch, b, 0, ids, trained)
        return {**_tensors(batch), "seen": torch.tensor(sum(len(ids) for ids, _ in parts))}

    def empty(self) -> dict[str, torch.Tensor]:
        return {**_tensors(_blank(1, _MULTIPLE)), "seen": torch.tensor(0)}


class PackedRows:
    """Rows of seq_len tokens that hold several examples, kept apart by cu_seqlens."""

    def __init__(self, examples: Examples, packing: Packing, *, isolate_documents: bool) -> None:
        self.examples, self.packing, self.isolate_documents = examples, packing, isolate_documents

    def __len__(self) -> int:
        return len(self.packing)

    def read(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """A micro-batch from (epoch, row) pairs [B, 2], T = seq_len.

        Returns:
            input_ids, labels, learned and seen as of `PaddedRows.read`; no label is the first token of an example. With
            isolation position_ids int64 [B, T], restarting at each example, and cu_seqlens int32 [n + 1], the starts
            of examples (and of the empty end of a row) over the B * T flattened tokens.
        """
        pack, length = self.packing, self.packing.capacity
        batch = _blank(len(rows), length)
        starts, seen = [], 0
        for b, (_, row) in enumerate(rows):
            at = 0
            for piece in range(int(pack.first[row]), int(pack.first[row + 1])):
                ids, trained = self.examples.read(int(pack.example[piece]))
                part = slice(int(pack.start[piece]), int(pack.stop[piece]))
                _lay(batch, b, at, ids[part], trained[part])
                starts.append(b * length + at)
                at += part.stop - part.start
            if at < length:
                starts.append(b * length + at)
            seen += at
        documents = documents_at(starts, len(rows), length) if self.isolate_documents else {}
        return {**_tensors(batch), **documents, "seen": torch.tensor(seen)}

    def empty(self) -> dict[str, torch.Tensor]:
        batch = _blank(1, self.packing.capacity)
        documents = documents_at([0], 1, self.packing.capacity) if self.isolate_documents else {}
        return {**_tensors(batch), **documents, "seen": torch.tensor(0)}


def example_rows(examples: Examples, config: Config, seed: int | None) -> tuple[Rows, str]:
    """Examples as rows, by data.packing, and in words how well they fill them; seed None is for validation."""
    data = config.data
    method = data.packing or "off"
    if method == "off":
        return PaddedRows(examples, by_length=seed is None), "one example a row, padded to the longest of its batch"
    longest = int(examples.lengths.max())
    if longest > data.seq_len and method != "concat":
        raise UserError(
            f"an example has {longest} tokens, more than a row of data.seq_len={data.seq_len}: raise it, lower "
            f"data.max_length={data.max_length}, or set data.packing=off or concat"
        )
    packing = pack(examples.lengths, data.seq_len, method, seed)
    kept_apart = "kept apart" if data.isolate_documents else "seeing each other (data.isolate_documents=false)"
    words = (
        f"packed by {method}: {len(examples):,} examples in {len(packing):,} rows of {data.seq_len:,} tokens, "
        f"{packing.utilisation:.1%} full, {kept_apart}"
    )
    return PackedRows(examples, packing, isolate_documents=data.isolate_documents), words


def _blank(rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((rows, length), dtype=np.int64), np.full((rows, length), IGNORE, dtype=np.int64)


def _lay(batch: tuple[np.ndarray, np.ndarray], row: int, at: int, ids: np.ndarray, trained: np.ndarray) -> None:
    """Puts an example's tokens, and the label before each learned one, at slot `at` of a row."""
    input_ids, labels = batch
    input_ids[row, at : at + len(ids)] = ids
    labels[row, at : at + len(ids) - 1] = np.where(trained[1:], ids[1:], IGNORE)


def _tensors(batch: tuple[np.ndarray, np.ndarray]) -> dict[str, torch.Tensor]:
    input_ids, labels = batch
    learned = np.flatnonzero(labels != IGNORE)
    return {
        "input_ids": torch.from_numpy(input_ids),
        "labels": torch.from_numpy(labels),
        "learned": torch.from_numpy(learned),
    }
