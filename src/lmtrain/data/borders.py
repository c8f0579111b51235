"""Where documents begin in a micro-batch, as attention reads it, and rows cut into shorter ones."""

from collections.abc import Sequence

import numpy as np
import torch


def documents_at(starts: Sequence[int] | np.ndarray, rows: int, length: int) -> dict[str, torch.Tensor]:
    """position_ids [rows, length] and cu_seqlens from the starts of documents, ascending, the first 0."""
    borders = np.array([*starts, rows * length], dtype=np.int32)
    positions = np.arange(rows * length) - np.repeat(borders[:-1], np.diff(borders))
    return {
        "position_ids": torch.from_numpy(positions.astype(np.int64)).view(rows, length),
        "cu_seqlens": torch.from_numpy(borders),
    }


def cut_rows(batch: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    """A micro-batch of `Windows` with each row cut into rows of `length` tokens, in their order.

    Args:
        batch: of [B, T] tokens; `length` divides T.

    Returns:
        The same of [B * T / length, length]: the last token of a shorter row still has its label, the token after it.
        Where there are document borders, the beginning of each row is one.
    """
    cut = {name: batch[name].reshape(-1, length) for name in ("input_ids", "labels")}
    if "cu_seqlens" not in batch:
        return cut
    tokens = batch["input_ids"].numel()
    starts = np.union1d(batch["cu_seqlens"][:-1].numpy(), np.arange(0, tokens, length))
    return cut | documents_at(starts, tokens // length, length)
