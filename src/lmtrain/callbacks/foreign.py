"""Lightning callbacks that are refused because they can't work here, with reasons; and an adapted ThroughputMonitor.

A run is a single epoch of Lightning's, so what acts at each epoch would act once or never. docs/lightning.md describes
the callbacks that work.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import lightning.pytorch.callbacks as theirs
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import RunningStage

from lmtrain.callbacks.validation import EarlyStopping
from lmtrain.config import safe_yaml
from lmtrain.errors import UserError

_WHY = safe_yaml.table(__file__, "refused.yaml")
REFUSED: dict[type[Callback], str] = {getattr(theirs, name): why for name, why in _WHY.items()}


Count = Callable[[Any], int]


def _micro_batches(batch: Any) -> list[Any]:
    """Returns the micro-batches of a training batch; a validation batch is a single one."""
    return batch.get("micro_batches", [batch])


def rows_of(batch: Any) -> int:
    return sum(len(micro_batch["input_ids"]) for micro_batch in _micro_batches(batch))


def tokens_of(batch: Any) -> int:
    """Counts the tokens of a batch, padding included."""
    return sum(micro_batch["input_ids"].numel() for micro_batch in _micro_batches(batch))


class ThroughputMonitor(theirs.ThroughputMonitor):
    """Lightning's ThroughputMonitor for batches of micro-batches; replaces the original in callbacks.extra."""

    def __init__(self, batch_size_fn: Count = rows_of, length_fn: Count = tokens_of, **kwargs: Any) -> None:
        super().__init__(batch_size_fn, length_fn, **kwargs)

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if RunningStage.TRAINING in self._t0s:  # false before the first step: nothing measured yet
            super().on_validation_end(trainer, *_)


_THROUGHPUT = f"{__name__}.ThroughputMonitor"
_STOPPING = f"{EarlyStopping.__module__}.{EarlyStopping.__name__}"
INSTEAD = {  # adapted to lmtrain's batches, and to validations before the first step
    "lightning.pytorch.callbacks.ThroughputMonitor": _THROUGHPUT,
    "lightning.pytorch.callbacks.throughput_monitor.ThroughputMonitor": _THROUGHPUT,
    "lightning.pytorch.callbacks.EarlyStopping": _STOPPING,
    "lightning.pytorch.callbacks.early_stopping.EarlyStopping": _STOPPING,
}


# Arguments with which a callback of Lightning's acts at epochs, and what acts at steps or validations.
BY_EPOCH = {
    "LearningRateMonitor": ("logging_interval", "epoch", "logging_interval=step"),
    "Timer": ("interval", "epoch", "interval=step"),
    "EarlyStopping": ("check_on_train_epoch_end", True, "check_on_train_epoch_end=false"),
    "ModelCheckpoint": ("save_on_train_epoch_end", True, "every_n_train_steps"),
}
EPOCH_HOOKS = ("on_train_epoch_start", "on_train_epoch_end")


def fitted(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns an entry of callbacks.extra; a Lightning callback is replaced by its adapted version, if any.

    Raises:
        UserError: its arguments make it act at epochs.
    """
    package, _, name = entry["_target_"].rpartition(".")
    argument, value, instead = BY_EPOCH.get(name, ("", None, ""))
    found = {argument: value} if argument in entry and entry[argument] == value else {}
    if name == "ModelCheckpoint" and (entry.get("every_n_epochs") or 0) > 1:
        found = {"every_n_epochs": entry["every_n_epochs"]}
    if package.startswith("lightning.") and found:
        typed = ", ".join(f"{key}={str(each).lower()}" for key, each in found.items())
        raise UserError(
            f"callbacks.extra: {name} with {typed} acts at the ends of epochs, and a run is a single epoch of "
            f"Lightning's: set {instead} instead"
        )
    return {**entry, "_target_": INSTEAD.get(entry["_target_"], entry["_target_"])}


def epoch_notes(callbacks: list[Callback]) -> list[str]:
    """Returns a note on each callback of the user's own that has a hook for epochs, which runs only once."""
    own = [c for c in callbacks if type(c).__module__.split(".")[0] not in ("lmtrain", "lightning")]
    return [
        f"callbacks.extra, {type(c).__name__}: {hook} runs once, as a run is a single epoch of Lightning's; "
        f"on_train_batch_end runs at each step"
        for c in own
        for hook in EPOCH_HOOKS
        if getattr(type(c), hook) is not getattr(Callback, hook)
    ]
