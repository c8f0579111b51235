"""Which column of a row means what, for every row format: the names and the formats are listed in tables.yaml."""

import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lmtrain.config.constraints import choice
from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat import TABLES
from lmtrain.data.chat.turns import BadRow, Remark, truth_of
from lmtrain.data.sources.tables import ArrowRow
from lmtrain.errors import UserError

NAMES: dict[str, list[str]] = TABLES["columns"]
BESIDE = ("system", "tools", "history", "input", "chat_template_kwargs")  # what a prompt may also be made of
_SCORES = ("margin", "score_chosen", "score_rejected")  # what pairs may have as well
_KINDS = {"conversations": "conversations", "pairs": "pairs", "unpaired": "unpaired answers", "prompts": "prompts"}
_SHOWN = 3  # names of a meaning that a message lists
BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}")  # {column}, and {{ or }} for a brace


class UnfitColumns(UserError):
    """Raised if the columns of a row fit no format, or not the format that is asked for."""


def plain(name: str) -> str:
    """Returns a column's name without what people write differently: case, accents, spaces and hyphens."""
    letters = unicodedata.normalize("NFKD", name.strip().casefold())
    return re.sub(r"[\s-]+", "_", "".join(c for c in letters if not unicodedata.combining(c)))


_PLAIN = {meaning: [plain(name) for name in names] for meaning, names in NAMES.items()}


@dataclass(frozen=True)
class Format:
    """The meanings that rows of a format must have, each with the names of such columns, and those they may have."""

    name: str
    required: Mapping[str, list[str]]
    beside: tuple[str, ...]

    def meaning_of(self, key: str) -> str | None:
        """Returns which of its meanings a key of data.columns is, by the meaning's own name or one of its names."""
        names = {**dict(self.required), **{meaning: NAMES[meaning] for meaning in self.beside}}
        if key in names and names[key] is NAMES[key]:
            return key
        return next((meaning for meaning, some in names.items() if plain(key) in map(plain, some)), None)


def _formats(kind: str) -> dict[str, Format]:
    beside = (*BESIDE, *_SCORES) if kind == "pairs" else BESIDE
    found = TABLES["formats"][kind].items()
    all_names = {name: one if isinstance(one, dict) else {m: NAMES[m] for m in one} for name, one in found}
    return {name: Format(name, one, () if name == "text" else beside) for name, one in all_names.items()}


FORMATS = {kind: _formats(kind) for kind in TABLES["formats"]}


@dataclass(frozen=True)
class RowColumns:
    """How rows with the same columns are read.

    columns: the column of each meaning.
    filled: the column of each name in braces of data.prompt_template and data.response_template.
    others: the columns that nothing reads, each with what it means: "prompt" for what a prompt would be made of,
        media, quality, or "" for anything else.
    absent: columns that data.columns names, and that the rows may have but don't.
    """

    format: Format
    columns: dict[str, str]
    filled: dict[str, str]
    others: dict[str, str]
    absent: list[str] = field(default_factory=list)

    @property
    def words(self) -> str:
        """The format, with the columns that are read in place of those it is known by."""
        usual = {m: [m] if names is NAMES[m] else names for m, names in self.format.required.items()}
        named = [f"{m}: {self.columns[m]}" for m in usual if self.columns.get(m, m) not in (*usual[m], *NAMES[m][:2])]
        return f"{self.format.name} ({', '.join(named)})" if named else self.format.name

    def values(self, row: Mapping[str, Any], where: str, **given: Any) -> dict[str, Any]:
        """Returns the values of a row that are not null, by their meanings; those in `given` replace them.

        Raises:
            BadRow: a required column is null, or the row has what no prompt can be made of.
        """
        found = {m: row[column] for m, column in self.columns.items() if row.get(column) is not None} | given
        if isinstance(row, ArrowRow):
            own = {meaning for meaning, column in self.columns.items() if column in row.own_nulls}
            found = {m: value if m in own else _without_none(value) for m, value in found.items()}
        for meaning, names in self.format.required.items():
            if meaning not in found:
                raise BadRow(where, f"there is no {' or '.join(names[:_SHOWN])} (the row has {', '.join(row)})")
        for column, meaning in self.others.items():
            if meaning == "media" and not is_empty(row.get(column)):
                raise BadRow(where, f"the row has {column}, and only text is learned: {leave_out(column)}")
            if meaning == "prompt" and not is_empty(row.get(column)):
                why = f"which the format {self.format.name} has no place for beside what it reads"
                raise BadRow(where, f"the row has {column}, {why}: {leave_out(column)}")
        return found

    def name(self, meaning: str) -> str:
        """Returns the name of the column of a meaning, for messages."""
        return self.columns.get(meaning, f"the {meaning}")

    def refuse(self, values: Mapping[str, Any], meanings: Iterable[str], why: str, where: str) -> None:
        """Raises BadRow if the row has a value of one of these meanings; `why` says what has no place for it."""
        for meaning in meanings:
            if not is_empty(values.get(meaning)):
                column = self.name(meaning)
                raise BadRow(where, f"the row has {column}, {why}: {leave_out(column)}")

    def unread(self, row: Mapping[str, Any]) -> tuple[list[str], list[Remark]]:
        """Returns the columns of a row that nothing reads, apart from remarks on those that mean something."""
        names, remarks = [], []
        for column, meaning in self.others.items():
            if is_empty(row.get(column)):
                continue
            if not meaning:
                names.append(column)
                continue
            is_label = plain(column) == "label" and truth_of(row[column]) is not None
            hint = "; data=unpaired_jsonl reads labels that are true or false" if is_label else ""
            remarks.append(Remark(f"the column {column} is not read{hint}"))
        return names, remarks + [Remark(f"{said}: there is no such column") for said in self.absent]


def leave_out(column: str) -> str:
    """Returns the advice for a column that has no place in what is learned."""
    return f"data.ignore_columns=[{column}] leaves it out"


def is_empty(value: Any) -> bool:
    """Returns whether a value says nothing: null, an empty text, list or mapping, or a list of nulls."""
    if isinstance(value, list | tuple):
        return all(item is None for item in value)
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, dict) and not value)


def detect(kind: str, columns: Iterable[str], cfg: DataConfig) -> RowColumns:
    """Returns how rows are read: by data.conversation_format or, if it is auto, the first format that fits them.

    Args:
        kind: conversations, pairs, unpaired or prompts.
        columns: the names of the rows' columns.

    Raises:
        UnfitColumns: no format fits, or the rows lack a column that the chosen format or data.columns names.
        UserError: data.conversation_format is unknown, or data.columns has a column that no such format has.
    """
    names, formats = list(columns), FORMATS[kind]
    wanted = cfg.conversation_format or "auto"
    choice("auto", *formats)("data.conversation_format", wanted)
    if wanted == "auto" and "template" in formats and (cfg.prompt_template or cfg.response_template):
        wanted = "template"
    tried = [formats[wanted]] if wanted != "auto" else [one for one in formats.values() if one.name != "template"]
    _check_keys(kind, tried, cfg)
    # The first format that fits; otherwise what is missing is named, what data.columns says first.
    for format in tried:
        reading = _reading(format, names, cfg)
        if _fits(reading, cfg, wanted == "auto"):
            return reading
    listed, said = ", ".join(names), ", ".join(f"{key}: {name}" for key, name in (cfg.columns or {}).items())
    for key, column in (cfg.columns or {}).items():
        if column not in names:
            raise UnfitColumns(f"data.columns.{key}={column}: the rows have no such column, but {listed}")
    if wanted != "auto":
        needs = " and ".join(" or ".join(one) for one in _lacking(_reading(tried[0], names, cfg), cfg))
        found = f"data.conversation_format={wanted} needs the column {needs}, and the rows have {listed}"
        named = f"{{{needs.split(' ')[0]}: {names[0] if names else 'its_name'}}}"
        raise UnfitColumns(f"{found}: name it with data.columns={named}")
    example = "{chosen: ..., rejected: ...}" if kind == "pairs" else "{prompt: ..., response: ...}"
    template = ", or write data.prompt_template and data.response_template with {column} in them"
    raise UnfitColumns(
        f"no format of {_KINDS[kind]} fits the columns {listed}{f' with data.columns={{{said}}}' if said else ''}. "
        f"Formats: {described(kind)}. Say what yours are called with data.columns={example}"
        f"{template if kind == 'conversations' else ''}"
    )


def described(kind: str) -> str:
    """Returns the names of formats with the columns that each requires, for messages."""
    named = (
        f"{name} ({', '.join(' or '.join(names[:_SHOWN]) for names in one.required.values())})"
        for name, one in FORMATS[kind].items()
        if one.required
    )
    return "; ".join(named)


def _check_keys(kind: str, tried: list[Format], cfg: DataConfig) -> None:
    known = dict.fromkeys([*(m for one in tried for m in one.required), *(m for one in tried for m in one.beside)])
    for key in cfg.columns or {}:
        if key not in placeholders(cfg) and not any(one.meaning_of(key) for one in tried):
            has = f"the format {tried[0].name} has" if len(tried) < len(FORMATS[kind]) - 1 else f"{_KINDS[kind]} have"
            raise UserError(f"data.columns.{key}: {has} no such column, but {', '.join(known)}")


def _lacking(reading: RowColumns, cfg: DataConfig) -> list[list[str]]:
    """Returns the usual names of each column that the rows would need and don't have."""
    format = reading.format
    if format.name == "template":
        if not cfg.prompt_template or not cfg.response_template:
            raise UserError("data.conversation_format=template needs data.prompt_template and data.response_template")
        return [[name] for name in placeholders(cfg) if name not in reading.filled]
    needed = [meaning for meaning in format.required if meaning != "prompt" or not cfg.prompt_template]
    return [format.required[meaning][:_SHOWN] for meaning in needed if meaning not in reading.columns]


def placeholders(cfg: DataConfig) -> list[str]:
    """Returns the names in braces of data.prompt_template and data.response_template."""
    return sorted(set(BRACES.findall(f"{cfg.prompt_template or ''}{cfg.response_template or ''}")) - {""})


def _fits(reading: RowColumns, cfg: DataConfig, auto: bool) -> bool:
    format = reading.format
    if _lacking(reading, cfg) or not auto:
        return not _lacking(reading, cfg)
    # A system turn, tools and so on are of a conversation: plain text has no place for them.
    is_chat = format.name == "prompt_completion" and any(meaning in reading.columns for meaning in BESIDE)
    return not is_chat and all(format.meaning_of(key) or key in placeholders(cfg) for key in cfg.columns or {})


def _reading(format: Format, names: list[str], cfg: DataConfig) -> RowColumns:
    """Finds the column of each meaning; those of data.prompt_template and data.response_template by their own names."""
    said, ignored = dict(cfg.columns or {}), set(cfg.ignore_columns or ())
    filled = {key: said.pop(key, key) for key in placeholders(cfg)}
    named = {format.meaning_of(key): (key, column) for key, column in said.items()}
    taken = {*filled.values(), *said.values(), *ignored}
    free = {plain(name): name for name in sorted(names, key=lambda name: name == plain(name)) if name not in taken}
    columns, absent = {}, []
    for meaning in (*format.required, *format.beside):
        if meaning in filled or (cfg.prompt_template and meaning in ("prompt", "input")):
            continue
        if meaning in named:
            key, column = named[meaning]
            if column in names:
                columns[meaning] = column
            elif meaning in format.beside:
                absent.append(f"data.columns.{key}={column}")
            continue
        usual = [plain(name) for name in format.required.get(meaning, NAMES[meaning])]
        found = next((free.pop(name) for name in usual if name in free), None)
        if found is not None:
            columns[meaning] = found
    filled = {key: column for key, column in filled.items() if column in names}
    read = {*columns.values(), *filled.values()}
    others = {name: "" if name in ignored else _kind(name, format, cfg) for name in names if name not in read}
    return RowColumns(format, columns, filled, others, absent)


def _kind(name: str, format: Format, cfg: DataConfig) -> str:
    """Returns what a column that a format doesn't read means: prompt, media, quality or ""."""
    if plain(name) in _PLAIN["media"]:
        return "media"
    if any(plain(name) in _PLAIN[meaning] for meaning in BESIDE):
        # Text is whole as it is, and data.prompt_template says what a prompt is made of.
        return "quality" if format.name == "text" or cfg.prompt_template else "prompt"
    return "quality" if plain(name) in _PLAIN["quality"] else ""


def _without_none(value: Any) -> Any:
    """Removes the keys whose value is null: Arrow adds to each row every key that any row of the file has."""
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value
