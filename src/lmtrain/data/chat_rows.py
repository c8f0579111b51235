"""Rows of conversations to examples: the formats of conversations.py through the templates of chat_templates.py."""

from collections.abc import Callable
from typing import Any

from lmtrain.data.chat_templates import ChatEncoder
from lmtrain.data.conversations import Completion, Conversation, detect_format, to_sample
from lmtrain.data.examples import Encoded
from lmtrain.schema import Data


class TemplateRows:
    """What encoders of rows that go through a chat template share; see `data.examples.RowEncoder`."""

    def __init__(self, tokenizer: Any, cfg: Data) -> None:
        self.chat = ChatEncoder(tokenizer, cfg)
        self.identity = self.chat.identity
        self._formats: dict[Any, str] = {}

    @property
    def words(self) -> str:
        return " and ".join(sorted(set(self._formats.values())))

    def format_of(self, row: dict[str, Any], cfg: Data, detect: Callable[[Any, Data], str]) -> str:
        """By the row's columns: files may hold rows of several formats."""
        key = (id(cfg), *row)
        if key not in self._formats:
            self._formats[key] = detect(row, cfg)
        return self._formats[key]

    def question(self, sample: Conversation | Completion) -> dict[str, Any]:
        """What a model is asked to see how it answers, and the answer the data has."""
        if isinstance(sample, Conversation):
            asked = [m for m in sample.messages if m["role"] == "user"][-1]["content"]
        else:
            asked = sample.prompt
        return {
            "prompt_ids": self.chat.prompt_ids(sample),
            "prompt": asked,
            "reference": self.chat.reference(sample),
            "chat": isinstance(sample, Conversation),
        }

    def decode(self, ids: list[int]) -> str:
        return self.chat.tokenizer.decode(ids)

    def finish_tokenizer(self, tokenizer: Any) -> None:
        if self.chat.template:
            tokenizer.chat_template = self.chat.template


class ChatRows(TemplateRows):
    """One example a row, or several where long rows are split."""

    group = 1

    def encode(self, row: dict[str, Any], where: str, cfg: Data, question: bool) -> Encoded:
        sample = to_sample(row, self.format_of(row, cfg, detect_format), cfg, where)
        examples = self.chat.encode(sample)
        return Encoded(
            [(e.input_ids, e.trained) for e in examples],
            sum(e.cut for e in examples),
            self.question(sample) if question else None,
        )
