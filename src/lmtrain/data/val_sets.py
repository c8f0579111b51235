"""Further sets to validate on, each with numbers of its own: data.val_sets, and fixed rows of the training data."""

import copy
import dataclasses
import re
from typing import Any, NamedTuple

from lmtrain.config.fingerprint import short_hash
from lmtrain.config.schema import Config
from lmtrain.config.schema_data import DataConfig, TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.data.corpus import Corpus, row_format
from lmtrain.data.examples.prepare import prepare_examples
from lmtrain.data.loaders import seen_rows, spread_rows
from lmtrain.data.order import Rows
from lmtrain.data.sources.choose import check_keys
from lmtrain.data.store import bins
from lmtrain.data.text.prepare import prepare
from lmtrain.data.text.windows import Windows
from lmtrain.errors import UserError

TRAIN_ROWS = "train_rows"  # the name of the set of training rows
# Keys of `data` that a set may have of its own; `split` is which split of a hub dataset it is.
KEYS = ("path", "name", "config_name", "revision", "split", "format", "text_column", "document_start", "num_samples",
        "conversation_format", "columns", "prompt_template", "response_template", "system_prompt")  # fmt: skip


class ValSet(NamedTuple):
    rows: Rows
    bytes_per_token: float | None  # of text
    fingerprint: str  # names the tokens, as that of a Corpus


def build_val_sets(config: Config, corpus: Corpus) -> dict[str, ValSet]:
    """The sets of data.val_sets, tokenized as the run's own data, and the rows of data.val_train_rows.

    Raises:
        UserError: a set's name or keys can't be, or its data is missing or empty.
    """
    found = {}
    for name, keys in config.data.val_sets.items():
        _check(name, keys)
        try:
            found[name] = _open(config, _data_of(config.data, keys), corpus)
        except UserError as error:
            raise UserError(f"data.val_sets.{name}: {error}") from None
    if config.data.val_train_rows:
        found[TRAIN_ROWS] = ValSet(
            spread_rows(_as_written(corpus.train), config.data.val_train_rows), None, corpus.fingerprint
        )
    return found


def _as_written(rows: Rows) -> Rows:
    """The rows with their documents as the validation split has them: not rearranged."""
    if isinstance(rows, Windows):
        rows = copy.copy(rows)
        rows.fim = None
    return rows


def _check(name: str, keys: Any) -> None:
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) or name == TRAIN_ROWS:
        raise UserError(
            f"data.val_sets.{name}: a name of letters, digits and _ is needed, other than {TRAIN_ROWS}: its loss is "
            f"val/<name>/loss"
        )
    if not isinstance(keys, dict) or not (keys.get("path") or keys.get("name")):
        raise UserError(f"data.val_sets.{name}={keys}: name its data, {{path: file.txt}} or {{name: wikitext}}")
    check_keys(keys, KEYS, f"data.val_sets.{name}")


def _data_of(data: DataConfig, keys: dict[str, Any]) -> DataConfig:
    """The run's settings with a set's own source, all of which is prepared as if to be trained on."""
    keys = dict(keys)
    split = keys.pop("split", data.val_split or data.train_split)
    own = copy.deepcopy(data)
    source = {"source": "files" if keys.get("path") else "hub", "path": None, "name": None, "config_name": None,
              "revision": None, "mixture": None, "format": "auto"}  # fmt: skip
    whole = {"val_path": None, "val_split": None, "val_fraction": 0.0, "train_split": split}
    return dataclasses.replace(own, **(source | whole | keys))


def _open(config: Config, data: DataConfig, corpus: Corpus) -> ValSet:
    tokenizer, trained = config.tokenizer, corpus.folder / "tokenizer"
    if tokenizer.kind in ("bpe", "char"):  # made from the run's own data
        tokenizer = TokenizerConfig(kind="hub", name_or_path=str(trained))
    if data.rows == "text":
        prepared = prepare(data, tokenizer)
        if tokenizers.tokenizer_hash(prepared.tokenizer) != tokenizers.tokenizer_hash(corpus.tokenizer):
            raise UserError("it can't be tokenized as the run's own data: tokenizer.kind=hub names the tokenizer")
        found = bins.open_bins(prepared.folder, "train")
        rows = Windows(found.shards, config.data.seq_len, seed=None, isolate_documents=config.data.isolate_documents)
        return ValSet(rows, found.bytes_per_token, prepared.fingerprint)
    encoder = row_format(config)
    made = prepare_examples(data, tokenizer, encoder)
    examples = made.split("train")
    assert examples is not None  # prepare_examples refuses data without it
    return ValSet(encoder.make_rows(examples, config, None)[0], None, made.fingerprint)


def count(rows: Rows) -> int:
    """How many rows of the data these are: of packed ones the examples in them."""
    examples = getattr(rows, "examples", None)
    return len(rows) if examples is None else len(examples) // examples.group


def measured_on(corpus: Corpus, val_sets: dict[str, ValSet], monitor: str) -> tuple[Rows | None, str]:
    """The rows that `monitor` is measured on, and the fingerprint of their tokens."""
    set_ = val_sets.get(monitor.split("/")[1]) if monitor.count("/") > 1 else None
    return (corpus.val, corpus.fingerprint) if set_ is None else (set_.rows, set_.fingerprint)


def scored_on(config: Config, corpus: Corpus, val_sets: dict[str, ValSet], monitor: str) -> str | None:
    """Names the rows that `monitor` is measured on: only scores with the same name are compared.

    None where nothing is validated.
    """
    rows, fingerprint = measured_on(corpus, val_sets, monitor)
    if rows is None:
        return None
    seen = seen_rows(rows, config.data.micro_batch_size, config.trainer.limit_val_batches)
    return short_hash([fingerprint, seen])
