"""Parameter groups: which parameters are trained with which learning rate and weight decay.

Weight decay is for matrices. Everything of two or more dimensions decays, including embeddings and the output layer, as
in GPT-2/3, Llama and nanoGPT; biases and norms never do. (OLMo 2, arXiv:2501.00656, leaves the embeddings out:
`optimizer.groups=[{pattern: embed|wte|wpe, weight_decay: 0}]`.)
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lmtrain.config.constraints import regular_expression
from lmtrain.config.options import MuonConfig
from lmtrain.config.schema import OptimizerConfig
from lmtrain.errors import UserError

RULE_KEYS = ("pattern", "lr", "weight_decay", "name")
# Patterns of the groups for which an entry needs only a name: {name: memory, lr: 1.0e-3}.
_ADAPTER, _MEMORY = "lora_|trainable_tokens_delta", r"\.memory(_bank)?\."
PRESETS = {"memory": _MEMORY, "adapter": _ADAPTER, "base": f"^(?!.*({_ADAPTER}|{_MEMORY}))"}
_NOTHING = {  # why such a group may be empty
    "memory": "this model has no memory (peft=memory, peft=memory_lora or memory=bank give it one)",
    "adapter": "no adapter is trained (peft=lora or peft=memory_lora bring one)",
    "base": "the base is frozen",
}
# Some biases (of experts) and norms (of heads) have two dimensions, so they are recognised by their names.
_BIAS_OR_NORM = re.compile(r"bias$|norm[^.]*(\.weight)?$", re.IGNORECASE)


@dataclass(frozen=True)
class _Rule:
    """One entry of optimizer.groups; the rule with an empty pattern has the parameters that no other rule matches."""

    name: str
    pattern: str
    lr: float
    weight_decay: float


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], cfg: OptimizerConfig
) -> list[dict[str, Any]]:
    """Splits the trainable parameters into groups, as `torch.optim` takes them, each parameter in exactly one.

    A group has `params` and their `param_names`, its own `name`, `lr` and `base_lr` (equal until `set_lr`), and
    `weight_decay`; for Muon also `algorithm`: muon or adamw. Parameters that match no pattern come first. Frozen
    parameters are left out, tied ones appear once, under their first name.

    Raises UserError if nothing is trainable, or an entry of cfg.groups is malformed or matches nothing.
    """
    # Trainable parameters, each once.
    first_names: dict[nn.Parameter, str] = {}
    for name, parameter in named_parameters:
        first_names.setdefault(parameter, name)
    trainable = {name: parameter for parameter, name in first_names.items() if parameter.requires_grad}
    if not trainable:
        raise UserError(f"the model has no trainable parameter ({len(first_names)} are frozen): unfreeze some")
    # The first entry of optimizer.groups whose pattern matches has it.
    rules = [_rule(entry, index, cfg) for index, entry in enumerate(cfg.groups)]
    rest = _Rule("", "", cfg.lr, cfg.weight_decay)
    owners = {name: next((r for r in rules if re.search(r.pattern, name)), rest) for name in trainable}
    for rule in rules:
        _check_matches(rule, owners)

    # Within an entry, matrices decay and the rest doesn't, and Muon takes only some.
    adamw_pattern = cfg.adamw_pattern if isinstance(cfg, MuonConfig) else None
    members: dict[tuple[_Rule, str, bool], dict[str, nn.Parameter]] = defaultdict(dict)
    for name, p in trainable.items():
        members[owners[name], _algorithm(name, p, adamw_pattern), is_matrix(name, p)][name] = p
    in_order = itertools.product(dict.fromkeys((rest, *rules)), ("", "muon", "adamw"), (True, False))
    return [
        _group(rule, algorithm, decays, members[rule, algorithm, decays])
        for rule, algorithm, decays in in_order
        if (rule, algorithm, decays) in members
    ]


def is_matrix(name: str, parameter: nn.Parameter) -> bool:
    """Returns whether weight decay applies: two or more dimensions, and neither a bias nor a norm."""
    return parameter.ndim >= 2 and not _BIAS_OR_NORM.search(name)


def set_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Sets every group's learning rate to `factor` (from `schedules.lr_factor`) times its base."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


def table_rows(groups: Iterable[dict[str, Any]]) -> list[tuple[str, int, int, float, float]]:
    """Returns one row per group, for printing: name, tensors, parameters, learning rate, weight decay."""
    return [
        (g["name"], len(g["params"]), sum(p.numel() for p in g["params"]), g["base_lr"], g["weight_decay"])
        for g in groups
    ]


def _rule(entry: dict[str, Any], index: int, cfg: OptimizerConfig) -> _Rule:
    where = f"optimizer.groups[{index}]"
    unknown = [key for key in entry if key not in RULE_KEYS]
    if unknown:
        raise UserError(f"{where}.{unknown[0]} is not known (keys: {', '.join(RULE_KEYS)})")
    pattern = entry.get("pattern") or PRESETS.get(str(entry.get("name")))
    if not isinstance(pattern, str) or not pattern:
        raise UserError(f"{where} has no pattern: give a regex ('lora_'), or one of the names {', '.join(PRESETS)}")
    regular_expression(f"{where}.pattern", pattern)
    values = {}
    for key, default in (("lr", cfg.lr), ("weight_decay", cfg.weight_decay)):
        value = default if entry.get(key) is None else entry[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
            raise UserError(f"{where}.{key}={value!r}: a number of at least 0 is needed (write 1.0e-4, not 1e-4)")
        values[key] = float(value)
    return _Rule(name=str(entry.get("name") or pattern), pattern=pattern, **values)


def _check_matches(rule: _Rule, owners: dict[str, _Rule]) -> None:
    if rule in owners.values():
        return
    taken = next((name for name in owners if re.search(rule.pattern, name)), None)
    if taken is not None:
        found = f"optimizer.groups: all that pattern {rule.pattern!r} matches ({taken}, ...) is taken by an earlier"
        raise UserError(f"{found} group ({owners[taken].pattern!r}): move it up or remove it")
    if rule.pattern == PRESETS.get(rule.name):
        raise UserError(f"optimizer.groups: {{name: {rule.name}}}: {_NOTHING[rule.name]}; leave the entry out")
    names = list(owners)
    shown = names[:: max(1, len(names) // 6)][:6]
    found = f"optimizer.groups: pattern {rule.pattern!r} matches no trained parameter"
    raise UserError(f"{found}, such as {', '.join(shown)}")


def _algorithm(name: str, parameter: nn.Parameter, adamw_pattern: str | None) -> str:
    """Returns muon for hidden matrices (2D, or experts stacked along a third axis), else adamw; "" without Muon.

    adamw_pattern: matrices that AdamW takes although Muon could; None for all other optimizers.
    """
    if adamw_pattern is None:
        return ""
    stacked_experts = parameter.ndim == 3 and "experts" in name
    hidden = is_matrix(name, parameter) and (parameter.ndim == 2 or stacked_experts)
    return "muon" if hidden and not re.search(adamw_pattern, name) else "adamw"


def _group(rule: _Rule, algorithm: str, decays: bool, members: dict[str, nn.Parameter]) -> dict[str, Any]:
    parts = (rule.name, algorithm, "decay" if decays else "no_decay")
    group = {
        "params": list(members.values()),
        "param_names": list(members),
        "name": "/".join(part for part in parts if part),
        "lr": rule.lr,
        "base_lr": rule.lr,
        "weight_decay": rule.weight_decay if decays else 0.0,
    }
    return {**group, "algorithm": algorithm} if algorithm else group
