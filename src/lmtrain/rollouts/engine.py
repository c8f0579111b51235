"""The interface of what samples completions: prompts in, tokens with their log-probabilities out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_BITS = 40  # probabilities are rounded down to multiples of 2**-40


class Request(NamedTuple):
    """A completion that is wanted."""

    prompt: Sequence[int]  # ids, at least one
    key: int  # 64 bits: all that is random of the completion follows from it


class Sampling(NamedTuple):
    """How tokens are drawn."""

    max_new_tokens: int
    temperature: float  # 0: always the likeliest token
    top_p: float  # among the fewest tokens that have this share of the probability; 1: all
    end_ids: tuple[int, ...]  # a completion ends with the first of them


class SampledText(NamedTuple):
    """A sampled completion of T tokens, its ending token included."""

    ids: list[int]
    log_probs: list[float]  # of each token at the sampling temperature, before top_p cuts anything off
    entropy: float  # nats, of the distributions its tokens were drawn from, summed
    ended: bool  # by an ending token; False: cut off at max_new_tokens


class Engine(ABC):
    """Samples completions with the weights of the model that is trained."""

    @abstractmethod
    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[SampledText]:
        """A completion for each request, in their order.

        The same requests under the same weights give the same completions. Other requests beside them change how
        matrices are multiplied, so the last bits of a probability, and a token whose draw falls within those bits.
        """


def draw(logits: Tensor, keys: Tensor, at: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """A token for each row of logits, from nothing but the row, its key and the token's place.

    Probabilities become whole numbers, of which sums are exact in any order. Tokens of a probability below 2**-40 are
    never drawn.

    Args:
        logits: [B, V], any float dtype.
        keys: int64 [B], of each row's completion.
        at: int64 [B], the number of the token in its completion.

    Returns: tokens int64 [B]; their log-probabilities and the entropies of the rows' distributions, fp32 [B].
    """
    scaled = logits.float() / (sampling.temperature or 1.0)
    log_probs = scaled.log_softmax(-1)  # [B, V]
    probabilities = log_probs.exp()
    entropy = -(probabilities * log_probs.clamp(min=-1e9)).sum(-1)
    if sampling.temperature == 0:
        tokens = logits.argmax(-1)
    else:
        shares = (probabilities * 2**_BITS).long()
        order = None
        if sampling.top_p < 1:
            shares, order = shares.sort(dim=-1, descending=True, stable=True)
            before = shares.cumsum(-1) - shares
            limit = (shares.sum(-1, keepdim=True).double() * sampling.top_p).long()
            shares = shares.masked_fill(before >= limit, 0)
        upto = shares.cumsum(-1)
        # A share of the sum, not a remainder: where the sum differs in its last bits, so does what is drawn.
        ticket = (_shifted(noise(keys, at), 11).double() * 2.0**-53 * upto[:, -1].double()).long()
        tokens = (upto <= ticket[:, None]).sum(-1).clamp(max=logits.shape[1] - 1)
        tokens = tokens if order is None else order.gather(1, tokens[:, None])[:, 0]
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0], entropy


def noise(keys: Tensor, at: Tensor) -> Tensor:
    """64 random bits as int64, [B], of each key at each place (splitmix64, Steele et al. 2014); wraps."""
    x = keys + (at + 1) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _signed(value: int) -> int:
    """The int64 that has the bits of a 64-bit number."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(x: Tensor, bits: int) -> Tensor:
    """`x >> bits` of what int64 holds as if it had no sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def as_keys(requests: Sequence[Request], device: torch.device) -> Tensor:
    """Keys of the requests, int64 [B]."""
    return torch.tensor([_signed(r.key & _MASK64) for r in requests], dtype=torch.int64, device=device)
