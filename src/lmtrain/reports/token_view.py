"""Decoded tokens for people: their borders, the loss mask in colour, the chapters of a memory that they read."""

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
from lmtrain.errors import UserError
from lmtrain.models.attention import generation_mode
from lmtrain.reports.report_page import as_text, asset, document, write_page
from lmtrain.terminal import counted, visible

LEARNED = ("black on #9be09b", "black on #79cf79")  # neighbouring tokens take turns
GIVEN = ("", "dim")
OPEN, CLOSE, BORDER = "⟦", "⟧", "╎"  # what stands for colour where there is none
_LONGEST_CHARACTER = 4  # tokens that one character can be spread over: it has at most as many bytes


@dataclass(frozen=True)
class TokenPiece:
    """A token's text; of several tokens where only together they are a character."""

    text: str
    ids: tuple[int, ...]
    learned: bool
    special: bool


def pieces(tokenizer: Any, ids: Sequence[int], learned: Sequence[bool]) -> list[TokenPiece]:
    """The tokens' texts, which joined are the text of all."""
    special = set(tokenizer.all_special_ids)
    found: list[TokenPiece] = []
    waiting: list[int] = []
    for at, token in enumerate(ids):
        waiting.append(token)
        text = _decode_after(tokenizer, found[-1].ids if found else (), waiting)
        is_special = token in special or tokenizer.added_tokens_decoder.get(token) is not None
        more = at + 1 < len(ids) and learned[at + 1] == learned[at] and len(waiting) < _LONGEST_CHARACTER
        if text.endswith("\ufffd") and more and not is_special:
            continue
        found.append(TokenPiece(text, tuple(waiting), bool(learned[at]), is_special))
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


def marked(shown: Sequence[TokenPiece], colour: bool) -> Text:
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


_IN_LEGEND = 12  # chapters that the page's legend lists, those that most tokens read
_TURN = 137.5  # degrees between the hues of neighbouring chapters: the golden angle keeps all of them apart


@torch.no_grad()
def chapters_read(model: PreTrainedModel, ids: list[int]) -> dict[int, list[list[int]]]:
    """By number of decoder layer, for each token the chapters it reads, likeliest first.

    Raises:
        UserError: the model has no memory.
    """
    blocks = memory_blocks(model)
    if not blocks:
        raise UserError(
            "inspect.text shows the chapters that tokens read, and this model has no memory (docs/memory.md)"
        )
    model.eval()
    with generation_mode(model):
        model.base_model(input_ids=torch.tensor([ids], device=model.device), use_cache=False)
    found = [block.route(block.last_router_logits)[0].tolist() for block in blocks]
    return dict(zip(blocks[0].settings.layers, found, strict=True))


def show_chapters(
    model: PreTrainedModel, tokenizer: Any, text: str, console: Console, html: str | None, name: str
) -> None:
    """Prints the text once a layer, each token in the colour of its first chapter; writes `html`.

    Args:
        name: of the model, for the page.

    Raises:
        UserError: no text, no memory, or the page can't be written.
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
    """A light colour of the chapter's own, #rrggbb."""
    parts = colorsys.hsv_to_rgb(chapter * _TURN % 360 / 360, 1, 1)
    return "#" + "".join(f"{int(150 + 100 * part):02x}" for part in parts)


def _write_chapters(path: str, words: list[str], read: dict[int, list[list[int]]], about: str) -> None:
    title = "Which chapters of its memory the model reads"
    parts = [
        f"<h1>{title}</h1>",
        f"<p>{as_text(about)}. A token has the colour and the number of the chapter that it gives the most weight; the "
        f"others are shown where the pointer rests on it.</p>",
    ]
    for layer, chapters in read.items():
        tokens = "".join(
            f'<i style="background:{_rgb(chosen[0])}" title="chapters {", ".join(map(str, chosen))}">'
            f"{as_text(word)}<sub>{chosen[0]}</sub></i>"
            for word, chosen in zip(words, chapters, strict=True)
        )
        most = Counter(chosen[0] for chosen in chapters).most_common(_IN_LEGEND)
        legend = " ".join(
            f'<span><i style="background:{_rgb(chapter)}">{chapter}</i> {counted(times, "token")}</span>'
            for chapter, times in most
        )
        parts.append(f'<h2>After layer {layer}</h2><p class="legend">chapter: {legend}</p>')
        parts.append(f'<pre class="chapters">{tokens}</pre>')
    write_page(document(title, asset("inspection.css"), parts), path)
