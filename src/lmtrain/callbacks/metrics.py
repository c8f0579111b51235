"""Metrics of the run, measured at each logged step and each validation, and put into its record (records.py).

Values stay on the device until a row is due, so a step that is not logged never waits for the GPU.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch
from transformers import PreTrainedModel

from lmtrain.callbacks.records import Records, Row
from lmtrain.callbacks.step_numbers import MACHINE, StepNumbers, machine_numbers
from lmtrain.config.batch import logged_every
from lmtrain.config.schema import Config
from lmtrain.distributed.devices import total
from lmtrain.errors import RunError, UserError
from lmtrain.models import flops
from lmtrain.objectives.base import Objective
from lmtrain.objectives.parts import StepResult
from lmtrain.strategies import lightning_private

# Fields that depend on the machine: the others are equal in the rows of a resumed and an uninterrupted run.
TIME_FIELDS = ("tokens_per_s", "samples_per_s", "step_ms", "data_wait_ms", "mfu", "memory_gib", *MACHINE, "time")


def without_times(row: Row) -> Row:
    """Returns the row without TIME_FIELDS: what two equal runs must share."""
    return {key: value for key, value in row.items() if key not in TIME_FIELDS}


class Clock:
    """Measures training time since the last row, without validations, saves and samples, and the wait for data."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.start = time.perf_counter()
        self.paused = self.data_wait = 0.0
        self.steps = 0

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
    """A callback that measures and opens each step's record; `listeners` (the progress bar) get each row at once."""

    def __init__(
        self,
        records: Records,
        config: Config,
        model: PreTrainedModel,
        numbers: StepNumbers,
        bytes_per_token: dict[str, float | None],
        total_steps: int,
    ) -> None:
        """
        Args:
            model: whole on every rank, so that its FLOPs can be counted now.
            numbers: computes further numbers of a step's record.
            bytes_per_token: of each validation set, by its name; '' is the validation split.
            total_steps: as planned; a short run logs every step.
        """
        self.records, self.log_every_n_steps = records, logged_every(config.trainer, total_steps)
        self.shows_steps = bool(config.callbacks.extra)  # whether others' callbacks may read trainer.callback_metrics
        self.numbers, self.bytes_per_token = numbers, bytes_per_token
        self.flops_per_token = {length: flops.flops_per_token(model, length) for length in numbers.lengths.values}
        self.peak_flops = flops.peak_flops(torch.device(config.trainer.accelerator), config.trainer.precision)
        self.clock = Clock()
        self.listeners: list[Callable[[Row], None]] = []
        self.tokens_seen = torch.zeros((), dtype=torch.int64)
        self.tokens_logged = 0
        self.last_train: Row = {}  # train/... and the number of the last logged step
        self.last_val: Row = {}
        self.train_seconds, self.train_tokens = 0.0, 0
        self._trained_until = 0.0  # training time on the clock when the last batch ended

    def state_dict(self) -> dict[str, Any]:
        last = {"last_train": dict(self.last_train), "last_val": dict(self.last_val)}
        return {"tokens_seen": int(self.tokens_seen), **last, "rows": self.records.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.tokens_seen = torch.tensor(state_dict["tokens_seen"], dtype=torch.int64)
        self.last_train = dict(state_dict.get("last_train", {}))  # earlier versions did not save it
        self.last_val = dict(state_dict["last_val"])

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if not isinstance(pl_module, Objective):
            found = f"the Trainer of a run trains objectives, and {type(pl_module).__name__} is none"
            raise UserError(f"{found}: derive it from lmtrain.objectives.base.Objective, or use a Trainer of your own")
        pl_module.logs_itself = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.tokens_seen = self.tokens_seen.to(pl_module.device)
        self.tokens_logged = int(self.tokens_seen)
        self.clock.restart()
        self._trained_until = 0.0
        self.records.start(trainer.global_step)
        others = (not type(c).__module__.startswith("lmtrain.") for c in trainer.callbacks)  # type: ignore[attr-defined]
        self.shows_steps = self.shows_steps or any(others)
        # A resumed run may begin with a validation, after which others' callbacks look at the last step's loss.
        known = {name: torch.tensor(x, dtype=torch.float64) for name, x in self.last_train.items() if name != "step"}
        trainer.callback_metrics.update(known)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Objective, *_: Any, **__: Any) -> None:
        self.records.begin(trainer.global_step + 1, trainer.is_global_zero)
        lightning_private.hide_logged(trainer, True)
        pl_module.set_rate(trainer.global_step)  # before callbacks read the learning rate
        self.clock.data_wait += self.clock.elapsed() - self._trained_until

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Objective, *_: Any, **__: Any) -> None:
        result = pl_module.last_step
        assert result is not None
        self.tokens_seen += result.seen
        self.clock.steps += 1
        if result.step % self.log_every_n_steps == 0 or result.step in (1, pl_module.total_steps):
            self._log_step(trainer, pl_module, result)
        if self.shows_steps or result.step == pl_module.total_steps:
            # Also at steps without a record; `log_dict` would take a millisecond.
            trainer.callback_metrics.update(pl_module.step_tensors())
        self._trained_until = self.clock.elapsed()

    def _log_step(self, trainer: pl.Trainer, module: Objective, result: StepResult) -> None:
        names = sorted(result.sums)
        sums = total(trainer, torch.stack([result.sums[n].double() for n in names]))
        # One transfer for the whole row.
        counts = [result.grad_norm, result.n_tokens, self.tokens_seen, *module.guard.tensors()]
        values = torch.cat([sums, torch.stack([n.double() for n in counts])]).tolist()  # fp32 rounds large ones
        grad_norm, n_tokens, tokens_seen, *guarded = values[len(names) :]
        module.guard.know(guarded)
        seconds, tokens = self.clock.elapsed(), int(tokens_seen) - self.tokens_logged
        self.train_seconds, self.train_tokens = self.train_seconds + seconds, self.train_tokens + tokens
        means = module.means_of(dict(zip(names, values, strict=False)), n_tokens)
        trained = {f"train/{name}": mean for name, mean in means.items()}
        self.last_train = {**trained, "step": result.step}
        row: Row = {"step": result.step, "tokens_seen": int(tokens_seen), **self.numbers(result.step)}
        row |= {"rows": result.rows, "bad_steps": module.guard.counts()[0], **trained}
        row |= {"lr": result.lr, "grad_norm": grad_norm, "tokens_per_s": round(tokens / seconds, 1)}
        row["step_ms"] = round(1000 * seconds / self.clock.steps, 3)
        row["data_wait_ms"] = round(1000 * self.clock.data_wait / self.clock.steps, 3)
        if self.peak_flops:
            needed = self.flops_per_token[self.numbers.row_length(result.step)] * tokens / seconds
            row["mfu"] = round(needed / (self.peak_flops * trainer.world_size), 4)
        if module.device.type == "cuda":
            row["memory_gib"] = round(torch.cuda.max_memory_allocated(module.device) / 2**30, 3)
        row["samples_per_s"] = round(self.numbers.rows_of_last(self.clock.steps, result.step) / seconds, 3)
        row |= machine_numbers(module.device)
        self.tokens_logged = int(tokens_seen)
        self.clock.restart()
        self.emit(trainer, row)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._val_start = time.perf_counter()
        self.records.validating = True

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.last_val |= self.records.logged_in_validation()  # checkpoint.monitor may be one of them
        self.clock.paused += time.perf_counter() - self._val_start

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.records.validating = True  # records cover training: a test returns its metrics

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.records.forget_validation()

    def log_validation(
        self, trainer: pl.Trainer, module: Objective, means: dict[str, dict[str, float]], scores: dict[str, float]
    ) -> Row:
        """Emits and returns the row of a validation, with perplexity and bits per byte if the loss is an NLL.

        Args:
            means: the means of each validation set, by its name; '' is the validation split.
            scores: the text metrics of answers to rows of the validation split.
        """
        row: Row = {"step": trainer.global_step, "tokens_seen": int(self.tokens_seen)}
        for name, numbers in means.items():
            prefix = f"val/{name}/" if name else "val/"
            more = derived(numbers["loss"], self.bytes_per_token.get(name)) if module.loss_is_nll else {}
            row |= {f"{prefix}{key}": value for key, value in (numbers | (scores if not name else {}) | more).items()}
        self.last_val = {k: v for k, v in row.items() if k.startswith("val/")} | {"step": row["step"]}
        self.emit(trainer, row, validation=True)
        return row

    def emit(self, trainer: pl.Trainer, row: Row, validation: bool = False) -> None:
        self.records.put(row, validation)
        if trainer.is_global_zero:
            for listener in self.listeners:
                listener(row)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        lightning_private.hide_logged(trainer, False)
        self.records.reopen()

    def teardown(self, trainer: pl.Trainer, pl_module: Objective, stage: str) -> None:
        pl_module.logs_itself = True  # for use under another Trainer
        self.records.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.records.abandon(trainer.is_global_zero)


class WriteRecords(pl.Callback):
    """A callback that writes the step's record once all others have logged, before the checkpoint, which counts it."""

    def __init__(self, records: Records) -> None:
        self.records = records

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.records.write(trainer.is_global_zero)  # of an overdue validation, or one before training

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any, **__: Any) -> None:
        if trainer.accumulate_grad_batches != 1:  # Lightning's step count would be wrong
            found = f"a callback has set trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}"
            raise RunError(f"{found}: a batch is a whole step, and data.global_batch_size says how many rows it has")
        if self.records.holds_step():  # Lightning itself passes them on after the checkpoint
            self.records.log_metrics(lightning_private.logged_at_step(trainer))
        assert isinstance(pl_module, Objective)
        if trainer.global_step == pl_module.total_steps:  # the only epoch, which is the run, ends here
            lightning_private.hide_logged(trainer, False)
            self.records.log_metrics(lightning_private.logged_over_epoch(trainer))
        self.records.close_step(trainer.is_global_zero)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Objective) -> None:
        asked_to_stop = pl_module.stop.agreed or pl_module.stop.asked()
        self.records.end(trainer.is_global_zero, whole=not asked_to_stop)


def derived(loss: float, bytes_per_token: float | None) -> dict[str, float]:
    """Returns perplexity = exp(loss) and bits_per_byte = loss / ln 2 / (UTF-8 bytes per token of the split)."""
    row = {"perplexity": float(torch.tensor(loss, dtype=torch.float64).exp())}
    if bytes_per_token:
        row["bits_per_byte"] = loss / 0.6931471805599453 / bytes_per_token
    return row
