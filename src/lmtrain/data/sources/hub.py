"""Datasets of the Hugging Face Hub, read row by row."""

import dataclasses
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.hub import commit_of, endpoint, explain_unreachable
from lmtrain.data.sources.pieces import Piece, join_rows
from lmtrain.data.sources.tables import ArrowRow, Record, check_columns, columns_of, text_of
from lmtrain.data.store.contents import Content, Facts, joined_digest
from lmtrain.errors import ReadError, UserError, disk_full, first_line

_ROWS = 256  # rows read at a time
_CONVERTED = "refs/convert/parquet"  # the hub's own conversion of datasets with a loading script


@contextmanager
def _explained(where: str) -> Iterator[None]:
    """Turns what reading a damaged or vanished file raises into one ReadError."""
    import pyarrow as pa

    try:
        yield
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ReadError(f"{where} can't be read from {endpoint()}: {first_line(error)}") from None


@contextmanager
def _offline() -> Iterator[None]:
    """Makes `datasets` use its cache only; otherwise it would retry the hub for half a minute first."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before


class HubSource:
    """A dataset named on the hub, or a dataset repository in a local folder; it is loaded when its splits are read."""

    notes: list[str] = []  # noqa: RUF012

    def __init__(self, cfg: DataConfig) -> None:
        self.cfg = cfg
        self.name, self.label = named(cfg)
        keys = ("name", "config_name", "revision", "train_split", "val_split")
        self.settings: dict[str, Any] = {"kind": "hub", **{key: getattr(cfg, key) for key in keys}}
        self.resolved: str | None = None
        self.content: Content | None = None
        self.unreachable = ""
        folder = Path(self.name).expanduser()
        if folder.is_dir():  # a local dataset repository
            self.content = Content(sorted(p for p in folder.rglob("*") if p.is_file()), Facts(cfg.cache_dir))
            self.resolved = joined_digest(self.content.digests.values())
        else:
            self.resolved, self.unreachable = commit_of("dataset", self.name, cfg.revision)

    def refuse_changed(self) -> None:
        """Raises ReadError if a file of a local repository was changed since; a commit on the hub stays as it is."""
        if self.content is not None:
            self.content.refuse_changed()

    @functools.cached_property
    def _splits(self) -> Any:
        return load_splits(self.cfg, self.resolved, self.unreachable)

    def _parts(self, name: str) -> list[str] | None:
        """Returns the dataset's splits that make up split "train" or "val"; None if it has no validation split."""
        asked = self.cfg.train_split if name == "train" else self.cfg.val_split
        parts = asked.split("+") if asked else []
        if name == "val" and not (parts and all(part in self._splits for part in parts)):
            return None
        return parts

    def records(self, name: str) -> Iterator[Record] | None:
        parts = self._parts(name)
        return None if parts is None else (r for part in parts for r in read_records(self._splits, part, self.cfg))

    def pieces(self, name: str) -> Iterator[Piece] | None:
        parts = self._parts(name)
        if parts is None:
            return None
        rows = (row for part in parts for row in read_rows(self._splits, part, self.cfg))
        if self.cfg.document_start:
            return join_rows(rows, self.cfg.document_start)
        return (Piece(row, True) for row in rows)

    def text_bytes(self, name: str) -> int | None:
        return None

    def notes_of_reading(self) -> list[str]:
        """Returns a note for the plan, available after reading, if there is no split data.val_split."""
        if not self.cfg.val_split or self._parts("val") is not None or self.cfg.val_fraction == 0:
            return []
        known = f"data.val_split; it has: {', '.join(self._splits)}"
        found = f"dataset {self.name!r} has no split {self.cfg.val_split!r} ({known})"
        return [f"{found}: a part of split {self.cfg.train_split} is held out (data.val_fraction)"]


def named(cfg: DataConfig) -> tuple[str, str]:
    """Returns the dataset's name, and its label in folder names."""
    if not cfg.name:
        raise UserError("data.name is not set: name a dataset of the hub, data.name=..., or files, data.path=...")
    return cfg.name, cfg.name.rstrip("/").split("/")[-1]


def load_splits(cfg: DataConfig, commit: str | None, unreachable: str) -> Any:
    """Loads the dataset's splits, {name: Dataset or IterableDataset}, from the local cache if `commit` is None."""
    import datasets

    name = str(cfg.name)
    name = os.path.expanduser(name) if os.path.isdir(os.path.expanduser(name)) else name
    options = {"streaming": cfg.streaming, "num_proc": None if cfg.streaming else cfg.num_proc}
    try:
        # From the cache, at the commit, or the hub's own conversion of what a script would load.
        if commit is None:
            with _offline():
                return datasets.load_dataset(name, cfg.config_name, **options)
        try:
            revision = None if os.path.isdir(name) else commit
            return datasets.load_dataset(name, cfg.config_name, revision=revision, **options)
        except RuntimeError as error:
            if "scripts are no longer supported" not in str(error):
                raise
            return _load_converted(name, cfg.config_name, options)
    except OSError as error:
        if commit is None:
            raise UserError(explain_unreachable("dataset", name, unreachable)) from None
        raise ReadError(f"dataset {name!r} can't be loaded from {endpoint()}: {first_line(error)}") from None
    except datasets.exceptions.DatasetsError as error:  # a file of the dataset can't be converted
        if disk_full(error):
            raise
        raise UserError(f"dataset {name!r} can't be loaded: {first_line(error.__cause__ or error)}") from None
    except StopIteration:  # `datasets` raises this for empty files
        raise UserError(f"dataset {name!r} can't be loaded: a file of it holds no rows") from None
    except (ValueError, RuntimeError) as error:  # an unknown config, or a loading script
        raise UserError(f"dataset {name!r} (data.config_name={cfg.config_name}) can't be loaded: {error}") from None


def _load_converted(name: str, config_name: str | None, options: dict[str, Any]) -> Any:
    """Loads the hub's parquet conversion of a dataset with a loading script, which `datasets` no longer runs."""
    import datasets

    try:
        # Its files lie in one folder per config, with one folder per split inside.
        return datasets.load_dataset(name, data_dir=config_name, revision=_CONVERTED, **options)
    except (OSError, ValueError) as error:
        why = f"it is a loading script, and its conversion to parquet can't be loaded ({first_line(error)})"
        raise UserError(f"dataset {name!r}: {why}: download its text and set data.path") from None


def check_split(splits: Any, split: str, cfg: DataConfig) -> None:
    """Raises UserError if a dataset has no such split, listing those it has."""
    if split not in splits:
        known = ", ".join(splits)
        raise UserError(f"dataset {cfg.name!r} has no split {split!r}; it has: {known}: set data.train_split, or split")


def read_rows(splits: Any, split: str, cfg: DataConfig) -> Iterator[str]:
    """Yields the text of each row of a split.

    Raises:
        UserError: the split or a text column doesn't exist (the message lists those that do), or the download fails.
    """
    where = f"dataset {cfg.name!r}, split {split}"
    check_split(splits, split, cfg)
    columns = columns_of(cfg.text_column)
    rows = splits[split]
    if rows.column_names:
        check_columns(columns, rows.column_names, where)
        rows = rows.select_columns(columns)
    with _explained(where):
        for batch in rows.iter(batch_size=_ROWS):
            for values in zip(*batch.values(), strict=True):
                yield text_of(dict(zip(batch, values, strict=True)), columns, cfg.column_separator or "", where)


def _undecoded(rows: Any) -> Any:
    """Returns the rows with images, sound, video and the like as they are stored: nothing here looks at them."""
    stored = _stored(rows.features)
    if stored == rows.features:
        return rows
    lazy = rows.to_iterable_dataset() if hasattr(rows, "to_iterable_dataset") else rows
    return lazy.cast(stored)


def _stored(feature: Any) -> Any:
    """Returns a feature of `datasets`, or a mapping or list of them, with everything in it left undecoded but JSON."""
    if isinstance(feature, dict):
        return type(feature)({name: _stored(part) for name, part in feature.items()})
    if isinstance(feature, list):
        return [_stored(part) for part in feature]
    if hasattr(feature, "feature"):
        return dataclasses.replace(feature, feature=_stored(feature.feature))
    is_media = getattr(feature, "decode", False) is True and not _has_json(feature)
    return dataclasses.replace(feature, decode=False) if is_media else feature


def _has_json(feature: Any) -> bool:
    """Returns whether there is JSON in a feature: Arrow holds it as text, so that a null in it is the data's own."""
    if isinstance(feature, dict | list):
        return any(_has_json(part) for part in (feature.values() if isinstance(feature, dict) else feature))
    return type(feature).__name__ == "Json" or (hasattr(feature, "feature") and _has_json(feature.feature))


def read_records(splits: Any, split: str, cfg: DataConfig) -> Iterator[Record]:
    """Yields every row of a split with all its columns, and its location.

    Raises:
        UserError: the split doesn't exist, or the download fails.
    """
    where = f"dataset {cfg.name!r}, split {split}"
    check_split(splits, split, cfg)
    with _explained(where):
        rows = _undecoded(splits[split])
        own = frozenset(name for name, feature in (rows.features or {}).items() if _has_json(feature))
        for number, row in enumerate(rows):
            yield f"{where}, row {number}", ArrowRow(row, own)
