"""How long a run will take, before its first step: by the speed of an earlier run of its kind, or of its GPU."""

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from lmtrain.config.schema import Config
from lmtrain.errors import UserError
from lmtrain.models import flops
from lmtrain.run.features import features_on
from lmtrain.run_folder.folder import RunDir

if TYPE_CHECKING:
    from lmtrain.run.build import Run

_NEWEST = 30  # runs beside this one that are looked into


def speed_of(config: Config, model: PreTrainedModel, world_size: int) -> dict[str, Any]:
    """What tokens/s depends on; two runs that agree in it are as fast as each other. Stands in summary.json."""
    c, t = config, config.trainer
    total, trained, _ = flops.parameter_counts(model)
    return {
        "objective": c.objective.name,
        "parameters": total,
        "trained": trained,
        "optimizer": c.optimizer.name,
        "seq_len": c.data.seq_len,
        "micro_batch_size": c.data.micro_batch_size,
        "precision": t.precision,
        "strategy": t.strategy,
        "compile": t.compile,
        "activation_checkpointing": t.activation_checkpointing,
        "devices": f"{world_size} x {t.accelerator}",
        "host": socket.gethostname(),
        **{name: value for feature in features_on(c) for name, value in feature.speed(c).items()},
    }


def words(run: "Run", tokens: float, flops_per_token: float) -> str:
    """Time of training `tokens` more tokens, validation apart, and how that is known."""
    found = earlier(speed_of(run.config, run.objective.model.model, run.trainer.world_size), run.dir.path)
    if found is not None:
        before, speed = found
        return f"about {span(tokens / speed)} at {speed:,.0f} tokens/s, the speed of {before.path.name}"
    peak = flops.peak_flops(torch.device(run.config.trainer.accelerator), "bf16-mixed")
    if peak is None:
        return "estimated after the first steps (no earlier run of this model and batch here to compare with)"
    mfu = run.config.estimate.mfu
    hoped = mfu * peak * run.trainer.world_size / flops_per_token
    return f"about {span(tokens / hoped)} at {hoped:,.0f} tokens/s, were {mfu:.0%} of the peak reached (estimate.mfu)"


def earlier(mine: dict[str, Any], run: Path) -> tuple[RunDir, float] | None:
    """The newest run in this or a sibling folder that agrees in all that speed depends on, and its tokens/s.

    mine: what `speed_of` says of the run in the folder `run`.
    """
    root = run.parent
    folders = [p for p in root.iterdir() if p.is_dir()] if root.is_dir() else []
    for folder in sorted(folders, key=_age)[:_NEWEST]:
        summary = _summary(folder)
        if summary.get("speed_of") == mine and summary.get("tokens_per_s"):
            return RunDir(folder), float(summary["tokens_per_s"])
    return None


def _age(folder: Path) -> float:
    summary = RunDir(folder).summary
    return -summary.stat().st_mtime if summary.exists() else 0.0


def _summary(folder: Path) -> dict[str, Any]:
    try:
        return RunDir(folder).read_summary() or {}
    except UserError:
        return {}


def span(seconds: float) -> str:
    """90 -> '1.5 minutes'."""
    seconds = max(seconds, 1)
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
