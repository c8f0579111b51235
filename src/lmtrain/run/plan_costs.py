"""The plan's rows on cost: time from an earlier similar run or the GPU's peak, FLOPs, memory, the machine."""

import bisect
import copy
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from lmtrain.config.batch import Stages, row_lengths
from lmtrain.config.schema import Config
from lmtrain.config.strategies import context_parallel
from lmtrain.distributed import devices
from lmtrain.models import flops
from lmtrain.models.architecture import MAX_POSITIONS
from lmtrain.models.blocks import decoder_blocks
from lmtrain.run.features import features_on
from lmtrain.run_folder.folder import RunDir
from lmtrain.terminal import si, time_in_words

if TYPE_CHECKING:
    from lmtrain.run.build import Run

HEADROOM = 0.1  # share of a device's memory left to the allocator and to kernels
_NEWEST = 30  # sibling runs that are examined, newest first
_STEP = 256  # tokens of a row per device; row lengths are multiples of this
_MOST = 2**15  # multiples of _STEP: no row beyond 8 M tokens per device is tried


def speed_of(run: "Run") -> dict[str, Any]:
    """Returns the settings tokens/s depends on; runs that agree in them are equally fast. Stored in summary.json."""
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
        **{name: value for feature in features_on(c) for name, value in feature.speed(c).items()},
    }


def plan_rows(run: "Run") -> list[tuple[str, str]]:
    """Returns the plan's rows on compute, memory and the machine."""
    c, model = run.config, run.objective.model.model
    per_token, compute = flops.flops_per_token(model, c.data.seq_len), flops_in_all(run)
    device = f"{run.trainer.world_size} x {devices.device_name(c.trainer.accelerator)}"
    computed = f"{c.trainer.precision}{describe_replacement(c)}{devices.speedup_words(c)} on {device}"
    return [
        ("compute", f"{si(per_token, 'FLOP')} a token, {si(compute, 'FLOP')} in all"),
        *memory_rows(model, c),
        ("precision", f"{computed}{describe_compiling(run)}{describe_checkpointing(c)}"),
        ("no GPU", devices.why_not_used() or ""),
    ]


def describe_time(run: "Run", tokens: float) -> str:
    """Describes the time to train `tokens` more tokens, without validation, and what the estimate is based on."""
    found = earlier(speed_of(run), run.dir.path)
    if found is not None:
        before, speed = found
        return f"about {time_in_words(tokens / speed)} at {speed:,.0f} tokens/s, the speed of {before.path.name}"
    peak = flops.peak_flops(torch.device(run.config.trainer.accelerator), "bf16-mixed")
    if peak is None:
        return "estimated after the first steps (no earlier run of this model and batch here to compare with)"
    mfu = run.config.estimate.mfu
    flops_per_token = flops.flops_per_token(run.objective.model.model, run.config.data.seq_len)
    hoped = mfu * peak * run.trainer.world_size / flops_per_token
    time = time_in_words(tokens / hoped)
    return f"about {time} at {hoped:,.0f} tokens/s, at {mfu:.0%} of the peak FLOP/s (estimate.mfu)"


def earlier(mine: dict[str, Any], run: Path) -> tuple[RunDir, float] | None:
    """Returns the newest run in this or a sibling folder with the same `speed_of`, and its tokens/s; None without one.

    `mine` is the result of `speed_of` for the run in the folder `run`.
    """
    for file in sorted(run.parent.glob("*/summary.json"), key=_changed, reverse=True)[:_NEWEST]:
        before = RunDir(file.parent)
        summary = before.summary_or_error()
        if summary.get("speed_of") == mine and summary.get("tokens_per_s"):
            return before, float(summary["tokens_per_s"])
    return None


def _changed(file: Path) -> float:
    """Returns the time of a file's last change, 0 if it is gone: a run that starts removes its summary."""
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def gib(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**28 else f"{value / 2**20:.0f} MiB"


def memory_rows(model: PreTrainedModel, c: Config) -> list[tuple[str, str]]:
    memory = flops.memory_estimate(model, c)
    parts = ", ".join(f"{name} {gib(size)}" for name, size in memory.items())
    found = [("memory", f"about {gib(sum(memory.values()))} a device: {parts}")]
    if context_parallel(c.trainer) > 1 and c.trainer.accelerator == "cuda" and torch.cuda.is_available():
        found.append(("longest row", describe_longest_row(model, c, torch.cuda.get_device_properties(0).total_memory)))
    return found


def describe_longest_row(model: PreTrainedModel, c: Config, card_bytes: int) -> str:
    """Describes how long rows may be with the config's context parallelism, and without it."""
    room = int(card_bytes * (1 - HEADROOM))
    key, size = "trainer.fsdp.context_parallel_size", context_parallel(c.trainer)
    alone = copy.deepcopy(c)
    alone.trainer.fsdp.context_parallel_size = 1
    tokens, by_itself = longest_row(model, c, room), longest_row(model, alone, room)
    words = (
        f"about {tokens:,} tokens with {key}={size} and {by_itself:,} with 1, by the same estimate, "
        f"{HEADROOM:.0%} of {gib(card_bytes)} left free"
    )
    positions = getattr(model.config.get_text_config(), MAX_POSITIONS, None)
    return words if positions is None or tokens <= positions else f"{words}; the model has {positions:,} positions"


def longest_row(model: PreTrainedModel, c: Config, room: int) -> int:
    """Returns the longest row, in multiples of 256 tokens per device, whose estimated memory fits in `room` bytes."""
    step, tried = _STEP * context_parallel(c.trainer), copy.deepcopy(c)

    def needed(multiple: int) -> int:
        tried.data.seq_len = multiple * step
        return sum(flops.memory_estimate(model, tried, room).values())

    return step * bisect.bisect_right(range(1, _MOST), float(room), key=needed)


def flops_in_all(run: "Run") -> float:
    """Returns the FLOPs of the whole run, with fewer for attention over shorter rows."""
    c, model = run.config, run.objective.model.model
    tokens_per_row = run.corpus.epoch_tokens / len(run.corpus.train)
    lengths, rows_before = row_lengths(c.data) or Stages.constant(c.data.seq_len), run.metrics.numbers.rows_before
    ends = [min(end, run.total_steps) for end in [*lengths.starts[1:], run.total_steps]]
    return sum(
        flops.flops_per_token(model, length) * tokens_per_row * (rows_before(end) - rows_before(min(start, end)))
        for start, end, length in zip(lengths.starts, ends, lengths.values, strict=True)
    )


def describe_compiling(run: "Run") -> str:
    """Describes what torch.compile is applied to, or why it is not, on a GPU or in a CPU run with budget.minutes."""
    t = run.config.trainer
    if t.compile:
        return f", compiled: {len(decoder_blocks(run.objective.model.model))} blocks and the loss"
    why = devices.why_not_compiled(t)
    if t.accelerator != "cuda" and (why is None or run.config.budget.minutes is None):
        return ""
    return f", not compiled: {why or 'trainer.compile=false'}"


def describe_replacement(c: Config) -> str:
    """Names the precision that replaces an unsupported one; Lightning's own warning about it is not shown."""
    replaced = c.trainer.precision == "16-mixed" and c.trainer.accelerator == "cpu"
    return ", computed as bf16-mixed (Lightning has no 16-mixed on a CPU)," if replaced else ""


def describe_checkpointing(c: Config) -> str:
    """Describes which activations blocks keep for the backward pass under activation checkpointing."""
    kept = {
        True: "",
        "selective": " (selective: results of matrix products and attention are kept)",
        "offload": " (in host memory)",
    }
    how = c.trainer.activation_checkpointing
    return f", activation checkpointing{kept[how]}" if how else ""
