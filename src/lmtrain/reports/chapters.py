"""Which chapters of a memory each token of a text reads, for `lmtrain inspect`: in the terminal and as a page."""

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.text import Text
from transformers import PreTrainedModel

from lmtrain.adapters.memory import memory_blocks
from lmtrain.errors import UserError, reason
from lmtrain.models.attention import generation_mode
from lmtrain.reports.report_page import as_text, document
from lmtrain.reports.token_view import has_colour, pieces
from lmtrain.terminal import visible

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


def show(model: PreTrainedModel, tokenizer: Any, text: str, console: Console, html: str | None) -> None:
    """Prints the text once a layer, each token in the colour of its first chapter; writes `html`.

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
        _write(html, words, read)


def _rgb(chapter: int) -> str:
    """A light colour of the chapter's own, #rrggbb."""
    hue = chapter * _TURN % 360 / 60
    rise = 1 - abs(hue % 2 - 1)
    parts = [(1, rise, 0), (rise, 1, 0), (0, 1, rise), (0, rise, 1), (rise, 0, 1), (1, 0, rise)][int(hue)]
    return "#" + "".join(f"{int(150 + 100 * part):02x}" for part in parts)


def _write(path: str, words: list[str], read: dict[int, list[list[int]]]) -> None:
    parts = []
    for layer, chapters in read.items():
        tokens = "".join(
            f'<i style="background:{_rgb(chosen[0])}" title="chapters {", ".join(map(str, chosen))}">'
            f"{as_text(word)}</i>"
            for word, chosen in zip(words, chapters, strict=True)
        )
        parts.append(f"<h2>after layer {layer}</h2><pre>{tokens}</pre>")
    style = "i{font-style:normal;color:#111}pre{white-space:pre-wrap;line-height:1.7}body{font-family:sans-serif}"
    try:
        Path(path).expanduser().write_text(document("chapters", style, parts), encoding="utf-8")
    except OSError as error:
        raise UserError(f"inspect.html={path} can't be written: {reason(error)}") from None
