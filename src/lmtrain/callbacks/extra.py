"""Lightning callbacks that are refused because they can't work here, with reasons; and an adapted ThroughputMonitor.

A run is a single epoch of Lightning's, so what acts at each epoch would act once or never. docs/lightning.md describes
the callbacks that work.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import lightning.pytorch.callbacks as theirs
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.states import RunningStage

from lmtrain.callbacks.early_stopping import EarlyStopping
from lmtrain.config import safe_yaml
from lmtrain.config.schema import Config
from lmtrain.config.targets import build_target
from lmtrain.errors import UserError
from lmtrain.run_folder.folder import RunDir

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


# Callbacks of Lightning's that are adapted to lmtrain's batches, and to validations before the first step.
ADAPTED = {cls.__name__: f"{cls.__module__}.{cls.__name__}" for cls in (ThroughputMonitor, EarlyStopping)}


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
    if not package.startswith("lightning."):
        return entry
    if found:
        typed = ", ".join(f"{key}={str(each).lower()}" for key, each in found.items())
        acts = f"callbacks.extra: {name} with {typed} acts at the ends of epochs"
        raise UserError(f"{acts}, and a run is a single epoch of Lightning's: set {instead} instead")
    return {**entry, "_target_": ADAPTED.get(name, entry["_target_"])}


def epoch_notes(callbacks: list[Callback]) -> list[str]:
    """Returns a note on each callback of the user's own that has a hook for epochs, which runs only once."""
    own = [c for c in callbacks if type(c).__module__.split(".")[0] not in ("lmtrain", "lightning")]
    once = "runs once, as a run is a single epoch of Lightning's; on_train_batch_end runs at each step"
    return [
        f"callbacks.extra, {type(c).__name__}: {hook} {once}"
        for c in own
        for hook in EPOCH_HOOKS
        if getattr(type(c), hook) is not getattr(Callback, hook)
    ]


def build_extra(config: Config) -> list[pl.Callback]:
    """Builds the callbacks of callbacks.extra; raises UserError for one that can't work here."""
    allowed, entries = config.run.allow_target, map(fitted, config.callbacks.extra)
    return [build_target(e, "callbacks.extra", pl.Callback, allowed, refused=REFUSED) for e in entries]


_NAMES_A_PLACE = re.compile(r"(dir|path|root|folder)s?$")  # argument names: dirpath, save_dir, ...
_LEADS_OUT = re.compile(r"^([/~]|file:)|(^|/)\.\.(/|$)")


def outside(config: Config, run_dir: RunDir, callbacks: list[pl.Callback]) -> list[str]:
    """Returns a note on each path outside the run's folder and the cache that the user's loggers and callbacks name."""
    roots = [run_dir.path, Path(config.data.cache_dir).expanduser()]
    named = [(f"logger.{name}", options) for name, options in config.logger.items()]
    theirs = [c for c in callbacks if not type(c).__module__.startswith("lmtrain.")]
    named += [(f"callbacks.extra, {type(c).__name__}", vars(c)) for c in theirs]
    return [
        f"{who}: {argument} is {place}, outside the run's folder: what is written there is no part of the run"
        for who, arguments in named
        for argument, place in _outside(arguments, roots)
    ]


def _outside(arguments: Any, roots: Sequence[Path], key: str = "") -> Iterator[tuple[str, Path]]:
    """Yields the name and path of each argument that is a path below none of `roots`."""
    if isinstance(arguments, dict | list):
        for name, inner in arguments.items() if isinstance(arguments, dict) else enumerate(arguments):
            yield from _outside(inner, roots, str(name))
    elif isinstance(arguments, str | Path) and key != "_target_" and str(arguments):
        text = str(arguments).removeprefix("file:")
        if _LEADS_OUT.search(text) or _NAMES_A_PLACE.search(key):
            place = Path(text).expanduser().resolve()
            if "://" not in text and not any(place.is_relative_to(root.resolve()) for root in roots):
                yield key, place
