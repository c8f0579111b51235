"""Builds the optimizer that the config selects, over its parameter groups."""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lmtrain.config.options import AdafactorConfig, AdamW8bitConfig, AdamWConfig, LionConfig, MuonConfig, arguments_of
from lmtrain.config.schema import OptimizerConfig
from lmtrain.config.targets import build_target, find_class
from lmtrain.distributed.dtensor import held
from lmtrain.errors import needing
from lmtrain.optim.adafactor import Adafactor
from lmtrain.optim.groups import parameter_groups
from lmtrain.optim.half import HALF, HalfOptimizer
from lmtrain.optim.muon import MuonWithAdamW
from lmtrain.optim.skipping import SkippingOptimizer, change, factor

Groups = list[dict[str, Any]]


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]], cfg: OptimizerConfig, allow_target: Sequence[str] = ()
) -> torch.optim.Optimizer:
    """Builds one optimizer for all trainable parameters; its state dict holds plain containers and tensors only.

    Args:
        named_parameters: `model.named_parameters()`.
        allow_target: run.allow_target, the packages from which `cfg._target_` may name a class.

    Raises UserError for an invalid entry of cfg.groups, or a package that isn't installed.
    """
    groups = parameter_groups(named_parameters, cfg)
    if cfg._target_ is not None:
        return _in_full(_custom(groups, cfg, allow_target), in_one_call=True)
    return _in_full(_BUILDERS[cfg.name](groups, cfg))


class Lion(SkippingOptimizer):
    """Lion with decoupled weight decay (Chen et al. 2023, arXiv:2302.06675, algorithm 2).

    It moves by the sign of an interpolated momentum. State: one `momentum` tensor per parameter.

    Every coordinate moves by exactly `lr`, so Lion needs a learning rate 3 to 10 times smaller than AdamW's and a
    weight decay larger by the same factor.
    """

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _update(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        """Updates all parameters at once: a handful of kernels instead of five per parameter. Shards stay local."""
        beta1, beta2 = group["betas"]
        momenta, gradients = self._momenta_and_gradients(parameters)
        directions = torch._foreach_lerp(momenta, gradients, 1 - beta1)
        torch._foreach_sign_(directions)
        change([held(p) for p in parameters], directions, group["lr"] * factor(self), group["weight_decay"])
        torch._foreach_lerp_(momenta, gradients, 1 - beta2)


class _InFull(HalfOptimizer):
    """Steps another class's optimizer as a `HalfOptimizer`; a subclass also inherits from that class."""

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if not any(p.dtype in HALF for group in self.param_groups for p in group["params"]):
            return super().step(closure)
        loss = None if closure is None else closure()
        self._in_full(super().step)
        return loss


def _in_full(optimizer: torch.optim.Optimizer, in_one_call: bool = False) -> torch.optim.Optimizer:
    """Makes the optimizer update half-precision weights in float32 (half.py), whatever its class."""
    if not isinstance(optimizer, HalfOptimizer):
        cls = type(optimizer)
        members = {"in_one_call": in_one_call, "__module__": cls.__module__}
        optimizer.__class__ = type(cls.__name__, (_InFull, cls), members)
    return optimizer


def _adamw(groups: Groups, cfg: AdamWConfig) -> torch.optim.Optimizer:
    """Builds torch's AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101)."""
    optimizer = torch.optim.AdamW(groups, **_adamw_arguments(cfg))
    # Else the gradient scaler of 16-mixed would leave unscaling to the fused step, which comes after clipping.
    optimizer._step_supports_amp_scaling = False
    optimizer.register_load_state_dict_pre_hook(_stay_fused)
    return optimizer


def _stay_fused(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Keeps the fused setting: torch would take that of the checkpoint, which may differ in earlier versions."""
    groups = [{**g, "fused": True} if "fused" in g else g for g in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def _adamw_arguments(cfg: AdamWConfig) -> dict[str, Any]:
    # The fused kernel is the fastest on GPUs, and on CPUs by a factor of 3 to 10, and skips a bad update by itself,
    # without a host sync (skipping.py).
    return {"betas": _betas(cfg), "eps": cfg.eps, "fused": True}


def _adamw_8bit(groups: Groups, cfg: AdamW8bitConfig) -> torch.optim.Optimizer:
    """Builds AdamW with both moments in 8 bits, quantised in blocks of 256 (Dettmers et al. 2022, arXiv:2110.02861)."""
    with needing("bitsandbytes", "optimizer=adamw_8bit"):
        from bitsandbytes.optim import AdamW8bit, GlobalOptimManager
    optimizer = AdamW8bit(groups, betas=_betas(cfg), eps=cfg.eps)
    # Exceptions are stored by position in a manager that all optimizers of the process share, so this one gets its own.
    manager = optimizer.mng = GlobalOptimManager.__new__(GlobalOptimManager)
    manager.initialize()
    for g, group in enumerate(optimizer.param_groups):
        for p, name in enumerate(group["param_names"]):
            if re.search(cfg.full_state_pattern, name):
                manager.index2config[g, p] = {"optim_bits": 32}
    return optimizer


def _adafactor(groups: Groups, cfg: AdafactorConfig) -> torch.optim.Optimizer:
    return Adafactor(groups, min_parameter_rms=cfg.min_parameter_rms)


def _lion(groups: Groups, cfg: LionConfig) -> torch.optim.Optimizer:
    return Lion(groups, betas=_betas(cfg))


def _muon(groups: Groups, cfg: MuonConfig) -> torch.optim.Optimizer:
    optimizer = MuonWithAdamW(groups, muon={"momentum": cfg.momentum}, adamw=_adamw_arguments(cfg))
    optimizer.register_load_state_dict_pre_hook(_stay_fused)
    return optimizer


_BUILDERS: dict[str, Callable[[Groups, Any], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw_8bit": _adamw_8bit,
    "adafactor": _adafactor,
    "lion": _lion,
    "muon": _muon,
}


def _custom(groups: Groups, cfg: OptimizerConfig, allow_target: Sequence[str]) -> torch.optim.Optimizer:
    """Builds a custom torch.optim.Optimizer from the section's own keys, plus lr and weight_decay if it takes them."""
    target = str(cfg._target_)
    takes = inspect.signature(find_class(target, "optimizer", torch.optim.Optimizer, allow_target)).parameters
    entry = {**arguments_of(cfg, takes), "_target_": target}
    optimizer = build_target(entry, "optimizer", torch.optim.Optimizer, allow_target, first=(groups,))
    optimizer._step_supports_amp_scaling = False  # as in _adamw
    return optimizer


def _betas(cfg: AdamWConfig | LionConfig) -> tuple[float, float]:
    beta1, beta2 = cfg.betas
    return float(beta1), float(beta2)
