"""The part of the typed config on data, tokenizers and the commands about data alone; see schema.py."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from lmtrain.config.constraints import *  # the vocabulary of declarations

PROMPT_ROWS = "lmtrain.data.examples.prompt_rows.PromptRowEncoder"  # the path of a class that imports torch
ANSWERS = ("assistant", "last_assistant", "completion")  # values of data.train_on that leave the prompt out


@dataclass(kw_only=True)
class CurriculumConfig:
    """Growth of the row length at the start of a run: see config/batch.py."""

    by: Annotated[str | None, TRAJECTORY, choice("length")] = None  # None: no curriculum
    start_length: Annotated[int | None, TRAJECTORY, at_least(1)] = None
    end_length: Annotated[int | None, SHOWN] = None  # None or equal to data.seq_len, the final length
    steps: Annotated[int | None, TRAJECTORY, at_least(1)] = None


@dataclass(kw_only=True)
class BatchWarmupConfig:
    """Growth of the number of rows per step at the start of a run: see config/batch.py."""

    start_size: Annotated[int | None, TRAJECTORY, at_least(1)] = None  # None: data.global_batch_size from step 0 on
    steps: Annotated[int | None, TRAJECTORY, at_least(1)] = None


@dataclass(kw_only=True)
class FillInTheMiddleConfig:
    """Rearrangement of text documents for fill-in-the-middle training: see data/text/fim.py."""

    rate: Annotated[float, TRAJECTORY, up_to_one] = 0.0  # share of documents that are rearranged
    spm_rate: Annotated[float, TRAJECTORY, up_to_one] = 0.5  # share of those in the order suffix, prefix, middle
    prefix_token: Annotated[str, TRAJECTORY, OPEN] = "<|fim_prefix|>"
    suffix_token: Annotated[str, TRAJECTORY, OPEN] = "<|fim_suffix|>"
    middle_token: Annotated[str, TRAJECTORY, OPEN] = "<|fim_middle|>"


def _from_hub(c: Any) -> bool:
    return c.data.source == "mixture" or (c.data.source == "hub" and not c.data.path)


_HUB = "it names data of the hub, which this data isn't: choose data=wikitext, say, or leave it out"
_OF_HUB = ReadWhere(_from_hub, _HUB)
_IS_STREAM = ReadWhere(
    lambda c: c.data.ring_bytes is not None or _from_hub(c),
    f"{_HUB}; files are streamed with data.ring_bytes=... beside it",
)
_OF_RING = ReadWhere(lambda c: c.data.ring_bytes is not None, "set data.ring_bytes too")
_OF_WHOLE_TEXT = ReadWhere(
    lambda c: c.data.rows == "text" and c.data.ring_bytes is None and c.data.source != "bins",
    "it needs all of the text before tokenizing: leave it out for bins and for a stream (data.ring_bytes)",
)
_OF_BINS = ReadWhere(lambda c: c.data.source in ("bins", "mixture"), "it is of token files: choose data=bins")
_OF_FILES = ReadWhere(
    lambda c: c.data.source not in ("python_stdlib", "mixture") and "." not in c.data.source,
    "choose what reads it: data=text, jsonl, parquet, bins, chat_jsonl or preference_jsonl",
)


def _has_formats(config: Any) -> bool:
    """Returns whether the rows may have several formats: not so lmtrain's classes of unpaired answers and prompts.

    A user's class may read any key.
    """
    return not config.data.rows.startswith("lmtrain.")


_OF_FORMATS = ReadWhere(_has_formats, "rows of this kind have one format; data.columns={prompt: ...} names its columns")
_OF_CONVERSATIONS = ReadWhere(lambda c: c.data.rows != "pairs" and _has_formats(c), "it builds only conversations")
_TRAINED_ON = ReadWhere(lambda c: c.data.rows != PROMPT_ROWS, "prompts aren't trained on: set data.max_prompt_length")
_PACKED = ReadWhere(_has_formats, "rows of this kind are never packed")
_OF_CLASS = ReadWhere(lambda c: "." in c.data.source, "set data.source=package.module.Class too")
_CUT_OFF = ReadWhere(lambda c: not c.data.val_path, "data.val_path already names the validation data")
_GROWING = ReadWhere(lambda c: c.data.curriculum.by is not None, "set data.curriculum.by=length too")
_MORE_ROWS = ReadWhere(lambda c: c.data.batch_warmup.start_size is not None, "set data.batch_warmup.start_size")
_REARRANGED = ReadWhere(lambda c: c.data.fim.rate > 0, "set data.fim.rate=0.5 too")


@dataclass(kw_only=True)
class DataConfig:
    # A LightningDataModule; None (older configs): follows from `rows`.
    _target_: Annotated[str | None, SHOWN, classes("lmtrain.data")] = None
    # How rows are interpreted: text, conversations, pairs, or the path of a row format's class.
    rows: Annotated[str, PREPARED, classes("lmtrain.data"), CONTENT]
    source: Annotated[
        str, PREPARED, classes("lmtrain.data"), choice_or_class("hub", "files", "python_stdlib", "bins", "mixture")
    ]
    name: Annotated[str | None, PREPARED, SOURCE, _OF_HUB]
    config_name: Annotated[str | None, PREPARED, OPEN, _OF_HUB]
    revision: Annotated[str | None, PREPARED, OPEN, _OF_HUB]
    # A file, folder, glob or URL, or a list of them.
    path: Annotated[Any, PREPARED, SOURCE, CONTENT, name_or_names, _OF_FILES]
    val_path: Annotated[Any, PREPARED, SOURCE, CONTENT, name_or_names]  # as path, for the validation data
    format: Annotated[str, PREPARED, CONTENT, choice("auto", "text", "jsonl", "json", "csv", "tsv", "parquet", "arrow")]
    # Whether the first line of a CSV or TSV file names the columns; None: unless it looks like the rows below it.
    header: Annotated[bool | None, PREPARED] = None
    train_split: Annotated[str, PREPARED, OPEN]
    val_split: Annotated[str | None, PREPARED, OPEN]
    val_fraction: Annotated[float, PREPARED, share, _CUT_OFF]
    # 0 for the config.yaml of earlier versions, which held out only val_fraction even of small data.
    min_val_rows: Annotated[int, PREPARED, CONTENT, not_negative, _CUT_OFF] = 0
    num_samples: Annotated[int | None, PREPARED, at_least(1)]
    # Arguments of the class that source names.
    source_options: Annotated[dict[str, Any] | None, PREPARED, only("number", "held_out", "seed"), _OF_CLASS] = None
    streaming: Annotated[bool, SHOWN, _IS_STREAM]
    num_proc: Annotated[int | None, SHOWN, at_least(1)]
    cache_dir: Annotated[str, SHOWN, CACHE, not_empty]
    seq_len: Annotated[int, TRAJECTORY, at_least(1)]
    global_batch_size: Annotated[int, TRAJECTORY, between(1, 2**31 - 1)]
    micro_batch_size: Annotated[int, MACHINE, at_least(1)]
    batch_warmup: Annotated[BatchWarmupConfig, _MORE_ROWS] = field(default_factory=BatchWarmupConfig)
    num_workers: Annotated[int, SHOWN, between(0, 512)]
    isolate_documents: Annotated[bool, TRAJECTORY]
    # Additional validation sets: {name: {path or name, ...}}, see data/val_sets.py.
    val_sets: Annotated[dict[str, Any], VALIDATION, SOURCE] = field(default_factory=dict)
    val_train_rows: Annotated[int, VALIDATION, not_negative] = 0
    curriculum: Annotated[CurriculumConfig, _GROWING] = field(default_factory=CurriculumConfig)
    # Pretraining text only.
    fim: Annotated[FillInTheMiddleConfig, _REARRANGED] = field(default_factory=FillInTheMiddleConfig)
    # A column or a list of columns, joined by column_separator.
    text_column: Annotated[Any, PREPARED, OPEN, name_or_names] = None
    column_separator: Annotated[str | None, PREPARED, OPEN] = None
    sample_by: Annotated[str | None, PREPARED, choice("document", "paragraph", "line")] = None
    # Rows are joined into one document until a row matches this pattern.
    document_start: Annotated[str | None, PREPARED, OPEN] = None
    min_length: Annotated[int | None, PREPARED, not_negative] = None
    dedup: Annotated[str | None, PREPARED, choice("exact", "near"), _OF_WHOLE_TEXT] = None  # see data/text/repeats.py
    append_eos: Annotated[bool | None, PREPARED] = None
    # Compared by the tokens themselves; None, in the config.yaml of earlier versions, puts none.
    prepend_bos: Annotated[bool | str | None, PREPARED, CONTENT, choice("auto")] = None
    shard_tokens: Annotated[int | None, PREPARED, at_least(1)] = None
    # Of token files that don't name theirs, see data/sources/token_files.py.
    dtype: Annotated[str | None, PREPARED, CONTENT, choice("uint16", "uint32", "int32", "int64"), _OF_BINS] = None
    # Streaming of data that is larger than the disk, see data/stream/.
    ring_bytes: Annotated[int | None, SHOWN, at_least(1)] = None
    ring_shard_tokens: Annotated[int | None, TRAJECTORY, at_least(1), _OF_RING] = None
    ring_window: Annotated[int | None, TRAJECTORY, at_least(1), _OF_RING] = None
    ring_val_tokens: Annotated[int | None, TRAJECTORY, at_least(1), _OF_RING] = None
    ring_patience: Annotated[float | None, SHOWN, not_negative, _OF_RING] = None
    # None: the weights of a text mixture are its sampling shares, independent of the sizes of the sources.
    mixture_temperature: Annotated[float | None, TRAJECTORY, above_zero] = None
    # [{path or name, config_name, train_split, weight}]
    mixture: Annotated[list[dict[str, Any]] | None, PREPARED, SOURCE, CONTENT] = None
    # Conversations (sft) and preference pairs (dpo, reward) only.
    conversation_format: Annotated[str | None, PREPARED, OPEN, _OF_FORMATS] = None  # auto or a key of FORMATS
    # The format's column name -> the name in this data: {prompt: question}.
    columns: Annotated[dict[str, str] | None, PREPARED, OPEN] = None
    # Columns that are read as if the rows didn't have them.
    ignore_columns: Annotated[list[str] | None, PREPARED, OPEN] = None
    prompt_template: Annotated[str | None, PREPARED, OPEN, _OF_FORMATS] = None  # text with placeholders {column}
    response_template: Annotated[str | None, PREPARED, OPEN, _OF_CONVERSATIONS] = None
    system_prompt: Annotated[str | None, PREPARED, OPEN] = None  # added to conversations without one
    # None: the tokenizer's own; the name of one of lmtrain's; or a Jinja file.
    chat_template: Annotated[str | None, PREPARED, SOURCE, CONTENT] = None
    # Variables of the chat template.
    template_options: Annotated[dict[str, Any] | None, PREPARED, OPEN] = None
    # Special tokens spelled out in a row's text are encoded as special tokens.
    allow_special_text: Annotated[bool | None, PREPARED] = None
    train_on: Annotated[str | None, PREPARED, choice(*ANSWERS, "all"), _TRAINED_ON] = None
    max_length: Annotated[int | None, PREPARED, _TRAINED_ON] = None
    max_prompt_length: Annotated[int | None, PREPARED, at_least(1)] = None  # preference pairs only
    on_too_long: Annotated[
        str | None, PREPARED, choice("truncate_left", "truncate_right", "drop", "split", "raise")
    ] = None
    on_bad_row: Annotated[str | None, PREPARED, choice("raise", "skip")] = None
    # Handling of conversations that begin with an assistant turn.
    on_assistant_first: Annotated[str | None, PREPARED, choice("drop_turn", "skip", "raise")] = None
    # The run is refused if a larger share of rows has no trained token.
    max_untrained: Annotated[float | None, SHOWN] = None
    share_prompts: Annotated[bool | None, MACHINE] = None  # preference pairs only
    packing: Annotated[
        str | None, TRAJECTORY, choice("off", "concat", "greedy", "first_fit", "best_fit_decreasing"), _PACKED
    ] = None


@dataclass(kw_only=True)
class TokenizerConfig:
    kind: Annotated[str, PREPARED, choice("hub", "bpe", "bytes", "char")]
    name_or_path: Annotated[str | None, PREPARED, SOURCE, CONTENT] = None
    revision: Annotated[str | None, PREPARED, OPEN] = None
    trust_remote_code: Annotated[bool, PREPARED, CODE] = False
    vocab_size: Annotated[int | None, PREPARED] = None
    min_frequency: Annotated[int | None, PREPARED] = None
    train_characters: Annotated[int | None, PREPARED] = None
    # Special tokens to add, such as <|im_start|>.
    add_tokens: Annotated[list[str] | None, PREPARED, OPEN, no_secret] = None


@dataclass(kw_only=True)
class PrepareConfig:
    executor: Annotated[str, SHOWN, choice("local", "slurm")]
    tasks: Annotated[int, SHOWN, at_least(1)]
    workers: Annotated[int | None, SHOWN, at_least(1)]
    slurm: Annotated[dict[str, Any], SHOWN]  # arguments of datatrove's SlurmPipelineExecutor


@dataclass(kw_only=True)
class InspectConfig:
    split: Annotated[str, SHOWN, choice("train", "val")]
    samples: Annotated[int, SHOWN, not_negative]
    tokens: Annotated[int, SHOWN, at_least(1)]
    html: Annotated[str | None, SHOWN]
