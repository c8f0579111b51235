"""Datasets of the Hugging Face Hub, read row by row."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import huggingface_hub

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.hub import endpoint, explain_unreachable, first_line
from lmtrain.data.sources.tables import check_columns, columns_of, text_of
from lmtrain.errors import ReadError, UserError, disk_full

_ROWS = 256  # rows read at a time
_CONVERTED = "refs/convert/parquet"  # the hub's own conversion of datasets that come as a loading script


def _broken() -> tuple[type[Exception], ...]:
    """What a damaged or vanished file raises in reading."""
    import pyarrow as pa

    return OSError, ConnectionError, ValueError, pa.ArrowException


@contextmanager
def _offline() -> Iterator[None]:
    """Has `datasets` look in its cache only; otherwise it would retry the hub for half a minute first."""
    import datasets

    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before


def load_splits(cfg: DataConfig, commit: str | None, unreachable: str) -> Any:
    """The dataset's splits, {name: Dataset or IterableDataset}; from the local cache where `commit` is None."""
    import datasets

    name = str(cfg.name)
    options: dict[str, Any] = {"streaming": cfg.streaming}
    if not cfg.streaming:
        options["num_proc"] = cfg.num_proc
    try:
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
    except (OSError, ConnectionError) as error:
        if commit is None:
            raise UserError(explain_unreachable("dataset", name, unreachable)) from None
        raise ReadError(f"dataset {name!r} can't be loaded from {endpoint()}: {first_line(error)}") from None
    except datasets.exceptions.DatasetsError as error:  # a file of it that can't be converted
        if disk_full(error):
            raise
        raise UserError(f"dataset {name!r} can't be loaded: {first_line(error.__cause__ or error)}") from None
    except StopIteration:  # what `datasets` raises for empty files
        raise UserError(f"dataset {name!r} can't be loaded: a file of it holds no rows") from None
    except (ValueError, RuntimeError) as error:  # a config that isn't there, or a loading script
        raise UserError(f"dataset {name!r} (data.config_name={cfg.config_name}) can't be loaded: {error}") from None


def _load_converted(name: str, config_name: str | None, options: dict[str, Any]) -> Any:
    """The hub's own parquet files of a dataset that comes as a loading script, which `datasets` no longer runs."""
    import datasets

    try:
        # They lie in a folder for each config, and in it one for each split.
        return datasets.load_dataset(name, data_dir=config_name, revision=_CONVERTED, **options)
    except (OSError, ValueError) as error:
        raise UserError(
            f"dataset {name!r} comes as a loading script, which `datasets` doesn't run any more, and its conversion to "
            f"parquet ({_CONVERTED}) can't be loaded ({first_line(error)}): download its text and set data.path"
        ) from None


def check_split(splits: Any, split: str, cfg: DataConfig) -> None:
    """Raises UserError where a dataset has no such split; lists those it has."""
    if split not in splits:
        raise UserError(
            f"dataset {cfg.name!r} has no split {split!r}; it has: {', '.join(splits)}. Set data.train_split"
        )


def read_rows(splits: Any, split: str, cfg: DataConfig) -> Iterator[str]:
    """The text of each row of a split.

    Raises:
        UserError: the split or a text column isn't there (the message lists those that are), or the download fails.
    """
    where = f"dataset {cfg.name!r}, split {split}"
    check_split(splits, split, cfg)
    columns = columns_of(cfg.text_column)
    rows = splits[split]
    if rows.column_names:
        check_columns(columns, rows.column_names, where)
        rows = rows.select_columns(columns)
    try:
        for batch in rows.iter(batch_size=_ROWS):
            for values in zip(*batch.values(), strict=True):
                yield text_of(dict(zip(batch, values, strict=True)), columns, cfg.column_separator or "", where)
    except _broken() as error:
        raise ReadError(f"{where} can't be read from {endpoint()}: {first_line(error)}") from None


def read_records(splits: Any, split: str, cfg: DataConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every row of a split with all its columns, and its place.

    Raises:
        UserError: the split isn't there, or the download fails.
    """
    where = f"dataset {cfg.name!r}, split {split}"
    if split not in splits:
        raise UserError(f"{where}: there is no such split; it has: {', '.join(splits)}. Set data.train_split")
    try:
        for number, row in enumerate(splits[split]):
            yield f"{where}, row {number}", row
    except _broken() as error:
        raise ReadError(f"{where} can't be read from {endpoint()}: {first_line(error)}") from None
