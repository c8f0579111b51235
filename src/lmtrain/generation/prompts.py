"""Prompts for the samples written during training: set by the user, questions of the data, or excerpts of its text."""

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from lmtrain.config.schema import SamplesConfig
from lmtrain.data.chat.special_text import AnswerDecoder
from lmtrain.data.chat.templates import own_template, user_turn
from lmtrain.data.corpus import Corpus
from lmtrain.data.examples.prepare import MAX_QUESTIONS
from lmtrain.data.order import Rows
from lmtrain.errors import UserError

_TOKENS = 24  # of a prompt that is taken from a text
_SENTENCE = re.compile(r"(?:(?<=[.!?])\s+|\n\s*)(?=\S)")  # what stands before one, or before a line
_WORD = re.compile(r"\s+(?=\S)")


@dataclass(frozen=True)
class Prompt:
    """A prompt: `given` is the text to continue or its token ids, `shown` is the text displayed to readers."""

    given: str | list[int]
    shown: str
    reference: str | None = None  # the answer in the data


def prompts_of(settings: SamplesConfig, corpus: Corpus, system_prompt: str | None) -> list[Prompt]:
    """Returns callbacks.samples.prompts and, for data with answers, the questions of the first validation rows.

    If the data is text and no prompt is set, one prompt is taken from the text, or, if metrics compare with the text
    that follows, one from each of callbacks.samples.rows rows. A prompt to a chat model becomes a user turn.

    Raises:
        UserError: more rows are requested than questions are kept, the metrics have nothing to compare with, or the
            chat template rejects a prompt.
    """
    if corpus.end_ids is None:
        if settings.metrics and corpus.val is not None and not settings.prompts:
            return continuations(corpus.val, corpus.tokenizer, settings.rows, settings.max_new_tokens)
        if settings.metrics and settings.prompts:
            why = "callbacks.samples.metrics compares with text of the data, and callbacks.samples.prompts have none"
            raise UserError(f"{why}: leave one of the two out")
        asked = settings.prompts or [a_prompt(corpus.val or corpus.train, corpus.tokenizer)]
        return [Prompt(text, text) for text in asked]
    if settings.rows > MAX_QUESTIONS:
        raise UserError(f"callbacks.samples.rows={settings.rows}: at most {MAX_QUESTIONS} can be answered")
    rows = corpus.questions[: settings.rows]
    if settings.metrics and not rows:
        raise UserError("callbacks.samples.metrics needs answers to score: set callbacks.samples.rows to 1 or more")
    template = own_template(corpus.tokenizer)
    if template is None or (rows and not rows[0]["chat"]):
        found = [Prompt(text, text) for text in settings.prompts]
    else:
        found = [Prompt(user_turn(corpus.tokenizer, template, text, system_prompt), text) for text in settings.prompts]
    return found + [Prompt(row["prompt_ids"], row["prompt"], row["reference"]) for row in rows]


def a_prompt(rows: Rows, tokenizer: Any) -> str:
    """Returns a few words of the middle row: files tend to begin with a licence, which says little about a model.

    A row may begin inside a word, so they are those from its first sentence, line or word on, up to a token's end.
    """
    ids = rows.read(np.array([[0, len(rows) // 2]]))["input_ids"][0, : 2 * _TOKENS].tolist()
    decoder = AnswerDecoder(tokenizer, ())
    ends = [len(decoder.decode(ids[:count])) for count in range(len(ids) + 1)]  # of the text, after so many tokens
    text, half = decoder.decode(ids), ends[min(_TOKENS, len(ids) // 2)]
    begins = next((m.end() for found in (_SENTENCE, _WORD) for m in found.finditer(text) if m.end() <= half), 0)
    before = next(count for count, end in enumerate(ends) if end >= begins)
    return text[begins : ends[min(before + _TOKENS, len(ids))]]


def continuations(rows: Rows, tokenizer: Any, count: int, new_tokens: int) -> list[Prompt]:
    """Returns the beginnings of `count` evenly spaced rows as prompts, with the next `new_tokens` as references."""
    if count < 1:
        raise UserError("callbacks.samples.metrics needs texts to score: set callbacks.samples.rows to 1 or more")
    found = []
    for place in range(min(count, len(rows))):
        index = len(rows) * (2 * place + 1) // (2 * min(count, len(rows)))
        ids = rows.read(np.array([[0, index]]))["input_ids"][0].tolist()
        start = min(_TOKENS, len(ids) // 2)
        text, follows = map(AnswerDecoder(tokenizer, ()).decode, (ids[:start], ids[start : start + new_tokens]))
        found.append(Prompt(text, text, follows))
    return found
