"""Evaluation data: documents as token ids, conversations or pairs, with a hash that identifies the data."""

import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.config.schema import Config
from lmtrain.config.schema_data import DataConfig, TokenizerConfig
from lmtrain.data.chat.templates import ChatEncoder
from lmtrain.data.examples.documents import Examples
from lmtrain.data.examples.pair_rows import PairRowEncoder
from lmtrain.data.examples.prepare import prepare_examples
from lmtrain.data.examples.prompt_rows import PromptRowEncoder
from lmtrain.data.examples.row_format import ChatRows
from lmtrain.data.sources import choose as sources
from lmtrain.data.sources.pieces import Piece
from lmtrain.data.store import bins
from lmtrain.data.stream.head import prepare_head
from lmtrain.data.text.encode import Encoder
from lmtrain.data.text.mixture import documents_of
from lmtrain.data.text.prepare import prepare
from lmtrain.errors import UserError


def kind_of(data: DataConfig) -> str:
    """Returns the kind of the data: text, conversations or pairs."""
    return "text" if data.conversation_format is None else "conversations" if data.ranking is None else "pairs"


def is_named(config: Config) -> bool:
    """Returns whether the command names the evaluation data; otherwise it is the run's own validation split."""
    data, choice = config.data, config.evaluate.data
    if choice != "auto":
        return choice == "named"
    return bool(data.val_path or data.path) or data.source != "python_stdlib" or data.rows != "text"


def chosen(config: Config, own: Config | None) -> tuple[Config, str]:
    """Returns the config whose data is evaluated on, and a description of the part that is used.

    Named data without a validation split of its own is used as a whole; of a run's data only the held-out part is used.

    Raises:
        UserError: no data is named and the model's training config is unknown.
    """
    if not is_named(config):
        if own is None:
            raise UserError(
                "evaluate on what? this model is not a run's: name data, such as data=text data.val_path=test.txt, or "
                "evaluate.data=named for the data of this command"
            )
        return own, "validation split of the run"
    named = copy.deepcopy(config)
    data = named.data
    files = data.val_path or data.path
    if files and data.source != "bins":
        data.path = data.val_path = files
        return named, f"all of {files if isinstance(files, str) else ', '.join(files)}"
    if data.source == "python_stdlib":
        return named, f"held-out {data.rows if data.rows != 'text' else 'modules'} of the standard library"
    return named, f"{data.name or data.source}, split {data.val_split or data.train_split}"


@dataclass
class ScoredDocuments:
    """Text as tokenized documents; `digest` is the SHA-256 of their token ids once they have been read."""

    config: Config
    limit: int | None
    digest: Any = field(default_factory=hashlib.sha256)

    def read(self, tokenizer: Any) -> Iterator[tuple[np.ndarray, int]]:
        """Yields (ids [T], UTF-8 bytes) of non-empty documents, tokenized as in training, without end-of-text token."""
        self.digest = hashlib.sha256()
        data = self.config.data
        held_as_bins = data.source == "bins" or data.ring_bytes is not None
        found = _of_bins(self.config, tokenizer) if held_as_bins else self._of_text(tokenizer)
        for ids, size in islice((d for d in found if len(d[0])), self.limit):
            self.digest.update(np.asarray(ids, dtype="<u4").tobytes())
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
        found = sources.pieces(sources.open_source(data), data, "val")
        if found is None:
            raise UserError(
                "there is no validation split to evaluate on: name data, such as data=text data.val_path=test.txt"
            )
        return found


def _of_bins(config: Config, tokenizer: Any) -> Iterator[tuple[np.ndarray, int]]:
    """Yields documents of prepared bins or a stream's head; UserError unless the model has their tokenizer."""
    make = prepare if config.data.source == "bins" else lambda *cfg: prepare_head(*cfg).prepared
    prepared = make(config.data, config.tokenizer)
    if tokenizer.get_vocab() != prepared.tokenizer.get_vocab():
        raise UserError(f"{prepared.folder} holds tokens of another tokenizer than the model's: evaluate on text")
    if not bins.has_split(prepared.folder, "val"):
        raise UserError(f"{prepared.folder} has no val.bin to evaluate on")
    for shard in bins.open_bins(prepared.folder, "val").shards:
        ends = shard.document_ends(1, shard.tokens + 1).tolist() if shard.docs is not None else [shard.tokens]
        for start, end in zip([0, *ends], ends, strict=False):
            ids = shard.read(start, end - start)
            ids = ids[:-1] if len(ids) and ids[-1] == tokenizer.eos_token_id else ids
            yield ids, len(tokenizer.decode(ids.tolist()).encode())


@dataclass(frozen=True)
class ScoredRows:
    """Conversations (one example each) or pairs (two examples each, the chosen one first), tokenized for a model."""

    examples: Examples
    questions: list[dict[str, Any]]  # prompt_ids, prompt, reference
    end_ids: list[int]
    fingerprint: str


def rows(config: Config, tokenizer_name: str | Path) -> ScoredRows:
    """Prepares the validation split of the conversations or pairs of `config`.

    Args:
        tokenizer_name: tokenizer folder or hub name; its chat template is used unless data.chat_template names one.

    Raises:
        UserError: the rows have a format of their own (KTO's labelled answers, a user's class), or there are none.
    """
    data = config.data
    if "." in data.rows and not data.rows.endswith(f".{PromptRowEncoder.__name__}"):
        raise UserError(
            f"these rows are {data.rows.rpartition('.')[2]}'s, and lmtrain.evaluate scores text, conversations and "
            f"pairs: val/... of the training are the scores on such rows; to score the model on others, name them: "
            f"data=chat_jsonl data.val_path=chats.jsonl"
        )
    if data.source == "hub" and data.name and not data.path and data.val_split is not None:
        data = copy.deepcopy(data)
        data.train_split = str(data.val_split)  # nothing is trained, so only this split is prepared
    encoder = ChatRows if kind_of(data) == "conversations" else PairRowEncoder
    prepared = prepare_examples(data, TokenizerConfig(kind="hub", name_or_path=str(tokenizer_name)), encoder)
    examples = prepared.split("val")
    if examples is None or len(examples) == 0:
        raise UserError("there is no validation split to evaluate on: name rows with data.val_path=...")
    ends = ChatEncoder(prepared.tokenizer, data).end_of_turn_ids()
    return ScoredRows(examples, prepared.meta["questions"], ends, prepared.fingerprint)
