"""The end of a run: summary.json, the table on the screen, and the export."""

import contextlib
import functools
import os
import platform
import socket
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lmtrain import terminal
from lmtrain.callbacks.step_numbers import peak_resident_bytes
from lmtrain.callbacks.time_budget import SCORE, Forecast
from lmtrain.checkpoints import retention, store
from lmtrain.config import trust
from lmtrain.config.effect import TRIAL
from lmtrain.errors import RunError, UserError
from lmtrain.exports import model_card
from lmtrain.files import read_jsonl
from lmtrain.reports import listing, report
from lmtrain.run.build import Run
from lmtrain.run.features import features_on
from lmtrain.run.next_commands import next_commands
from lmtrain.run.plan_costs import speed_of
from lmtrain.run.repository import git_state
from lmtrain.run_folder.finished import asked
from lmtrain.secrets import command

_LEARNED = 0.98  # val/loss of a run that has learned something, relative to that before its first step


@functools.cache
def versions() -> dict[str, str]:
    names = ("lmtrain", "torch", "lightning", "transformers", "datasets", "tokenizers", "peft", "hydra-core")
    found = {"python": platform.python_version()}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def write_summary(run: Run, status: str, started: float, error: BaseException | None = None) -> dict[str, Any]:
    """Writes and returns summary.json, at the end of a run: its presence shows that the run has ended, and how."""
    checkpoints = store.scan(run.dir.checkpoints)
    scores = retention.scores(run.dir.checkpoints, run.config.checkpoint.monitor, run.scored_on)
    best = retention.best_of(scores, run.data.ranking)
    metrics = run.metrics
    summary = {
        "status": status,
        "step": run.trainer.global_step,
        "tokens": int(metrics.tokens_seen),
        "asked": asked(run.config),
        "last": f"checkpoints/{checkpoints[-1].name}" if checkpoints else None,
        "best": f"checkpoints/{store.name_of(best)}" if best is not None else None,
        "best_metric": {run.config.checkpoint.monitor: dict(scores)[best]} if best is not None else None,
        "best_scores": model_card.scores_at(run.dir.metrics, best) or None,
        "train": metrics.last_train,
        "validation": metrics.last_val,
        "tokens_per_s": round(metrics.train_tokens / metrics.train_seconds, 1) if metrics.train_seconds else None,
        "speed_of": speed_of(run),
        "wall_seconds": round(time.time() - started, 1),
        "device": f"{run.trainer.world_size} x {run.config.trainer.accelerator}",
        "precision": run.config.trainer.precision,
        # 0 bytes without a GPU; then the peak resident memory of this process.
        "peak_memory_gib": round((torch.cuda.max_memory_allocated() or peak_resident_bytes()) / 2**30, 3),
        "command": command("train", run.config.command.words),
        "host": socket.gethostname(),
        "git": git_state(),
        "versions": versions(),
    }
    # The forecast for a run with a budget: the final bits per byte, its bounds, and the step it was made at.
    made = next((c.made for c in run.trainer.callbacks if isinstance(c, Forecast)), None)  # type: ignore[attr-defined]
    if made:
        summary["forecast"] = made
    for feature in features_on(run.config):
        summary |= feature.summary(run.objective.model.model, run.config)
    if status == "finished" and run.ended_by is not None:
        summary["ended_by"] = run.ended_by
    if error is not None:
        summary["error"] = f"{type(error).__name__}: {error}"
    run.dir.write_summary(summary)
    if run.config.report.enabled:
        with contextlib.suppress(OSError, UserError, RunError):  # a full disk is reported where it matters
            report.write_own(run.dir)
    return summary


def note_failure(run: Run, started: float, error: BaseException) -> None:
    """Writes summary.json of a run that failed, on rank 0."""
    if run.trainer.is_global_zero:
        with contextlib.suppress(RunError):  # if the disk failed, `error` is still what the user should read
            write_summary(run, "failed", started, error=error)


def export(run: Run) -> list[Path]:
    """Writes <run>/export and, where there is an adapter to merge (export.merge), <run>/export_merged."""
    from lmtrain.adapters.trainable import adapter_of
    from lmtrain.exports.hf_folder import export_model
    from lmtrain.run_folder.trained import from_run
    from lmtrain.strategies import sharding

    rows, cfg = run.corpus.val or run.corpus.train, run.config.export
    example = rows.read(np.zeros((1, 2), dtype=np.int64))["input_ids"][:, : run.config.data.seq_len]
    model: Any = run.objective.model.model
    if sharding.is_sharded(run.objective.model):  # loads the same weights unsharded
        # On the host: a base model that is sharded because of its size does not fit on one GPU beside its shard.
        model, _, _ = from_run(run.dir, "last", trust.granted(run.config), on_host=True)
    else:
        for feature in features_on(run.config):
            feature.restore_model(model)
    can_merge = cfg.merge and adapter_of(model) is not None
    ends, step = run.corpus.end_ids, run.trainer.global_step
    return [
        export_model(
            run.dir, model, run.corpus.tokenizer, cfg, merge=merge, example=example, eos_token_ids=ends, step=step
        )
        for merge in ([False, True] if can_merge else [False])  # last, because merging changes the model
    ]


def show(run: Run, summary: dict[str, Any], exported: list[Path]) -> None:
    """Prints a table (loss, best step, tokens/s, memory, time, paths of curves and exports) and suggested commands."""
    if os.environ.get(TRIAL) == "1":  # the sweep reports its trials
        return
    val, title = run.metrics.last_val, f"{summary['status'].replace('_', ' ')} at step {summary['step']:,}"
    if os.environ.get(TRIAL) or run.config.run.quiet:
        keys = [f"val/{name}" for name in (*run.config.headline(), "loss")]
        numbers = [f"{key} {val[key]:.4f}" for key in keys if key in val][:1]
        print(", ".join([title, *numbers, str(run.dir.path)]), flush=True)
        return
    run.console.print(terminal.facts(facts_of(run, summary, exported), title))
    unlearned = hardly_learned(run)
    if unlearned:
        run.console.print(f"note: {unlearned}", soft_wrap=True, highlight=False, markup=False)
    run.console.print("next:")
    for line in next_commands(run, summary["status"]):
        run.console.print(f"  {line}", soft_wrap=True, highlight=False, markup=False)


def hardly_learned(run: Run) -> str | None:
    """Returns a note if the loss on held-out rows has not fallen since before the first step; None without that one."""
    before = next((row for row in read_jsonl(run.dir.metrics, b'"val/loss"') if "val/loss" in row), None)
    last = run.metrics.last_val.get("val/loss")
    if before is None or before["step"] > 0 or last is None or last < _LEARNED * before["val/loss"]:
        return None
    after = terminal.counted(run.trainer.global_step, "update")
    found = f"val/loss was {before['val/loss']:.4f} before the first step and is {last:.4f} after {after}"
    raised = f"raise trainer.max_epochs or optimizer.lr (now {run.config.optimizer.lr:g})"
    return f"it has hardly learned: {found}: {raised}, or see with python -m lmtrain.inspect what it was shown"


def facts_of(run: Run, summary: dict[str, Any], exported: list[Path]) -> list[tuple[str, str]]:
    """Returns the rows of the table printed at the end of a run, as (name, value in words)."""
    last, rows = {**run.metrics.last_train, **run.metrics.last_val}, list[tuple[str, str]]()
    names = run.config.headline()
    keys = [f"{kind}/{name}" for name in names for kind in ("train", "val")]
    keys += ["train/loss", "val/perplexity", "val/rewards/margin"]
    rows += [(key, f"{last[key]:.4f}") for key in dict.fromkeys(keys) if key in last]
    made = summary.get("forecast", {})
    if SCORE in made and SCORE in last:
        off = last[SCORE] / made[SCORE] - 1
        words = f"{SCORE} {made[SCORE]:.4f} at step {made['step']:,}; the final value differs by {off:+.1%}"
        rows.append(("forecast", words))
    monitor, mode = run.config.checkpoint.monitor, run.config.checkpoint.mode
    best = listing.best_row(run.dir, summary, monitor, mode) if run.data.ranking != retention.LAST else None
    if best is not None:
        rows.append(("best", "{} {:.4f} at step {:,}".format(*listing.lead(best, names), best["step"])))
    rows.append(("tokens", f"{summary['tokens']:,}"))
    if summary["tokens_per_s"]:
        rows.append(("tokens/s", f"{summary['tokens_per_s']:,.0f}"))
    return [
        *rows,
        ("wall time", terminal.time_in_words(summary["wall_seconds"])),
        ("peak memory", f"{summary['peak_memory_gib']:.2f} GiB"),
        ("run", str(run.dir.path)),
        ("curves", str(run.dir.report if run.dir.report.exists() else run.dir.metrics)),
        *(("export", f"{folder}  ({model_card.reader(folder)} reads it)") for folder in exported),
    ]
