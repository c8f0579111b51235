"""The optimizer of a config, over its parameter groups."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from lmtrain.errors import UserError
from lmtrain.optim.adafactor import Adafactor
from lmtrain.optim.groups import check_pattern, parameter_groups
from lmtrain.optim.lion import Lion
from lmtrain.optim.muon import MuonWithAdamW
from lmtrain.schema import Optimizer

Groups = list[dict[str, Any]]


def build_optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]], cfg: Optimizer) -> torch.optim.Optimizer:
    """One optimizer for all trainable parameters; its state dict holds plain containers and tensors only.

    Args:
        named_parameters: `model.named_parameters()`.

    Raises UserError for an unknown name, a missing or impossible value, or a package that isn't installed.
    """
    if cfg.name not in _BUILDERS:
        raise UserError(f"optimizer.name={cfg.name} is not known (options: {', '.join(_BUILDERS)})")
    groups = parameter_groups(named_parameters, cfg)
    try:
        return _BUILDERS[cfg.name](groups, cfg)
    except ValueError as error:  # each optimizer checks its own ranges
        raise UserError(f"optimizer.name={cfg.name}: {error}") from None


def _adamw(groups: Groups, cfg: Optimizer) -> torch.optim.Optimizer:
    """Loshchilov & Hutter 2019 (arXiv:1711.05101), torch's own."""
    optimizer = torch.optim.AdamW(groups, **_adamw_options(cfg))
    # Else the gradient scaler of 16-mixed would leave unscaling to the fused step, after the gradients were clipped.
    optimizer._step_supports_amp_scaling = False
    return optimizer


def _adamw_options(cfg: Optimizer) -> dict[str, Any]:
    fused = _required(cfg, "fused")
    if fused not in (True, False, "auto"):
        raise UserError(f"optimizer.fused={fused!r}: auto, true or false is needed")
    # The fused kernel is the fastest on GPUs and CPUs, there by a factor of 3 to 10. False would forbid the
    # multi-tensor implementation as well; None leaves torch its choice.
    return {"betas": _betas(cfg), "eps": _required(cfg, "eps"), "fused": bool(fused) or None}


def _adamw_8bit(groups: Groups, cfg: Optimizer) -> torch.optim.Optimizer:
    """Dettmers et al. 2022 (arXiv:2110.02861): both moments in 8 bits, quantised in blocks of 256."""
    try:
        from bitsandbytes.optim import AdamW8bit, GlobalOptimManager
    except ImportError as error:
        raise UserError(
            f'optimizer=adamw_8bit needs bitsandbytes ({error}): pip install "lmtrain[bitsandbytes]"'
        ) from None
    optimizer = AdamW8bit(groups, betas=_betas(cfg), eps=_required(cfg, "eps"))
    # Exceptions are kept by position in a manager that all optimizers of the process share: give this one its own.
    manager = optimizer.mng = GlobalOptimManager.__new__(GlobalOptimManager)
    manager.initialize()
    pattern = _required(cfg, "full_state_pattern")
    check_pattern("optimizer.full_state_pattern", pattern)
    for g, group in enumerate(optimizer.param_groups):
        for p, name in enumerate(group["param_names"]):
            if re.search(pattern, name):
                manager.index2config[g, p] = {"optim_bits": 32}
    return optimizer


def _adafactor(groups: Groups, cfg: Optimizer) -> torch.optim.Optimizer:
    keys = ("beta2_decay", "eps", "min_parameter_rms", "clip_threshold")
    return Adafactor(groups, **{key: _required(cfg, key) for key in keys})


def _lion(groups: Groups, cfg: Optimizer) -> torch.optim.Optimizer:
    return Lion(groups, betas=_betas(cfg))


def _muon(groups: Groups, cfg: Optimizer) -> torch.optim.Optimizer:
    muon = {key: _required(cfg, key) for key in ("momentum", "nesterov", "ns_steps")}
    return MuonWithAdamW(groups, muon=muon, adamw=_adamw_options(cfg))


_BUILDERS: dict[str, Callable[[Groups, Optimizer], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
    "adafactor": _adafactor,
    "lion": _lion,
    "muon": _muon,
}


def _required(cfg: Optimizer, key: str) -> Any:
    value = getattr(cfg, key)
    if value is None:
        raise UserError(f"optimizer.name={cfg.name} needs optimizer.{key}: choose optimizer={cfg.name}")
    return value


def _betas(cfg: Optimizer) -> tuple[float, float]:
    betas = _required(cfg, "betas")
    try:
        beta1, beta2 = (float(beta) for beta in betas)
    except (TypeError, ValueError):
        raise UserError(f"optimizer.betas={betas!r}: two numbers are needed, such as [0.9,0.95]") from None
    return beta1, beta2
