"""What became of the rows of a split: how many were taken, cut, left out, and why."""

from collections import Counter
from dataclasses import dataclass, field

from lmtrain.errors import UserError
from lmtrain.schema import Data


@dataclass
class Counts:
    """What became of a split's rows."""

    rows: int = 0
    examples: int = 0
    tokens: int = 0
    trained: int = 0
    shortened: int = 0
    dropped: int = 0
    untrained: int = 0
    untrained_at: str | None = None
    untrained_text: str | None = None  # the beginning and end of that row
    bad: dict[str, int] = field(default_factory=Counter)
    bad_at: dict[str, str] = field(default_factory=dict)
    longest: int = 0


def short(text: str, characters: int = 160) -> str:
    """Beginning and end of a text, in quotes."""
    if len(text) <= 2 * characters:
        return repr(text)
    return f"{text[:characters]!r} ... {text[-characters:]!r}"


def too_many_untrained(counts: Counts, cfg: Data) -> bool:
    """Whether more than data.max_untrained of the rows have nothing to learn."""
    seen = counts.examples + counts.untrained
    return cfg.max_untrained is not None and counts.untrained > cfg.max_untrained * max(1, seen)


def check_untrained(counts: Counts, cfg: Data, name: str) -> None:
    """Raises UserError where more than data.max_untrained of the rows have nothing to learn."""
    if too_many_untrained(counts, cfg):
        seen = counts.examples + counts.untrained
        raise UserError(
            f"{counts.untrained:,} of {seen:,} {name} rows have no learned token, the first is {counts.untrained_at}: "
            f"{counts.untrained_text}. Is data.max_length={cfg.max_length} too short (data.on_too_long="
            f"{cfg.on_too_long}), or data.train_on={cfg.train_on} wrong for this data? python -m lmtrain.inspect shows "
            f"the rows that are left; data.max_untrained={cfg.max_untrained} is the share allowed"
        )


def summary(name: str, counts: Counts) -> str:
    """What became of a split's rows, in one line."""
    share = counts.trained / max(1, counts.tokens)
    words = [
        f"{name}: {counts.rows:,} rows -> {counts.examples:,} examples, {counts.tokens:,} tokens, {share:.0%} learned"
    ]
    for number, what in ((counts.shortened, "shortened"), (counts.dropped, "too long and dropped"),
                         (counts.untrained, "without a learned token, left out"),
                         (sum(counts.bad.values()), "bad rows skipped")):  # fmt: skip
        if number:
            words.append(f"{number:,} {what}")
    words += [f"({reason}: {n:,}, first {counts.bad_at[reason]})" for reason, n in counts.bad.items()]
    return ", ".join(words)
