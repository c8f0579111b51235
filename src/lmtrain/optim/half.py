"""Optimizer steps of bfloat16 and float16 weights that lose nothing to rounding.

bfloat16 weights near 0.05 are 2.4e-4 apart, so an update of 2e-5, usual in fine-tuning, would be rounded away. Each
such weight therefore has a `rest` beside it in the optimizer's state, an int16: its distance to the exact weight,
counted in float32 numbers. A step joins both to a float32, updates that like any float32 weight, and splits it again.
What is trained is the float32 weight of mixed precision, stored in 4 bytes and not in 6.

The moments of matrices are stored in bfloat16. A slow average (beta2 of 0.999) changes by less than half of bfloat16's
steps, so moments are rounded stochastically: up or down with the probability that makes the mean exact (Gupta et al.
2015, arXiv:1502.02551). The draws are a function of the value and of the number of the step, so that there is no
generator to save, and shards are rounded like whole tensors.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lmtrain.data.order import step_seed
from lmtrain.distributed.dtensor import as_part_of, held, like, whole

HALF = (torch.bfloat16, torch.float16)
REST = "rest"
# Most weights that are in float32 at a time, unless one tensor has more: a step needs 24 bytes for each of them.
BUCKET = 2**24
_LOW = 0xFFFF  # the bits of a float32 that bfloat16 cuts off
_ODD = 0x3C6EF372 + 1  # any large odd number: the upper bits of a product with it depend on all bits


class HalfOptimizer(torch.optim.Optimizer):
    """Base class of optimizers whose steps update half-precision weights as if these were float32.

    State of such a weight: `rest`, int16, and what a float32 weight has, with tensors of a matrix's shape in bfloat16.
    A group counts the steps in `updates`.
    """

    in_one_call = False  # whether all weights must be updated by one call, as in optimizers that count their calls

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores state in the dtypes it was saved in, where torch alone would cast it to a half-precision weight's.

        A state without rests, that of an earlier version or of float32 weights, begins with random ones.
        """
        super().load_state_dict(state_dict)
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        for saved_id, parameter in zip(saved_ids, _parameters(self), strict=True):
            if parameter.dtype not in HALF:
                self.state.get(parameter, {}).pop(REST, None)
                continue
            for key, value in state_dict["state"].get(saved_id, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][key] = value.to(self.state[parameter][key].device, copy=True)

    @torch.no_grad()
    def _in_full(self, step: Callable[[], Any]) -> None:
        """Calls `step`, which updates the weights in `self.param_groups` that have a gradient, in float32."""
        given = [p for p in _parameters(self) if p.grad is not None]
        if not any(p.dtype in HALF for p in given):
            step()
            return
        for group in self.param_groups:
            group["updates"] = group.get("updates", 0) + 1
        for bucket in [given] if self.in_one_call else _buckets(given):
            self._update_bucket(bucket, step)

    def _update_bucket(self, bucket: list[Tensor], step: Callable[[], Any]) -> None:
        """Calls `step` with float32 weights in the places of the half ones of a bucket, and none in those of others."""
        halves = [p for p in bucket if p.dtype in HALF]
        places = {p: place for place, p in enumerate(_parameters(self))}
        for p in halves:
            if REST not in self.state[p]:
                self.state[p][REST] = like(first_rest(p, places[p]), p)
        wide = _Wide(halves, [self.state[p] for p in halves])
        instead = {p: p for p in bucket} | dict(zip(halves, wide.weights, strict=True))
        absent, lists = nn.Parameter(torch.empty(0)), [group["params"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["params"] = [instead.get(p, absent) for p in group["params"]]
            self.state.update(zip(wide.weights, wide.states, strict=True))
            step()
        finally:
            for group, parameters in zip(self.param_groups, lists, strict=True):
                group["params"] = parameters
            states = [self.state.pop(weight, {}) for weight in wide.weights]
        wide.put_back(states, self.param_groups[0]["updates"])


class _Wide:
    """Float32 copies of half-precision weights, with their gradients and states.

    All weights are in one piece of memory, as are all gradients and all moments, so that a hundred of them take as few
    kernels as one.
    """

    def __init__(self, halves: list[Tensor], own: list[dict[str, Any]]) -> None:
        self.halves, self.own = halves, own
        self.exact = join(_flat(halves), _flat([state[REST] for state in own], torch.int32))
        self.weights = [nn.Parameter(part) for part in _parts(self.exact, halves)]
        gradients = _flat([p.grad for p in halves])  # type: ignore[misc]
        for weight, gradient in zip(self.weights, _parts(gradients, halves), strict=True):
            weight.grad = gradient
        self.states = [{key: value for key, value in state.items() if key != REST} for state in own]
        moments = self._moments(self.states)
        flat = _flat([self.states[i][key] for i, key in moments])
        for (i, key), part in zip(moments, _parts(flat, [halves[i] for i, _ in moments]), strict=True):
            self.states[i][key] = part

    def _moments(self, states: list[dict[str, Any]]) -> list[tuple[int, str]]:
        """Returns (index of the weight, key) of the float tensors that have their weight's shape."""
        return [
            (i, key)
            for i, (p, state) in enumerate(zip(self.halves, states, strict=True))
            for key, value in state.items()
            if isinstance(value, Tensor) and value.is_floating_point() and value.shape == p.shape and value.ndim
        ]

    def put_back(self, states: list[dict[str, Any]], step: int) -> None:
        """Stores the updated weights and the given states, rounded; `step` is what moments are rounded with."""
        exact = _flat(self.weights)  # not self.exact: an optimizer may assign to weight.data
        _store(exact, self.halves)
        rest = exact.view(torch.int32) - _flat(self.halves).view(torch.int32)
        # A weight midway between two others can be 2^15 away. In float16 those near zero are further away still.
        _store(rest.clamp_(-(2**15), 2**15 - 1), [state[REST] for state in self.own])
        moments = self._moments(states)
        flat = round_randomly(_flat([states[i][key] for i, key in moments]), step)
        for i, key in moments:
            kept = self.own[i].get(key)
            is_kept = isinstance(kept, Tensor) and kept.dtype == torch.bfloat16 and kept.shape == self.halves[i].shape
            states[i][key] = kept if is_kept else torch.empty_like(self.halves[i], dtype=torch.bfloat16)
        _store(flat, [states[i][key] for i, key in moments])
        for own, state in zip(self.own, states, strict=True):
            own.update(state)


@torch.no_grad()
def fill_in(parameter: Tensor, place: int, dtype: torch.dtype) -> None:
    """Gives fp32 weights that all are numbers of `dtype` random bits below these, in place; they round to the same.

    Mixed precision rounds weights for its products, which therefore don't change. Those of a bf16 checkpoint would not
    seem to move before their updates add up to half of the distance to the next number; see `first_rest`. Zeros stay
    zeros. All ranks call it.
    """
    near = held(parameter)
    # Of the whole parameter, whatever shards it has; nothing is read back from the device.
    filled = whole(lies_on(parameter, dtype)) & (near != 0)
    rest = held(like(first_rest(parameter, place, dtype), parameter)).int() * filled
    near.copy_(join(near.flatten().clone(), rest.flatten()).view(near.shape))


def lies_on(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns whether all weights, of any float dtype, are numbers of `dtype`, bool 0-dim."""
    return (weights.to(dtype).to(weights.dtype) == weights).all()


def first_rest(parameter: Tensor, place: int, dtype: torch.dtype | None = None) -> Tensor:
    """Returns random rests that round to the weights of a whole parameter, int16, drawn from its `place` in a list.

    `dtype` is what is rounded to, the parameter's own if it is None.

    With rests of 0, all weights would stand still until their updates add up to half of the distance to the next
    number. Random ones are what rounding float32 weights leaves, so in the mean the weights move from the first step.
    """
    cut = 16 if (dtype or parameter.dtype) == torch.bfloat16 else 13  # bits of a float32 that the dtype lacks
    numbers = torch.arange(parameter.numel(), dtype=torch.int32, device=parameter.device)
    draws = (numbers + _salt(place)).mul_(_ODD)
    draws = (draws ^ (draws >> 15)).mul_(_ODD) >> (32 - cut)
    return draws.clamp_(min=1 - 2 ** (cut - 1)).short().view(parameter.shape)


def join(near: Tensor, rest: Tensor) -> Tensor:
    """Returns the exact weights, float32 [N], in the memory of `near`, float32 [N]; `rest` is int32 [N]."""
    bits = near.view(torch.int32)
    # Below zero there is no number to count to: the weight was set to 0 from outside, and its rest was of another.
    bits += torch.where(near == 0, rest.clamp(min=0), rest)
    return near


def round_randomly(values: Tensor, step: int) -> Tensor:
    """Rounds float32 [N] to bfloat16 numbers, stochastically, in place; the draws depend on `step` and the value."""
    bits = values.view(torch.int32)
    draws = (bits + _salt(step)).mul_(_ODD).bitwise_right_shift_(16).bitwise_and_(_LOW)
    bits += draws
    bits &= ~_LOW
    return values


def _salt(number: int) -> int:
    return step_seed(0, number, 0) & 0x7FFFFFFF


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _buckets(parameters: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yields the parameters that are not in half precision, then the others, at most BUCKET elements at a time.

    Sizes of whole tensors count, so that ranks with different shards agree.
    """
    bucket, size = [p for p in parameters if p.dtype not in HALF], BUCKET
    for p in (p for p in parameters if p.dtype in HALF):
        size += p.numel()
        if size > BUCKET:
            if bucket:
                yield bucket
            bucket, size = [], p.numel()
        bucket.append(p)
    yield bucket


def _flat(tensors: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns this rank's shards of all tensors, one after the other, as a new tensor of `dtype`."""
    shards = [held(tensor) for tensor in tensors]
    flat = torch.empty(sum(s.numel() for s in shards), dtype=dtype, device=shards[0].device if shards else None)
    if shards:
        torch._foreach_copy_(_pieces(flat, shards), shards)
    return flat


def _store(flat: Tensor, tensors: list[Tensor]) -> None:
    """Copies back into this rank's shards what `_flat` has put together, rounding to nearest."""
    shards = [held(tensor) for tensor in tensors]
    if shards:
        torch._foreach_copy_(shards, _pieces(flat, shards))


def _pieces(flat: Tensor, shards: list[Tensor]) -> list[Tensor]:
    sizes = [shard.numel() for shard in shards]
    return [piece.view(shard.shape) for piece, shard in zip(flat.split(sizes), shards, strict=True)]


def _parts(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns views of a flat tensor in the shapes of the parameters, sharded as these are."""
    pieces = _pieces(flat, [held(p) for p in parameters])
    return [as_part_of(piece, p) for piece, p in zip(pieces, parameters, strict=True)]
