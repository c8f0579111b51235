"""Prepares rows (conversations, preferences) as tokenized examples on disk, cached by a hash of their inputs."""

import contextlib
import functools
import itertools
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from fractions import Fraction
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Self

import numpy as np
from transformers import PreTrainedTokenizerFast

from lmtrain.config.schema_data import DataConfig, TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.data.chat.turns import BadRow
from lmtrain.data.examples.documents import Examples
from lmtrain.data.examples.parts import read_rows, recall_formats, write_formats, write_rows
from lmtrain.data.examples.row_counts import Counts, check_lost, check_untrained, short, summary
from lmtrain.data.examples.row_format import Encoded, Example, RowEncoder
from lmtrain.data.fast_ids import TextIds
from lmtrain.data.order import Repeats
from lmtrain.data.sources.choose import MixturePart, min_val_rows, open_parts, refuse_changed_parts, split_records
from lmtrain.data.sources.reading import note_reading, recall_reading
from lmtrain.data.store import bins, contents
from lmtrain.data.store.parts import Tasks, check_divisible
from lmtrain.data.store.prepared import PreparedData, folder_key, folder_of, new_meta, prepare_folder, settings
from lmtrain.data.store.progress import PrepareProgress
from lmtrain.data.store.writer import BinWriter
from lmtrain.data.tokenizers import Identity
from lmtrain.distributed.ranks import end_with_parent
from lmtrain.errors import RunError, UserError

# Raised when the same rows and settings begin to give different examples, so that older folders are no longer used.
EXAMPLES_VERSION = 9
_SHARD_TOKENS = 2**30  # maximum number of tokens in one file
MAX_QUESTIONS = 256  # validation rows also kept as text, to compare generated answers with their references


@dataclass(frozen=True)
class PreparedExamples(PreparedData):
    """A folder of examples, and how often those of each source occur per epoch; the fingerprint covers both."""

    weights: list[Fraction]

    @property
    def counts(self) -> dict[str, dict[str, Any]]:
        """The counts of each split's rows: how many were used, shortened, dropped or skipped, and why."""
        return {name: split["counts"] for name, split in self.meta["splits"].items()}

    @property
    def is_weighted(self) -> bool:
        return any(weight != 1 for weight in self.weights)

    def split(self, name: str) -> Examples | None:
        found = self.splits.get(name)
        if found is None:
            return None
        group = self.meta["group"]
        repeats = Repeats([n // group for n in self.meta["splits"][name]["parts"]], self.weights)
        return Examples(found.shards, repeats if self.is_weighted else None, group)


def prepare_examples(
    cfg: DataConfig,
    tokenizer_cfg: TokenizerConfig,
    make_encoder: Callable[[Any, DataConfig], RowEncoder],
    progress: bool = True,
    splits: tuple[str, ...] = ("train", "val"),
    tasks: Tasks | None = None,
) -> PreparedExamples:
    """Tokenizes the rows of `splits` that `cfg` names into <cache_dir>/<label>-<hash>, or reuses that folder.

    Args:
        tasks: what encodes the training files in shares, if it is to be several processes; the result is the same.

    Raises:
        UserError: there are no such rows, a row is bad (data.on_bad_row=raise), too many rows have no token to train
            on or lose a field, a template doesn't fit, or the cache can't be written.
        RunError: the disk is full.
    """
    # Everything that the tokens follow from is in the key of the folder.
    parts, named = open_parts(cfg), tokenizers.identity(tokenizer_cfg)
    is_made = tokenizer_cfg.kind in ("bpe", "char")  # of the rows' text, only once the folder has to be filled
    known = replace(tokenizer_cfg, kind="bytes") if is_made else tokenizer_cfg
    tokenizer = tokenizers.load_or_train(known, lambda _: iter(()), named)
    encoder = make_encoder(tokenizer, cfg)
    key = folder_key(
        cfg,
        tokenizer_cfg,
        version=EXAMPLES_VERSION,
        parts=[{"source": p.source.settings, "resolved": p.source.resolved, "data": settings(p.cfg)} for p in parts],
        tokenizer_hash=tokenizers.tokenizer_hash(tokenizer),
        encoder=encoder.identity,
        **min_val_rows(cfg),
        **({} if "train" in splits else {"splits": splits}),
    )
    target = folder_of(cfg, f"{parts[0].source.label}-{named.label}", key)
    notes = [note for part in parts for note in part.source.notes]
    with PrepareProgress(progress) as show:
        filling = _ExampleFilling(cfg, tokenizer_cfg, parts, named, tokenizer, encoder, make_encoder, splits, show)
        if tasks is not None and not bins.is_complete(target):
            _check_divisible(parts, encoder)
            filling.encoded = tasks.encode(target, filling.begin, filling.encode_part)
        changed = functools.partial(refuse_changed_parts, parts)
        found = dict(vars(prepare_folder(target, lambda folder: filling.fill(folder, key), changed, notes, cfg, show)))
    # The weights change how often examples are seen, not what is stored.
    weights = [part.weight for part in parts]
    if any(weight != 1 for weight in weights):
        found["fingerprint"] = contents.fingerprint([found["fingerprint"], [str(weight) for weight in weights]])
    prepared = PreparedExamples(**found, weights=weights)
    for name, counts in prepared.counts.items():
        check_untrained(Counts(**counts), cfg, name, prepared.meta["group"])
        check_lost(Counts(**counts), cfg, name)
    return prepared


@dataclass
class _ExampleFilling:
    """Fills an empty folder with the examples of some sources, or with a task's part of them."""

    cfg: DataConfig
    tokenizer_cfg: TokenizerConfig
    parts: list[MixturePart]
    named: Identity
    tokenizer: PreTrainedTokenizerFast  # one of bytes, if one is made from the rows
    encoder: RowEncoder
    make_encoder: Callable[[Any, DataConfig], RowEncoder]
    splits: tuple[str, ...]
    show: PrepareProgress
    encoded: Path | None = None  # the folder of the training rows that tasks have encoded

    @property
    def is_made(self) -> bool:
        return self.tokenizer_cfg.kind in ("bpe", "char")

    def make_tokenizer(self) -> PreTrainedTokenizerFast:
        """Makes a tokenizer from the rows."""
        self.show.say(f"training tokenizer={self.tokenizer_cfg.kind} on the rows of {self.parts[0].source.label}")
        whole = self.make_encoder(self.tokenizer, replace(self.cfg, max_length=None))
        texts = functools.partial(_texts, self.parts, whole, self.cfg)
        return tokenizers.load_or_train(self.tokenizer_cfg, texts, self.named)

    def begin(self, folder: Path) -> None:
        """Saves a tokenizer that is made from the rows, for all tasks."""
        if self.is_made:
            tokenizers.save(self.make_tokenizer(), folder)

    def encode_part(self, folder: Path, rank: int, tasks: int) -> None:
        """Encodes a share of the training rows of each source, those that will be held out included."""
        encoder = self.encoder
        if self.is_made:
            encoder = self.make_encoder(tokenizers.load_folder(folder.with_name("shared")), self.cfg)
        rows: Iterator[Row] = (
            (number, *row)
            for number, part in enumerate(self.parts)
            for row in part.source.share(rank, tasks).records("train") or ()  # type: ignore[attr-defined]
        )
        with _Encoding(encoder, [part.cfg for part in self.parts], self.cfg.num_proc) as encoding:
            write_rows(folder, encoding.of(rows, None), len(self.parts))
        write_formats(folder, encoder.formats)  # type: ignore[attr-defined]
        note_reading(folder)

    def fill(self, folder: Path, key: dict[str, Any]) -> None:
        tokenizer, encoder = self.tokenizer, self.encoder
        if self.is_made:
            shared = self.encoded / "shared" if self.encoded is not None else None
            tokenizer = self.make_tokenizer() if shared is None else tokenizers.load_folder(shared)
            encoder = self.make_encoder(tokenizer, self.cfg)
        if self.encoded is not None:
            recall_reading(self.encoded)
            recall_formats(self.encoded, encoder.formats)  # type: ignore[attr-defined]
        meta: Any = new_meta(tokenizer, key) | {"notes": []}
        rows = _RowWriter(folder, self.cfg, self.parts, encoder, meta, self.show, self.encoded)
        rows.write(self.splits)
        encoder.finish_tokenizer(tokenizer)
        tokenizers.save(tokenizer, folder / "tokenizer")
        meta |= {"group": encoder.group, "words": encoder.words, "questions": rows.questions}
        meta["notes"] += [note for part in self.parts for note in getattr(part.source, "notes_of_reading", list)()]
        bins.save_meta(meta, folder)


def _texts(parts: list[MixturePart], in_bytes: RowEncoder, cfg: DataConfig, name: str) -> Iterator[str]:
    """Yields the rows of a split as the model reads them, whole and without special tokens, to make a tokenizer from.

    in_bytes: an encoder whose ids are bytes, and special tokens from 256 on.
    """
    with _Encoding(in_bytes, [part.cfg for part in parts], cfg.num_proc) as encoding:
        for _, encoded in encoding.of(_rows(parts, name), None):
            for ids, *_ in [] if isinstance(encoded, BadRow) else encoded.examples:
                yield in_bytes.decode([i for i in ids if i < 256])


def _rows(parts: list[MixturePart], name: str) -> Iterator["Row"]:
    return ((i, *row) for i, part in enumerate(parts) for row in split_records(part, name) or ())


def _check_divisible(parts: list[MixturePart], encoder: RowEncoder) -> None:
    for part in parts:
        check_divisible(part.source, part.cfg)
    if not vars(type(encoder)).get("independent", False):
        found = f"{type(encoder).__name__} (data.rows) doesn't declare that it encodes each by itself (`independent`)"
        raise UserError(f"prepare.tasks encodes rows apart from one another, and {found}: leave prepare.tasks out")


@dataclass
class _RowWriter:
    """Tokenizes splits of some sources into a folder."""

    folder: Path
    cfg: DataConfig
    parts: list[MixturePart]
    encoder: RowEncoder
    meta: Any  # of the folder; the splits' counts are added to it
    show: PrepareProgress
    encoded: Path | None = None  # the folder of the training rows that tasks have encoded
    questions: list[dict[str, Any]] = field(default_factory=list)  # the first MAX_QUESTIONS of the validation rows

    def write(self, splits: tuple[str, ...]) -> None:
        with _Encoding(self.encoder, [part.cfg for part in self.parts], self.cfg.num_proc) as encoding:
            for name in splits:
                self._write_split(name, encoding)

    def _write_split(self, name: str, encoding: "_Encoding") -> None:
        """Tokenizes one split of all parts, unless there is no such split or it has no examples.

        If no row of the validation split is left, a note in `meta` says why.
        """
        counts, written, asked = Counts(), [0] * len(self.parts), name == "val"
        self.show.start(name, None)
        with BinWriter(self.folder, name, self.meta["dtype"], _SHARD_TOKENS, masked=True) as writer:
            if self.encoded is not None and name == "train":
                rows = read_rows(self.encoded, self.parts)
            else:
                rows = encoding.of(_rows(self.parts, name), self.questions if asked else None)
            for (i, where, _), encoded in rows:
                before = writer.documents
                self.write_row(where, encoded, self.parts[i].cfg, writer, counts, asked)
                written[i] += writer.documents - before
            split = writer.close()
        if counts.examples:
            self.show.say("\n".join(summary(name, counts)))
            self.meta["splits"][name] = {**split, "bytes": None, "counts": counts.__dict__, "parts": written}
            return
        check_untrained(counts, self.cfg, name, self.encoder.group)
        left = "; ".join(summary(name, counts))
        if name == "train":
            none = f"{self.parts[0].source.label} holds no rows to train on"
            raise UserError(f"no row is left to train on: {left}" if counts.rows else none)
        if counts.rows:
            self.meta["notes"].append(f"no row is left to validate on: {left}")

    def write_row(
        self, where: str, encoded: Encoded | BadRow, cfg: DataConfig, writer: BinWriter, counts: Counts, asked: bool
    ) -> None:
        """Writes the examples of a row, and counts what became of it.

        asked: whether its question is kept, with the number of its first example.
        """
        encoder = self.encoder
        counts.rows += 1
        if isinstance(encoded, BadRow):
            if cfg.on_bad_row == "raise" and not encoded.skip:
                raise UserError(encoded.refusal())
            counts.add_bad(encoded.reason, encoded.where)
            return
        counts.assistant_first += encoded.dropped_turns > 0
        counts.dropped += not encoded.examples
        counts.shortened += encoded.cut > 0
        counts.note(encoded.remarks, encoded.texts, where)
        counts.note_unread(encoded.unread, getattr(encoder, "unread_as", ""))
        groups = [encoded.examples[i : i + encoder.group] for i in range(0, len(encoded.examples), encoder.group)]
        first = counts.examples
        for group in groups:
            if not all(any(example[1]) for example in group):
                counts.untrained += 1
                if counts.untrained_at is None:
                    counts.untrained_at, counts.untrained_text = where, short(encoder.decode(group[-1][0]))
                continue
            self.show.advance(0, sum(len(example[0]) for example in group))
            _write(group, writer, counts, encoded.kept, getattr(encoder, "learns", True))
        if counts.examples > first and asked and encoded.question is not None:
            self.questions.append({**encoded.question, "example": first})


def _write(group: list[Example], writer: BinWriter, counts: Counts, kept: str | None, learns: bool) -> None:
    for ids, trained, *label in group:
        array = np.array(ids, dtype=writer.dtypes["bin"])
        writer.append(array, np.array(trained), ends_document=True, label=label[0] if label else None, text=kept)
        counts.examples += 1
        counts.tokens += len(ids)
        counts.trained += sum(trained) if learns else 0  # a prompt's tokens are all given
        counts.longest = max(counts.longest, len(ids))


ENOUGH = 2000  # training rows from which on several processes encode: one or two seconds of work
_CHUNK = 64  # rows that are encoded at a time
_MOST = 8  # processes by default: as many as one process can feed
Row = tuple[int, str, Any]  # the number of its source, where it is, and the row, or a message why it can't be read
_theirs: tuple[RowEncoder, list[DataConfig]]  # in a process that encodes rows


def _begin(encoder: RowEncoder, cfgs: list[DataConfig], parent: int) -> None:
    """Begins a process that encodes rows; Ctrl-C is for its parent, with which it ends."""
    global _theirs
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(parent, signal.SIGKILL)
    os.environ["RAYON_NUM_THREADS"] = "1"  # of fastokens
    _theirs = encoder, cfgs


def _encode_there(rows: list[Row]) -> tuple[list[Encoded | BadRow], dict[Any, str]]:
    """Encodes rows up to one that raises an exception; also returns the formats so far."""
    found: list[Encoded | BadRow] = []
    with contextlib.suppress(Exception):
        for row in rows:
            found.append(_encode(*_theirs, row))
    return found, getattr(_theirs[0], "formats", {})


def _encode(encoder: RowEncoder, cfgs: list[DataConfig], row: Row | Exception, asked: bool = False) -> Encoded | BadRow:
    """Encodes a row, with its question if `asked`; returns a BadRow instead of raising it."""
    if isinstance(row, Exception):
        raise row
    source, where, record = row
    try:
        return BadRow(where, record) if isinstance(record, str) else encoder.encode(record, where, cfgs[source], asked)
    except BadRow as bad:
        return bad
    except RecursionError:
        return BadRow(where, "the row is nested too deep")


class _Encoding:
    """Encodes rows in order, from ENOUGH training rows on in several processes, which changes nothing but the time.

    The processes are forked before anything is encoded here: they inherit the encoder, and have threads of their own.
    What raises an exception there, is encoded again here, where it stops the preparation.
    """

    def __init__(self, encoder: RowEncoder, cfgs: list[DataConfig], processes: int | None) -> None:
        self.encoder, self.cfgs = encoder, cfgs
        can = sys.platform == "linux" and not TextIds.has_threads and vars(type(encoder)).get("independent", False)
        self.processes = (processes or min(_MOST, len(os.sched_getaffinity(0)))) if can else 1
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def of(self, rows: Iterator[Row], questions: list[Any] | None) -> Iterator[tuple[Row, Encoded | BadRow]]:
        """Yields rows with what became of them; those whose questions are still wanted are encoded in this process."""
        rows = _with_error(rows)
        if questions is None and self.processes > 1:
            first = list(itertools.islice(rows, ENOUGH))
            rows = itertools.chain(first, rows)
            if len(first) == ENOUGH:
                given = (self.encoder, self.cfgs, os.getpid())
                self.pool = ProcessPoolExecutor(self.processes, get_context("fork"), _begin, given)
        while self.pool is None or _asks(questions):
            row = next(rows, None)
            if row is None:
                return
            yield row, _encode(self.encoder, self.cfgs, row, _asks(questions))
        waiting: deque[tuple[list[Row], Future[Any]]] = deque()
        for chunk in iter(lambda: list(itertools.islice(rows, _CHUNK)), []):
            waiting.append((chunk, self.pool.submit(_encode_there, [row for row in chunk if isinstance(row, tuple)])))
            if len(waiting) > 2 * self.processes:
                yield from self._encoded_of(*waiting.popleft())
        while waiting:
            yield from self._encoded_of(*waiting.popleft())

    def _encoded_of(self, rows: list[Row], there: "Future[Any]") -> Iterator[tuple[Row, Encoded | BadRow]]:
        found: list[Encoded | BadRow] = []
        try:
            found, formats = there.result()
            self.encoder.formats.update(formats)  # type: ignore[attr-defined]
        except BrokenProcessPool:
            raise RunError("a process that encodes rows was killed, maybe out of memory: set data.num_proc=1") from None
        except Exception:  # what can't be pickled
            pass
        for row, encoded in itertools.zip_longest(rows, found):
            yield row, encoded or _encode(self.encoder, self.cfgs, row)


def _asks(questions: list[Any] | None) -> bool:
    return questions is not None and len(questions) < MAX_QUESTIONS


def _with_error(rows: Iterator[Row]) -> Iterator[Any]:
    """Yields rows, and the exception that ends them: it comes after what is found out about the rows before."""
    try:
        yield from rows
    except Exception as error:
        yield error
