"""What a row format is: how rows of a dataset become examples, and examples the rows of micro-batches; that of SFT."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmtrain.config.schema import Config
from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat.conversations import Completion, Conversation, UnfitColumns, detect_format, to_sample
from lmtrain.data.chat.templates import ChatEncoder
from lmtrain.data.chat.turns import BadRow, Remark, unread
from lmtrain.data.examples.documents import Examples
from lmtrain.data.examples.rows import example_rows
from lmtrain.data.order import Rows

# Token ids and loss mask; a third entry, a whole number, is kept beside them as the example's label (Examples.labels).
Example = tuple[list[int], list[bool]] | tuple[list[int], list[bool], int]


@dataclass
class Encoded:
    """What an encoder makes of a row: nothing where it is dropped for its length."""

    examples: list[Example]  # a pair's chosen and rejected stand one after another
    cut: int = 0  # tokens taken away
    question: dict[str, Any] | None = None  # {"prompt_ids", "prompt", "reference", "chat": by the chat template}
    dropped_turns: int = 0  # before the first user turn
    remarks: list[Remark] = field(default_factory=list)  # what the plan says of it
    texts: int = 1  # that its conversation became, for the chat template rewrites earlier turns
    kept: str | None = None  # a line of text that is kept beside each of its examples (Examples.texts)


class RowEncoder(Protocol):
    """A row format: from a row to its examples, and from the examples on disk to the rows of micro-batches.

    It is built from (tokenizer, config.data). data.rows names it: conversations, pairs, or the path of its class. For
    rows {"question", "answer"} whose answers are learned:

        class QuestionRows:
            identity, group, words = {"format": "questions", "version": 1}, 1, "questions and answers"

            def __init__(self, tokenizer, cfg):
                self.tokenizer = tokenizer

            def encode(self, row, where, cfg, question):
                if not row.get("answer"):
                    raise BadRow(where, "there is no answer")
                given, learned = (self.tokenizer(row[k])["input_ids"] for k in ("question", "answer"))
                ids = [*given, *learned, self.tokenizer.eos_token_id][: cfg.seq_len + 1]
                return Encoded([(ids, [at >= len(given) for at in range(len(ids))])])

    with `decode`, `make_rows` and `finish_tokenizer` as of ChatRows.
    """

    # What shapes the examples besides the rows, the settings and the tokenizer's rules; for a class of a user's also
    # a version, raised when the same rows come to make other examples: it is in the key of prepared data.
    identity: dict[str, Any]
    group: int  # examples that belong together and are dropped together: 1, or 2 for a pair

    @property
    def words(self) -> str:
        """What it took the rows for, for the plan."""

    def encode(self, row: dict[str, Any], where: str, cfg: DataConfig, question: bool) -> Encoded:
        """The examples of a row, a multiple of `group` of them; none where it is dropped.

        Args:
            where: file and line, for messages.
            question: whether the row's prompt and reference answer are wanted too.

        Raises:
            BadRow: the row can't be read; data.on_bad_row says what follows.
        """

    def decode(self, ids: list[int]) -> str: ...

    @staticmethod
    def make_rows(examples: Examples, config: Config, seed: int | None) -> tuple[Rows, str]:
        """What the loader reads micro-batches from, and in words how the examples are laid out, for the plan.

        Args:
            seed: of the data order; None for validation.
        """

    def finish_tokenizer(self, tokenizer: Any) -> None:
        """Leaves in the tokenizer what those who use the trained model need: the chat template."""


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
