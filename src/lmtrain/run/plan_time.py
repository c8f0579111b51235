"""How long a run will take, before its first step: by the speed of an earlier run of its kind, or of its GPU."""

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain.errors import UserError
from lmtrain.models import flops
from lmtrain.run import estimation
from lmtrain.run.folder import RunDir

if TYPE_CHECKING:
    from lmtrain.run.build import Run

_NEWEST = 30  # runs beside this one that are looked into


def speed_of(run: "Run") -> dict[str, Any]:
    """What tokens/s depends on; two runs that agree in it are as fast as each other. Stands in summary.json."""
    c, t = run.config, run.config.trainer
    total, trained, _ = flops.parameter_counts(run.objective.model.model)
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
        "devices": f"{run.trainer.world_size} x {t.accelerator}",
        "host": socket.gethostname(),
    }


def words(run: "Run", tokens: float, flops_per_token: float) -> str:
    """Time of training `tokens` more tokens, validation apart, and how that is known."""
    found = earlier(run)
    if found is not None:
        name, speed = found
        return f"about {span(tokens / speed)} at {speed:,.0f} tokens/s, the speed of {name}"
    peak = None if run.config.trainer.accelerator != "cuda" else estimation.device_of(run.config).peak
    if peak is None:
        return "shown after the first steps: no run of this kind lies beside this one"
    mfu = run.config.estimate.mfu
    speed = mfu * peak * run.trainer.world_size / flops_per_token
    return f"about {span(tokens / speed)} at {speed:,.0f} tokens/s, were {mfu:.0%} of the peak reached (estimate.mfu)"


def earlier(run: "Run") -> tuple[str, float] | None:
    """Name and tokens/s of the newest run in this or a sibling folder that agrees in all that speed depends on."""
    mine, root = speed_of(run), run.dir.path.parent
    folders = [p for p in root.iterdir() if p.is_dir()] if root.is_dir() else []
    for folder in sorted(folders, key=_age)[:_NEWEST]:
        summary = _summary(folder)
        if summary.get("speed_of") == mine and summary.get("tokens_per_s"):
            return folder.name, float(summary["tokens_per_s"])
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
