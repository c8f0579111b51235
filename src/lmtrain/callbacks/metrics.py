"""Numbers of the run: one row of metrics.jsonl per logged step and per validation, handed on to the loggers.

Values stay on the device until a row is due, so a step that is not logged never waits for the GPU.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import lightning.pytorch as pl
import torch

from lmtrain.objectives.base import Objective
from lmtrain.strategies.data_parallel import total

Row = dict[str, Any]
# Fields that depend on the machine's speed: the rest of a resumed run's rows equals the uninterrupted run's.
TIME_FIELDS = ("tokens_per_s", "step_ms", "data_wait_ms", "mfu", "memory_gib", "time")


def without_times(row: Row) -> Row:
    """The row without TIME_FIELDS: what two equal runs must share."""
    return {key: value for key, value in row.items() if key not in TIME_FIELDS}


class Clock:
    """Time spent training since the last row, without validations, saves and samples, and the time waited for data."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.start, self.paused, self.data_wait, self.steps = time.perf_counter(), 0.0, 0.0, 0

    def elapsed(self) -> float:
        return time.perf_counter() - self.start - self.paused

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        before = time.perf_counter()
        try:
            yield
        finally:
            self.paused += time.perf_counter() - before


class Metrics(pl.Callback):
    """Writes metrics.jsonl and feeds the loggers; `listeners` (the progress bar) get every row."""

    def __init__(
        self,
        path: Path,
        *,
        log_every_n_steps: int,
        bytes_per_token: float | None,
        flops_per_token: float,
        peak: float | None,
    ) -> None:
        self.path, self.log_every_n_steps = path, log_every_n_steps
        self.bytes_per_token, self.flops_per_token, self.peak_flops = bytes_per_token, flops_per_token, peak
        self.clock = Clock()
        self.listeners: list[Callable[[Row], None]] = []
        self.tokens_seen = torch.zeros((), dtype=torch.int64)
        self.tokens_logged = 0
        self.last_val: Row = {}
        self.train_seconds, self.train_tokens = 0.0, 0
        self._trained_until = 0.0  # training time on the clock when the last batch ended
        self._file: TextIO | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"tokens_seen": int(self.tokens_seen), "last_val": dict(self.last_val)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens_seen = torch.tensor(state_dict["tokens_seen"])
        self.last_val = dict(state_dict["last_val"])

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.tokens_seen = self.tokens_seen.to(pl_module.device)
        self.tokens_logged = int(self.tokens_seen)
        self.clock.restart()
        self._trained_until = 0.0

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.clock.data_wait += self.clock.elapsed() - self._trained_until

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Objective)
        assert pl_module.last_step is not None
        self.tokens_seen += pl_module.last_step.seen
        self.clock.steps += 1
        step = pl_module.last_step.step
        if step % self.log_every_n_steps == 0 or step in (1, pl_module.total_steps):
            self._log_step(trainer, pl_module)
        self._trained_until = self.clock.elapsed()

    def _log_step(self, trainer: pl.Trainer, module: Objective) -> None:
        result = module.last_step
        assert result is not None
        names = sorted(result.sums)
        sums = total(trainer, torch.stack([result.sums[n].double() for n in names]))
        # One transfer for the whole row.
        values = torch.cat([sums, torch.stack([result.grad_norm, result.n_tokens, self.tokens_seen]).double()]).tolist()
        grad_norm, n_tokens, tokens_seen = values[len(names) :]
        seconds, tokens = self.clock.elapsed(), int(tokens_seen) - self.tokens_logged
        self.train_seconds, self.train_tokens = self.train_seconds + seconds, self.train_tokens + tokens
        row: Row = {"step": result.step, "tokens_seen": int(tokens_seen)}
        row |= {"rows": result.rows, "bad_steps": module.guard.counts()[0]}
        row |= {f"train/{n}": v / max(n_tokens, 1) for n, v in zip(names, values, strict=False)}
        row |= {"lr": result.lr, "grad_norm": grad_norm, "tokens_per_s": round(tokens / seconds, 1)}
        row |= {
            "step_ms": round(1000 * seconds / self.clock.steps, 3),
            "data_wait_ms": round(1000 * self.clock.data_wait / self.clock.steps, 3),
        }
        if self.peak_flops:
            flops = self.flops_per_token * tokens / seconds
            row["mfu"] = round(flops / (self.peak_flops * trainer.world_size), 4)
        if module.device.type == "cuda":
            row["memory_gib"] = round(torch.cuda.max_memory_allocated(module.device) / 2**30, 3)
        self.tokens_logged = int(tokens_seen)
        self.clock.restart()
        self.emit(trainer, row)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._val_start = time.perf_counter()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.clock.paused += time.perf_counter() - self._val_start

    def log_validation(self, trainer: pl.Trainer, module: Objective, means: dict[str, float]) -> Row:
        """Adds perplexity and bits per byte, where the loss is one to make them of, and writes the row."""
        row: Row = {"step": trainer.global_step, "tokens_seen": int(self.tokens_seen)}
        row |= {f"val/{name}": value for name, value in means.items()}
        if module.loss_is_nll:
            row |= derived(means["loss"], self.bytes_per_token)
        self.last_val = {k: v for k, v in row.items() if k.startswith("val/")} | {"step": row["step"]}
        self.emit(trainer, row)
        return row

    def emit(self, trainer: pl.Trainer, row: Row) -> None:
        if not trainer.is_global_zero:
            return
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")
        strict = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
        self._file.write(json.dumps({**strict, "time": round(time.time(), 3)}, allow_nan=False) + "\n")
        self._file.flush()
        numbers = {k: v for k, v in row.items() if k != "step" and isinstance(v, int | float)}
        for logger in trainer.loggers:
            logger.log_metrics(numbers, step=row["step"])
        for listener in self.listeners:
            listener(row)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def derived(loss: float, bytes_per_token: float | None) -> Row:
    """val/perplexity = exp(loss) and val/bits_per_byte = loss / ln 2 / (UTF-8 bytes per token of the split)."""
    row: Row = {"val/perplexity": float(torch.tensor(loss, dtype=torch.float64).exp())}
    if bytes_per_token:
        row["val/bits_per_byte"] = loss / 0.6931471805599453 / bytes_per_token
    return row
