"""What sampling knows of each row of a batch besides its cache: its next logits, its tokens, whether it has ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lmtrain.rollouts.engine import Request, SampledText, Sampling, as_keys, draw


@dataclass
class RowStates:
    """The state of the B rows that are generated, besides their cache."""

    logits: Tensor  # [B, V], of their next tokens
    keys: Tensor  # int64 [B]
    written: Tensor  # int64 [B], number of tokens of each completion so far
    positions: Tensor  # int64 [B], of the token that was drawn last
    live: Tensor  # bool [B], False once a completion has ended
    tokens: Tensor  # int64 [B, max_new_tokens + 1]
    log_probs: Tensor  # fp32 [B, max_new_tokens + 1]
    entropy: Tensor  # fp32 [B]

    def map(self, change: Callable[..., Tensor], *others: "RowStates") -> "RowStates":
        """Returns rows each of whose tensors is `change` of those of these rows and of the others."""
        return RowStates(*map(change, *(vars(rows).values() for rows in (self, *others))))

    def draw(self, sampling: Sampling, ends: Tensor) -> None:
        """Draws a token for each row."""
        tokens, log_probs, entropy = draw(self.logits, self.keys, self.written, sampling)
        most = sampling.max_new_tokens
        at = torch.where(self.live, self.written, most)[:, None]  # finished rows write to the last column, never read
        self.tokens.scatter_(1, at, tokens[:, None])
        self.log_probs.scatter_(1, at, log_probs[:, None])
        self.entropy += entropy * self.live
        self.written += self.live
        self.live &= ~(tokens[:, None] == ends).any(1) & (self.written < most)

    def last_tokens(self) -> Tensor:
        """Returns the tokens that were drawn last, int64 [B, 1]."""
        return self.tokens.gather(1, (self.written - 1)[:, None])

    def texts(self, rows: Sequence[int], sampling: Sampling) -> list[SampledText]:
        """Returns the completions of some of the rows."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.tokens.device)
        parts = (x[index].tolist() for x in (self.tokens, self.log_probs, self.written, self.entropy))
        return [
            SampledText(ids[:count], log_probs[:count], entropy, ids[count - 1] in sampling.end_ids)
            for ids, log_probs, count, entropy in zip(*parts, strict=True)
        ]


def new_rows(requests: Sequence[Request], sampling: Sampling, logits: Tensor, positions: Tensor) -> RowStates:
    """Returns rows of which nothing is written yet."""
    written = torch.zeros(len(requests), dtype=torch.int64, device=logits.device)
    shape = (len(requests), sampling.max_new_tokens + 1)
    blank = torch.zeros(shape, dtype=torch.float32, device=logits.device)
    keys = as_keys(requests, logits.device)
    return RowStates(logits, keys, written, positions, written == 0, blank.long(), blank, blank[:, 0].clone())
