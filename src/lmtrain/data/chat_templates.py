"""Samples as token ids, each with whether it is learned.

A conversation goes through its chat template and is then tokenized as one text, without special tokens added: the
template alone says whether a text begins with one (BOS). A plain text gets the beginning that the tokenizer gives any
text, and the end of text after its completion.
"""

from bisect import bisect_left, bisect_right
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerFast

from lmtrain.data import named_templates
from lmtrain.data.chat_rendering import ChatTemplate, Rendered, answers_of
from lmtrain.data.conversations import Completion, Conversation
from lmtrain.data.lengths import Example, fit
from lmtrain.data.turns import BadRow
from lmtrain.errors import UserError
from lmtrain.schema import Data

__all__ = ["ChatEncoder", "Example"]


class ChatEncoder:
    """Tokens and labels of conversations and plain texts, by the settings of `cfg`.

    Args:
        tokenizer: a fast tokenizer.
        cfg: chat_template, train_on, max_length and on_too_long are read.

    Raises:
        UserError: no template, an unknown one, or one that doesn't go with the tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, cfg: Data) -> None:
        self.tokenizer, self.cfg = tokenizer, cfg
        # Plain texts can do without a template, so none is looked for where nothing names one.
        self._template = self._chat if cfg.chat_template or tokenizer.chat_template else None
        start = tokenizer("")["input_ids"][:1]
        self._bos = start if start == [tokenizer.bos_token_id] else []

    @property
    def template(self) -> str | None:
        """The chat template, Jinja; None where neither the config nor the tokenizer names one."""
        return self._template.text if self._template else None

    @property
    def identity(self) -> dict[str, Any]:
        """What shapes the tokens besides the rows and the tokenizer's vocabulary."""
        return {
            "template": self.template,
            "special_tokens": {k: str(v) for k, v in self.tokenizer.special_tokens_map.items()},
            "train_on": self.cfg.train_on,
            "max_length": self.cfg.max_length,
            "on_too_long": self.cfg.on_too_long,
        }

    def encode(self, sample: Conversation | Completion) -> list[Example]:
        """The examples a sample makes: one, none where it is dropped for its length, several where it is split.

        Raises:
            BadRow: the template refuses the row, or it is too long and on_too_long is raise.
            UserError: the template can't tell this conversation's answers from the rest (see chat_rendering.py).
        """
        if isinstance(sample, Completion):
            ids, trained = self._completion(sample)
            borders: list[int] = []
        else:
            ids, trained, borders = self._conversation(sample)
        trained[:1] = [False] * len(trained[:1])  # nothing comes before it to predict it from
        return fit(ids, trained, borders, self.cfg, sample.where)

    def pair(
        self, prompt: list[dict[str, Any]], answer: list[dict[str, Any]], tools: Any = None, where: str = ""
    ) -> tuple[list[int], list[bool]]:
        """Token ids of a prompt and its answer, with which of them the answer is scored by; uncut.

        By data.train_on these are the assistant turns after the prompt, the last of them, or (completion) all that the
        template writes after the words that ask for the first.

        Args:
            prompt: turns before the first that an answer may differ in.
            answer: the turns after them, an assistant's first.
        """
        conversation = Conversation([*prompt, *answer], tools, where)
        turns = [turn for turn in answers_of(conversation.messages) if turn >= len(prompt)]
        turns = turns[-1:] if self.cfg.train_on == "last_assistant" else turns
        rendered = self._chat.render(conversation, turns)
        ids, offsets = self._tokens(rendered.text)
        trained = [False] * len(ids)
        for span in self._learned(rendered, conversation, turns):
            first, last = _tokens_of(offsets, span)
            trained[first:last] = [True] * (last - first)
        return ids, trained

    def pair_of_texts(self, prompt: str, completion: str) -> tuple[list[int], list[bool]]:
        """The same for plain texts: the prompt with the tokenizer's BOS, the completion with the end of text."""
        return self._completion(Completion(prompt, completion, ""))

    def prompt_ids(self, sample: Conversation | Completion) -> list[int]:
        """What a model is given to write the last answer itself."""
        if isinstance(sample, Completion):
            return self._with_bos(self._tokens(sample.prompt)[0])
        messages = sample.messages[: answers_of(sample.messages)[-1]]
        return self._tokens(self._chat.prompt(messages, sample.tools, sample.where))[0]

    def reference(self, sample: Conversation | Completion) -> str:
        """The answer that stands in the data where the model writes its own."""
        if isinstance(sample, Completion):
            return sample.completion
        return str(sample.messages[answers_of(sample.messages)[-1]]["content"])

    def end_of_turn_ids(self) -> list[int]:
        """Ids that end an answer: the template's end-of-turn token and the tokenizer's end of text."""
        return end_ids(self.tokenizer, self._template)

    @cached_property
    def _chat(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, *named_templates.find(self.cfg.chat_template, self.tokenizer))

    def _conversation(self, sample: Conversation) -> tuple[list[int], list[bool], list[int]]:
        answers = answers_of(sample.messages)
        asked = {"assistant": answers, "last_assistant": answers[-1:], "completion": answers[:1], "all": []}
        turns = asked[str(self.cfg.train_on)]
        rendered = self._chat.render(sample, turns)
        ids, offsets = self._tokens(rendered.text)
        trained = [False] * len(ids)
        for start, end in self._learned(rendered, sample, turns):
            first, last = _tokens_of(offsets, (start, end))
            trained[first:last] = [True] * (last - first)
        borders = [_tokens_of(offsets, (0, border))[1] for border in rendered.borders]
        return ids, trained, borders

    def _learned(self, rendered: Rendered, sample: Conversation, turns: list[int]) -> list[tuple[int, int]]:
        if self.cfg.train_on == "all":
            return [(0, len(rendered.text))]
        if self.cfg.train_on == "completion":
            return [(rendered.spans[0][0], len(rendered.text))]
        pairs = zip(turns, rendered.spans, strict=True)
        return [span for turn, span in pairs if sample.messages[turn].get("train", True)]

    def _completion(self, sample: Completion) -> tuple[list[int], list[bool]]:
        ids, offsets = self._tokens(sample.prompt + sample.completion)
        first, _ = _tokens_of(offsets, (len(sample.prompt), len(sample.prompt) + len(sample.completion)))
        if self.cfg.train_on == "all":
            first = 0
        if self.tokenizer.eos_token_id is None:
            raise UserError("the tokenizer has no end of text, so the model could never learn to stop: choose another")
        whole = self._with_bos([*ids, self.tokenizer.eos_token_id])
        first += len(whole) - len(ids) - 1
        return whole, [i >= first for i in range(len(whole))]

    def _with_bos(self, ids: list[int]) -> list[int]:
        return ids if ids[:1] == self._bos else self._bos + ids

    def _tokens(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Token ids, and the characters [start, end) that each stands for."""
        found = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return found["input_ids"], found["offset_mapping"]


def own_template(tokenizer: PreTrainedTokenizerFast) -> ChatTemplate | None:
    """The template a tokenizer comes with, as those of trained models do."""
    return ChatTemplate(tokenizer, *named_templates.find(None, tokenizer)) if tokenizer.chat_template else None


def end_ids(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate | None) -> list[int]:
    """Ids that end an answer: the template's end-of-turn token and the tokenizer's end of text."""
    ends = tokenizer(template.end_of_turn, add_special_tokens=False)["input_ids"][-1:] if template else []
    eos = tokenizer.eos_token_id
    return ends + ([eos] if eos is not None and eos not in ends else [])


def user_turn(tokenizer: PreTrainedTokenizerFast, template: ChatTemplate, text: str, system: str | None) -> list[int]:
    """Token ids of a conversation that asks for the answer to `text`."""
    messages = [{"role": "system", "content": system}] if system else []
    try:
        asked = template.prompt([*messages, {"role": "user", "content": text}], None, "prompt")
    except BadRow as bad:
        raise UserError(f"a prompt can't be put into a conversation: {bad.reason}") from None
    return tokenizer(asked, add_special_tokens=False)["input_ids"]


def _tokens_of(offsets: list[tuple[int, int]], span: tuple[int, int]) -> tuple[int, int]:
    """The tokens [first, last) that hold a character of `span`; one that begins before it and reaches into it counts.

    Both ends of the offsets rise with the token, so what is between needs no look: tokens of white space may have no
    characters of their own there.
    """
    first = bisect_right(offsets, span[0], key=lambda offset: offset[1])
    return first, bisect_left(offsets, span[1], lo=first, key=lambda offset: offset[0])
