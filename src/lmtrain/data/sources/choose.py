"""Opens the source of text or rows (hub, files, standard library, a class of the user's) and splits it in two."""

import dataclasses
import hashlib
import inspect
import itertools
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, Protocol

from lmtrain.config.constraints import regular_expression
from lmtrain.config.schema_data import DataConfig
from lmtrain.config.targets import build_target, building, class_named, lacking
from lmtrain.data.sources.files import FileSource
from lmtrain.data.sources.hub import HubSource
from lmtrain.data.sources.pieces import Piece, at_least, enough, first, is_held_out, plan_split, split
from lmtrain.data.sources.stdlib import StdlibSource
from lmtrain.data.sources.tables import Record
from lmtrain.data.store.contents import Facts
from lmtrain.errors import UserError, did_you_mean


class Source(Protocol):
    """A corpus before any filter; `open_source` chooses one. A source of two documents held in memory would be:

    class Greetings:
        label, settings, resolved, notes = "greetings", {"kind": "greetings"}, "v1", []

        def pieces(self, name):
            return iter([Piece("Hello, ", ends=False), Piece("world", ends=True), Piece("Bye", ends=True)])

        def text_bytes(self, name):
            return 15
    """

    label: str  # its name in messages and in the name of the folder of prepared data
    settings: dict[str, Any]  # what the user asked for: plain values, part of the key of the prepared data
    resolved: str | None  # what it resolved to: a digest of the bytes, a commit; None if the hub didn't answer
    notes: list[str]  # for the plan: files of a folder that are not read

    def pieces(self, name: str) -> Iterator[Piece] | None:
        """Returns the documents of split "train" or "val" in pieces of any length, in the same order at every call.

        Returns None if the corpus has no validation split of its own: data.val_fraction of it is then held out.

        Raises:
            UserError: a file or a row can't be read; the message says where.
        """

    def text_bytes(self, name: str) -> int | None:
        """Returns about how many bytes of text the split has, for the progress bar; None if unknown."""

    def records(self, name: str) -> Iterator[Record] | None:
        """Returns the split's rows (conversations, pairs, prompts), each with its location; None as in `pieces`."""


def open_source(cfg: DataConfig) -> Source:
    """Opens the source that `cfg` names; `data.path` takes precedence over a dataset's name.

    Raises:
        UserError: a file is missing or empty, the hub lacks the name, or document_start is not a regular expression.
    """
    if cfg.val_path and not cfg.path:
        raise UserError(f"data.val_path={cfg.val_path} goes with files to train on: set data.path too")
    regular_expression("data.document_start", cfg.document_start or "")
    if "." in cfg.source:
        return open_own(cfg)
    if cfg.source == "python_stdlib":
        return StdlibSource(cfg)
    if cfg.source == "files" or cfg.path:
        return FileSource(cfg)
    return HubSource(cfg)


def refuse_changed(source: Any) -> None:
    """Raises ReadError if files of the source were changed since it was opened; one's own class need not tell."""
    getattr(source, "refuse_changed", lambda: None)()


def pieces(source: Source, cfg: DataConfig, name: str) -> Iterator[Piece] | None:
    """Returns the documents of split "train" or "val" after the filters; None if there is to be no validation split.

    data.min_length and data.num_samples apply to each split of the corpus; data.val_fraction is held out of the
    documents that remain.
    """
    held_out = filtered(source, cfg, "val")
    if held_out is not None:
        return held_out if name == "val" else filtered(source, cfg, "train")
    if cfg.val_fraction == 0:
        return filtered(source, cfg, "train") if name == "train" else None
    share, cut = plan_split(filtered(source, cfg, "train") or (), cfg.val_fraction, cfg.min_val_rows)
    return at_least(split(filtered(source, cfg, "train") or (), share, cut, held_out=name == "val"), 1)


def filtered(source: Source, cfg: DataConfig, name: str) -> Iterator[Piece] | None:
    """Returns the documents of a split that pass data.min_length and data.num_samples; None if it doesn't exist."""
    found = source.pieces(name)
    if found is None:
        return None
    kept = at_least(found, cfg.min_length or 0)
    return kept if cfg.num_samples is None else first(kept, cfg.num_samples)


def expected_bytes(source: Source, cfg: DataConfig, name: str) -> int | None:
    """Returns about how many bytes of text a split will have; None if unknown."""
    if cfg.num_samples is not None:
        return None
    if source.pieces("val") is not None:
        return source.text_bytes(name)
    whole, share = source.text_bytes("train"), cfg.val_fraction if name == "val" else 1 - cfg.val_fraction
    return None if whole is None else int(whole * share)


def open_own(cfg: DataConfig) -> Any:
    """Builds the object of the class that data.source names, and extends its settings for the key of prepared data.

    Its identity is what the class reports and a hash of its code (`_code_of`): if that changed, it is read again.

    Raises:
        UserError: the class is not allowed, can't be imported, lacks a member of a source, doesn't accept its
            arguments, or raises an exception.
    """
    # Composing the config has enforced run.allow_target. Objects built from the options may only be of this module.
    opened, options = [cfg.source.rpartition(".")[0]], cfg.source_options or {}
    cls = class_named(cfg.source, "data.source", opened)
    reads = ["pieces", "text_bytes"] if cfg.rows == "text" else ["records"]
    missing = lacking(cls, ("label", "settings", "resolved", "notes", *reads))
    if missing:
        kind = "text" if cfg.rows == "text" else "rows"
        found = f"data.source={cfg.source} is not a source of {kind}: it lacks {', '.join(missing)}"
        declared = "what __init__ sets has to be declared in the class body too, label: str"
        raise UserError(f"{found} (see lmtrain.data.sources.choose.Source; {declared})")
    if "_target_" in options or "_args_" in options:
        raise UserError("data.source_options: _target_ and _args_ have no meaning here; data.source names the class")
    source = build_target({"_target_": cfg.source, **options}, "data.source", cls, opened)
    with building("data.source", cfg.source):  # a property may raise
        settings = source.settings
        if not isinstance(settings, Mapping):
            raise UserError(f"data.source={cfg.source}: its settings are {settings!r}: make them a dict")
        source.settings = {**settings, "class": cfg.source, "options": options, "code": _code_of(cls, cfg.cache_dir)}
    return source


def _code_of(cls: type, cache_dir: str) -> str:
    """Returns a digest of the class's module, and of the modules and data files beside it that its code names.

    It is '' if there is no such code.
    """
    try:
        code, here = inspect.getsource(sys.modules[cls.__module__]), Path(inspect.getfile(cls))
    except (OSError, TypeError):  # the class was created at run time
        return ""
    read = [here]
    for path in read:
        text = path.read_text(encoding="utf-8", errors="replace") if path.suffix == ".py" else ""
        words = [word for line in _IMPORTS.findall(text) for word in re.findall(r"\w+", line)]
        named = sorted({*_NAMES.findall(text), *(f"{word}.py" for word in words)})
        read += [found for name in named if (found := here.parent / name).is_file() and found not in read]
    digests = Facts(cache_dir).digests(read[1:])
    return hashlib.sha256("".join([code, *digests.values()]).encode()).hexdigest()[:16]


_IMPORTS = re.compile(r"^\s*(?:from|import)\b.*", re.MULTILINE)
_NAMES = re.compile(r"[\"'/]([^\"'/\s]{1,100})[\"']")
_MIXTURE_KEYS = ("path", "val_path", "name", "config_name", "revision", "format", "train_split", "val_split",
                 "num_samples", "conversation_format", "columns", "ignore_columns", "header", "weight")  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MixturePart:
    """One source of a mixture, or the only source, with its config and how often its rows are seen in an epoch."""

    cfg: DataConfig
    source: Source
    weight: Fraction


def check_keys(entry: dict[str, Any], known: Sequence[str], where: str) -> None:
    """Raises UserError for the first unknown key of an entry, and suggests the nearest known one."""
    for key in entry:
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise UserError(f"{where}.{key} is not known{hint} (keys: {', '.join(known)})")


def open_parts(cfg: DataConfig) -> list[MixturePart]:
    """Opens the sources that `cfg` names: a single one, or those of data.mixture.

    Raises UserError for text sources, missing files and unknown keys in the mixture.
    """
    if cfg.source == "mixture":
        if not cfg.mixture:
            raise UserError("data.mixture is empty: list sources, data.mixture=[{path: a.jsonl, weight: 2}, {name: b}]")
        return [_part(cfg, entry, number) for number, entry in enumerate(cfg.mixture)]
    if cfg.source not in ("hub", "files", "python_stdlib") and "." not in cfg.source:
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


def refuse_changed_parts(parts: Sequence[MixturePart]) -> None:
    for part in parts:
        refuse_changed(part.source)


def min_val_rows(cfg: DataConfig) -> dict[str, int]:
    """Returns what data.min_val_rows adds to the key of prepared data; empty if it has no effect."""
    return {"min_val_rows": cfg.min_val_rows} if cfg.min_val_rows and cfg.val_fraction and not cfg.val_path else {}


def split_records(part: MixturePart, name: str) -> Iterator[Record] | None:
    """Returns the rows of split "train" or "val"; without the latter, every (1 / val_fraction)-th row is held out.

    A larger share of a small number of rows is held out (data.min_val_rows). Returns None if there is to be no
    validation split. data.num_samples limits the rows of each of the source's own splits.
    """
    cfg = part.cfg

    def rows(of: str) -> Iterator[Record] | None:
        found = part.source.records(of)
        return None if found is None else itertools.islice(found, cfg.num_samples)

    own = rows("val")
    if own is not None:
        return own if name == "val" else rows("train")
    if cfg.val_fraction == 0:
        return rows("train") if name == "train" else None
    there = sum(1 for _ in itertools.islice(rows("train") or (), math.ceil(cfg.min_val_rows / cfg.val_fraction)))
    share = enough(cfg.val_fraction, there, cfg.min_val_rows)
    train = enumerate(rows("train") or ())
    return (row for index, row in train if is_held_out(index, share) == (name == "val"))
