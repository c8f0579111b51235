"""The prepared data of a run as rows, whatever the objective: bins for text, examples for conversations."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmtrain.data import bins
from lmtrain.data.chat_rows import ChatRows
from lmtrain.data.chat_templates import ChatEncoder
from lmtrain.data.example_rows import PackedRows, PaddedRows
from lmtrain.data.example_store import Examples
from lmtrain.data.examples import PreparedExamples, prepare_examples
from lmtrain.data.modules import Rows
from lmtrain.data.packing import pack
from lmtrain.data.pair_rows import PairRowEncoder, PairRows
from lmtrain.data.prepare import prepare
from lmtrain.data.row_counts import Counts, summary
from lmtrain.data.windows import Windows
from lmtrain.errors import UserError
from lmtrain.schema import Config


@dataclass
class Corpus:
    """Rows to train and validate on, and what is known about them."""

    tokenizer: Any
    folder: Path
    fingerprint: str  # names the tokens themselves
    train: Rows
    val: Rows | None
    epoch_tokens: int  # tokens of the training rows, without padding
    words: list[str]  # for the plan
    val_bytes_per_token: float | None = None
    questions: list[dict[str, Any]] = field(default_factory=list)  # prompt_ids, prompt, reference, chat
    end_ids: list[int] | None = None  # that end an answer; None where data is text
    splits: dict[str, Any] = field(default_factory=dict)  # what became of the rows of each


def build_corpus(config: Config) -> Corpus:
    """Prepares the data of `config`, or finds it prepared; UserError where it doesn't fit the objective."""
    _check_kind(config)
    build = {"causal_lm": _text, "sft": _conversations, "dpo": _pairs}[config.objective.name]
    return build(config)


def _check_kind(config: Config) -> None:
    """Text is for causal_lm, conversations for sft, pairs of answers for dpo; each option of data is one of them."""
    name, data = config.objective.name, config.data
    kind = "text" if data.conversation_format is None else "conversations" if data.ranking is None else "pairs"
    needed = {"causal_lm": "text", "sft": "conversations", "dpo": "pairs"}
    options = {
        "text": "data=text data.path=book.txt, data=wikitext",
        "conversations": "data=chat_jsonl data.path=chats.jsonl, data=alpaca",
        "pairs": "data=preference_jsonl data.path=pairs.jsonl, data=hh_rlhf",
    }
    if kind != needed[name]:
        objective = next(n for n, k in needed.items() if k == kind)
        raise UserError(
            f"objective={name} needs {needed[name]}, and this data holds {kind}: choose {options[needed[name]]}, ..., "
            f"or train on it with objective={objective}"
        )


def _text(config: Config) -> Corpus:
    prepared = prepare(config.data, config.tokenizer)
    train = bins.open_bins(prepared.folder, "train")
    val = bins.open_bins(prepared.folder, "val") if bins.has_split(prepared.folder, "val") else None
    seq_len, isolate = config.data.seq_len, config.data.isolate_documents
    rows = Windows(train.shards, seq_len, seed=config.seed, isolate_documents=isolate)
    documents = f" in {train.documents:,} documents" if train.documents is not None else ""
    return Corpus(
        prepared.tokenizer,
        prepared.folder,
        prepared.fingerprint,
        rows,
        Windows(val.shards, seq_len, seed=None, isolate_documents=isolate) if val is not None else None,
        len(rows) * seq_len,
        [f"{train.tokens:,} tokens{documents} ({prepared.folder})"],
        val.bytes / val.tokens if val is not None and val.bytes else None,
        splits={**prepared.meta["splits"]},
    )


def _conversations(config: Config) -> Corpus:
    prepared = prepare_examples(config.data, config.tokenizer, ChatRows)
    train, val = _splits(prepared)
    rows, words = example_rows(train, config, config.seed)
    val_rows = example_rows(val, config, None)[0] if val is not None else None
    return _of_examples(prepared, config, rows, val_rows, int(train.starts[-1]), words)


def _pairs(config: Config) -> Corpus:
    prepared = prepare_examples(config.data, config.tokenizer, PairRowEncoder)
    train, val = _splits(prepared)
    share = bool(config.data.share_prompts)
    rows = PairRows(train, share_prompts=share)
    val_rows = PairRows(val, share_prompts=share) if val is not None else None
    words = f"each pair is two examples{', its prompt there once' if share else ''}; no padding"
    return _of_examples(prepared, config, rows, val_rows, rows.epoch_tokens, words)


def _splits(prepared: PreparedExamples) -> tuple[Examples, Examples | None]:
    train = prepared.split("train")
    assert train is not None  # prepare_examples refuses data without it
    return train, prepared.split("val")


def _of_examples(
    prepared: PreparedExamples, config: Config, train: Rows, val: Rows | None, epoch_tokens: int, words: str
) -> Corpus:
    return Corpus(
        prepared.tokenizer,
        prepared.folder,
        prepared.fingerprint,
        train,
        val,
        epoch_tokens,
        [*split_words(prepared), words],
        questions=prepared.meta["questions"],
        end_ids=ChatEncoder(prepared.tokenizer, config.data).end_of_turn_ids(),
        splits=prepared.meta["splits"],
    )


def example_rows(examples: Examples, config: Config, seed: int | None) -> tuple[Rows, str]:
    """Examples as rows, by data.packing, and in words how well they fill them; seed None is for validation."""
    data = config.data
    method = data.packing or "off"
    if method == "off":
        return PaddedRows(examples, by_length=seed is None), "one example a row, padded to the longest of its batch"
    longest = int(examples.lengths.max())
    if longest > data.seq_len and method != "concat":
        raise UserError(
            f"an example has {longest} tokens, more than a row of data.seq_len={data.seq_len}: raise it, lower "
            f"data.max_length={data.max_length}, or set data.packing=off or concat"
        )
    packing = pack(examples.lengths, data.seq_len, method, seed)
    kept_apart = "kept apart" if data.isolate_documents else "seeing each other (data.isolate_documents=false)"
    words = (
        f"packed by {method}: {len(examples):,} examples in {len(packing):,} rows of {data.seq_len:,} tokens, "
        f"{packing.utilisation:.1%} full, {kept_apart}"
    )
    return PackedRows(examples, packing, isolate_documents=data.isolate_documents), words


def split_words(prepared: PreparedExamples) -> list[str]:
    """What became of the rows, a line a split."""
    splits = prepared.meta["splits"]
    lines = [summary(name, Counts(**counts)) for name, counts in splits.items()]
    return [f"rows of {prepared.meta['words']} ({prepared.folder})", *lines]
