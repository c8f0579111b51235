"""Human-readable views of tokens: borders, and the loss mask in colour."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from lmtrain.data.chat.special_text import following
from lmtrain.terminal import visible

LEARNED = ("black on #9be09b", "black on #79cf79")  # two shades that alternate between neighbouring tokens
GIVEN = ("", "dim")
OPEN, CLOSE, BORDER = "⟦", "⟧", "╎"  # marks used instead of colour
_LONGEST_CHARACTER = 4  # maximum number of tokens per character, as UTF-8 has at most 4 bytes


@dataclass(frozen=True)
class TokenPiece:
    """The text of one token, or of several tokens that form a character only together."""

    text: str
    ids: tuple[int, ...]
    learned: bool
    special: bool


def pieces(tokenizer: Any, ids: Sequence[int], learned: Sequence[bool]) -> list[TokenPiece]:
    """Decodes tokens into pieces whose concatenation is the whole text."""
    special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
    found: list[TokenPiece] = []
    waiting: list[int] = []
    for at, token in enumerate(ids):
        waiting.append(token)
        text = following(tokenizer, list(found[-1].ids) if found else [], waiting)
        is_special = token in special
        more = at + 1 < len(ids) and learned[at + 1] == learned[at] and len(waiting) < _LONGEST_CHARACTER
        if text.endswith("\ufffd") and more and not is_special:
            continue
        found.append(TokenPiece(text, tuple(waiting), bool(learned[at]), is_special))
        waiting = []
    return found


def has_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def marked(shown: Sequence[TokenPiece], colour: bool) -> Text:
    """Joins the pieces, with learned ones on green; without colour learned runs are in ⟦ ⟧, with ╎ between tokens."""
    text, before = Text(), False
    for number, piece in enumerate(shown):
        words = visible(piece.text).replace("\n", "↵\n")
        if colour:
            style = (LEARNED if piece.learned else GIVEN)[number % 2]
            text.append(words, style=f"{style} bold".strip() if piece.special else style)
            continue
        if piece.learned != before:
            text.append(OPEN if piece.learned else CLOSE)
        elif number:
            text.append(BORDER)
        text.append(words)
        before = piece.learned
    if before and not colour:
        text.append(CLOSE)
    return text


def legend(colour: bool) -> Text:
    """Returns a legend for the output of `marked`."""
    if not colour:
        return Text(f"{OPEN}learned{CLOSE} given, {BORDER} between tokens, ↵ ends a line")
    words = Text(" learned ", style=LEARNED[0])
    return words.append(" given, token by token; ", "default").append("bold", "bold").append(": special, ↵ ends a line")
