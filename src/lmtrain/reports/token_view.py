"""Human-readable views of tokens: borders, the loss mask in colour, the memory chapters that each token reads."""

import colorsys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from transformers import PreTrainedModel

from lmtrain.adapters.memory import memory_blocks
from lmtrain.data.chat.special_text import following
from lmtrain.errors import UserError
from lmtrain.models.attention import generation_mode
from lmtrain.reports.report_page import document, rendered, write_page
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


_IN_LEGEND = 12  # number of chapters in the page's legend: those that most tokens read
_TURN = 137.5  # degrees between the hues of consecutive chapters: the golden angle keeps hues distinct


@torch.no_grad()
def chapters_read(model: PreTrainedModel, ids: list[int]) -> dict[int, list[list[int]]]:
    """Returns, for each decoder layer with a memory, the chapters that each token reads, most probable first.

    Raises:
        UserError: the model has no memory.
    """
    blocks = memory_blocks(model)
    if not blocks:
        raise UserError("inspect.text shows the chapters that tokens read; this model has no memory (docs/memory.md)")
    model.eval()
    with generation_mode(model):
        model.base_model(input_ids=torch.tensor([ids], dtype=torch.int64, device=model.device), use_cache=False)
    found = [block.route(block.last_router_logits)[0].tolist() for block in blocks]
    return dict(zip(blocks[0].settings.layers, found, strict=True))


def show_chapters(
    model: PreTrainedModel, tokenizer: Any, text: str, console: Console, html: str | None, name: str
) -> None:
    """Prints the text once per memory layer, each token in the colour of its first chapter; writes `html` if set.

    Args:
        name: the model's name, for the page.

    Raises:
        UserError: the text is empty, the model has no memory, or the page can't be written.
    """
    ids = tokenizer(text)["input_ids"]
    if not ids:
        raise UserError("inspect.text is empty: give some words")
    read = chapters_read(model, ids)
    words = [piece.text for token in ids for piece in pieces(tokenizer, [token], [False])]
    colour = has_colour(console)
    for layer, chapters in read.items():
        body = Text()
        for word, chosen in zip(words, chapters, strict=True):
            style = f"black on {_rgb(chosen[0])}" if colour else ""
            body.append(visible(word).replace("\n", "↵\n"), style=style)
            body.append(f"[{','.join(map(str, chosen))}] ", style="dim")
        console.print(Panel(body, title=Text(f"after layer {layer}: token[chapters]"), title_align="left"))
    if html is not None:
        settings = memory_blocks(model)[0].settings
        about = f"{name}: {settings.num_chapters} chapters, of which each token reads {settings.top_k} (top-k)"
        _write_chapters(html, words, read, about)


def _rgb(chapter: int) -> str:
    """Returns a distinct light colour for the chapter, as #rrggbb."""
    parts = colorsys.hsv_to_rgb(chapter * _TURN % 360 / 360, 1, 1)
    return "#" + "".join(f"{int(150 + 100 * part):02x}" for part in parts)


def _write_chapters(path: str, words: list[str], read: dict[int, list[list[int]]], about: str) -> None:
    title, layers = "Which chapters of its memory the model reads", []
    for layer, chapters in read.items():
        tokens = [(word, chosen, _rgb(chosen[0])) for word, chosen in zip(words, chapters, strict=True)]
        most = Counter(chosen[0] for chosen in chapters).most_common(_IN_LEGEND)
        layers.append((layer, tokens, [(chapter, _rgb(chapter), times) for chapter, times in most]))
    body = rendered("chapters.html", title=title, about=about, layers=layers)
    write_page(document(title, body), path)
