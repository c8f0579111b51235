"""What must be true of the first steps of an objective; it costs nothing after them.

Of one with a reference: before the first step policy and reference give the same log-probabilities
(`check_agreement`). Of any objective: once steps were taken that must show, trained weights are others and frozen ones
are not (`WeightsMove`).

What the loss of a first step should be is said of no objective: weights from scratch may have any scale.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lmtrain.distributed.devices import total
from lmtrain.distributed.dtensor import held
from lmtrain.errors import RunError
from lmtrain.models.blocks import evaluating

FULL = (1e-4, 1e-6)  # how far log-probabilities may differ, absolutely and relative to them, in fp32
HALF = (5e-2, 2e-3)  # the same where matrices are multiplied in half precision
# Learning rates, times gradient norms up to 1, that must sum to this before weights have to be others: an update of
# less, of a new adapter say, may be rounded away. In fp32, and in half precision.
MUST_SHOW = (1e-4, 1e-2)
# The first step to look after: some optimizers change weights every few steps only, or begin with far smaller steps
# than their learning rate says.
WEIGHTS_SINCE = 20
CHUNK = 2**22  # elements of a tensor that are summed at once
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def check_agreement(objective: Any, batch: dict[str, Tensor]) -> None:
    """Compares the log-probabilities of the answers [rows, answers] under policy and reference, without dropout.

    Args:
        objective: a `ReferenceObjective`.
        batch: the first micro-batch of the run.

    Raises:
        RunError: they differ by more than rounding.
    """
    with evaluating(objective.model):
        policy, _ = objective.answer_log_probs(batch)
    reference = objective.reference_log_probs(batch)
    absolute, relative = FULL if _is_full(objective) else HALF
    wrong = ~((policy - reference).abs() <= absolute + relative * reference.abs())
    if not wrong.any():
        return
    row, answer = wrong.nonzero()[0].tolist()
    if objective.precomputed is not None:
        folder = objective.precomputed.folder
        advice = f"The precomputed log-probabilities are of another model or other rows: remove {folder}"
    elif objective.frozen_copy is None:
        advice = (
            "The adapter changes the model before it is trained, or the base was changed when it was put in: "
            "set objective.reference=frozen_copy"
        )
    else:
        advice = (
            "A callback of your own may write to the weights, or something random is left on outside training, or "
            "trainer.precision is too coarse; else please report this"
        )
    raise RunError(
        f"policy and reference differ before the first step, so the reference is not the model this run starts from: "
        f"answer {answer + 1} of row {row + 1} of the first micro-batch has log-probability "
        f"{policy[row, answer].item():.6g} under the policy and {reference[row, answer].item():.6g} under the "
        f"reference ({int(wrong.sum())} of {wrong.numel()} answers differ). {advice}"
    )


def _is_full(objective: Any) -> bool:
    return objective.trainer.precision in ("32-true", "64-true")


def check_judged(optimizer: torch.optim.Optimizer, step: int, judged: int) -> None:
    """Raises RunError where the gradients of `step` were not looked at; `judged` is the last step whose were."""
    if judged != step:
        raise RunError(
            f"{type(optimizer).__name__}.step(closure) doesn't call its closure, in which gradients are clipped and "
            f"looked at: begin it with `if closure is not None: closure()`"
        )


class WeightsMove:
    """Looks once, after the first step whose updates must show, whether trained weights changed, and no frozen one.

    That is a logged step from `WEIGHTS_SINCE` on, or a later one where rates are tiny, as in a warm-up. Until then
    nothing is read from the device. To be made before the first step.
    """

    def __init__(self, objective: Any) -> None:
        self.objective = objective
        self.names, self.trained, self.before = _weights(objective)
        self.must_show = MUST_SHOW[0 if _is_full(objective) else 1]
        self.rates, self.moved = 0.0, torch.zeros(())

    def over(self, step: int, rates: Sequence[float], grad_norm: Tensor, may_wait: bool) -> bool:
        """Whether nothing is left to look at after a step; to be asked after each, once it is taken.

        Args:
            rates: the learning rates of the step, of which the slowest group's counts.
            grad_norm: before clipping, 0-dim; of a step that was left out not finite.
            may_wait: for the device, as a step that is logged does.

        Raises:
            RunError: what is wrong, and that learning rate and gradients are not zero.
        """
        rate = min(rates)
        self.rates += rate
        finite = torch.nan_to_num(grad_norm.detach(), 0.0, 0.0, 0.0).clamp(0, 1)
        self.moved = self.moved.to(finite) + rate * finite
        if rate == 0 < max(rates):
            return True  # nobody knows of which group the gradients were
        if not may_wait or step < WEIGHTS_SINCE or self.rates < self.must_show:
            return False
        if self.moved.item() < self.must_show:
            return self.rates > 1000 * self.must_show  # gradients of nearly nothing, as grad_norm tells
        found = self.wrong()
        if found:
            raise RunError(
                f"after {step} optimizer steps {found}. Learning rate and gradients are not zero (grad_norm "
                f"{grad_norm.item():.3g}); if nothing of that is so, please report this"
            )
        return True

    def wrong(self) -> str:
        """What is wrong, and why that may be; "" where nothing is. Every rank calls it."""
        changed, trained = (_weights(self.objective)[2] != self.before).cpu(), self.trained
        found = torch.stack([trained.any(), (changed & trained).any(), (changed & ~trained).any()])
        trainer = self.objective.trainer
        any_trained, moved, thawed = total(trainer, found.double().to(self.objective.device)).tolist()
        if thawed:
            here = [name for name, bad in zip(self.names, (changed & ~trained).tolist(), strict=True) if bad]
            return (
                f"weights that are frozen have changed ({here[0] if here else 'on another rank'}): an optimizer or a "
                f"callback of your own may write to them"
            )
        if any_trained and not moved:
            return (
                f"every trained weight is bit for bit what it was before the first: trainer.precision="
                f"{trainer.precision} rounds the updates away, and bf16-mixed and 32-true, which keep weights in fp32, "
                f"don't; or the optimizer (optimizer._target_, of your own) changes nothing"
            )
        return ""


@torch.no_grad()
def _weights(objective: Any) -> tuple[list[str], Tensor, Tensor]:
    """Names, which are trained (bool [N], in host memory), and checksums (int64 [N]) of this rank's parameters.

    Frozen ones in whole numbers are left out: kernels may lay quantised weights out again.
    """
    names, trained, sums = [], [], []
    for name, p in objective.model.named_parameters():
        here = held(p)
        if here.numel() == 0 or not here.is_floating_point() or is_traceable_wrapper_subclass(here):
            continue
        names.append(name)
        trained.append(p.requires_grad)
        sums.append(_checksum(here).to(objective.device))
    empty = torch.zeros(0, dtype=torch.int64, device=objective.device)
    return names, torch.tensor(trained, dtype=torch.bool), torch.stack(sums) if sums else empty


def _checksum(tensor: Tensor) -> Tensor:
    """Checksum of all bits, int64, 0-dim: sums of the values read as integers and of their squares."""
    whole = tensor.detach().contiguous().flatten().view(INTEGERS[tensor.element_size()])
    parts = (part.long() for part in whole.split(CHUNK))
    return torch.stack([(part * (part + 1)).sum() for part in parts]).sum()
