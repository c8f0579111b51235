"""How a run ended: summary.json, the table on the screen, the export."""

import contextlib
import os
import platform
import shlex
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table

from lmtrain import checkpoint as store
from lmtrain import cli, retention
from lmtrain.errors import RunError
from lmtrain.train import asked

if TYPE_CHECKING:
    from lmtrain.build import Run


def versions() -> dict[str, str]:
    names = ("lmtrain", "torch", "lightning", "transformers", "datasets", "tokenizers", "peft", "hydra-core")
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def write_summary(run: "Run", status: str, started: float, error: BaseException | None = None) -> dict[str, Any]:
    """summary.json: written last, so its presence says that the run has ended and how."""
    checkpoints = store.scan(run.dir.checkpoints)
    scores = retention.scores(run.dir.checkpoints, run.config.checkpoint.monitor)
    best = retention.best_of(scores, run.config.checkpoint.mode)
    metrics = run.metrics
    summary = {
        "status": status,
        "step": run.trainer.global_step,
        "tokens": int(metrics.tokens_seen),
        "asked": asked(run.config),
        "last": f"checkpoints/{checkpoints[-1].name}" if checkpoints else None,
        "best": f"checkpoints/{store.name_of(best)}" if best is not None else None,
        "best_metric": {run.config.checkpoint.monitor: dict(scores)[best]} if best is not None else None,
        "validation": metrics.last_val,
        "tokens_per_s": round(metrics.train_tokens / metrics.train_seconds, 1) if metrics.train_seconds else None,
        "wall_seconds": round(time.time() - started, 1),
        "device": f"{run.trainer.world_size} x {run.config.trainer.accelerator}",
        "precision": run.config.trainer.precision,
        "versions": versions(),
    }
    if error is not None:
        summary["error"] = f"{type(error).__name__}: {error}"
    run.dir.write_summary(summary)
    return summary


def note_failure(run: "Run", started: float, error: BaseException) -> None:
    """summary.json of a run that failed."""
    if run.trainer.is_global_zero:
        with contextlib.suppress(RunError):  # the disk may be what failed; `error` is what the user should read
            write_summary(run, "failed", started, error=error)


def export(run: "Run") -> Path:
    from lmtrain.hf_folder import export_model
    from lmtrain.strategies import sharding
    from lmtrain.trained import from_run

    rows = run.corpus.val or run.corpus.train
    example = rows.read(np.zeros((1, 2), dtype=np.int64))["input_ids"][:, : run.config.data.seq_len]
    model: Any = run.objective.model.model
    if sharding.is_sharded(run.objective.model):  # the same weights, in one piece
        model, _, _ = from_run(run.dir, "last")
    return export_model(
        model,
        run.corpus.tokenizer,
        run.dir.export,
        dtype=run.config.export.dtype,
        run_config=run.dir.config,
        example=example,
        merge=run.config.export.merge,
        eos_token_ids=run.corpus.end_ids,
    )


def reader(folder: Path) -> str:
    """What loads an exported folder."""
    adapter = (folder / "adapter_config.json").exists()
    return f"{'peft.AutoPeftModelForCausalLM' if adapter else 'AutoModelForCausalLM'}.from_pretrained"


def say_how_to_go_on(run: "Run") -> None:
    """The command that continues this run, after its checkpoint was written."""
    typed = shlex.split(os.environ[cli.TYPED]) if cli.TYPED in os.environ else sys.argv[1:]
    words = [w for w in typed if not w.startswith(("run.resume=", "run.dir="))]
    command = shlex.join(["python", "-m", "lmtrain.train", *words, f"run.dir={run.dir.path}", "run.resume=auto"])
    run.console.print(
        f"stopped by {run.preemption.why()} at step {run.trainer.global_step:,} of {run.total_steps:,}; "
        f"the checkpoint is written. Go on with:"
    )
    print(f"  {command}", flush=True)


def show(run: "Run", status: str, exported: Path | None) -> None:
    """A small table: loss, bits per byte, tokens/s, and where things lie."""
    table = Table(
        title=f"{status.replace('_', ' ')} at step {run.trainer.global_step:,}", title_justify="left", box=None
    )
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    val, metrics = run.metrics.last_val, run.metrics
    for key in ("val/loss", "val/perplexity", "val/bits_per_byte", "val/rewards/accuracy", "val/rewards/margin"):
        if key in val:
            table.add_row(key, f"{val[key]:.4f}")
    table.add_row("tokens", f"{int(metrics.tokens_seen):,}")
    if metrics.train_seconds:
        table.add_row("tokens/s", f"{metrics.train_tokens / metrics.train_seconds:,.0f}")
    table.add_row("run", str(run.dir.path))
    if exported is not None:
        table.add_row("export", f"{exported}  ({reader(exported)} reads it)")
    run.console.print(table)
