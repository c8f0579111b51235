"""The prepared data of a run: training and validation rows, and what is known about them.

Text becomes token bins, a mixture of bins or a stream; all other data becomes examples of a row format.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from lmtrain.config.batch import step_sizes
from lmtrain.config.defaults import conf_dir
from lmtrain.config.options import OBJECTIVES
from lmtrain.config.proposers import option_holding
from lmtrain.config.schema import Config
from lmtrain.config.schema_data import DataConfig
from lmtrain.config.targets import building, class_named, lacking
from lmtrain.data import framing
from lmtrain.data.chat.find_template import find_template
from lmtrain.data.chat.templates import ChatEncoder
from lmtrain.data.examples.documents import TextPieces
from lmtrain.data.examples.pair_rows import PairRowEncoder, PairRows
from lmtrain.data.examples.prepare import PreparedExamples, prepare_examples
from lmtrain.data.examples.row_counts import Counts, remark_lines, summary
from lmtrain.data.examples.row_format import ChatRows, RowEncoder
from lmtrain.data.examples.rows import example_rows
from lmtrain.data.mixing import Mixture, MixtureSource
from lmtrain.data.order import Rows
from lmtrain.data.store.bins import SplitBins
from lmtrain.data.store.parts import Tasks
from lmtrain.data.store.prepared import PreparedData
from lmtrain.data.store.shards import Shard
from lmtrain.data.stream.head import Head, prepare_head
from lmtrain.data.stream.ring import StreamRows, make_ring
from lmtrain.data.text.fim import fill_in_the_middle, fim_lines
from lmtrain.data.text.mixture import mixture_fingerprint, mixture_lines, prepare_mixture
from lmtrain.data.text.prepare import prepare
from lmtrain.data.text.windows import Windows
from lmtrain.data.tokenizers import tokenizer_hash
from lmtrain.errors import UserError, naming
from lmtrain.terminal import counted


@runtime_checkable
class PadsAnswers(Protocol):
    """Rows that pack several examples into one row of a micro-batch; `pad` switches to one padded example per row."""

    padded: bool

    def pad(self) -> None: ...

    @property
    def epoch_tokens(self) -> int: ...


@dataclass(kw_only=True)
class Corpus:
    """Training and validation rows, and what is known about them."""

    tokenizer: Any
    tokenizer_hash: str  # of the tokenizer as it came; it now begins a text as the rows do
    folder: Path
    fingerprint: str  # identifies the tokens themselves, independent of the folder
    train: Rows
    val: Rows | None
    epoch_tokens: int  # tokens of the training rows, without padding
    words: list[str]  # lines about the data for the plan
    notes: list[str]  # remarks on the sources (such as files not read), for the plan and inspect
    val_bytes_per_token: float | None = None
    questions: list[dict[str, Any]] = field(default_factory=list)  # prompt_ids, prompt, reference, chat
    end_ids: list[int] | None = None  # token ids that end an answer; None for text
    splits: dict[str, Any] = field(default_factory=dict)  # counts of each split, by name
    stream: Head | None = None  # set if the training rows come from a stream

    @classmethod
    def of(cls, prepared: PreparedData, **facts: Any) -> "Corpus":
        """Builds a Corpus from a prepared folder; `facts` are further fields, which override those of the folder."""
        known = {
            "tokenizer": prepared.tokenizer,
            "tokenizer_hash": tokenizer_hash(prepared.tokenizer),
            "folder": prepared.folder,
            "fingerprint": prepared.fingerprint,
            "notes": prepared.notes,
            "splits": {**prepared.meta["splits"]},
        }
        return cls(**(known | facts))

    @property
    def repeats(self) -> bool:
        """Whether a pass over the training rows reads the same rows again; those of a stream come once."""
        return self.stream is None

    def plan_rows(self, config: Config) -> list[tuple[str, str]]:
        tokenizer = f"{config.tokenizer.kind}, {len(self.tokenizer):,} tokens"
        return [("data", "\n".join([*self.words, *self.notes])), ("tokenizer", tokenizer)]

    def how_to_validate(self, data: DataConfig) -> str:
        """Returns advice on which config keys to set in order to get a validation split."""
        if data.source == "bins":
            return (
                "name a folder of validation tokens with data.val_path, or prepare the text with data.val_fraction=0.01"
            )
        rows = self.splits["train"].get("rows")  # only conversations and pairs have it; text can be cut anywhere
        if rows == 1:
            return "data.val_path or data.val_split names one, because a single row can't be divided"
        share = 0.01 if rows is None else max(0.01, math.ceil(100 / rows) / 100)  # every (1 / share)-th row
        return f"data.val_fraction={share:g} holds one out, data.val_path or data.val_split names one"


def _keep_prompts_apart(corpus: Corpus, longest: int, more: Sequence[Rows]) -> None:
    for rows in (corpus.train, corpus.val, *more):
        if isinstance(rows, PairRows) and rows.share_prompts and int(rows.examples.lengths.max()) > longest:
            rows.share_prompts = False
    if isinstance(corpus.train, PairRows) and not corpus.train.share_prompts:
        corpus.epoch_tokens = corpus.train.epoch_tokens
        corpus.words[-1] = f"both answers see the prompt of their own: beyond {longest:,} tokens positions differ"


def fit_to_model(
    config: Config, corpus: Corpus, unpacked_because: str | None, longest: int | None = None, more: Sequence[Rows] = ()
) -> None:
    """Switches to one padded example per row if the model can't isolate packed documents; `corpus.words` says so.

    Args:
        unpacked_because: the reason why the model can't isolate documents; None if it can.
        longest: of longer examples the tokens have another rotary embedding, so that a shorter one can't share theirs;
            None: all have the same.
        more: further rows to switch, besides those of the corpus.

    Raises:
        UserError: the rows hold several isolated documents and can't be switched to padding.
    """
    if longest is not None:
        _keep_prompts_apart(corpus, longest, more)
    if unpacked_because is None:
        return
    data = config.data
    packs = data.packing not in (None, "off")
    if isinstance(corpus.train, PadsAnswers) and (data.isolate_documents or not packs):
        for rows in (corpus.train, corpus.val, *more):
            if isinstance(rows, PadsAnswers):
                rows.pad()
        corpus.epoch_tokens = corpus.train.epoch_tokens
        corpus.words[-1] = f"each example is a padded row of its own: in one, each sees others ({unpacked_because})"
    elif data.isolate_documents and data.packing != "off":
        advice = "isolate_documents=false" if data.packing is None else "packing=off"
        chosen = " or model.attention=auto" if unpacked_because.startswith("model.attention=") else ""
        found = f"this model can't isolate the documents of a row ({unpacked_because})"
        raise UserError(f"data.isolate_documents=true: {found}: set data.{advice}{chosen}")


# The row formats of lmtrain; data.rows is one of these names or the import path of another row format's class.
ROW_FORMATS: dict[str, type[RowEncoder]] = {"conversations": ChatRows, "pairs": PairRowEncoder}


def build_corpus(config: Config) -> Corpus:
    """Prepares the data of `config` or opens it from the cache; raises UserError if it doesn't fit the objective."""
    check_rows(config)
    return prepare_corpus(config)


def prepare_corpus(config: Config, tasks: Tasks | None = None) -> Corpus:
    """Prepares the data as `build_corpus` does, but for any objective: the kind of rows is not checked.

    tasks: what encodes rows in shares, see `prepare_examples`.
    """
    if config.data.rows != "text":
        corpus = _examples(config, row_format(config), tasks)
    elif config.data.ring_bytes is not None:
        corpus = _stream(config)
    else:
        corpus = _mixture(config) if config.data.source == "mixture" else _text(config)
    if config.data.source != "bins":
        framing.follow(corpus.tokenizer, framing.wanted(corpus.tokenizer, config.data))
    return corpus


def check_rows(config: Config) -> None:
    """Raises UserError if the data holds something else than the objective needs."""
    objective, held = config.objective, config.data.rows
    if objective.rows == held or held_by(held, config) == held_by(objective.rows, config):
        return
    option = "text" if objective.rows == "text" else option_holding(objective.rows, [conf_dir()])
    options = f"data={option} data.path=..." if option else f"an option of the group data with rows: {objective.rows}"
    needed = f"rows such as data={option} reads" if option and "." in objective.rows else objective.rows
    others = [name for name, (_, made) in OBJECTIVES.items() if made.rows == held]
    instead = f", or train on it with objective={others[0]}" if others else ""
    raise UserError(f"objective={objective.name} needs {needed}, and this data holds {held}: choose {options}{instead}")


def held_by(rows: str, config: Config) -> str:
    """Returns what rows of a format hold (`RowEncoder.holds`), by its name as in data.rows; of text its name."""
    return rows if rows == "text" else getattr(format_named(rows, config.run.allow_target), "holds", rows)


def row_format(config: Config) -> type[RowEncoder]:
    """Returns the class that data.rows names; raises UserError if it can't be imported or lacks a method."""
    return format_named(config.data.rows, config.run.allow_target)


def format_named(rows: str, allow_target: Sequence[str]) -> type[RowEncoder]:
    if rows in ROW_FORMATS:
        return ROW_FORMATS[rows]
    if "." not in rows:
        raise UserError(f"data.rows={rows} is not known: text, {', '.join(ROW_FORMATS)}, or the path of a class")
    cls = class_named(rows, "data.rows", allow_target)
    missing = lacking(cls, ("group", "encode", "decode", "make_rows", "words", "finish_tokenizer"))
    if missing:
        found = f"data.rows={rows} is not a row format: it lacks {', '.join(missing)}"
        raise UserError(f"{found} (lmtrain.data.examples.row_format.RowEncoder says what they do)")
    return cls


def _text(config: Config) -> Corpus:
    prepared = prepare(config.data, config.tokenizer)
    train, val = prepared.splits["train"], prepared.splits.get("val")  # prepare refuses data without the first
    rows, words = text_rows(train.shards, config, config.seed)
    documents = f" in {counted(train.documents, 'document')}" if train.documents is not None else ""
    known = [f"{train.tokens:,} tokens{documents} ({prepared.folder})", *bos_lines(train, prepared.tokenizer)]
    if isinstance(rows, Windows):
        rows.fim = fill_in_the_middle(config.data, rows.shards, prepared.tokenizer, config.seed)
        words = fim_lines(rows.fim)
    corpus = Corpus.of(
        prepared,
        train=rows,
        val=text_rows(val.shards, config, None)[0] if val is not None else None,
        epoch_tokens=len(rows) * config.data.seq_len if isinstance(rows, Windows) else rows.examples.tokens,
        words=[*known, *words],
        val_bytes_per_token=bytes_per_target([val] if val is not None else [], config.data, prepared.tokenizer),
    )
    if config.data.source == "bins" and train.documents is not None:
        framing.follow(corpus.tokenizer, framing.held(corpus.tokenizer, train.begins_with))
    return corpus


def _stream(config: Config) -> Corpus:
    """Builds a corpus that reads a stream ahead of training; the stream's first tokens are the validation split."""
    make_ring(config, "uint16")  # before anything is read: reject settings that don't even fit the smallest dtype
    head = prepare_head(config.data, config.tokenizer)
    prepared = head.prepared
    val = prepared.splits["val"]  # prepare_head refuses a stream without it
    ring = make_ring(config, prepared.meta["dtype"])
    return Corpus.of(
        prepared,
        fingerprint=head.fingerprint,
        train=StreamRows(ring),
        val=_windows(val.shards, config, None),
        epoch_tokens=ring.window_rows * ring.seq_len,
        words=[f"{head.source.label}, a stream of {head.source.parts:,} files or shards: windows of "
               f"{ring.window_rows:,} rows in a ring of {ring.bytes:,} bytes",
               f"held out: its first {val.tokens:,} tokens ({prepared.folder})", *bos_lines(val, prepared.tokenizer)],
        val_bytes_per_token=bytes_per_target([val], config.data, prepared.tokenizer),
        stream=head,
    )  # fmt: skip


def _windows(shards: list[Shard], config: Config, seed: int | None) -> Windows:
    return Windows(shards, config.data.seq_len, seed=seed, isolate_documents=config.data.isolate_documents)


def text_rows(shards: list[Shard], config: Config, seed: int | None) -> tuple[Any, list[str]]:
    """Returns windows of text, or documents laid out by data.packing, and lines that describe their layout."""
    if config.data.packing is None:
        return _windows(shards, config, seed), []
    rows, words = example_rows(TextPieces(shards, config.data.seq_len), config, seed)
    return rows, [words]


def _mixture(config: Config) -> Corpus:
    """Builds the corpus of a text mixture: windows of all sources, concatenated, and the order that mixes them."""
    parts = prepare_mixture(config.data, config.tokenizer)
    trained = [part.splits["train"] for _, part in parts]
    held_out = [part.splits["val"] for _, part in parts if "val" in part.splits]
    # The rows of each source, and the order that mixes them by weight.
    sources = []
    for source, part in parts:
        with naming(f"data.mixture, {source.label} ({part.folder})"):
            rows = len(_windows(part.splits["train"].shards, config, config.seed))
        sources.append(MixtureSource(source.label, rows, source.weights, source.max_epochs))
    mixture = Mixture(sources, step_sizes(config.data), config.data.mixture_temperature)
    windows = _windows([shard for split in trained for shard in split.shards], config, config.seed)
    windows.mixture = mixture
    windows.fim = fill_in_the_middle(config.data, windows.shards, parts[0][1].tokenizer, config.seed)
    counts = {"train": _summed(trained), "val": _summed(held_out)}
    return Corpus.of(
        parts[0][1],
        fingerprint=mixture_fingerprint(parts),
        train=windows,
        val=_windows([shard for split in held_out for shard in split.shards], config, None) if held_out else None,
        epoch_tokens=len(windows) * config.data.seq_len,
        words=[f"{counts['train']['tokens']:,} tokens of {counted(len(sources), 'source')}",
               *mixture_lines(parts, mixture), *bos_lines(trained[0], parts[0][1].tokenizer), *fim_lines(windows.fim)],
        notes=[note for _, part in parts for note in part.notes],
        val_bytes_per_token=bytes_per_target(held_out, config.data, parts[0][1].tokenizer),
        splits=counts,
    )  # fmt: skip


def bos_lines(split: SplitBins, tokenizer: Any) -> list[str]:
    """Returns the line of the plan on BOS, if documents begin with it or the tokenizer begins a text with it."""
    own = framing.start_of(tokenizer)
    start = "".join(map(tokenizer.convert_ids_to_tokens, own)) or tokenizer.bos_token
    if split.begins_with(own or [tokenizer.bos_token_id]):
        return [f"each document begins with {start}"]
    if own == [tokenizer.eos_token_id]:
        return [f"between documents stands one {start}, which ends the first and begins the second"]
    without = f"documents begin without {start}, which the tokenizer puts before a text"
    return [f"{without} (data.prepend_bos)"] if own else []


def bytes_per_target(splits: list[SplitBins], data: DataConfig, tokenizer: Any) -> float | None:
    """Returns the UTF-8 bytes of text per predicted token: BOS is one unless documents are apart; None if unknown."""
    known, apart = _summed(splits), data.isolate_documents or data.packing is not None
    start = framing.start_of(tokenizer) or [tokenizer.bos_token_id]
    begins = [split.documents or 0 for split in splits if apart and split.begins_with(start)]
    return known["bytes"] / (known["tokens"] - sum(begins)) if known["bytes"] else None


def _summed(splits: list[SplitBins]) -> dict[str, Any]:
    """Returns the sum of each count over several splits; None for a count that any of them lacks."""
    counts = {name: [getattr(split, name) for split in splits] for name in ("tokens", "documents", "bytes")}
    return {name: None if None in found else sum(found) for name, found in counts.items()}


def _examples(config: Config, encoder: type[RowEncoder], tasks: Tasks | None) -> Corpus:
    def make(tokenizer: Any, data: DataConfig) -> RowEncoder:
        with building("data.rows", f"{encoder.__module__}.{encoder.__qualname__}"):
            return encoder(tokenizer, data)  # type: ignore[call-arg]  # a protocol's own constructor takes nothing

    prepared = prepare_examples(config.data, config.tokenizer, make, tasks=tasks)
    train, val = prepared.split("train"), prepared.split("val")
    assert train is not None  # prepare_examples refuses data without it
    if len(train) == 0:
        raise UserError(f"data.mixture={config.data.mixture}: with these weights no row is left to train: raise them")
    rows, words = encoder.make_rows(train, config, config.seed)
    return Corpus.of(
        prepared,
        train=rows,
        val=encoder.make_rows(val, config, None)[0] if val is not None and len(val) > 0 else None,  # by the weights
        epoch_tokens=getattr(rows, "epoch_tokens", train.tokens),
        words=[*split_lines(prepared), *_template_lines(config.data, prepared.tokenizer), words],
        questions=prepared.meta["questions"],
        end_ids=ChatEncoder(prepared.tokenizer, config.data).end_of_turn_ids(),
        splits={**prepared.counts},
    )


def _template_lines(data: DataConfig, tokenizer: Any) -> list[str]:
    """Returns the plan's line on the chat template that data.chat_template=auto chose, where it is not the model's."""
    if data.chat_template != "auto" or tokenizer.chat_template != find_template("alpaca", tokenizer)[0]:
        return []
    return ["chat template: alpaca, as the tokenizer has none of its own (data.chat_template=auto)"]


def split_lines(prepared: PreparedExamples) -> list[str]:
    """Returns lines for the plan that say what became of the rows of each split."""
    lines = []
    for name, counts in prepared.counts.items():
        lines += [*summary(name, Counts(**counts)), *(f"{name}: {line}" for line in remark_lines(Counts(**counts)))]
    if prepared.is_weighted:
        examples = [f"{name} {len(prepared.split(name) or ()):,}" for name in prepared.counts]
        weights = ", ".join(f"{float(weight):g}" for weight in prepared.weights)
        lines.append(f"examples in an epoch, by the weights {weights}: {', '.join(examples)}")
    return [f"rows of {prepared.meta['words']} ({prepared.folder})", *lines]
