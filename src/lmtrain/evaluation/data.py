"""Evaluation data: documents as token ids, conversations or pairs, with a hash that identifies the data."""

import copy
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.config.effect import names_data
from lmtrain.config.schema import Config
from lmtrain.config.schema_data import DataConfig, TokenizerConfig
from lmtrain.data import framing
from lmtrain.data.chat.templates import ChatEncoder
from lmtrain.data.corpus import held_by, row_format
from lmtrain.data.examples.documents import Examples
from lmtrain.data.examples.prepare import prepare_examples
from lmtrain.data.examples.prompt_rows import PromptRowEncoder
from lmtrain.data.examples.row_counts import Counts
from lmtrain.data.examples.row_format import PAIRS, ChatRows
from lmtrain.data.sources import choose as sources
from lmtrain.data.sources.pieces import Piece
from lmtrain.data.stream.head import prepare_head
from lmtrain.data.text.encode import Encoder
from lmtrain.data.text.mixture import documents_of
from lmtrain.data.text.prepare import pieces_of, prepare
from lmtrain.data.tokenizers import unknown_token
from lmtrain.errors import UserError


def kind_of(config: Config) -> str:
    """Returns the kind of the data: text, conversations (and rows that are scored like them) or pairs."""
    held = held_by(config.data.rows, config)
    return held if held == "text" else "pairs" if held == PAIRS else "conversations"


def chosen(config: Config, own: Config | None) -> tuple[Config, str]:
    """Returns the config whose data is evaluated on, and a description of the part that is used.

    Named files are used as a whole; of other data, as of a run's own, only the validation split or held-out part is.

    Raises:
        UserError: no data is named and the model's training config is unknown.
    """
    if not names_data(config):
        if own is None:
            advice = "name data, such as data=text data.val_path=test.txt, or evaluate.data=named"
            raise UserError(f"evaluate on what? this model is not a run's: {advice} for the data of this command")
        own.data.cache_dir = config.data.cache_dir  # a run's config.yaml doesn't say where this command writes
        return own, "validation split of the run"
    named = copy.deepcopy(config)
    data = named.data
    files = data.val_path or data.path
    if files and data.source != "bins":
        data.source, data.path, data.val_path = "files", files, files  # whatever data is trained on by default
        return named, f"all of {files if isinstance(files, str) else ', '.join(files)}"
    if data.source == "python_stdlib":
        return named, "held-out modules of the standard library"
    if data.source != "hub":  # data.val_split is the split of a dataset of the hub
        return named, f"{data.path if data.source == 'bins' else data.source.rpartition('.')[2]}, validation part"
    if not _has_own_split(data):
        return named, f"{data.name}, held out of split {data.train_split}"
    return named, f"{data.name}, split {data.val_split}"


def _has_own_split(data: DataConfig) -> bool:
    """Returns whether a dataset of the hub has the split data.val_split, or data.val_fraction is held out instead."""
    return sources.open_source(data).records("val") is not None


def bytes_of(token: int, tokenizer: Any) -> int:
    """Returns the number of bytes of text that a token stands for, also if it is only a part of a character."""
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    written = tokenizer.convert_ids_to_tokens(token)
    if "\ufffd" not in text or "\ufffd" in written:
        return len(text.encode())
    # Such a token is written with one character per byte, or, where single bytes are a fallback, as <0xE2>.
    return 1 if re.fullmatch("<0x[0-9A-F]{2}>", written) else len(written)


@dataclass
class ScoredDocuments:
    """Text as tokenized documents.

    Once they have been read, `digest` is the SHA-256 of their token ids, and `unknown` the number of those that stand
    for characters which the tokenizer lacks.
    """

    config: Config
    limit: int | None
    digest: Any = field(default_factory=hashlib.sha256)
    unknown: int = 0

    def read(self, tokenizer: Any) -> Iterator[tuple[np.ndarray, int]]:
        """Yields (ids [T], UTF-8 bytes) of non-empty documents, tokenized as in training, without end-of-text token."""
        self.digest, self.unknown, unk = hashlib.sha256(), 0, unknown_token(tokenizer)
        data = self.config.data
        held_as_bins = data.source == "bins" or data.ring_bytes is not None
        found = _of_bins(self.config, tokenizer) if held_as_bins else self._of_text(tokenizer)
        for ids, size in islice((d for d in found if len(d[0])), self.limit):
            self.digest.update(np.asarray(ids, dtype="<u4").tobytes())
            self.unknown += 0 if unk is None else int(np.count_nonzero(ids == unk))
            yield ids, size

    def _of_text(self, tokenizer: Any) -> Iterator[tuple[np.ndarray, int]]:
        parts, size = [], 0
        for part in Encoder(tokenizer, None).encode(self._pieces()):
            parts.append(part.ids)
            size += part.text_bytes
            if part.ends:
                yield np.concatenate(parts), size
                parts, size = [], 0

    def _pieces(self) -> Iterator[Piece]:
        data = self.config.data
        if data.source == "mixture":
            return documents_of(data, "val")
        found = pieces_of(data, "val")
        if found is None:
            raise UserError("there is no validation split to score: name data, such as data=text data.val_path=a.txt")
        return found


def _of_bins(config: Config, tokenizer: Any) -> Iterator[tuple[np.ndarray, int]]:
    """Yields documents of prepared bins or a stream's head; UserError unless the model has their tokenizer."""
    make = prepare if config.data.source == "bins" else lambda *cfg: prepare_head(*cfg).prepared
    prepared = make(config.data, config.tokenizer)
    if tokenizer.get_vocab() != prepared.tokenizer.get_vocab():
        raise UserError(f"{prepared.folder} holds tokens of another tokenizer than the model's: evaluate on text")
    if "val" not in prepared.splits:
        raise UserError(f"{config.data.path} has no validation split: name one's folder with data.val_path")
    shards = prepared.splits["val"].shards
    if any(shard.mask is not None for shard in shards):
        raise UserError(f"{config.data.path} has a loss mask, and all of a text is scored: evaluate on text")
    before = framing.start_of(tokenizer) or [tokenizer.bos_token_id]
    begun: list[np.ndarray] = []  # parts of a document that is longer than a shard
    for shard in shards:
        ends = shard.document_ends(1, shard.tokens + 1).tolist() if shard.docs is not None else [shard.tokens]
        for start, end in zip([0, *ends], ends, strict=False):
            ids = np.concatenate([*begun, shard.read(start, end - start)])
            begun.clear()
            ids = ids[:-1] if len(ids) and ids[-1] == tokenizer.eos_token_id else ids
            ids = ids[len(before) :] if ids[: len(before)].tolist() == before else ids
            yield ids, len(tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False).encode())
        last = ends[-1] if ends else 0
        begun.append(shard.read(last, shard.tokens - last))


@dataclass(frozen=True)
class ScoredRows:
    """Conversations (one example each) or pairs (two examples each, the chosen one first), tokenized for a model."""

    examples: Examples
    questions: dict[int, dict[str, Any]]  # prompt_ids, prompt and reference, by the example that is their answer
    end_ids: list[int]
    fingerprint: str
    left_out: int = 0  # rows of the data without an example, and answers without a token to score
    is_split: bool = False  # whether some conversations became several examples


def rows(config: Config, tokenizer_name: str | Path) -> ScoredRows:
    """Prepares the validation split of the rows of `config` by their row format.

    Its `to_evaluate` may choose the examples to score; prompts with an answer are scored as conversations.

    Args:
        tokenizer_name: tokenizer folder or hub name; its chat template is used unless data.chat_template names one.

    Raises:
        UserError: there are none.
    """
    data = config.data
    if data.source == "hub" and not data.path and _has_own_split(data):
        data = copy.deepcopy(data)
        data.train_split = str(data.val_split)  # nothing is trained, so only this split is prepared
    encoder = row_format(config)
    if encoder is PromptRowEncoder:
        encoder = ChatRows
    tokenizer = TokenizerConfig(kind="hub", name_or_path=str(tokenizer_name))
    prepared = prepare_examples(data, tokenizer, encoder, splits=("val",))
    examples = prepared.split("val")
    if examples is not None:
        examples = getattr(encoder, "to_evaluate", lambda examples: examples)(examples)
    if examples is None or len(examples) == 0:
        raise UserError("there is no validation split to evaluate on: name rows with data.val_path=...")
    ends = ChatEncoder(prepared.tokenizer, data).end_of_turn_ids()
    # Folders of earlier versions don't have the number of the example.
    asked = {examples.place_of(q.get("example", i)): q for i, q in enumerate(prepared.meta["questions"])}
    questions = {place: question for place, question in asked.items() if place is not None}
    counts = Counts(**prepared.counts["val"])
    used = counts.rows - sum(counts.bad.values()) - counts.dropped
    is_split = encoder is ChatRows and counts.examples + counts.untrained > used
    return ScoredRows(examples, questions, ends, prepared.fingerprint, counts.rows - used + counts.untrained, is_split)
