"""Exact log-likelihoods of tokens under a model: of text in sliding windows, of single answers."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch

from lmtrain.models.language_model import LanguageModel

_AHEAD = 16  # batches whose windows are sorted by length together, so that little is padding


class Window(NamedTuple):
    """Tokens the model sees at once, [T], and which of them are scored, bool [T]; never the first."""

    ids: np.ndarray
    scored: np.ndarray
    row: int  # the document, conversation or answer they belong to


def windows(ids: np.ndarray, row: int, context: int, stride: int) -> Iterator[Window]:
    """A document's windows: each but the first token is scored once, in the first window that holds it.

    Past the first window every token sees at least `context - stride` tokens before it.
    """
    done = 1
    for begin in range(0, max(1, len(ids)), stride):
        end = min(begin + context, len(ids))
        if end > done:
            yield Window(ids[begin:end], np.arange(begin, end) >= done, row)
            done = end
        if end == len(ids):
            return


def negative_log_likelihoods(
    model: LanguageModel,
    stretches: Iterable[Window],
    batch_size: int,
    precision: str = "float32",
    part: tuple[int, int] = (0, 1),
) -> Iterator[tuple[int, float, int]]:
    """(row, summed negative log-likelihood in nats, scored tokens) of each window; in no order.

    Windows are padded at the end, where no token that counts can see it, so a batch's size changes nothing but the
    last bits.

    Args:
        precision: float32 or bfloat16 (autocast of matrix products; log-probabilities stay fp32).
        part: (i, n) for every n-th batch from the i-th on: n callers have all windows, each batch as one would make it.
    """
    device = model.model.device
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bfloat16")
    for batch in islice(_batches(stretches, batch_size), part[0], None, part[1]):
        with torch.inference_mode(), autocast:
            sums = _summed(model, batch, device)
        for window, total in zip(batch, sums, strict=True):
            yield window.row, total, int(window.scored.sum())


def _batches(stretches: Iterable[Window], batch_size: int) -> Iterator[list[Window]]:
    waiting = iter(stretches)
    while some := list(islice(waiting, batch_size * _AHEAD)):
        some.sort(key=lambda window: -len(window.ids))
        for start in range(0, len(some), batch_size):
            yield some[start : start + batch_size]


def _summed(model: LanguageModel, batch: list[Window], device: torch.device) -> list[float]:
    longest = max(len(window.ids) for window in batch)
    input_ids = np.zeros((len(batch), longest), dtype=np.int64)
    scored = np.zeros((len(batch), longest), dtype=bool)
    for b, window in enumerate(batch):
        input_ids[b, : len(window.ids)] = window.ids
        scored[b, 1 : len(window.ids)] = window.scored[1:]
    at = torch.from_numpy(np.flatnonzero(scored)).to(device)  # in the flattened B * T
    found = model.log_probs(
        torch.from_numpy(input_ids).to(device), None, None, None, scored=at, before=at - 1
    ).tokens.double()
    sums = torch.zeros(len(batch), dtype=torch.float64, device=device)
    return (-sums.index_add(0, at // longest, found)).tolist()
