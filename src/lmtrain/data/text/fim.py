"""Fill-in-the-middle: documents rearranged so that a model learns to write the text between two others.

Bavarian et al. 2022 (arXiv:2207.14255), applied to the documents as they stand in a row (the paper's context-level
form): two positions, drawn uniformly, cut a document into prefix, middle and suffix. These become
    PSM   <prefix> prefix <suffix> suffix <middle> middle
    SPM   <prefix> <suffix> suffix <middle> prefix middle
after the document's BOS and followed by its end, if the row contains them. The positions are between tokens.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.order import mix64
from lmtrain.data.store.shards import Shard
from lmtrain.errors import UserError

_MARKS = 3  # additional tokens of a rearranged document


@dataclass(frozen=True)
class FillInTheMiddle:
    """What to rearrange, and the token ids it takes; draws are a function of (seed, epoch, row, document in the row).

    rate: share of documents that are rearranged; spm_rate: share of those that become SPM.
    end, begin: the tokens that end and begin a document, where it has them; None if there are none.
    """

    rate: float
    spm_rate: float
    prefix: int
    suffix: int
    middle: int
    end: int | None
    seed: int
    begin: int | None = None

    def rearrange(self, tokens: np.ndarray, ends: np.ndarray, epoch: int, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Rearranges the documents of a row; returns the row's tokens [n] and where documents end in it.

        The marker tokens take room, so the same number of tokens is dropped at the end of the row; a document that is
        truncated by that, or that continues after the row, has no end.

        Args:
            tokens: int64 [n].
            ends: ascending, each in 1 .. n: one past the last token of a document.
        """
        done: list[np.ndarray] = []
        new_ends, at = [], 0
        borders = np.unique([0, *ends, len(tokens)])
        for document, (begin, stop) in enumerate(itertools.pairwise(borders)):
            part, ended = tokens[begin:stop], stop in ends
            draws = [mix64(self.seed, 0xF1, epoch, row, document, draw) / 2**64 for draw in range(4)]
            room = len(tokens) - at
            chosen = draws[0] < self.rate and room > _MARKS
            if len(part) + _MARKS * chosen > room:
                part, ended = part[: room - _MARKS * chosen], False
            done.append(self._parts_in_order(part, draws) if chosen else part)
            at += len(done[-1])
            if ended:
                new_ends.append(at)
            if at == len(tokens):
                break
        return np.concatenate(done), np.array(new_ends, dtype=np.int64)

    def _parts_in_order(self, document: np.ndarray, draws: list[float]) -> np.ndarray:
        """Returns the document, [n] with n > 0, as PSM or SPM, [n + 3]."""
        last = len(document) - int(document[-1] == self.end)
        begin, text, end = np.split(document, [int(last > 0 and document[0] == self.begin), last])
        first, second = sorted(int(draw * (len(text) + 1)) for draw in draws[1:3])
        prefix, middle, suffix = np.split(text, [first, second])
        if draws[3] < self.spm_rate:
            return np.concatenate([begin, [self.prefix, self.suffix], suffix, [self.middle], prefix, middle, end])
        return np.concatenate([begin, [self.prefix], prefix, [self.suffix], suffix, [self.middle], middle, end])


def fill_in_the_middle(data: DataConfig, shards: list[Shard], tokenizer: Any, seed: int) -> FillInTheMiddle | None:
    """Returns the FillInTheMiddle that data.fim asks for, or None if nothing is rearranged.

    Raises:
        UserError: the tokenizer lacks one of the marker tokens, or the bins don't say where documents end.
    """
    fim = data.fim
    if not fim.rate:
        return None
    for shard in shards:
        shard.check_borders("data.fim.rate=0")
        if shard.mask is not None:
            raise UserError(f"data.fim.rate={fim.rate}: {shard.path} comes with a loss mask: set data.fim.rate=0")
    names = [fim.prefix_token, fim.suffix_token, fim.middle_token]
    vocabulary = tokenizer.get_vocab()
    missing = [name for name in names if name not in vocabulary]
    if missing:
        advice = f"add with 'tokenizer.add_tokens=[{','.join(missing)}]', or name its own with data.fim.prefix_token"
        found = f"data.fim.rate={fim.rate}: the tokenizer has no {' '.join(missing)}"
        raise UserError(f"{found}: {advice}, suffix_token and middle_token")
    prefix, suffix, middle = (vocabulary[name] for name in names)
    end, begin = tokenizer.eos_token_id, tokenizer.bos_token_id
    return FillInTheMiddle(fim.rate, fim.spm_rate, prefix, suffix, middle, end, seed, begin)


def fim_lines(fim: FillInTheMiddle | None) -> list[str]:
    """Returns the line of the plan about fill-in-the-middle, if it is used."""
    if fim is None:
        return []
    return [f"fill-in-the-middle: {fim.rate:.0%} of the documents in a row, {fim.spm_rate:.0%} of those suffix first"]
