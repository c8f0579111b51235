"""Rows with columns (conversations, preferences) from the hub, from files, or from a mixture of both."""

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Any, Protocol

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.sources.choose import open_source
from lmtrain.data.sources.pieces import enough, is_held_out
from lmtrain.data.sources.tables import Record
from lmtrain.errors import UserError

_MIXTURE_KEYS = ("path", "val_path", "name", "config_name", "revision", "format", "train_split", "val_split",
                 "num_samples", "conversation_format", "columns", "weight")  # fmt: skip


class RecordSource(Protocol):
    """A source of rows; `settings` and `resolved` are its identity, as of `data.sources.Source`."""

    label: str
    settings: dict[str, Any]
    resolved: str | None
    notes: list[str]

    def records(self, name: str) -> Iterator[Record] | None:
        """The rows of split "train" or "val"; None where there is no validation split of its own."""


@dataclasses.dataclass(frozen=True)
class MixturePart:
    """One source of a mixture, or the only one: its config and how often its rows are seen in an epoch."""

    cfg: DataConfig
    source: RecordSource
    weight: Fraction


def check_keys(entry: dict[str, Any], known: Sequence[str], where: str) -> None:
    """Raises UserError for the first key of an entry that isn't known; names the nearest that is."""
    for key in entry:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"{where}.{key} is not known{hint} (keys: {', '.join(known)})")


def open_parts(cfg: DataConfig) -> list[MixturePart]:
    """The sources that `cfg` names: one, or those of data.mixture.

    Raises UserError for text sources, missing files, unknown keys in the mixture.
    """
    if cfg.source == "mixture":
        if not cfg.mixture:
            raise UserError("data.mixture is empty: list sources, data.mixture=[{path: a.jsonl, weight: 2}, {name: b}]")
        return [_part(cfg, entry, number) for number, entry in enumerate(cfg.mixture)]
    questions = cfg.source == "python_stdlib" and cfg.rows != "text"
    if cfg.source not in ("hub", "files") and "." not in cfg.source and not questions:
        raise UserError(f"data.source={cfg.source} holds text, not rows: choose data=chat_jsonl data.path=..., say")
    return [MixturePart(cfg, open_source(cfg), Fraction(1))]  # type: ignore[arg-type]


def _part(cfg: DataConfig, entry: dict[str, Any], number: int) -> MixturePart:
    where = f"data.mixture[{number}]"
    check_keys(entry, _MIXTURE_KEYS, where)
    if ("path" in entry) == ("name" in entry):
        raise UserError(f"{where}: give either path (files) or name (a dataset of the hub)")
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise UserError(f"{where}.weight={weight!r}: a number above 0, how often its rows are seen in an epoch")
    own = {key: value for key, value in entry.items() if key != "weight"}
    part = dataclasses.replace(cfg, **{"source": "files" if "path" in entry else "hub", "mixture": None, **own})
    return MixturePart(part, open_source(part), Fraction(str(weight)).limit_denominator(10**6))  # type: ignore[arg-type]


def split_records(part: MixturePart, name: str) -> Iterator[Record] | None:
    """The rows of split "train" or "val"; where the source has no validation split, every (1 / val_fraction)-th row.

    Of few rows a larger share is held out (data.min_val_rows). None where there is to be no validation split.
    data.num_samples counts rows of the source's own split.
    """
    own = _first(part.source.records("val"), part.cfg.num_samples)
    if own is not None:
        return own if name == "val" else _first(part.source.records("train"), part.cfg.num_samples)
    train = _first(part.source.records("train"), part.cfg.num_samples)
    if part.cfg.val_fraction == 0 or train is None:
        return train if name == "train" else None
    looked_at = _first(part.source.records("train"), part.cfg.num_samples) or ()
    few = part.cfg.min_val_rows
    there = sum(1 for _ in itertools.islice(looked_at, math.ceil(few / part.cfg.val_fraction)))
    return _held_out(train, enough(part.cfg.val_fraction, there, few), name == "val")


def _first(rows: Iterator[Record] | None, number: int | None) -> Iterator[Record] | None:
    if rows is None or number is None:
        return rows
    return (row for _, row in zip(range(number), rows, strict=False))


def _held_out(rows: Iterable[Record], fraction: float, held_out: bool) -> Iterator[Record]:
    for index, row in enumerate(rows):
        if is_held_out(index, fraction) == held_out:
            yield row
