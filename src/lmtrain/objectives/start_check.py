"""Checks on the first steps of an objective, which cost nothing afterwards.

For every objective: once enough steps were taken for a change to be visible (`FirstSteps`), trained weights must have
changed and frozen ones must not (`WeightsMove`). With a reference: policy and reference must give the same
log-probabilities before the first step (`check_agreement`, `check_start`), and different ones afterwards
(`answers_move`). Only preference losses are checked for the value of the first loss: with other objectives, weights
initialised from scratch may have any scale.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel

from lmtrain.distributed.devices import total
from lmtrain.distributed.dtensor import held
from lmtrain.errors import RunError
from lmtrain.losses.preferences import LOSSES, Loss, LossOptions, Pairs, Ratios, preference_losses
from lmtrain.models.blocks import evaluating
from lmtrain.optim.half import REST, join
from lmtrain.strategies.placement import placement_of
from lmtrain.terminal import note

FULL = (1e-4, 1e-6)  # absolute and relative tolerance of log-probabilities in fp32
HALF = (5e-2, 2e-3)  # the same if matrices are multiplied in half precision
# Log-probabilities must have changed once the sum over steps of learning rate times gradient norm (at most 1) reaches
# this: a smaller update, of a new adapter say, may be rounded away. In fp32, and in half precision.
MUST_SHOW = (1e-6, 1e-4)
# The same for weights, and the first step to check: some optimizers change weights only every few steps, or begin with
# far smaller steps than their learning rate suggests.
WEIGHTS_MUST_SHOW, WEIGHTS_SINCE = 1e-4, 20
# How many trained weights are looked at; gradients below this part of their mean are not expected to move one.
SAMPLE, NEARLY_ZERO = 2**13, 0.01
CHUNK = 2**22  # elements of a tensor that are summed at a time
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def check_agreement(objective: Any, batch: dict[str, Tensor], answers: Sequence[str]) -> tuple[Tensor, ...]:
    """Checks that policy and reference agree; returns the log-probabilities [rows, answers] of both and the tolerance.

    Both are computed without dropout, as the reference always is.

    Args:
        objective: a `ReferenceObjective`, as in all functions below that use a reference.
        batch: the first micro-batch of the run.
        answers: names of the answers of a row, for the error message.

    Raises:
        RunError: they differ by more than the tolerance.
    """
    with evaluating(objective.model):
        policy, _ = objective.answer_log_probs(batch)
    reference = objective.reference_log_probs(batch)
    absolute, relative = FULL if _is_full(objective) else HALF
    difference = (policy - reference).abs()
    allowed = absolute + relative * reference.abs()
    if not bool((difference <= allowed).all()):
        raise RunError(_what_differs(objective, policy, reference, difference > allowed, answers))
    return policy, reference, allowed


def _is_full(objective: Any) -> bool:
    return objective.trainer.precision in ("32-true", "64-true")


def check_start(objective: Any, batch: dict[str, Tensor]) -> Tensor:
    """Returns the policy's log-probabilities [pairs, 2] before the first step, after checking them and the loss.

    Raises:
        RunError: they differ from the reference's, or the loss differs from its known value at log-ratios of 0.
    """
    policy, reference, allowed = check_agreement(objective, batch, ("chosen answer of pair", "rejected answer of pair"))
    tokens = batch["lengths"].view(-1, 2)
    pairs = Pairs(*policy.unbind(1), *tokens.unbind(1), *reference.unbind(1))
    loss = preference_losses(objective.loss, pairs, objective.options).preference
    kind = LOSSES[objective.loss]
    assert kind.at_zero is not None
    expected = kind.at_zero(objective.options)
    off = (loss - expected).abs().max().item()
    if not off <= loss_slack(kind, objective.options, expected, allowed.max().item()):
        found = f"at the first step objective.loss={objective.loss} is {loss[0].item():.6g}"
        raise RunError(f"{found} where policy and reference agree, instead of {expected:.6g}: please report this")
    return policy


class FirstSteps:
    """A check that runs once, after the first step whose updates must be visible.

    It runs at step `since` of a run, or at a later logged step while learning rates are tiny, as in a warm-up. Until
    then nothing is read from the device.

    Args:
        must_show: the sum of learning rates, times gradient norms up to 1, from which a change must be visible: a
            smaller update, of a new adapter say, may be rounded away.
        wrong: returns what is wrong and the likely reason, or None if nothing is. Every rank calls it.
        slowest: take the smallest learning rate of all parameter groups as that of a step, instead of the largest.
    """

    def __init__(
        self, must_show: float, wrong: Callable[[], tuple[str, str] | None], *, since: int = 1, slowest: bool = False
    ) -> None:
        self.must_show, self.wrong, self.since, self.slowest = must_show, wrong, since, slowest
        self.rates, self.moved = 0.0, torch.zeros((), dtype=torch.float32)

    def before_update(self) -> None:
        """Called before each optimizer step, once its gradients are clipped."""

    def over(self, step: int, rates: Sequence[float], grad_norm: Tensor, may_wait: bool) -> bool:
        """Runs the check if it is due; returns whether it is finished. Must be called after each optimizer step.

        Args:
            rates: the learning rates of the step, one per parameter group.
            grad_norm: before clipping, 0-dim; it may be non-finite if the step was skipped.
            may_wait: whether the host may wait for the device, as in a step that is logged.

        Raises:
            RunError: the check failed although learning rate and gradients are not zero.
        """
        rate = min(rates) if self.slowest else max(rates)
        self.rates += rate
        finite = torch.nan_to_num(grad_norm.detach(), 0.0, 0.0, 0.0).clamp(0, 1)
        self.moved = self.moved.to(finite) + rate * finite
        if rate == 0 < max(rates):
            return True  # the gradient norm doesn't tell which group it comes from
        if not may_wait or step < self.since or self.rates < self.must_show:
            return False
        if self.moved.item() < self.must_show:
            return self.rates > 1000 * self.must_show  # gradients are nearly zero, as grad_norm shows
        found = self.wrong()
        if found is not None:
            what, why = found
            after = f"after {step} optimizer step{'s' * (step > 1)} {what}"
            zero = f"though learning rate and gradients are not zero (grad_norm {grad_norm.item():.3g})"
            raise RunError(f"{after}, {zero}: {why}")
        return True


def check_judged(optimizer: torch.optim.Optimizer, step: int, judged: int) -> None:
    """Raises RunError if the gradients of `step` were not checked; `judged` is the last step whose gradients were."""
    if judged != step:
        found = f"{type(optimizer).__name__}.step(closure) doesn't call its closure, in which gradients are clipped"
        raise RunError(f"{found}: begin it with `if closure is not None: closure()`")


def name_unreached(objective: Any) -> None:
    """Names the trained parameters that the first step's backward did not reach; called after it.

    Rows of an embedding that were not seen, and stacked experts that no token was routed to, have gradients of 0.

    Raises:
        RunError: there are some, and DistributedDataParallel would fail on them in the next step.
    """
    if placement_of(objective.trainer).steps_itself:
        return  # the engine keeps the gradients
    names = [n for n, p in objective.model.model.named_parameters() if p.requires_grad and p.grad is None]
    if not names:
        return
    some = f"{', '.join(names[:3])}{f' ({len(names)} in all)' if len(names) > 3 else ''}"
    ddp = getattr(objective.trainer.strategy, "model", None)
    if isinstance(ddp, DistributedDataParallel) and not ddp.find_unused_parameters:
        found = f"no gradient reaches {some}, and ranks that keep whole copies wait for their gradients"
        raise RunError(f"{found}. Set trainer.strategy=ddp_find_unused_parameters_true")
    if objective.trainer.is_global_zero:
        note(f"no gradient reaches {some}: the loss is computed without these weights, so they stay as they are")


class WeightsMove(FirstSteps):
    """The check that trained weights change and frozen ones don't; must be built before the first step.

    Trained ones are judged by a sample of those whose gradients are not nearly zero, in full precision: joined with
    what `half.py` keeps beside half-precision weights. If all stand still the run ends, if most do it is told.

    Args:
        sharded: ranks hold shards, so frozen weights, gathered and freed between steps, are not looked at.
    """

    def __init__(self, objective: Any, sharded: bool = False) -> None:
        super().__init__(WEIGHTS_MUST_SHOW, self._wrong, since=WEIGHTS_SINCE, slowest=True)
        self.objective, self.rate = objective, 0.0
        self.parameters = [p for group in objective._optimizer.param_groups for p in group["params"]]
        # An odd number, so that it isn't the same column of every row.
        self.stride = sum(p.numel() for p in self.parameters) // SAMPLE | 1
        named = [] if sharded else objective.model.named_parameters()
        # Kernels may change the memory layout of quantised weights, which are integers or tensor subclasses.
        frozen = {n: p for n, p in named if not p.requires_grad and p.is_floating_point() and type(p) is Parameter}
        never_changes = torch.zeros(1, dtype=torch.float32, device=objective.device)
        self.frozen = {"on another rank": never_changes, **frozen}
        self.sums = self._checksums()
        # Then [n]: the sample after step 1, and its gradients since.
        self.before = self.gradients = torch.zeros((), dtype=torch.float32)

    def before_update(self) -> None:
        found = [torch.zeros_like(self._some(p)) if p.grad is None else self._some(p.grad) for p in self.parameters]
        self.gradients = self.gradients + torch.cat(found).float().abs().nan_to_num(0.0, 0.0, 0.0)

    def over(self, step: int, rates: Sequence[float], grad_norm: Tensor, may_wait: bool) -> bool:
        if step == 1:  # which makes the rests
            self.before, self.gradients = self._exact(), torch.zeros((), dtype=torch.float32)
        rises, self.rate = min(rates) > self.rate, min(rates)
        if step >= self.since and not rises and 0 < self.rates < self.must_show:
            self.must_show = self.rates / 2000  # there is no warm-up to wait for
        return super().over(step, rates, grad_norm, may_wait)

    def _some(self, tensor: Tensor) -> Tensor:
        return held(tensor).flatten()[:: self.stride]

    @torch.no_grad()
    def _exact(self) -> Tensor:
        """Returns the sampled weights, [n], at least in the precision that they are updated in."""
        parts = []
        for p in self.parameters:
            near, rest = self._some(p), self.objective._optimizer.state.get(p, {}).get(REST)
            parts.append(near if rest is None else join(near.float(), self._some(rest).int()))
        return torch.cat(parts)

    def _checksums(self) -> Tensor:
        return torch.stack([_checksum(p).to(self.objective.device) for p in self.frozen.values()])

    def _wrong(self) -> tuple[str, str] | None:
        thawed = self._checksums() != self.sums
        due = self.gradients > NEARLY_ZERO * self.gradients.sum() / self.gradients.count_nonzero().clamp(min=1)
        found = [marks.sum().to(thawed.device) for marks in (thawed, due, due & (self._exact() != self.before))]
        n_thawed, n_due, n_moved = total(self.objective.trainer, torch.stack(found).double()).tolist()
        if n_thawed:
            which = list(self.frozen)[int(thawed.int().argmax())]
            whose = "an optimizer or a callback of your own may write to them; else please report this"
            return f"weights that are frozen have changed ({which})", whose
        if n_due and not n_moved and self.moved.item() >= WEIGHTS_MUST_SHOW:
            whose = "the optimizer (optimizer._target_, of your own) changes nothing, or a callback puts weights back"
            return f"each of {n_due:,.0f} trained weights looked at is bit for bit what it was after the first", whose
        if n_moved < n_due / 2 and self.objective.trainer.is_global_zero:
            share = f"only {n_moved / n_due:.1%} of the trained weights have moved since the first step"
            lost = "other updates are below their precision, and lost, or a part of your own puts weights back"
            note(f"{share} ({n_due:,.0f} were looked at): {lost}. Raise optimizer.lr ({self.rate:g} now)")
        return None


def _checksum(tensor: Tensor) -> Tensor:
    """Computes a checksum of all bits, int64, 0-dim: the sum of the values, read as integers, and of their squares."""
    whole = tensor.detach().contiguous().flatten().view(INTEGERS[tensor.element_size()])
    parts = (part.long() for part in whole.split(CHUNK))
    return torch.stack([(part * (part + 1)).sum() for part in parts]).sum()


def answers_move(objective: Any, batch: dict[str, Tensor], before: Tensor) -> FirstSteps:
    """Builds the check that the policy's log-probabilities change, and differ from the reference's.

    Args:
        batch: the first micro-batch of the run.
        before: log-probabilities of its answers before the first step, [rows, answers].
    """

    @torch.no_grad()
    def wrong() -> tuple[str, str] | None:
        with evaluating(objective.model):
            policy, _ = objective.answer_log_probs(batch)
        reference = objective.reference_log_probs(batch)
        for other, what in ((before, "what they were before the first"), (reference, "the reference's")):
            if torch.equal(policy, other):
                found = f"the policy's log-probabilities of the first micro-batch are still exactly {what}"
                lost = f"updates that trainer.precision ({objective.trainer.precision} here) doesn't show"
                return found, f"objective.reference=frozen_copy can cause it, or {lost}: raise optimizer.lr"
        return None

    return FirstSteps(MUST_SHOW[0] if _is_full(objective) else MUST_SHOW[1], wrong)


def loss_slack(loss: Loss, options: LossOptions, at_zero: float, ratio: float) -> float:
    """Returns how far a loss may be from its value at log-ratios of 0 if they are up to `ratio` instead."""
    corners = torch.tensor([[ratio, ratio], [ratio, -ratio], [-ratio, ratio], [-ratio, -ratio]], dtype=torch.float64)
    losses = loss.function(Ratios(*corners.unbind(1)), options)
    return (losses - at_zero).abs().max().item() + 1e-6 * max(1.0, at_zero)


def _what_differs(objective: Any, policy: Tensor, reference: Tensor, wrong: Tensor, answers: Sequence[str]) -> str:
    row, which = wrong.nonzero()[0].tolist()
    under = [f"{values[row, which].item():.6g}" for values in (policy, reference)]
    shown = f"the {answers[which]} {row + 1} of the first micro-batch has the log-probabilities {' and '.join(under)}"
    differ = f"({int(wrong.sum())} of {wrong.numel()} answers differ)"
    found = f"policy and reference differ before the first step: {shown} {differ}. "
    if objective.precomputed is not None:
        why = "The precomputed log-probabilities are of another model or rows"
        return f"{found}{why}: remove {objective.precomputed.folder}"
    changed = objective.frozen_copy.changed() if objective.frozen_copy is not None else []
    if changed:
        return found + f"Trained weights differ from their first values: {changed[0]} ({len(changed)} in all)"
    if objective.frozen_copy is None:
        why = "The adapter changes the model before it is trained, or the base was changed when it was put in"
        return f"{found}{why}: set objective.reference=frozen_copy"
    why = "The weights are the same, so the forwards differ: something is random, or trainer.precision too coarse"
    return f"{found}{why}; please report this"
