"""Decoded tokens for people: token borders, the loss mask in colour, control characters made visible."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from lmtrain.terminal import visible

LEARNED = ("black on #9be09b", "black on #79cf79")  # neighbouring tokens take turns
GIVEN = ("", "dim")
OPEN, CLOSE, BORDER = "⟦", "⟧", "╎"  # what stands for colour where there is none
_LONGEST_CHARACTER = 4  # tokens that one character can be spread over: it has at most as many bytes


@dataclass(frozen=True)
class Piece:
    """A token's text; of several tokens where only together they are a character."""

    text: str
    ids: tuple[int, ...]
    learned: bool
    special: bool


def pieces(tokenizer: Any, ids: Sequence[int], learned: Sequence[bool]) -> list[Piece]:
    """The tokens' texts, which joined are the text of all."""
    special = set(tokenizer.all_special_ids)
    found: list[Piece] = []
    waiting: list[int] = []
    for at, token in enumerate(ids):
        waiting.append(token)
        text = _decode_after(tokenizer, found[-1].ids if found else (), waiting)
        is_special = token in special or tokenizer.added_tokens_decoder.get(token) is not None
        more = at + 1 < len(ids) and learned[at + 1] == learned[at] and len(waiting) < _LONGEST_CHARACTER
        if text.endswith("\ufffd") and more and not is_special:
            continue
        found.append(Piece(text, tuple(waiting), bool(learned[at]), is_special))
        waiting = []
    return found


def _decode_after(tokenizer: Any, before: tuple[int, ...], ids: list[int]) -> str:
    """The text of `ids` where they follow `before`: some tokenizers leave out the space a text begins with."""
    options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    context = tokenizer.decode(list(before), **options) if before else ""
    whole = tokenizer.decode([*before, *ids], **options)
    return whole[len(context) :] if whole.startswith(context) else tokenizer.decode(ids, **options)


def has_colour(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def marked(shown: Sequence[Piece], colour: bool) -> Text:
    """The pieces in a row, learned ones on green; without colour in ⟦ ⟧, with ╎ between tokens."""
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
    """What `marked` shows, in a few words."""
    if not colour:
        return Text(f"{OPEN}learned{CLOSE} given, {BORDER} between tokens, ↵ ends a line")
    words = Text(" learned ", style=LEARNED[0])
    return words.append(" given, token by token; ", "default").append("bold", "bold").append(": special, ↵ ends a line")
