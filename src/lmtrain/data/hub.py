"""Datasets and revisions from the Hugging Face Hub, with an unreachable hub found out in seconds.

`datasets` and `transformers` retry an unreachable hub for half a minute or more. So the commit that a name stands for
is asked first, in one request without retries; it is also the identity of what is then loaded.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import huggingface_hub
from huggingface_hub import errors as hub_errors

from lmtrain.data.rows import check_columns, columns_of, text_of
from lmtrain.errors import UserError
from lmtrain.schema import Data

_ROWS = 256  # rows read at a time
_CONVERTED = "refs/convert/parquet"  # the hub's own conversion of datasets that come as a loading script


class Unreachable(Exception):
    """The hub gave no answer; the message is the reason."""


def endpoint() -> str:
    """Where the hub is asked for, HF_ENDPOINT or huggingface.co."""
    return str(huggingface_hub.constants.ENDPOINT)


def commit_of(kind: Literal["dataset", "tokenizer", "model"], name: str, revision: str | None) -> str:
    """The commit hash that a dataset's, tokenizer's or model's name and revision stand for.

    Raises:
        UserError: the hub answers that there is no such name or revision, or that it may not be read.
        Unreachable: no answer within HF_HUB_ETAG_TIMEOUT seconds (10 unless set), or offline mode.
    """
    if revision and re.fullmatch(r"[0-9a-f]{40}", revision):
        return revision
    api = huggingface_hub.HfApi()
    ask = api.dataset_info if kind == "dataset" else api.model_info
    try:
        info = ask(name, revision=revision, timeout=huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT)
    except hub_errors.GatedRepoError:
        raise UserError(
            f"{kind} {name!r} is gated: accept its terms at {endpoint()}, then set HF_TOKEN or run `hf auth login`"
        ) from None
    except hub_errors.RevisionNotFoundError:
        raise UserError(f"{kind} {name!r} has no revision {revision!r} on {endpoint()}") from None
    except (hub_errors.RepositoryNotFoundError, hub_errors.HFValidationError):
        raise UserError(
            f"{kind} {name!r} doesn't exist on {endpoint()}, or is private (then set HF_TOKEN or run `hf auth login`)"
        ) from None
    except Exception as error:  # the HTTP library behind huggingface_hub, and its errors, differ between versions
        raise Unreachable(_first_line(error)) from None
    return str(info.sha)


def explain_unreachable(kind: str, name: str, reason: str) -> str:
    """The message for a name that is neither reachable nor cached."""
    instead = {
        "dataset": "other text with data=python_stdlib or data.path=<files>",
        "tokenizer": "tokenizer.name_or_path=<local folder>, or tokenizer=bpe (trained on the data) or tokenizer=bytes",
        "model": "model.name_or_path=<folder of a downloaded one>, or a model from scratch, model=gpt_nano",
    }[kind]
    return (
        f"{kind} {name!r} can't be fetched: {endpoint()} doesn't answer ({reason}), and there is no copy in "
        f"{os.environ.get('HF_HOME', '~/.cache/huggingface')}. Set HF_ENDPOINT to a mirror, HF_HOME to a folder with a "
        f"cached copy, or choose {instead}"
    )


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


def load_splits(cfg: Data, commit: str | None, unreachable: str) -> Any:
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
        raise UserError(f"dataset {name!r} can't be loaded from {endpoint()}: {_first_line(error)}") from None
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
            f"parquet ({_CONVERTED}) can't be loaded ({_first_line(error)}): download its text and set data.path"
        ) from None


def read_rows(splits: Any, split: str, cfg: Data) -> Iterator[str]:
    """The text of each row of a split.

    Raises:
        UserError: the split or a text column isn't there (the message lists those that are), or the download fails.
    """
    where = f"dataset {cfg.name!r}, split {split}"
    if split not in splits:
        raise UserError(
            f"dataset {cfg.name!r} has no split {split!r}; it has: {', '.join(splits)}. Set data.train_split"
        )
    columns = columns_of(cfg.text_column)
    rows = splits[split]
    if rows.column_names:
        check_columns(columns, rows.column_names, where)
        rows = rows.select_columns(columns)
    try:
        for batch in rows.iter(batch_size=_ROWS):
            for values in zip(*batch.values(), strict=True):
                yield text_of(dict(zip(batch, values, strict=True)), columns, cfg.column_separator or "", where)
    except (OSError, ConnectionError) as error:
        raise UserError(f"{where} can't be read from {endpoint()}: {_first_line(error)}") from None


def read_records(splits: Any, split: str, cfg: Data) -> Iterator[tuple[str, dict[str, Any]]]:
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
    except (OSError, ConnectionError) as error:
        raise UserError(f"{where} can't be read from {endpoint()}: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}"
