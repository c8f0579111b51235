"""Experts of a mixture under autocast; the router logits of mixtures and memories, and the losses computed from them.

transformers records router logits too (`output_router_logits`), but its recording breaks the graph of every compiled
block five times; a hook that stores a tensor on its module causes no graph break.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward
from transformers.utils.output_capturing import OutputRecorder

from lmtrain.config.schema import RouterConfig
from lmtrain.losses.router import Totals, over_layers, totals

EXPERTS = "lmtrain"  # the experts_implementation of models built here
KEPT = "last_router_logits"
REPORTED = ("deviation", "z_loss", "entropy", "dead")  # metrics besides the load-balancing loss
Logits = dict[str, tuple[Tensor, ...]]  # {kind of router ("router", "memory"): logits [B * T, C] of each layer}


class Routers:
    """The routers of a model, in order; none if it has neither a mixture of experts nor a memory.

    Modules that store their logits themselves (memory blocks) have the attributes `keeps_router_logits` and `top_k`.

    `by_transformers` is true if transformers records router logits in a way that this class doesn't know; the forward
    then has to be called with `output_router_logits=True`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        recorder = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
        self.modules: list[Any] = []
        if isinstance(recorder, OutputRecorder) and isinstance(recorder.target_class, type):
            self.modules = [
                module
                for name, module in model.base_model.named_modules()
                if isinstance(module, recorder.target_class) and (recorder.layer_name or "") in name
            ]
            for module in self.modules:
                module.register_forward_hook(_keep(recorder.index))
        self.by_transformers = recorder is not None and not self.modules
        self.memories: list[Any] = [m for m in model.modules() if getattr(m, "keeps_router_logits", False)]

    @property
    def of_experts(self) -> bool:
        return bool(self.modules) or self.by_transformers

    def take(self, output: Any) -> Logits:
        """Returns the router logits of the forward that gave `output`, and removes them from the modules.

        Memory blocks that are disabled have no logits.
        """
        experts = tuple(module.__dict__.pop(KEPT) for module in self.modules) or getattr(output, "router_logits", None)
        found = {"router": experts or (), "memory": tuple(m.__dict__.pop(KEPT) for m in self.memories if m.enabled)}
        return {kind: logits for kind, logits in found.items() if logits}


class _Kind(NamedTuple):
    """How the routers of one kind are trained."""

    top_k: int
    load_balance: float  # weight of the load-balancing loss


@dataclass
class StepRouting:
    """What the router losses of a micro-batch need to know about the whole optimizer step (router.scope=step).

    units: number of units (trained tokens or pairs) of the step on all ranks, the divisor of its sums, 0-dim.
    part: number of units of the current micro-batch, 0-dim.
    whole: totals of the step over all ranks, by kind of router; None while they are accumulated in `gathered`.
    add_ranks: sums a tensor over the ranks that read different rows.
    """

    units: Tensor
    part: Tensor
    add_ranks: Callable[[Tensor], Tensor]
    gathered: dict[str, Totals] = field(default_factory=dict)
    whole: dict[str, Totals] | None = None

    def gather(self, kind: str, found: Totals) -> None:
        """Adds the totals of a micro-batch to the step's; those of a micro-batch without units count as zeros."""
        before = self.gathered.get(kind)
        real = [value * (self.part > 0) for value in found]
        self.gathered[kind] = Totals(*(real if before is None else map(torch.add, before, real)))

    def finish(self) -> None:
        """Sums the gathered totals over the ranks; every rank must call it."""
        self.whole = {kind: _over_ranks(found, self.add_ranks) for kind, found in self.gathered.items()}


class RouterLosses:
    """The losses that routers add to the mean loss, and the router metrics.

    `step` is set during an optimizer step whose router losses are computed over the whole step; `chosen` counts, per
    kind of router, how many of this rank's tokens of the step chose each choice, [routers, C].

    Args:
        settings: the router section of the config, with over_layers resolved; None: only load balancing, with the
            weight from the model's own config.
    """

    def __init__(self, model: PreTrainedModel, routers: Routers, settings: RouterConfig | None) -> None:
        config = model.config.get_text_config()
        own = getattr(config, "router_aux_loss_coef", None) or 0.0
        wanted = settings.load_balance if settings is not None else None
        self.kinds: dict[str, _Kind] = {}
        if routers.of_experts:
            self.kinds["router"] = _Kind(getattr(config, "num_experts_per_tok", 0), own if wanted is None else wanted)
        if routers.memories:
            self.kinds["memory"] = _Kind(routers.memories[0].top_k, wanted or 0.0)
        self.deviation = settings.deviation if settings is not None else 0.0
        self.z_loss = settings.z_loss if settings is not None else 0.0
        self.over_layers = settings.over_layers if settings is not None else "sum"
        self.of_steps = settings is not None and settings.scope == "step" and bool(self.kinds)
        # The prefix of each kind's metrics: a memory's metrics are named like a mixture's if it is the only kind.
        self.shown = dict.fromkeys(self.kinds, "router")
        if len(self.shown) > 1:
            self.shown["memory"] = "router/memory"
        self.step: StepRouting | None = None
        self.chosen: dict[str, Tensor] = {}

    def names(self) -> list[str]:
        """Returns the names of the reported metrics, which are means."""
        return [f"{self.shown[kind]}/{name}" for kind in self.kinds for name in ("load_balance", *REPORTED)]

    def __call__(self, found: Logits) -> tuple[Tensor | None, dict[str, Tensor]]:
        """Returns (the term to add to the mean loss, the reported means), or (None, {}) if no router has logits.

        load_balance is reported as 1 for even load.
        The caller multiplies both by the units of the micro-batch, and divides their sums by the units of the step.
        """
        parts, aux = list[Tensor](), dict[str, Tensor]()
        for kind, logits in found.items():
            top_k, weight = self.kinds[kind]
            each = [totals(x, top_k) for x in logits]
            if torch.is_grad_enabled():
                chosen = torch.stack([t.chosen for t in each])
                self.chosen[kind] = self.chosen[kind] + chosen if kind in self.chosen else chosen
            wholes, share = self._of_step(kind, each)
            terms = over_layers(logits, top_k, wholes, self.over_layers)
            added = [weight * terms.load_balance]
            added += [w * term for w, term in ((self.deviation, terms.deviation), (self.z_loss, terms.z_loss)) if w]
            parts.append(share * sum(added[1:], added[0]))
            layers = len(logits) if self.over_layers == "sum" else 1
            aux[f"{self.shown[kind]}/load_balance"] = share * terms.load_balance.detach() / (layers * top_k)
            aux |= {f"{self.shown[kind]}/{name}": share * getattr(terms, name).detach() for name in REPORTED}
        return sum(parts[1:], parts[0]) if parts else None, aux

    def _of_step(self, kind: str, each: Sequence[Totals]) -> tuple[Sequence[Totals], Tensor | float]:
        """Returns (the totals with which each router's terms are computed, the factor to multiply those terms by).

        The terms of a micro-batch are means, which the caller weights by its units. With totals of the whole step the
        terms are parts that simply add up, so the factor undoes that weighting. If the step has a single micro-batch,
        its totals are summed over the ranks here.
        """
        if self.step is None:
            return each, 1.0
        stacked = Totals(*map(torch.stack, zip(*each, strict=True)))
        if self.step.whole is None:
            self.step.gather(kind, stacked)
            if not torch.is_grad_enabled():
                return each, 1.0  # this pass only gathers totals; the caller discards its loss
        whole = self.step.whole[kind] if self.step.whole else _over_ranks(self.step.gathered[kind], self.step.add_ranks)
        return [Totals(*router) for router in zip(*whole, strict=True)], self.step.units / self.step.part.clamp(min=1)


def _over_ranks(found: Totals, add: Callable[[Tensor], Tensor]) -> Totals:
    """Sums totals of shapes [routers, C], [routers, C] and [routers] over the ranks, with one collective."""
    choices = found.chosen.shape[-1]
    summed = add(torch.cat([found.chosen, found.probabilities, found.tokens[:, None]], dim=1))
    return Totals(summed[:, :choices], summed[:, choices:-1], summed[:, -1])


def _keep(index: int) -> Any:
    def hook(module: nn.Module, _inputs: Any, output: Any) -> None:
        setattr(module, KEPT, output[index] if isinstance(output, tuple) else output)

    return hook


class _Cast:
    """A view of an experts module whose parameters are cast to another dtype."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype) -> None:
        self.experts, self.dtype = experts, dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.experts, name)
        return value.to(self.dtype) if isinstance(value, nn.Parameter) else value


def experts_forward(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Implements transformers' experts interface: hidden [N, D], top_k_index and top_k_weights [N, k]; returns [N, D].

    transformers sorts tokens by expert and computes all experts in one grouped product, which autocast doesn't cover:
    with fp32 parameters it would run in fp32, at a quarter of the speed or less. Here the weights are cast first. There
    is no grouped product in fp64: the family's own loop over experts is used.
    """
    if hidden.dtype == torch.float64:
        return type(experts).forward.__wrapped__(experts, hidden, top_k_index, top_k_weights)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        experts = _Cast(experts, torch.get_autocast_dtype(device))
    return grouped_mm_experts_forward(experts, hidden, top_k_index, top_k_weights)


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)


def use_experts(model: PreTrainedModel) -> None:
    """Makes the model use `experts_forward` if it has experts in transformers' grouped layout."""
    if any(hasattr(m, "_apply_gate") and hasattr(m, "has_gate") for m in model.modules()):
        model.set_experts_implementation(EXPERTS)
