"""The row encoder of SFT: a conversation to tokenized examples."""

from collections.abc import Callable
from typing import Any

from lmtrain.config.schema import Config
from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat.conversations import Completion, Conversation, UnfitColumns, detect_format, to_sample
from lmtrain.data.chat.templates import ChatEncoder
from lmtrain.data.chat.turns import BadRow, Remark, unread
from lmtrain.data.examples.documents import Examples
from lmtrain.data.examples.row_format import Encoded
from lmtrain.data.examples.rows import example_rows
from lmtrain.data.order import Rows


def _without_system(sample: Completion | Conversation, cfg: DataConfig) -> list[Remark]:
    """A prompt that is text goes through no chat template: it has no place for a system prompt."""
    if isinstance(sample, Conversation) or not cfg.system_prompt:
        return []
    return [Remark("data.system_prompt has no effect: the prompt is text; write it as messages, [{role: user, ...}]")]


class TemplateRows:
    """What encoders of rows that go through a chat template share; see `data.examples.RowEncoder`."""

    def __init__(self, tokenizer: Any, cfg: DataConfig) -> None:
        self.chat = ChatEncoder(tokenizer, cfg)
        self.identity = self.chat.identity
        self._formats: dict[Any, str] = {}

    @property
    def words(self) -> str:
        return " and ".join(sorted(set(self._formats.values())))

    def format_of(
        self, row: dict[str, Any], where: str, cfg: DataConfig, detect: Callable[[Any, DataConfig], str]
    ) -> str:
        """Chooses the format by the row's columns, as files may hold several kinds. Raises BadRow where none fits."""
        key = (id(cfg), *row)
        if key not in self._formats:
            try:
                self._formats[key] = detect(row, cfg)
            except UnfitColumns as error:
                raise BadRow(where, str(error)) from None
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

    def encode(self, row: dict[str, Any], where: str, cfg: DataConfig, question: bool) -> Encoded:
        self.chat.begin_row()
        sample = to_sample(row, self.format_of(row, where, cfg, detect_format), cfg, where)
        examples = self.chat.encode(sample)
        return Encoded(
            [(e.input_ids, e.trained) for e in examples],
            sum(e.cut for e in examples),
            self.question(sample) if question else None,
            sample.dropped_turns if isinstance(sample, Conversation) else 0,
            [*self.chat.remarks, *unread(row), *_without_system(sample, cfg)],
            self.chat.texts,
        )

    @staticmethod
    def make_rows(examples: Examples, config: Config, seed: int | None) -> tuple[Rows, str]:
        return example_rows(examples, config, seed)
