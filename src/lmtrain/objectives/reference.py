"""The reference model of preference optimisation: the model at the start of the run, frozen and never saved.

frozen_copy   the initial values of the trained parameters, swapped in for a forward pass: a copy of the trained
              parameters only, so of just the adapter where one is trained, whether it is new or continued
adapter_off   the frozen base model with its new adapter disabled, at no cost in memory
precomputed   log-probabilities of all rows, computed once before training and kept in data.cache_dir
none          for losses that have no reference
"""

import contextlib
import functools
import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from lmtrain.adapters.memory_adapter import has_been_trained, memory_of
from lmtrain.adapters.trainable import adapter_of, base_parameters, trainable_names
from lmtrain.data.store.cache import build_once, compute_in_parts, compute_share, load_numbers, parts_of
from lmtrain.data.store.progress import RowProgress
from lmtrain.distributed import process_group as world
from lmtrain.distributed.dtensor import held, is_part, part, swap
from lmtrain.errors import UserError
from lmtrain.strategies.sharding import reshard


class Choice(NamedTuple):
    """The kind of reference: frozen_copy, adapter_off, precomputed or none; and the reason for it, if auto chose it."""

    kind: str
    why: str = ""


def choose(wanted: str, model: nn.Module, why_online: str) -> Choice:
    """Returns the kind of reference that objective.reference=`wanted` means for this model, resolving auto.

    Args:
        why_online: why it doesn't pay off, or isn't possible, to precompute the reference of a model whose parameters
            are all trained; "" if it pays off.

    Raises:
        UserError: adapter_off is wanted, but the base model is not the model the run starts from.
    """
    obstacle = _why_not_adapter_off(model)
    if wanted == "adapter_off" and obstacle:
        found = f"objective.reference=adapter_off: {obstacle}, so the base is not the model this run starts from"
        raise UserError(f"{found}: set objective.reference=frozen_copy")
    if wanted != "auto":
        return Choice(wanted)
    if obstacle is None:
        return Choice("adapter_off", "the base is what the run starts from")
    if trainable_names(model) is not None:
        return Choice("frozen_copy", "a copy of only the trained part of the model")
    if why_online:
        return Choice("frozen_copy", why_online)
    return Choice("precomputed", "one pass over the pairs before training, no copy of the weights")


def _why_not_adapter_off(model: nn.Module) -> str | None:
    """Returns why the model with its adapter disabled differs from the model as it is now, or None if it does not."""
    adapter = adapter_of(model)
    if has_been_trained(model):
        return "the memory has been trained before"
    base_is_frozen = not any(p.requires_grad for p in base_parameters(model))
    if adapter is None and memory_of(model) is not None and base_is_frozen:
        return None
    if adapter is None:
        return "no adapter is trained (peft=none)"
    if adapter.start:
        return "this adapter's initial values were taken out of the base's weights (peft.init_weights)"
    if adapter.config.bias != "none":
        return f"peft.bias={adapter.config.bias} trains biases of the base"
    if not base_is_frozen:
        return "the base is trained too ({name: base} in optimizer.groups)"
    if any(bool(p.any()) for name, p in model.named_parameters() if ".lora_B." in name):
        return "the adapter has been trained before (peft.adapter)"
    return None


def first_values_hash(model: nn.Module) -> str:
    """Returns a hash of the trained parameters' shapes and of some of their values; it takes milliseconds."""
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        if p.requires_grad:
            flat = p.detach().flatten()
            some = flat[:: max(1, flat.numel() // 64)].float().cpu().numpy()
            digest.update(f"{name}{tuple(p.shape)}".encode() + some.tobytes())
    return digest.hexdigest()[:16]


class FrozenCopy:
    """A copy of a model's trained parameters at construction; `in_place()` swaps it in for the trained ones.

    It is kept in a plain dict, so that neither checkpoints nor optimizers see it. Of sharded parameters it holds this
    rank's shards.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.values = {name: held(p).clone() for name, p in self.parameters.items()}

    def replace(self, values: dict[str, Tensor]) -> None:
        """Replaces recorded initial values with full tensors."""
        for name, value in values.items():
            self.values[name].copy_(part(value.to(self.values[name].device), self.parameters[name]))

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Swaps in the initial values within the context; nothing computed there may be backpropagated through."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        reshard(self.model)  # parameters that are gathered now hold the values before the swap
        torch.clear_autocast_cache()  # and so do the casts that autocast caches by tensor object
        for name, p in self.parameters.items():
            if is_part(p):  # it is gathered from its own storage, so the contents are swapped
                swap(held(p), self.values[name])
            else:
                trained = p.data
                p.data = self.values[name].to(p)  # moved to the model's device and dtype by the first swap
                self.values[name] = trained

    def changed(self) -> list[str]:
        """Returns the names of parameters that no longer hold their initial values."""
        return [name for name, p in self.parameters.items() if not torch.equal(held(p), self.values[name].to(held(p)))]


def weights_hash(model: nn.Module) -> str:
    """Returns the SHA-256 of the state dict of a model: its parameters and persistent buffers."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor):
            digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Precomputed:
    """Log-probabilities of all rows' answers under the initial model, read from a cache or computed into it.

    Args:
        cache_dir: data.cache_dir.
        identity: what else the numbers depend on: rows, the model's architecture and settings, precision.
    """

    def __init__(self, cache_dir: str, identity: dict[str, Any]) -> None:
        self.cache_dir, self.identity = Path(cache_dir).expanduser(), identity
        self.folder: Path | None = None

    def key(self, model: nn.Module) -> str:
        """Returns the cache key: a hash of the weights and of all settings that a forward pass depends on."""
        identity = json.dumps(self.identity, sort_keys=True, default=str)
        return hashlib.sha256(f"{weights_hash(model)} {identity}".encode()).hexdigest()[:16]

    def find(self, model: nn.Module, splits: dict[str, Any], numbers: Callable[[Any, np.ndarray], np.ndarray]) -> None:
        """Sets `reference` of the rows of every split, read from the cache or computed.

        `numbers(rows, indices)` computes the log-probabilities of the rows of one split at `indices` (int64 [n]), fp64
        [n, answers]. All ranks must call this method: each computes its share of the parts, then one rank joins them
        into the cache folder. If nodes share no disk, each node also computes the parts of the other nodes. After an
        interruption, the next call continues with the parts saved so far.
        """
        folder = self.folder = self.cache_dir / f"reference-{self.key(model)}"
        parts = parts_of(folder)

        def is_complete(folder: Path) -> bool:
            return all((folder / f"{name}.npy").exists() for name in splits)

        def build(temporary: Path) -> None:
            for name, rows in splits.items():
                progress.say(f"reference log-probabilities of {len(rows):,} {name} pairs, once for this model and data")
                progress.start(f"{name} pairs", len(rows), doing="reference of")
                every, of = np.arange(len(rows)), functools.partial(numbers, rows)
                np.save(temporary / f"{name}.npy", compute_in_parts(parts / name, every, of, progress))

        if world.size() > 1 and not world.from_first(lambda: is_complete(folder)):
            self._compute_shares(splits, numbers, parts)
        if not is_complete(folder):
            with RowProgress(True) as progress:
                build_once(folder, is_complete, build, progress.say)
            shutil.rmtree(parts, ignore_errors=True)
        for name, rows in splits.items():
            rows.reference = load_numbers(folder / f"{name}.npy")

    def _compute_shares(
        self, splits: dict[str, Any], numbers: Callable[[Any, np.ndarray], np.ndarray], parts: Path
    ) -> None:
        if world.rank() == 0:
            print(f"reference log-probabilities on {world.size()} ranks, once for this model and data", flush=True)
        for turn, (name, rows) in enumerate(splits.items()):
            rank = (world.rank() + turn) % world.size()  # rotated: else rank 0 would get the first part of every split
            compute_share(parts / name, np.arange(len(rows)), functools.partial(numbers, rows), rank, world.size())
        world.together(lambda: None)
