"""Where text comes from (the hub, files, the standard library, a class of the user): its identity, its two splits."""

import hashlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from lmtrain.config.schema_data import DataConfig
from lmtrain.config.targets import build_target, building, class_named, lacking
from lmtrain.data.hub import Unreachable, commit_of
from lmtrain.data.sources import files, hub, stdlib
from lmtrain.data.sources.addresses import size_of
from lmtrain.data.sources.pieces import Piece, at_least, first, join_rows, plan_cut, share_to_hold_out, split
from lmtrain.data.store.contents import Facts
from lmtrain.errors import UserError


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
        return _StdlibSource(cfg)
    if cfg.source == "files" or cfg.path:
        return _FileSource(cfg)
    return _HubSource(cfg)


def pieces(source: Source, cfg: DataConfig, name: str) -> Iterator[Piece] | None:
    """The documents of split "train" or "val" after the filters; None where there is to be no validation split.

    data.min_length and data.num_samples apply to each split of the corpus; what is held out by data.val_fraction
    comes out of the documents they leave.
    """
    held_out = _filtered(source, cfg, "val")
    if held_out is not None:
        return held_out if name == "val" else _filtered(source, cfg, "train")
    train = _filtered(source, cfg, "train")
    assert train is not None
    if cfg.val_fraction == 0:
        return train if name == "train" else None
    share = share_to_hold_out(_filtered(source, cfg, "train") or iter(()), cfg.val_fraction, cfg.min_val_rows)
    cut = plan_cut(_filtered(source, cfg, "train") or iter(()), share)
    return at_least(split(train, share, cut, held_out=name == "val"), 1)


def _filtered(source: Source, cfg: DataConfig, name: str) -> Iterator[Piece] | None:
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


class _StdlibSource:
    label = "python_stdlib"
    notes: list[str] = []  # noqa: RUF012

    def __init__(self, cfg: DataConfig) -> None:
        self.cfg = cfg
        self.files = stdlib.stdlib_files()
        self.resolved: str | None = Facts(None).digest(self.files)
        self.settings: dict[str, Any] = {"kind": "python_stdlib"}
        if cfg.rows != "text":
            self.settings["questions"] = stdlib.VERSION

    def records(self, name: str) -> Iterator[tuple[str, dict[str, Any] | str]] | None:
        """Questions about the library: conversations, or pairs of answers; those of "val" about modules of its own."""
        if name == "val" and self.cfg.val_fraction == 0:
            return None
        return stdlib.rows_of(self.cfg.rows, name == "val", self.cfg.val_fraction)

    def pieces(self, name: str) -> Iterator[Piece] | None:
        return stdlib.stdlib_pieces() if name == "train" else None

    def text_bytes(self, name: str) -> int | None:
        return sum(f.stat().st_size for f in self.files)


class _FileSource:
    def __init__(self, cfg: DataConfig) -> None:
        if not cfg.path:
            raise UserError("data.path is not set: name a file, a folder, a glob or a list of them, data.path=...")
        self.cfg = cfg
        found, self.notes = files.find_files(cfg.path, cfg.format)
        self.splits = {"train": found}
        if cfg.val_path:
            self.splits["val"], notes = files.find_files(cfg.val_path, cfg.format, key="data.val_path")
            self.notes = [*self.notes, *(note for note in notes if note not in self.notes)]
        first_part = cfg.path if isinstance(cfg.path, str) else str(next(iter(cfg.path)))
        self.label = re.split(r"[*?\[]", first_part)[0].rstrip("/").split("/")[-1] or "files"
        self.settings = {
            "kind": "files",
            "formats": sorted({format for _, format in self.splits["train"]}),
            "sample_by": cfg.sample_by,
        }
        facts = Facts(cfg.cache_dir)
        self.resolved: str | None = "+".join(files.digest([p for p, _ in part], facts) for part in self.splits.values())

    def pieces(self, name: str) -> Iterator[Piece] | None:
        return files.read_pieces(self.splits[name], self.cfg) if name in self.splits else None

    def records(self, name: str) -> Iterator[tuple[str, dict[str, Any] | str]] | None:
        return files.read_records(self.splits[name]) if name in self.splits else None

    def text_bytes(self, name: str) -> int | None:
        part = self.splits.get(name, [])
        plain = all(format == "text" and path.suffix not in files.COMPRESSED for path, format in part)
        sizes = [size_of(path) for path, _ in part]
        return sum(size or 0 for size in sizes) if plain and None not in sizes else None


class _HubSource:
    notes: list[str] = []  # noqa: RUF012

    def __init__(self, cfg: DataConfig) -> None:
        if not cfg.name:
            raise UserError("data.name is not set: name a dataset of the hub, data.name=..., or files, data.path=...")
        self.cfg = cfg
        self.label = cfg.name.rstrip("/").split("/")[-1]
        self.settings = {
            "kind": "hub",
            "name": cfg.name,
            "config_name": cfg.config_name,
            "revision": cfg.revision,
            "train_split": cfg.train_split,
            "val_split": cfg.val_split,
        }
        self.unreachable = ""
        self._splits: Any = None
        try:
            self.resolved: str | None = self._identity(cfg)
        except Unreachable as error:
            self.resolved, self.unreachable = None, str(error)

    def _identity(self, cfg: DataConfig) -> str:
        folder = Path(str(cfg.name)).expanduser()
        if folder.is_dir():  # a dataset repository on this machine
            return Facts(cfg.cache_dir).digest(sorted(p for p in folder.rglob("*") if p.is_file()))
        return commit_of("dataset", str(cfg.name), cfg.revision)

    def _parts(self, name: str) -> list[str] | None:
        """The dataset's splits that make up split "train" or "val"; None where it has no validation split."""
        if self._splits is None:
            self._splits = hub.load_splits(self.cfg, self.resolved, self.unreachable)
        asked = self.cfg.train_split if name == "train" else self.cfg.val_split
        parts = asked.split("+") if asked else []
        if name == "val" and not (parts and all(part in self._splits for part in parts)):
            return None
        return parts

    def records(self, name: str) -> Iterator[tuple[str, dict[str, Any] | str]] | None:
        parts = self._parts(name)
        return None if parts is None else (r for part in parts for r in hub.read_records(self._splits, part, self.cfg))

    def pieces(self, name: str) -> Iterator[Piece] | None:
        parts = self._parts(name)
        if parts is None:
            return None
        rows = (row for part in parts for row in hub.read_rows(self._splits, part, self.cfg))
        if self.cfg.document_start:
            return join_rows(rows, self.cfg.document_start)
        return (Piece(row, True) for row in rows)

    def text_bytes(self, name: str) -> int | None:
        return None


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
        settings = _mapping(source.settings, cfg.source)
        source.settings = {**settings, "class": cfg.source, "options": options, "code": _code_of(cls)}
    return source


def _mapping(settings: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(settings, Mapping):
        raise UserError(f"data.source={name}: its settings are {settings!r}: make them a dict of what shapes its data")
    return settings


def _code_of(cls: type) -> str:
    """A digest of the module that holds the class."""
    try:
        text = inspect.getsource(sys.modules[cls.__module__])
    except (OSError, TypeError):  # made at run time
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
