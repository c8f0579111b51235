"""Explains exceptions raised during training, each in one message: what happened, and what to change."""

import math

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lmtrain import errors
from lmtrain.checkpoints import retention
from lmtrain.config.override_text import shell_word
from lmtrain.distributed import process_group as world
from lmtrain.distributed.devices import data_parallel
from lmtrain.errors import RunError, disk_full, first_line
from lmtrain.models import flops
from lmtrain.run.build import Run


def explain(error: BaseException, run: Run) -> RunError | None:
    """Returns a RunError that says what to do about `error`, or None if only a traceback helps."""
    if isinstance(error, torch.OutOfMemoryError) or errors.out_of_memory(error):
        return out_of_memory(error, run)
    if not isinstance(error, RunError) and disk_full(error):
        where = getattr(error, "filename", None) or run.dir.path
        return RunError(f"the disk is full ({where}): free space or set run.dir elsewhere; {last_good(run)}")
    if lost_worker(error, run):
        found = f"a data loading process ended unexpectedly ({first_line(error)}): most often memory"
        return RunError(f"{found}; set data.num_workers=0 to see its own error; {last_good(run)}")
    if run.trainer.world_size > 1 and "Timed out waiting" in str(error):  # gloo's message
        waited = f"waited {run.config.trainer.rank_timeout} s for another that did nothing (trainer.rank_timeout)"
        why = f"why is in its own output, and for GPUs in {world.traces()}, which torchfrtrace reads"
        return RunError(f"rank {run.trainer.global_rank} {waited}: {why}; {last_good(run)}")
    if run.trainer.world_size > 1 and _lost_peer(error):
        ended = RunError(f"another rank has ended, so this one can't go on; {last_good(run)}")
        ended.shared = True  # rank 0 says it; the rank that ended first has said why, unless it was killed
        return ended
    if isinstance(error, MisconfigurationException) or "self.log(" in str(error):  # Lightning's message
        return RunError(f"{' '.join(str(error).split())}; {last_good(run)}")
    return None


def _lost_peer(error: BaseException) -> bool:
    """Returns whether gloo lost the connection to another rank, by its message."""
    words = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return type(error).__name__ in ("RuntimeError", "DistBackendError") and any(word in str(error) for word in words)


def refuse_lost_model(run: Run) -> None:
    """Raises RunError if the loss of the last validation is not finite: such a run counts as failed."""
    last = run.metrics.last_val
    loss = last.get("val/loss", 0.0)
    if not math.isfinite(loss):
        found = f"val/loss is {loss} at step {last['step']:,}: the model has diverged, and nothing is exported"
        helps = "a lower optimizer.lr, a longer schedule.warmup_steps, trainer.precision=32-true"
        raise RunError(f"{found}. What helps most: {helps}; {last_good(run)}")


def lost_worker(error: BaseException, run: Run) -> bool:
    """Returns whether a data loader worker died: torch reports it, or its pipe broke in the middle of a batch."""
    if isinstance(error, RuntimeError) and "DataLoader worker" in str(error):
        return True
    return run.config.data.num_workers > 0 and isinstance(error, ConnectionError | EOFError)


def last_good(run: Run) -> str:
    """Describes the checkpoint that the run can be continued from."""
    found = retention.manifests(run.dir.checkpoints)
    if not found:
        return "no checkpoint had been written yet"
    losses = {path: content["metrics"].get("val/loss") for path, content in found.items()}
    known = [loss for loss in (*losses.values(), run.metrics.last_val.get("val/loss")) if loss is not None]
    unknown = 0.0 if all(map(math.isfinite, known)) else math.nan  # after a divergence only a score tells
    sound = [path for path, loss in losses.items() if math.isfinite(unknown if loss is None else loss)]
    if not sound:
        return "no checkpoint has a finite val/loss to go on from"
    if sound[-1] == [*found][-1]:
        here = shell_word("run.dir", str(run.dir.path))
        return f"the last checkpoint is untouched ({sound[-1].name}); go on with {here} run.resume=auto"
    again = f"go on from it in another folder with {shell_word('run.resume', str(sound[-1]))} run.dir=NEW"
    return f"the newest checkpoint with a finite val/loss is {sound[-1].name}; {again}"


def out_of_memory(error: BaseException, run: Run) -> RunError:
    """Returns a RunError that lists what took the memory and overrides that reduce it.

    Row length and optimizer can't change on resume, so they are suggested for a new run.
    """
    c = run.config
    parts = flops.memory_estimate(run.objective.model.model, c)
    took = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in sorted(parts.items(), key=lambda p: -p[1]))
    half, ranks = max(1, c.data.micro_batch_size // 2), data_parallel(run.trainer).size
    smaller = next(rows for rows in range(half, 0, -1) if c.data.global_batch_size % (rows * ranks) == 0)
    fixes = []
    if smaller < c.data.micro_batch_size:
        fixes.append(f"data.micro_batch_size={smaller} (same numbers, more accumulation)")
    if not c.trainer.activation_checkpointing:
        fixes.append("trainer.activation_checkpointing=true")
    anew = [f"data.seq_len={max(1, c.data.seq_len // 2)}"]
    if c.optimizer.name == "adamw":
        anew.append("optimizer=adafactor")
    less = f"What needs less: {', or '.join(fixes)}; " if fixes else ""
    found = f"out of memory ({first_line(error)}). Estimated need: {took}. {less}{last_good(run)}"
    return RunError(f"{found}. In a new run, less is needed with {', or '.join(anew)}")
