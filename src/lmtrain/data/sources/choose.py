"""Where text and rows come from (the hub, files, the standard library, a class of the user): identity, two splits."""

import dataclasses
import hashlib
import inspect
import itertools
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Protocol

from lmtrain.config.schema_data import DataConfig
from lmtrain.config.targets import build_target, building, class_named, lacking
from lmtrain.data.sources.files import FileSource
from lmtrain.data.sources.hub import HubSource
from lmtrain.data.sources.pieces import (
    Piece,
    at_least,
    enough,
    first,
    is_held_out,
    plan_cut,
    share_to_hold_out,
    split,
)
from lmtrain.data.sources.stdlib import StdlibSource
from lmtrain.data.sources.tables import Record
from lmtrain.errors import UserError, did_you_mean


class Source(Protocol):
    """A corpus before any filter; `open_source` chooses one. Two documents in memory would be:

    class Greetings:
        label, settings, resolved, notes = "greetings", {"kind": "greetings"}, "v1", []

        def pieces(self, name):
            return iter([Piece("Hello, ", ends=False), Piece("world", ends=True), Piece("Bye", ends=True)])

        def text_bytes(self, name):
            return 15
    """

    label: str  # its name in messages and in the folder of its prepared data
    settings: dict[str, Any]  # what the user asked for: plain values, in the key of the prepared data
    resolved: str | None  # what that turned out to be: a digest of the bytes, a commit; None where no hub answered
    notes: list[str]  # for the plan: files of a folder that are not read

    def pieces(self, name: str) -> Iterator[Piece] | None:
        """The documents of split "train" or "val", in order and the same at every call, in pieces of any length.

        None where the corpus has no validation split of its own: data.val_fraction of the documents is then held out.

        Raises:
            UserError: a file or a row can't be read; the message says where.
        """

    def text_bytes(self, name: str) -> int | None:
        """About how many bytes of text the split has, for the progress bar; None where that isn't known."""

    def records(self, name: str) -> Iterator[Record] | None:
        """Its rows (conversations, pairs, prompts) with their places, where these are read, not text; as `pieces`."""


def open_source(cfg: DataConfig) -> Source:
    """The source that `cfg` names; `data.path` set by the user wins over a dataset's name.

    Raises:
        UserError: a missing or empty file, a name the hub doesn't have, a document_start that is not a pattern.
    """
    if cfg.val_path and not cfg.path:
        raise UserError(f"data.val_path={cfg.val_path} goes with files to train on: set data.path too")
    try:
        re.compile(cfg.document_start or "")
    except re.error as error:
        raise UserError(f"data.document_start={cfg.document_start!r} is not a regular expression: {error}") from None
    if "." in cfg.source:
        return open_own(cfg)
    if cfg.source == "python_stdlib":
        return StdlibSource(cfg)
    if cfg.source == "files" or cfg.path:
        return FileSource(cfg)
    return HubSource(cfg)


def pieces(source: Source, cfg: DataConfig, name: str) -> Iterator[Piece] | None:
    """The documents of split "train" or "val" after the filters; None where there is to be no validation split.

    data.min_length and data.num_samples apply to each split of the corpus; what is held out by data.val_fraction
    comes out of the documents they leave.
    """
    held_out = filtered(source, cfg, "val")
    if held_out is not None:
        return held_out if name == "val" else filtered(source, cfg, "train")
    train = filtered(source, cfg, "train")
    assert train is not None
    if cfg.val_fraction == 0:
        return train if name == "train" else None
    share = share_to_hold_out(filtered(source, cfg, "train") or iter(()), cfg.val_fraction, cfg.min_val_rows)
    cut = plan_cut(filtered(source, cfg, "train") or iter(()), share)
    return at_least(split(train, share, cut, held_out=name == "val"), 1)


def filtered(source: Source, cfg: DataConfig, name: str) -> Iterator[Piece] | None:
    """The documents of a split that data.min_length and data.num_samples leave; None where the source has none."""
    found = source.pieces(name)
    if found is None:
        return None
    kept = at_least(found, cfg.min_length or 0)
    return kept if cfg.num_samples is None else first(kept, cfg.num_samples)


def expected_bytes(source: Source, cfg: DataConfig, name: str) -> int | None:
    """About how many bytes of text a split will have; None where that isn't known."""
    if cfg.num_samples is not None:
        return None
    if source.pieces("val") is not None:
        return source.text_bytes(name)
    whole_text = source.text_bytes("train")
    return (
        None if whole_text is None else int(whole_text * (cfg.val_fraction if name == "val" else 1 - cfg.val_fraction))
    )


def open_own(cfg: DataConfig) -> Any:
    """The object of the class that data.source names, with what the key of prepared data needs.

    Its identity is what the class says it is and the text of the module it stands in: a changed class is read again.

    Raises:
        UserError: the class is not allowed, can't be imported or lacks what a source has; its arguments are others, or
            it raises.
    """
    # Composing refused what run.allow_target doesn't open. Of the options nothing but this module's may be built.
    opened, options = [cfg.source.rpartition(".")[0]], cfg.source_options or {}
    cls = class_named(cfg.source, "data.source", opened)
    reads = ["pieces", "text_bytes"] if cfg.rows == "text" else ["records"]
    missing = lacking(cls, ("label", "settings", "resolved", "notes", *reads))
    if missing:
        raise UserError(
            f"data.source={cfg.source} is not a source of {'text' if cfg.rows == 'text' else 'rows'}: it lacks "
            f"{', '.join(missing)} (lmtrain.data.sources.choose.Source says what they are; those that __init__ sets "
            f"stand on the class with their type, label: str)"
        )
    if "_target_" in options or "_args_" in options:
        raise UserError("data.source_options: _target_ and _args_ have no meaning here; data.source names the class")
    source = build_target({"_target_": cfg.source, **options}, "data.source", cls, opened)
    with building("data.source", cfg.source):  # a property may raise
        settings = source.settings
        if not isinstance(settings, Mapping):
            raise UserError(
                f"data.source={cfg.source}: its settings are {settings!r}: make them a dict of what shapes its data"
            )
        source.settings = {**settings, "class": cfg.source, "options": options, "code": _code_of(cls)}
    return source


def _code_of(cls: type) -> str:
    """A digest of the module that holds the class."""
    try:
        text = inspect.getsource(sys.modules[cls.__module__])
    except (OSError, TypeError):  # made at run time
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_MIXTURE_KEYS = ("path", "val_path", "name", "config_name", "revision", "format", "train_split", "val_split",
                 "num_samples", "conversation_format", "columns", "weight")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MixturePart:
    """One source of a mixture, or the only one: its config and how often its rows are seen in an epoch."""

    cfg: DataConfig
    source: Source
    weight: Fraction


def check_keys(entry: dict[str, Any], known: Sequence[str], where: str) -> None:
    """Raises UserError for the first key of an entry that isn't known; names the nearest that is."""
    for key in entry:
        if key not in known:
            hint = did_you_mean(str(key), known)
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
    return [MixturePart(cfg, open_source(cfg), Fraction(1))]


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
    return MixturePart(part, open_source(part), Fraction(str(weight)).limit_denominator(10**6))


def split_records(part: MixturePart, name: str) -> Iterator[Record] | None:
    """The rows of split "train" or "val"; where the source has no validation split, every (1 / val_fraction)-th row.

    Of few rows a larger share is held out (data.min_val_rows). None where there is to be no validation split.
    data.num_samples counts rows of the source's own split.
    """
    cfg = part.cfg

    def rows(of: str) -> Iterator[Record] | None:
        found = part.source.records(of)
        return None if found is None else itertools.islice(found, cfg.num_samples)

    own = rows("val")
    if own is not None:
        return own if name == "val" else rows("train")
    train = rows("train")
    if cfg.val_fraction == 0 or train is None:
        return train if name == "train" else None
    there = sum(1 for _ in itertools.islice(rows("train") or (), math.ceil(cfg.min_val_rows / cfg.val_fraction)))
    share = enough(cfg.val_fraction, there, cfg.min_val_rows)
    return (row for index, row in enumerate(train) if is_held_out(index, share) == (name == "val"))
