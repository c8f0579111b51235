"""CUDA graphs of sampling steps: to launch the kernels of a step one by one takes longer than they run."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Step = Callable[[], None]


class StepGraphs:
    """Records steps of a model. The first one that is recorded decides whether any will be.

    usable: whether steps are recorded; None: unknown until one has been.
    """

    def __init__(self) -> None:
        self.usable: bool | None = None

    def recorded(self, step: Step, logits: Tensor, changed: Sequence[Any]) -> Step | None:
        """Returns a function that repeats `step`, or None if its graph can't be used, which is said once.

        Args:
            logits: [B, V], which a step writes.
            changed: the tensors, also in dictionaries and lists, that a step changes in place.
        """
        if self.usable is False:
            return None
        try:
            replay = record(step)
            reason = None if self.usable or _repeats(step, replay, logits, changed) else "it gives other logits"
        except RuntimeError as error:  # a layer waits for the device
            reason = str(error).partition("\n")[0][:120]
        self.usable = reason is None
        if reason is None:
            return replay
        log.warning("rollouts: no CUDA graph of a step can be used (%s), so sampling is slower", reason)
        return None


def record(step: Step) -> Step:
    """Returns a function that repeats what `step` launches on the GPU, with the tensors of now."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


def _repeats(step: Step, replay: Step, logits: Tensor, changed: Sequence[Any]) -> bool:
    """Returns whether a recorded step gives the logits that a step gives; leaves the tensors as they are.

    Keys and values of both are written to the next column, which the next step writes again.
    """
    tensors = [x for part in changed for x in _tensors(part)]
    before = [x.clone() for x in tensors]
    found = []
    for run in (step, replay):
        run()
        found.append(logits.clone())
        for x, value in zip(tensors, before, strict=True):
            x.copy_(value)
    # Not bit for bit: products in a graph may have another amount of memory, and so be added in another order.
    return bool((found[0] - found[1]).norm() <= 0.01 * found[0].norm())


def _tensors(x: Any) -> list[Tensor]:
    """Returns the tensors in dictionaries and lists."""
    inner = x.values() if isinstance(x, dict) else x if isinstance(x, list) else ()
    return [x] if isinstance(x, Tensor) else [tensor for y in inner for tensor in _tensors(y)]
