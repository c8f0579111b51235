"""Decides how to train on data files named on the command line, by their names and first rows. Imports no torch."""

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from lmtrain.config import safe_yaml
from lmtrain.config.override_text import bare_or_quoted, shell_word, written
from lmtrain.config.overrides import parse_all
from lmtrain.config.proposers import Proposal, epochs, holds_tokens, suffix_of
from lmtrain.data.chat.columns import RowColumns, detect, plain
from lmtrain.data.chat.turns import truth_of
from lmtrain.data.sources import encodings, files
from lmtrain.data.sources.addresses import is_address
from lmtrain.data.sources.lines import COMPRESSED, open_binary
from lmtrain.data.sources.tables import read_otherwise, read_table
from lmtrain.errors import UserError

ROWS = 20  # first rows that are examined
_SMALL = 20_000_000 * 4  # bytes of weights: models below learn from larger rates and smaller steps
_RECIPE = {"experiment", "model", "optimizer", "schedule", "tokenizer", "objective", "peft"}  # set by experiment=dial
_PROSE = ("text", "content", "body", "article", "document", "story")  # columns of text that is read as it is
_ASKED = re.compile(r"[?？؟]\W*\Z")


@dataclass
class Recipe:
    """How to train on data files: overrides, and one line that describes them."""

    overrides: list[str]
    says: str


def propose(paths: Sequence[str], typed: Sequence[str]) -> list[Proposal]:
    """Proposes objective, reader, columns and run length for these files, beside the typed overrides.

    Raises:
        UserError: the files don't exist, or hold nothing to train on.
    """
    keys = {word.key: word.value for word in parse_all(typed) if word.sets}
    found = recipe(paths, keys)
    proposals = [Proposal(override, "") for override in found.overrides]
    proposals[0] = Proposal(found.overrides[0], found.says)
    chosen = {word.key: word.value for word in parse_all(found.overrides)}
    return [*proposals, *(epochs({**keys, **chosen}, chosen["data"]) if "data" in chosen else ())]


def recipe(paths: Sequence[str], keys: Mapping[str, Any]) -> Recipe:
    """Returns the recipe for these files; `keys` maps the typed keys to their values."""
    path: Any = list(paths) if len(paths) > 1 else paths[0]
    own = [f"data.path={bare_or_quoted(path) if isinstance(path, str) else written(path)}"]
    named = ", ".join(paths[:3]) + (f" and {len(paths) - 3} more" if len(paths) > 3 else "")
    first = Path(paths[0]).expanduser()
    if {"data", "data.source", "data.format"} & keys.keys() or is_address(paths[0]):
        return Recipe(own, f"{named}: data.path")
    if holds_tokens(first):
        return Recipe(["data=bins", *own], f"{named} holds token ids: data=bins")
    if first.is_file() and suffix_of(paths[0]) not in files.FORMATS:
        _refuse_binary(first)
        return Recipe(["data=text", "data.format=text", *own], f"{named} is read as plain text (data.format=text)")
    found, _ = files.find_files(path, "auto")
    file, format = found[0]
    if format == "text":
        many = f" ({len(found):,} files)" if len(found) > 1 else ""
        chosen = [] if {"objective", "experiment"} & keys.keys() else ["data=text"]
        if any(key.startswith("budget.") for key in keys) and not _RECIPE & keys.keys():
            chosen = ["experiment=dial", *chosen]
        read_by = " ".join(chosen) or "data.path"
        return Recipe([*chosen, *own], f"{named} is plain text{many}: {read_by}")
    header = keys.get("data.header")
    read = read_table(file, format, header=header if isinstance(header, bool) else None)
    rows = [row for _, row in itertools.islice(read, ROWS) if isinstance(row, dict)]
    if not rows:
        inspect = f"python -m lmtrain.inspect {shell_word('data.path', str(file))}"
        raise UserError(f"{file} holds no row that can be read: {inspect} shows why")
    made = _of_rows(rows, named, own, keys, format)
    odd = read_otherwise.get(str(file))
    return Recipe(made.overrides, f"{made.says}; {odd}" if odd else made.says)


def _refuse_binary(path: Path) -> None:
    with open_binary(path) as file:
        start = file.read(4096)
    if b"\0" in start and encodings.marked(start) is None:
        known = ", ".join([*files.FORMATS, *COMPRESSED])
        raise UserError(f"{path} is neither text nor a table that lmtrain reads (known: {known})")


def _of_rows(rows: list[dict[str, Any]], named: str, own: list[str], keys: Mapping[str, Any], format: str) -> Recipe:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    is_open = not {"data.columns", "data.text_column", "experiment"} & keys.keys()
    if is_open and keys.get("objective", "sft") == "sft" and recipe_of(columns, rows) is None:
        texts = _question_and_answer(rows, columns, named, own)
        if texts is not None:
            chosen = f"data.columns={written({'prompt': texts[0], 'response': texts[1]})}"
            columns_of = {"data.columns": {"prompt": texts[0], "response": texts[1]}}
            found = _of_rows(rows, named, [chosen, *own], {**keys, **columns_of}, format)
            return Recipe(found.overrides, f"{found.says}; data.text_column={bare_or_quoted(texts[1])} reads one alone")
    entry = None if "data.text_column" in keys else recipe_of(columns, rows, keys.get("data.columns"))
    if entry is None:
        return _text(rows, columns, named, own, keys, format)
    what, kind = entry["what"], entry["data"]
    shown = f"{named} holds {what} (columns {', '.join(columns[:6])})"
    if {"objective", "experiment"} & keys.keys():
        return Recipe(own, f"{shown}, read as the objective wants")
    if "model" in keys or "model.name_or_path" in keys:
        model = str(keys.get("model", ""))
        extra = [o for o in _needed_by(model) if o.partition("=")[0] not in keys]
        small = "small" in entry and is_small(model) and not (_RECIPE - {"model"}) & keys.keys()
        overrides = [*entry["small" if small else "with_model"], f"data={kind}", *extra, *own]
        return Recipe(overrides, f"{shown}: {' '.join(overrides[:-1])}")
    choices = [o for o in entry["alone"] if o.partition("=")[0] not in keys]
    chose = f"{' '.join([*choices, *own[:-1]])} (SmolLM2-135M-Instruct with LoRA)"
    return Recipe([*choices, f"data={kind}", *own], f"{shown}: {chose}; model=... names another model")


def is_small(model: str) -> bool:
    """Returns whether a run or an exported folder has less than 20 M parameters, by the size of its weights in fp32."""
    files = (Path(model).expanduser() / name for name in ("export/model.safetensors", "model.safetensors"))
    return any(file.is_file() and file.stat().st_size < _SMALL for file in files)


def _needed_by(model: str) -> list[str]:
    """Returns what conversations need of a model: a chat template, and from scratch a length and a tokenizer."""
    if not model or "/" in model or model == "pretrained" or Path(model).is_dir():
        return ["data.chat_template=auto"]
    own = ["data.seq_len=${model.max_position_embeddings}", "data.chat_template=alpaca"]
    return ["tokenizer=bytes", *own] if model.endswith("_nano") else own


def recipe_of(
    columns: Sequence[str], rows: Sequence[dict[str, Any]], named: Mapping[str, str] | None = None
) -> dict[str, Any] | None:
    """Returns the entry of recipes.yaml for rows with these columns, or None for text.

    named: the typed value of data.columns.
    """
    cfg = SimpleNamespace(columns=dict(named or {}), ignore_columns=None, conversation_format=None,
                          prompt_template=None, response_template=None)  # fmt: skip
    for recipe in safe_yaml.table(__file__, "recipes.yaml"):
        try:
            reading = detect(recipe["rows"], columns, cfg)  # type: ignore[arg-type]
        except UserError:  # as one that these columns, or those named by hand, don't fit
            continue
        if reading.format.name != "text" and _has_labels(reading, rows):  # text is also read for pretraining
            return dict(recipe)
    return None


def _has_labels(reading: RowColumns, rows: Sequence[dict[str, Any]]) -> bool:
    """Returns whether the rows have labels that are true or false, or are of a format without labels."""
    column = reading.columns.get("label")
    labels = [row[column] for row in rows if row.get(column) is not None] if column is not None else [True]
    return bool(labels) and all(truth_of(label) is not None for label in labels)


def _question_and_answer(
    rows: Sequence[dict[str, Any]], columns: Sequence[str], named: str, own: list[str]
) -> tuple[str, str] | None:
    """Returns the columns of questions and answers, if the rows have two columns of text and the first is asking.

    Raises:
        UserError: the first is only shorter, as titles are, too.
    """
    said = {c: [row[c] for row in rows if isinstance(row.get(c), str) and row[c].strip()] for c in columns}
    words = {c: sum(len(text.split()) for text in texts) / max(1, len(texts)) for c, texts in said.items()}
    texts = [c for c in columns if len(said[c]) * 2 > len(rows) and (words[c] > 1.5 or not "".join(said[c]).isascii())]
    if len(texts) != 2 or plain(texts[1]) in _PROSE or plain(texts[0]) in _PROSE:
        return None
    first, second = texts
    if sum(bool(_ASKED.search(text)) for text in said[first]) * 2 >= len(said[first]):
        return first, second
    if sum(map(len, said[first])) * 2 > sum(map(len, said[second])):
        return None
    command = f"python -m lmtrain.train {' '.join(shell_word('data.path', o.partition('=')[2]) for o in own)}"
    pair = shell_word("data.columns", f"{{prompt: {first}, response: {second}}}")
    alone = f"Text to read on its own? {command} {shell_word('data.text_column', second)}"
    found = f"{named} has two columns of text, {first} and {second}"
    raise UserError(f"{found}. Questions and answers? {command} {pair}. {alone}")


def _text(
    rows: list[dict[str, Any]], columns: list[str], named: str, own: list[str], keys: Mapping[str, Any], format: str
) -> Recipe:
    """Proposes to train on the text of data.text_column, or else of the column with the most text."""
    option = "parquet" if format in ("parquet", "arrow") else "jsonl"
    if "data.text_column" in keys:
        return Recipe([f"data={option}", *own], f"{named}: text of the column {keys['data.text_column']}")
    sizes = {c: sum(len(row[c]) for row in rows if isinstance(row.get(c), str)) for c in columns}
    longest = max(sizes, key=lambda c: (sizes[c], c == "text"), default=None)
    if longest is None or sizes[longest] == 0:
        raise UserError(f"{named} has no column of text (it has {', '.join(columns)}): name one, data.text_column=...")
    others = [c for c in columns if c != longest]
    also = f"; not read: {', '.join(others[:6])}" if others else ""
    column = [] if longest == "text" else [f"data.text_column={bare_or_quoted(longest)}"]
    return Recipe([f"data={option}", *column, *own], f"{named} holds text in the column {longest}{also}")
