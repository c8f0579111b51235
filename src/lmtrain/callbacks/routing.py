"""Router usage in the record of each logged step, and warnings about routers that send all tokens the same way."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lmtrain import terminal
from lmtrain.callbacks.records import Records
from lmtrain.distributed.devices import total
from lmtrain.objectives.base import Objective

MOST = 64  # numbers in a record at most: with more choices, neighbouring ones are counted together
CHOICES = {"memory": "chapters", "router": "experts"}


class Routing(pl.Callback):
    """A callback that counts, on the device, successive steps in which a router used no more choices than one token."""

    def __init__(self, records: Records, warn_after_steps: int | None, memory_noise: float | None) -> None:
        """
        Args:
            warn_after_steps: router.warn_after_steps; None: no warning.
            memory_noise: memory.router_noise, quoted in the warning.
        """
        self.records, self.warn_after_steps, self.memory_noise = records, warn_after_steps, memory_noise
        self.in_a_row: dict[str, Tensor] = {}  # steps, int64 [routers], by kind of router
        self.reported: set[tuple[str, int]] = set()

    def state_dict(self) -> dict[str, Any]:
        return {kind: steps.tolist() for kind, steps in self.in_a_row.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.in_a_row = {kind: torch.tensor(steps, dtype=torch.int64) for kind, steps in state_dict.items()}

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Objective, *_: Any, **__: Any) -> None:
        chosen = pl_module.model.router_losses.chosen
        for kind, counts in chosen.items():
            top_k = pl_module.model.router_losses.kinds[kind].top_k
            same = ((counts > 0).sum(1) <= top_k) & (counts.shape[1] > top_k)
            before = self.in_a_row.get(kind, torch.zeros_like(same, dtype=torch.int64))
            self.in_a_row[kind] = torch.where(same, before.to(same.device) + 1, 0)
        if self.records.holds_step():
            self.records.add({f"router/{CHOICES[kind]}": use(total(trainer, x)) for kind, x in chosen.items()})
            self.warn(pl_module, trainer.global_step)

    def warn(self, module: Objective, step: int) -> None:
        """Warns once about each router that has collapsed, and says what helps."""
        limit, losses = self.warn_after_steps, module.model.router_losses
        for kind, steps in self.in_a_row.items():
            for number, count in enumerate(steps.tolist()):
                if limit is None or count < limit or (kind, number) in self.reported:
                    continue
                self.reported.add((kind, number))
                top_k, choices = losses.kinds[kind].top_k, losses.chosen[kind].shape[1]
                noise = f", memory.router_noise ({self.memory_noise:g})" if kind == "memory" else ""
                same = f"has sent all tokens to the same {top_k} of {choices} {CHOICES[kind]} for {count:,} steps"
                change = f"raise router.load_balance ({losses.kinds[kind].load_balance:g}){noise} or lower optimizer.lr"
                terminal.note(f"step {step:,}: router {number + 1} of {len(steps)} {same}: {change}")


def use(chosen: Tensor) -> list[int]:
    """Returns each choice's share in thousandths, over all routers, from counts [routers, C]; at most MOST values."""
    shares = chosen.double().sum(0)
    bins = min(MOST, shares.shape[0])
    number = torch.arange(shares.shape[0], device=shares.device) * bins // shares.shape[0]
    summed = shares.new_zeros(bins).index_add(0, number, shares)
    return (1000 * summed / summed.sum().clamp(min=1)).round().long().tolist()
