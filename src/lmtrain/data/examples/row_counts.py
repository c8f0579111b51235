"""Counts of the rows of a split: how many were used, shortened, dropped or skipped, and why."""

import re
from collections import Counter
from dataclasses import dataclass, field

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat.turns import Remark
from lmtrain.errors import UserError
from lmtrain.terminal import counted

_SHOWN = 8  # maximum number of reasons that are shown on a line of their own
_KINDS = 100  # maximum number of reasons that are counted separately
# What differs between the reasons of similar rows: the text after a colon, quoted values, details, numbers.
_VARIES = [
    (re.compile(r": .*", re.DOTALL), ""),
    (re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL), "'...'"),
    (re.compile(r"\b(and is|is a list with|fits the columns|the rows have|unknown role) .*", re.DOTALL), r"\1 ..."),
    (re.compile(r"\((its keys|the row has|[^()]*column)\b[^()]*\)"), "(...)"),
    (re.compile(r"\d[\d.,]*"), "N"),
]


@dataclass
class Counts:
    """Counts of what became of a split's rows."""

    rows: int = 0
    examples: int = 0
    tokens: int = 0
    trained: int = 0
    shortened: int = 0
    dropped: int = 0
    untrained: int = 0
    untrained_at: str | None = None
    untrained_text: str | None = None  # the beginning and end of that row's text
    assistant_first: int = 0  # rows whose turns before the first user turn were dropped
    bad: dict[str, int] = field(default_factory=dict)  # number of skipped rows by kind of reason
    bad_at: dict[str, str] = field(default_factory=dict)  # where the first row of each kind is,
    bad_first: dict[str, str] = field(default_factory=dict)  # and its full reason
    longest: int = 0
    split: int = 0  # conversations that became several examples because the chat template rewrites turns
    split_into: int = 0  # the number of these examples
    remarks: dict[str, int] = field(default_factory=Counter)  # number of rows by remark
    remarks_at: dict[str, str] = field(default_factory=dict)
    lost: dict[str, int] = field(default_factory=Counter)  # the same for remarks about a field the model never sees
    unread: dict[str, int] = field(default_factory=dict)  # number of rows by column that is not read
    unread_as: str = ""  # what the plan says of these columns

    def seen(self, group: int) -> int:
        """Returns the number of rows that were encoded, those without a token to train on included.

        group: the number of examples of a row, which are left out together: 2 for pairs.
        """
        return self.examples // group + self.untrained

    def note(self, remarks: list[Remark], texts: int, where: str) -> None:
        """Counts the remarks about one row, and the row itself if it became several texts."""
        if texts > 1:
            self.split += 1
            self.split_into += texts
        for remark in dict.fromkeys(remarks):
            self.remarks[remark.text] = self.remarks.get(remark.text, 0) + 1
            self.remarks_at.setdefault(remark.text, where)
            if remark.lost:
                self.lost[remark.text] = self.lost.get(remark.text, 0) + 1

    def note_unread(self, columns: list[str], said: str) -> None:
        """Counts a row's columns that are not read."""
        self.unread_as = said
        for column in columns:
            self.unread[column] = self.unread.get(column, 0) + 1

    def add_bad(self, reason: str, where: str) -> None:
        """Counts a skipped row; reasons that differ only in numbers, quoted values or details are of one kind."""
        kind = reason
        for pattern, instead in _VARIES:
            kind = pattern.sub(instead, kind)
        if kind not in self.bad and len(self.bad) >= _KINDS:
            kind = "other"
        self.bad[kind] = self.bad.get(kind, 0) + 1
        self.bad_at.setdefault(kind, where)
        self.bad_first.setdefault(kind, reason)


def short(text: str) -> str:
    """Returns the beginning and end of a text, up to 160 characters each, in quotes."""
    return repr(text) if len(text) <= 320 else f"{text[:160]!r} ... {text[-160:]!r}"


def too_many_untrained(counts: Counts, cfg: DataConfig, group: int) -> bool:
    """Returns whether the share of rows without a token to train on exceeds data.max_untrained; see `Counts.seen`."""
    return cfg.max_untrained is not None and counts.untrained > cfg.max_untrained * max(1, counts.seen(group))


def check_untrained(counts: Counts, cfg: DataConfig, name: str, group: int) -> None:
    """Raises UserError if the share of rows without a token to train on exceeds data.max_untrained."""
    if too_many_untrained(counts, cfg, group):
        found = f"{counts.untrained:,} of {counts.seen(group):,} {name} rows have no learned token"
        first = f"the first is {counts.untrained_at}: {counts.untrained_text}"
        short = f"Is data.max_length={cfg.max_length} too short (data.on_too_long={cfg.on_too_long})"
        wrong = f"or data.train_on={cfg.train_on} wrong for this data? Allowed: data.max_untrained={cfg.max_untrained}"
        raise UserError(f"{found}, {first}. {short}, {wrong}")


def too_many_lost(counts: Counts, cfg: DataConfig) -> str | None:
    """Returns the remark about a field lost in a larger share of rows than data.max_untrained, or None."""
    taken = counts.rows - sum(counts.bad.values())
    if cfg.max_untrained is None:
        return None
    return next((text for text, number in counts.lost.items() if number > cfg.max_untrained * max(1, taken)), None)


def check_lost(counts: Counts, cfg: DataConfig, name: str) -> None:
    """Raises UserError if the share of rows with a field that the model never sees exceeds data.max_untrained."""
    lost = too_many_lost(counts, cfg)
    if lost is not None:
        found = f"{counts.lost[lost]:,} of {counts.rows:,} {name} rows: {lost}, the first is {counts.remarks_at[lost]}"
        advice = "Choose a template that shows it (data.chat_template), remove it, or allow it: data.max_untrained=1"
        raise UserError(f"{found}. {advice}")


def remark_lines(counts: Counts) -> list[str]:
    """Returns the remarks about the rows that were used, one line each."""
    lines = []
    if counts.split:
        found = f"{counted(counts.split, 'conversation')} became {counts.split_into:,} examples"
        lines.append(f"{found}: the chat template renders earlier turns differently later on")
    if counts.unread:
        named = ", ".join(f"{column} ({counted(n, 'row')})" for column, n in counts.unread.items())
        lines.append(f"columns {counts.unread_as}: {named}")
    remarks = counts.remarks.items()
    return lines + [f"{counted(n, 'row')}: {text}; first {counts.remarks_at[text]}" for text, n in remarks]


def summary(name: str, counts: Counts) -> list[str]:
    """Summarizes a split's rows: a line of counts, then one line for each reason why rows were skipped."""
    rows, examples = counted(counts.rows, "row"), counted(counts.examples, "example")
    words = [f"{name}: {rows} -> {examples}, {counts.tokens:,} tokens"]
    if counts.trained or not counts.examples:  # not of prompts
        words.append(f"{counts.trained / max(1, counts.tokens):.0%} learned")
    for number, what in ((counts.shortened, "shortened"), (counts.dropped, "too long and dropped"),
                         (counts.untrained, "without a learned token, left out"),
                         (counts.assistant_first, "began with the assistant, whose first turns were dropped"),
                         (sum(counts.bad.values()), "bad rows skipped")):  # fmt: skip
        if number:
            words.append(f"{number:,} {what}")
    return [", ".join(words), *(f"{name}: {number}, {reason}" for number, reason in bad_lines(counts))]


def bad_lines(counts: Counts) -> list[tuple[str, str]]:
    """Returns ("12 rows skipped", "first FILE, line 3: why") per reason, most frequent first; the rarest are merged."""
    ranked = sorted(counts.bad.items(), key=lambda item: -item[1])
    lines = [
        (f"{counted(number, 'row')} skipped", f"first {counts.bad_at[kind]}: {counts.bad_first[kind]}")
        for kind, number in ranked[:_SHOWN]
    ]
    rest = [number for _, number in ranked[_SHOWN:]]
    if rest:
        lines.append((f"{counted(sum(rest), 'row')} skipped", f"for {counted(len(rest), 'other reason')}"))
    return lines
