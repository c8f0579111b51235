"""From rows (conversations, preferences) to tokenized examples on disk, found again by a hash of what shaped them."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from transformers import PreTrainedTokenizerFast

from lmtrain.data import example_store as store
from lmtrain.data import tokenizers
from lmtrain.data.cache import build_once
from lmtrain.data.conversations import BadRow
from lmtrain.data.example_store import Examples, ExampleWriter
from lmtrain.data.prepare import key_hash
from lmtrain.data.progress import PrepareProgress
from lmtrain.data.records import Part, open_parts, split_records
from lmtrain.data.row_counts import Counts, check_untrained, short, summary
from lmtrain.errors import RunError, UserError, disk_full
from lmtrain.schema import Data, Tokenizer

# Raised when the same rows and settings come to give another folder, so that one made before is not used any more.
EXAMPLES_VERSION = 2
_SHAPING = ("num_samples", "val_fraction", "on_bad_row")
MAX_QUESTIONS = 256  # validation rows kept in words, for answers to be written beside their references


@dataclass
class Encoded:
    """What an encoder makes of a row: nothing where it is dropped for its length."""

    examples: list[tuple[list[int], list[bool]]]  # ids, learned; a pair's chosen and rejected stand one after another
    cut: int = 0  # tokens taken away
    question: dict[str, Any] | None = None  # {"prompt_ids", "prompt", "reference", "chat": by the chat template}


class RowEncoder(Protocol):
    """From a row to its examples, `group` of which belong together (1, or 2 for a pair)."""

    identity: dict[str, Any]
    group: int

    @property
    def words(self) -> str:
        """What it took the rows for, for the plan."""

    def encode(self, row: dict[str, Any], where: str, cfg: Data, question: bool) -> Encoded:
        """Raises BadRow."""

    def decode(self, ids: list[int]) -> str: ...

    def finish_tokenizer(self, tokenizer: Any) -> None:
        """Leaves in the tokenizer what those who use the trained model need: the chat template."""


@dataclass(frozen=True)
class PreparedExamples:
    """A folder of examples and its tokenizer; `fingerprint` names the tokens themselves, wherever the folder lies."""

    folder: Path
    meta: dict[str, Any]
    tokenizer: PreTrainedTokenizerFast
    fingerprint: str

    def split(self, name: str) -> Examples | None:
        return Examples(self.folder, name) if name in self.meta["splits"] else None


def prepare_examples(
    cfg: Data, tokenizer_cfg: Tokenizer, make_encoder: Callable[[Any, Data], RowEncoder], progress: bool = True
) -> PreparedExamples:
    """Tokenizes the rows that `cfg` names into <cache_dir>/<label>-<hash>, or finds them there.

    Safe to call from several processes at once and to kill at any moment.

    Raises:
        UserError: no such rows, a bad row (data.on_bad_row=raise), too many rows without a learned token, a template
            that doesn't fit, a cache that can't be written.
        RunError: the disk is full.
    """
    show = PrepareProgress(progress)
    try:
        return _prepare(cfg, tokenizer_cfg, make_encoder, show)
    finally:
        show.stop()


def _prepare(
    cfg: Data, tokenizer_cfg: Tokenizer, make_encoder: Callable[[Any, Data], RowEncoder], show: PrepareProgress
) -> PreparedExamples:
    if tokenizer_cfg.kind == "bpe":
        raise UserError(
            "tokenizer=bpe is trained on text, conversations need a tokenizer that exists: tokenizer=hub "
            "tokenizer.name_or_path=..., tokenizer=gpt2 or tokenizer=bytes; model=pretrained brings its own"
        )
    parts, named = open_parts(cfg), tokenizers.identity(tokenizer_cfg)
    tokenizer = tokenizers.load_or_train(tokenizer_cfg, lambda _: iter(()), named)
    encoder = make_encoder(tokenizer, cfg)
    key = {
        "version": EXAMPLES_VERSION,
        "sources": [{**part.source.settings, "weight": part.weight, "num_samples": part.cfg.num_samples,
                     "format": part.cfg.conversation_format, "columns": part.cfg.columns} for part in parts],
        "tokenizer": tokenizers.tokenizer_hash(tokenizer),
        "encoder": encoder.identity,
        "resolved": [part.source.resolved for part in parts],
        **{name: getattr(cfg, name) for name in _SHAPING},
    }  # fmt: skip
    key = json.loads(json.dumps(key, default=str))
    label = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{parts[0].source.label}-{named.label}")
    target = Path(cfg.cache_dir).expanduser() / f"{label}-{key_hash(key)[:12]}"

    def build(folder: Path) -> None:
        _build(folder, cfg, parts, encoder, tokenizer, key, show)

    if not _is_complete(target):
        build_once(target, _is_complete, build, show.say)
    meta = store.load_meta(target)
    for name, counts in meta["splits"].items():
        check_untrained(Counts(**counts), cfg, name)
    splits = [Examples(target, name) for name in meta["splits"]]
    return PreparedExamples(target, meta, tokenizers.load_folder(target / "tokenizer"), store.fingerprint(splits))


def _is_complete(folder: Path) -> bool:
    return (folder / store.META).exists()


def _build(
    folder: Path,
    cfg: Data,
    parts: list[Part],
    encoder: RowEncoder,
    tokenizer: PreTrainedTokenizerFast,
    key: dict[str, Any],
    show: PrepareProgress,
) -> None:
    """Fills an empty folder: examples, tokenizer, and the meta file last."""
    meta: dict[str, Any] = {"format_version": store.FORMAT_VERSION, "group": encoder.group, "splits": {}, "key": key}
    meta["questions"] = []  # of the validation rows
    try:
        for name in ("train", "val"):
            questions = meta["questions"] if name == "val" else None
            counts = _write_split(folder, cfg, parts, name, encoder, questions, show)
            if counts is not None:
                meta["splits"][name] = dict(counts.__dict__)
        meta["words"] = encoder.words
        encoder.finish_tokenizer(tokenizer)
        tokenizers.save(tokenizer, folder / "tokenizer")
        store.save_meta(meta, folder)
    except Exception as error:
        if disk_full(error):
            raise RunError(
                f"the disk is full: {folder.parent} can't take the tokenized rows; free some space, or set "
                f"data.cache_dir to a folder on another disk; what was written is removed"
            ) from None
        raise


def _write_split(
    folder: Path,
    cfg: Data,
    parts: list[Part],
    name: str,
    encoder: RowEncoder,
    questions: list[dict[str, Any]] | None,
    show: PrepareProgress,
) -> Counts | None:
    """Tokenizes one split of all parts; None where there is no such split or nothing is left of it.

    questions: filled with the first MAX_QUESTIONS of the split, where it is given.
    """
    counts = Counts()
    writer = ExampleWriter(folder, name)
    show.start(name, None)
    try:
        for part in parts:
            rows = split_records(part, name)
            if rows is not None:
                written = _write_part(part, rows, encoder, writer, counts, questions, show)
                _repeat(written, part.weight, encoder.group, writer, counts)
    finally:
        writer.close()
    if counts.examples == 0:
        _check_empty(counts, cfg, name, parts)
        return None
    show.say(summary(name, counts))
    return counts


def _write_part(
    part: Part,
    rows: Any,
    encoder: RowEncoder,
    writer: ExampleWriter,
    counts: Counts,
    questions: list[dict[str, Any]] | None,
    show: PrepareProgress,
) -> list[tuple[list[int], list[bool]]]:
    """Writes each row's examples once; returns them where the part's weight asks for more or fewer."""
    kept: list[tuple[list[int], list[bool]]] = []
    for where, row in rows:
        counts.rows += 1
        try:
            if isinstance(row, str):
                raise BadRow(where, row)
            asked = questions is not None and len(questions) < MAX_QUESTIONS
            encoded = encoder.encode(row, where, part.cfg, question=asked)
        except BadRow as bad:
            if part.cfg.on_bad_row == "raise":
                raise UserError(
                    f"{bad.where}: {bad.reason}; mend the row, or set data.on_bad_row=skip to leave such rows out"
                ) from None
            counts.bad[bad.reason] = counts.bad.get(bad.reason, 0) + 1
            counts.bad_at.setdefault(bad.reason, bad.where)
            continue
        counts.dropped += not encoded.examples
        counts.shortened += encoded.cut > 0
        groups = [encoded.examples[i : i + encoder.group] for i in range(0, len(encoded.examples), encoder.group)]
        for group in groups:
            if not all(any(trained) for _, trained in group):
                counts.untrained += 1
                if counts.untrained_at is None:
                    counts.untrained_at, counts.untrained_text = where, short(encoder.decode(group[-1][0]))
                continue
            show.advance(0, sum(len(ids) for ids, _ in group))
            if part.weight == 1:
                _write(group, writer, counts)
            else:
                kept += group
        if groups and questions is not None and encoded.question is not None:
            questions.append(encoded.question)
    return kept


def _repeat(
    examples: list[tuple[list[int], list[bool]]], weight: float, group: int, writer: ExampleWriter, counts: Counts
) -> None:
    """Each of a part's examples floor(weight) times, and an evenly spread rest of them once more."""
    whole, rest = divmod(weight, 1.0)
    number = len(examples) // group
    for index in range(number):
        more = int((index + 1) * rest + 1e-9) > int(index * rest + 1e-9)
        for _ in range(int(whole) + more):
            _write(examples[index * group : (index + 1) * group], writer, counts)


def _write(group: list[tuple[list[int], list[bool]]], writer: ExampleWriter, counts: Counts) -> None:
    for ids, trained in group:
        writer.append(ids, trained)
        counts.examples += 1
        counts.tokens += len(ids)
        counts.trained += sum(trained)
        counts.longest = max(counts.longest, len(ids))


def _check_empty(counts: Counts, cfg: Data, name: str, parts: list[Part]) -> None:
    """Raises UserError where a split that is needed has nothing left to train on."""
    check_untrained(counts, cfg, name)
    if name == "train" and counts.rows == 0:
        raise UserError(f"{parts[0].source.label} holds no rows to train on")
    if name == "train":
        raise UserError(f"no row is left to train on: {summary(name, counts)}")
