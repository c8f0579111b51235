"""Further validation sets, each with metrics of its own: data.val_sets, and a fixed sample of the training rows."""

import copy
import dataclasses
import re
from typing import Any, NamedTuple

from lmtrain.config.fingerprint import short_hash
from lmtrain.config.schema import Config
from lmtrain.config.schema_data import DataConfig, TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.data.corpus import Corpus, bytes_per_target, row_format, text_rows
from lmtrain.data.examples.prepare import prepare_examples
from lmtrain.data.loaders import seen_rows, spread_rows
from lmtrain.data.order import Rows
from lmtrain.data.sources.choose import check_keys
from lmtrain.data.text.prepare import prepare
from lmtrain.data.text.windows import Windows
from lmtrain.errors import UserError, naming

TRAIN_ROWS = "train_rows"  # the name of the validation set made of training rows
# Keys of `data` that a set may override; `split` is the split of a hub dataset.
KEYS = ("path", "name", "config_name", "revision", "split", "format", "text_column", "document_start", "num_samples",
        "header", "conversation_format", "columns", "ignore_columns", "prompt_template", "response_template",
        "system_prompt")  # fmt: skip


class ValSet(NamedTuple):
    """The rows of a validation set and what is known about them; `notes` are remarks on its source, as in a Corpus."""

    rows: Rows
    bytes_per_token: float | None  # None for data other than text
    fingerprint: str  # identifies the tokens, like that of a Corpus
    notes: list[str]


def build_val_sets(config: Config, corpus: Corpus) -> dict[str, ValSet]:
    """Builds the sets of data.val_sets, tokenized like the run's own data, and the set of data.val_train_rows.

    Raises:
        UserError: a set's name or keys are invalid, or its data is missing or empty.
    """
    found = {}
    for name, keys in config.data.val_sets.items():
        _check(name, keys)
        with naming(f"data.val_sets.{name}"):
            found[name] = _open(config, _data_of(config.data, keys), corpus)
    if config.data.val_train_rows:
        rows = corpus.train
        if isinstance(rows, Windows):  # without fill-in-the-middle: documents in their original order, as in validation
            rows = copy.copy(rows)
            rows.fim = None
        found[TRAIN_ROWS] = ValSet(spread_rows(rows, config.data.val_train_rows), None, corpus.fingerprint, [])
    return found


def _check(name: str, keys: Any) -> None:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or name == TRAIN_ROWS:
        raise UserError(f"data.val_sets.{name}: a name of letters, digits and _ is needed, other than {TRAIN_ROWS}")
    if not isinstance(keys, dict) or not (keys.get("path") or keys.get("name")):
        raise UserError(f"data.val_sets.{name}={keys}: name its data, {{path: file.txt}} or {{name: wikitext}}")
    check_keys(keys, KEYS, f"data.val_sets.{name}")


def _data_of(data: DataConfig, keys: dict[str, Any]) -> DataConfig:
    """Returns the run's data config with a set's own source, all of which is prepared as a training split.

    data.dedup is for training documents, and would leave out documents of the set.
    """
    keys = dict(keys)
    split = keys.pop("split", data.val_split or data.train_split)
    source = {"source": "files" if keys.get("path") else "hub", "path": None, "name": None, "config_name": None,
              "revision": None, "mixture": None, "format": "auto"}  # fmt: skip
    whole = {"val_path": None, "val_split": None, "val_fraction": 0.0, "train_split": split, "dedup": None}
    return dataclasses.replace(copy.deepcopy(data), **(source | whole | keys))


def _open(config: Config, data: DataConfig, corpus: Corpus) -> ValSet:
    tokenizer, trained = config.tokenizer, corpus.folder / "tokenizer"
    if tokenizer.kind in ("bpe", "char"):  # such a tokenizer was made from the run's own data
        tokenizer = TokenizerConfig(kind="hub", name_or_path=str(trained))
    if data.rows == "text":
        prepared = prepare(data, tokenizer)
        if tokenizers.tokenizer_hash(prepared.tokenizer) != corpus.tokenizer_hash:
            raise UserError("its tokenizer would differ from that of the run's data: name that by tokenizer.kind=hub")
        found = prepared.splits["train"]
        rows = text_rows(found.shards, config, None)[0]
        notes = [note for note in prepared.notes if "data.dedup=" not in note]  # a set is scored as it is
        return ValSet(rows, bytes_per_target([found], config.data, corpus.tokenizer), prepared.fingerprint, notes)
    encoder = row_format(config)
    made = prepare_examples(data, tokenizer, encoder)
    examples = made.split("train")
    assert examples is not None  # prepare_examples refuses data without it
    return ValSet(encoder.make_rows(examples, config, None)[0], None, made.fingerprint, made.notes)


def count(rows: Rows) -> int:
    """Returns the number of rows of the data; packed rows count by the examples in them."""
    examples = getattr(rows, "examples", None)
    return len(rows) if examples is None else len(examples) // examples.group


def measured_on(corpus: Corpus, val_sets: dict[str, ValSet], monitor: str) -> tuple[Rows | None, str]:
    """Returns the rows that the metric `monitor` is measured on, and the fingerprint of their tokens."""
    set_ = val_sets.get(monitor.split("/")[1]) if monitor.count("/") > 1 else None
    return (corpus.val, corpus.fingerprint) if set_ is None else (set_.rows, set_.fingerprint)


def scored_on(config: Config, corpus: Corpus, val_sets: dict[str, ValSet], monitor: str) -> str | None:
    """Returns a name for the rows that `monitor` is measured on: only scores with the same name are comparable.

    It is None if there is no validation split.
    """
    rows, fingerprint = measured_on(corpus, val_sets, monitor)
    if rows is None:
        return None
    seen = seen_rows(rows, config.data.micro_batch_size, config.trainer.limit_val_batches)
    return short_hash([fingerprint, seen])
