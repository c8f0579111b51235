"""The interface of engines that sample completions: prompts in, tokens with their log-probabilities out."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

_BITS = 40  # probabilities are rounded down to multiples of 2**-40


class Request(NamedTuple):
    """A request for one completion."""

    prompt: Sequence[int]  # token ids, at least one
    key: int  # 64 bits: the seed of everything random in the completion
    known: int = 0  # as many tokens of the prompt are a prompt and its completion of the call before


class Sampling(NamedTuple):
    """The settings of sampling."""

    max_new_tokens: int
    temperature: float  # 0: always the most likely token
    top_p: float  # draw from the fewest tokens that have this share of the probability; 1: from all
    end_ids: tuple[int, ...]  # a completion ends at the first of these
    vocabulary: int | None = None  # ids from here on belong to no token and are never drawn: rows that pad embeddings


# By the tokens of a prompt with its completion; what it is is up to the engine.
PrefixCache = dict[tuple[int, ...], Any]


class SampledText(NamedTuple):
    """A completion of T tokens, including its ending token. The model sampled all of them, or those of its turns."""

    ids: list[int]
    log_probs: list[float]  # of each sampled token at the sampling temperature, before top_p and vocabulary are applied
    entropy: float  # nats, summed over the distributions of the sampled tokens, before both are applied
    ended: bool  # whether by an ending token; False: cut off at max_new_tokens
    sampled: list[bool] | None = None  # [T], False for tokens of an environment; None: all are sampled


class Engine(ABC):
    """Base class of engines, which sample completions with the weights of the model that is trained."""

    @abstractmethod
    def generate(
        self, requests: Sequence[Request], sampling: Sampling, kept: PrefixCache | None = None
    ) -> list[SampledText]:
        """Returns a completion for each request, in their order.

        kept: what an engine keeps of completions that the next call continues; the weights must stay the same.

        The same requests under the same weights give the same completions. Other requests in the batch change how
        matrices are multiplied, hence the last bits of a probability, and a token if its draw falls within those bits.
        """


def draw(logits: Tensor, keys: Tensor, at: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """Draws a token for each row of logits, which depends only on the row, its key and the token's position.

    Probabilities are converted to integers, whose sums are exact in any order. Tokens of a probability below 2**-40 are
    never drawn.

    Args:
        logits: [B, V], any float dtype.
        keys: int64 [B], of each row's completion.
        at: int64 [B], the number of the token in its completion.

    Returns: tokens int64 [B]; their log-probabilities and the entropies of the rows' distributions, fp32 [B].
    """
    scaled = logits.float() if sampling.temperature in (0, 1) else logits.float() / sampling.temperature
    log_probs = scaled.log_softmax(-1)  # [B, V]
    probabilities = log_probs.exp()
    entropy = -(probabilities * log_probs.clamp(min=-1e9)).sum(-1)
    if sampling.temperature == 0:
        tokens = logits[:, : sampling.vocabulary].argmax(-1)
    else:
        shares = (probabilities[:, : sampling.vocabulary] * 2**_BITS).long()
        order = None
        if sampling.top_p < 1:
            shares, order = shares.sort(dim=-1, descending=True, stable=True)
            before = shares.cumsum(-1) - shares
            limit = (shares.sum(-1, keepdim=True).double() * sampling.top_p).long()
            shares = shares.masked_fill(before >= limit, 0)
        upto = shares.cumsum(-1)
        # A fraction of the sum, not a remainder: if the sum differs in its last bits only, so does the ticket.
        ticket = (_shifted(noise(keys, at), 11).double() * 2.0**-53 * upto[:, -1].double()).long()
        tokens = torch.searchsorted(upto, ticket[:, None], right=True)[:, 0].clamp(max=shares.shape[1] - 1)
        tokens = tokens if order is None else order.gather(1, tokens[:, None])[:, 0]
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0], entropy


def noise(keys: Tensor, at: Tensor) -> Tensor:
    """Returns 64 random bits for each key and position, int64 [B] (splitmix64, Steele et al. 2014); overflow wraps."""
    x = keys + (at + 1) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _signed(value: int) -> int:
    """Returns the int64 that has the bits of an unsigned 64-bit number."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Returns `x >> bits`, reading int64 as unsigned."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def as_keys(requests: Sequence[Request], device: torch.device) -> Tensor:
    """Returns the keys of the requests, int64 [B]."""
    return torch.tensor([_signed(r.key) for r in requests], dtype=torch.int64, device=device)
