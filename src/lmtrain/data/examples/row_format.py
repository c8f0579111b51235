"""The interface of row formats: from a dataset's rows to examples, and to rows of micro-batches; the format of SFT."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from lmtrain.config.schema import Config
from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat.columns import RowColumns, UnfitColumns, detect
from lmtrain.data.chat.conversations import Completion, Conversation, to_sample
from lmtrain.data.chat.jinja_rendering import answers_of
from lmtrain.data.chat.templates import ChatEncoder
from lmtrain.data.chat.turns import BadRow, Remark, unread
from lmtrain.data.examples.documents import Examples
from lmtrain.data.examples.rows import example_rows
from lmtrain.data.order import Rows

# Token ids and loss mask; an optional third entry, an integer, is stored as the example's label (Examples.labels).
Example = tuple[list[int], list[bool]] | tuple[list[int], list[bool], int]


@dataclass
class Encoded:
    """The result of encoding a row; it has no examples if the row is dropped for its length."""

    examples: list[Example]  # the chosen and the rejected example of a pair are adjacent
    cut: int = 0  # number of tokens cut off
    question: dict[str, Any] | None = None  # {"prompt_ids", "prompt", "reference", "chat": by the chat template}
    dropped_turns: int = 0  # before the first user turn
    remarks: list[Remark] = field(default_factory=list)  # notes for the plan
    unread: list[str] = field(default_factory=list)  # columns of the row that nothing reads
    texts: int = 1  # number of texts that its conversation became, if the chat template rewrites earlier turns
    kept: str | None = None  # a line of text that is stored with each of its examples (Examples.texts)


# What the rows of a format hold. An objective trains on every format that holds what it needs (ObjectiveConfig.rows).
TOKENS = "tokens with a loss mask"
PAIRS = "pairs of answers"
ANSWERS = "answers with a label"
PROMPTS = "prompts"


class RowEncoder(Protocol):
    """A row format, which converts rows to examples, and the examples on disk to the rows of micro-batches.

    It is built from (tokenizer, config.data). data.rows names it: conversations, pairs, or the path of its class. For
    example, for rows {"question", "answer"} whose answers are trained on:

        class QuestionRows(RowFormat):
            identity = {"format": "questions", "version": 1}

            def encode(self, row, where, cfg, question):
                if not row.get("answer"):
                    raise BadRow(where, "there is no answer")
                given, learned = (self.tokenizer(row[k])["input_ids"] for k in ("question", "answer"))
                ids = [*given, *learned, self.tokenizer.eos_token_id][: cfg.seq_len + 1]
                return Encoded([(ids, [at >= len(given) for at in range(len(ids))])])

    A static method `to_evaluate(examples)` may return those of the examples that `lmtrain.evaluate` scores.
    """

    holds: ClassVar[str]  # TOKENS, PAIRS, ANSWERS or PROMPTS, and then its `make_rows` reads what others of these do

    # What determines the examples besides rows, settings and the tokenizer's rules; it is in the key of prepared data.
    # A user's class also needs a version here, to raise when the same rows begin to give different examples.
    identity: dict[str, Any]
    group: int  # examples that belong together and are dropped together: 1, or 2 for a pair

    @property
    def words(self) -> str:
        """The formats in which the rows were read, for the plan."""

    def encode(self, row: dict[str, Any], where: str, cfg: DataConfig, question: bool) -> Encoded:
        """Returns the examples of a row, whose number is a multiple of `group`; none if the row is dropped.

        Args:
            where: file and line, for messages.
            question: whether to return the row's prompt and reference answer too.

        Raises:
            BadRow: the row can't be read; data.on_bad_row decides whether it is skipped.
        """

    def decode(self, ids: list[int]) -> str: ...

    @staticmethod
    def make_rows(examples: Examples, config: Config, seed: int | None) -> tuple[Rows, str]:
        """Returns the rows that the loader reads micro-batches from, and a description of their layout for the plan.

        Args:
            seed: the seed of the data order; None for validation.
        """

    def finish_tokenizer(self, tokenizer: Any) -> None:
        """Stores in the tokenizer what users of the trained model need: the chat template."""


class RowFormat:
    """A base class for row formats: one example per row, tokens with a loss mask. See `RowEncoder`."""

    holds: ClassVar[str] = TOKENS
    identity: dict[str, Any]
    group = 1

    def __init__(self, tokenizer: Any, cfg: DataConfig) -> None:
        self.tokenizer = tokenizer

    @property
    def words(self) -> str:
        return f"rows of {type(self).__name__}"

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids))

    @staticmethod
    def make_rows(examples: Examples, config: Config, seed: int | None) -> tuple[Rows, str]:
        return example_rows(examples, config, seed)

    def finish_tokenizer(self, tokenizer: Any) -> None:
        """Changes nothing: there is no chat template."""


class TemplateRows(RowFormat):
    """The base class of encoders for rows that go through a chat template; see `RowEncoder`.

    version: what a subclass adds to the identity.
    independent: whether a class encodes each row by itself, apart from `formats`, so that several processes may.
    kind: the kind of the rows, of those in tables.yaml.
    unread_as: what the plan says of the columns that aren't read.
    """

    kind = "conversations"
    unread_as = "that nothing reads"
    version: ClassVar[dict[str, int]] = {}
    independent = False  # a subclass may remember rows: each says it for itself

    def __init__(self, tokenizer: Any, cfg: DataConfig) -> None:
        super().__init__(tokenizer, cfg)
        self.chat = ChatEncoder(tokenizer, cfg)
        self.identity = {**self.chat.identity, **self.version}
        self.formats: dict[Any, RowColumns] = {}  # of the rows so far, by their columns

    @property
    def words(self) -> str:
        return " and ".join(sorted({reading.words for reading in self.formats.values()}))

    def reading_of(self, row: dict[str, Any], where: str, cfg: DataConfig) -> RowColumns:
        """Chooses how a row is read by its columns, as files may mix formats; raises BadRow if no format fits."""
        key = (id(cfg), *row)
        if key not in self.formats:
            try:
                self.formats[key] = detect(self.kind, row, cfg)
            except UnfitColumns as error:
                raise BadRow(where, str(error)) from None
        return self.formats[key]

    def question(self, sample: Conversation | Completion) -> dict[str, Any]:
        """Returns the prompt for a sample answer from the model, and the reference answer from the data."""
        if isinstance(sample, Conversation):
            *before, answer = sample.messages[: answers_of(sample.messages)[-1] + 1]
            asked = [m for m in before if m["role"] == "user"][-1]["content"]
            reference = str(answer["content"])
        else:
            asked, reference = sample.prompt, sample.completion
        return {
            "prompt_ids": self.chat.prompt_ids(sample),
            "prompt": asked,
            "reference": self.chat.as_decoded(reference),
            "chat": isinstance(sample, Conversation),
        }

    def finish_tokenizer(self, tokenizer: Any) -> None:
        if self.chat.template is None:
            return
        found, several = self.chat.chat, tokenizer.chat_template
        tokenizer.chat_template = found.text
        if isinstance(several, dict) and not self.chat.cfg.chat_template:
            tools = {"tool_use": found.tool_use} if found.tool_use else {}
            tokenizer.chat_template = {**several, "default": found.text, **tools}


class ChatRows(TemplateRows):
    """The row format of SFT: one example per row, or several if a row is split or its earlier turns are rewritten."""

    independent = True

    def encode(self, row: dict[str, Any], where: str, cfg: DataConfig, question: bool) -> Encoded:
        self.chat.begin_row()
        reading = self.reading_of(row, where, cfg)
        sample = to_sample(row, reading, cfg, where)
        examples = self.chat.encode(sample)
        others, remarks = reading.unread(row)
        remarks = [*self.chat.remarks, *unread(row), *remarks]
        if isinstance(sample, Completion) and cfg.system_prompt:  # a text prompt doesn't go through a chat template
            words = "the prompt is text; write it as messages, [{role: user, ...}]"
            remarks.append(Remark(f"data.system_prompt has no effect: {words}"))
        if len(examples) > self.chat.texts:
            remarks.append(Remark("became several examples, as they are longer than data.max_length"))
        return Encoded(
            [(e.input_ids, e.trained) for e in examples],
            sum(e.cut for e in examples),
            self.question(sample) if question else None,
            sample.dropped_turns if isinstance(sample, Conversation) else 0,
            remarks,
            others,
            self.chat.texts,
        )
