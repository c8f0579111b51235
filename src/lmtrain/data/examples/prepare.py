"""Prepares rows (conversations, preferences) as tokenized examples on disk, cached by a hash of their inputs."""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.config.schema_data import DataConfig, TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.data.chat.turns import BadRow
from lmtrain.data.examples.documents import Examples
from lmtrain.data.examples.row_counts import Counts, check_lost, check_untrained, short, summary
from lmtrain.data.examples.row_format import Example, RowEncoder
from lmtrain.data.order import Repeats
from lmtrain.data.sources.choose import MixturePart, min_val_rows, open_parts, split_records
from lmtrain.data.store import bins, contents
from lmtrain.data.store.prepared import PreparedData, folder_key, folder_of, new_meta, prepare_folder, settings
from lmtrain.data.store.progress import PrepareProgress
from lmtrain.data.store.writer import BinWriter
from lmtrain.errors import UserError

# Raised when the same rows and settings begin to give different examples, so that older folders are no longer used.
EXAMPLES_VERSION = 7
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
) -> PreparedExamples:
    """Tokenizes the rows that `cfg` names into <cache_dir>/<label>-<hash>, or reuses that folder.

    Raises:
        UserError: there are no such rows, a row is bad (data.on_bad_row=raise), too many rows have no token to train
            on or lose a field, a template doesn't fit, or the cache can't be written.
        RunError: the disk is full.
    """
    if tokenizer_cfg.kind in ("bpe", "char"):
        raise UserError(
            f"tokenizer={tokenizer_cfg.kind} is made from text, conversations need a tokenizer that exists: "
            "tokenizer=hub tokenizer.name_or_path=..., tokenizer=gpt2 or bytes; model=pretrained brings its own"
        )
    parts, named = open_parts(cfg), tokenizers.identity(tokenizer_cfg)
    tokenizer = tokenizers.load_or_train(tokenizer_cfg, lambda _: iter(()), named)
    encoder = make_encoder(tokenizer, cfg)
    key = folder_key(
        cfg,
        tokenizer_cfg,
        version=EXAMPLES_VERSION,
        parts=[{"source": p.source.settings, "resolved": p.source.resolved, "data": settings(p.cfg)} for p in parts],
        tokenizer_hash=tokenizers.tokenizer_hash(tokenizer),
        encoder=encoder.identity,
        **min_val_rows(cfg),
    )
    target = folder_of(cfg, f"{parts[0].source.label}-{named.label}", key)
    notes = [note for part in parts for note in part.source.notes]
    with PrepareProgress(progress) as show:

        def fill(folder: Path) -> None:
            questions: list[dict[str, Any]] = []  # of the validation rows
            meta: Any = new_meta(tokenizer, key) | {"notes": []}
            for name, asked in (("train", None), ("val", questions)):
                split = _write_split(folder, cfg, parts, name, encoder, meta, asked, show)
                if split is not None:
                    meta["splits"][name] = split
            encoder.finish_tokenizer(tokenizer)
            tokenizers.save(tokenizer, folder / "tokenizer")
            meta |= {"group": encoder.group, "words": encoder.words, "questions": questions}
            meta["notes"] += [note for part in parts for note in getattr(part.source, "notes_of_reading", list)()]
            bins.save_meta(meta, folder)

        found = dict(vars(prepare_folder(target, fill, notes, cfg, show)))
    weights = [part.weight for part in parts]
    if any(weight != 1 for weight in weights):
        found["fingerprint"] = contents.fingerprint([found["fingerprint"], [str(weight) for weight in weights]])
    prepared = PreparedExamples(**found, weights=weights)
    for name, counts in prepared.counts.items():
        check_untrained(Counts(**counts), cfg, name, prepared.meta["group"])
        check_lost(Counts(**counts), cfg, name)
    return prepared


def _write_split(
    folder: Path,
    cfg: DataConfig,
    parts: list[MixturePart],
    name: str,
    encoder: RowEncoder,
    meta: bins.Meta,
    questions: list[dict[str, Any]] | None,
    show: PrepareProgress,
) -> dict[str, Any] | None:
    """Tokenizes one split of all parts; returns None if there is no such split or it has no examples.

    If no row of the validation split is left, a note in `meta` says why.

    questions: if given, the first MAX_QUESTIONS questions of the split are added to it, each with the number of its
        row's first example.
    """
    counts, written = Counts(), [0]
    show.start(name, None)
    with BinWriter(folder, name, meta["dtype"], _SHARD_TOKENS, masked=True) as writer:
        for part in parts:
            _write_part(part, split_records(part, name) or (), encoder, writer, counts, questions, show)
            written.append(writer.documents)
        split = writer.close()
    if counts.examples == 0:
        check_untrained(counts, cfg, name, encoder.group)
        left = "; ".join(summary(name, counts))
        if name == "train":
            none = f"{parts[0].source.label} holds no rows to train on"
            raise UserError(f"no row is left to train on: {left}" if counts.rows else none)
        if counts.rows:
            meta["notes"].append(f"no row is left to validate on: {left}")
        return None
    show.say("\n".join(summary(name, counts)))
    return {**split, "bytes": None, "counts": counts.__dict__, "parts": np.diff(written).tolist()}


def _write_part(
    part: MixturePart,
    rows: Any,
    encoder: RowEncoder,
    writer: BinWriter,
    counts: Counts,
    questions: list[dict[str, Any]] | None,
    show: PrepareProgress,
) -> None:
    """Writes the examples of each row of a part, and counts what became of the row."""
    for where, row in rows:
        counts.rows += 1
        try:
            if isinstance(row, str):
                raise BadRow(where, row)
            asked = questions is not None and len(questions) < MAX_QUESTIONS
            encoded = encoder.encode(row, where, part.cfg, asked)
        except (BadRow, RecursionError) as error:
            bad = error if isinstance(error, BadRow) else BadRow(where, "the row is nested too deep")
            if part.cfg.on_bad_row == "raise" and not bad.skip:
                raise UserError(bad.refusal()) from None
            counts.add_bad(bad.reason, bad.where)
            continue
        counts.assistant_first += encoded.dropped_turns > 0
        counts.dropped += not encoded.examples
        counts.shortened += encoded.cut > 0
        counts.note(encoded.remarks, encoded.texts, where)
        groups = [encoded.examples[i : i + encoder.group] for i in range(0, len(encoded.examples), encoder.group)]
        first = counts.examples
        for group in groups:
            if not all(any(example[1]) for example in group):
                counts.untrained += 1
                if counts.untrained_at is None:
                    counts.untrained_at, counts.untrained_text = where, short(encoder.decode(group[-1][0]))
                continue
            show.advance(0, sum(len(example[0]) for example in group))
            _write(group, writer, counts, encoded.kept, getattr(encoder, "learns", True))
        if counts.examples > first and questions is not None and encoded.question is not None:
            questions.append({**encoded.question, "example": first})


def _write(group: list[Example], writer: BinWriter, counts: Counts, kept: str | None, learns: bool) -> None:
    for ids, trained, *label in group:
        array = np.array(ids, dtype=writer.dtypes["bin"])
        writer.append(array, np.array(trained), ends_document=True, label=label[0] if label else None, text=kept)
        counts.examples += 1
        counts.tokens += len(ids)
        counts.trained += sum(trained) if learns else 0  # a prompt's tokens are all given
        counts.longest = max(counts.longest, len(ids))
