"""Prompt rows {prompt, any other columns}: the prompts for a model, and the columns that rewards may use."""

import itertools
import json
from typing import Any, NamedTuple

import numpy as np
import torch

from lmtrain.config.schema import Config
from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat.columns import BESIDE, RowColumns, detect, is_empty, leave_out
from lmtrain.data.chat.conversations import Completion, Conversation, options_of
from lmtrain.data.chat.pairs import opening
from lmtrain.data.chat.turns import BadRow, Remark, check, tools_of, unread, whole_text
from lmtrain.data.examples.documents import ExampleRows, Examples
from lmtrain.data.examples.row_format import PROMPTS, Encoded, TemplateRows
from lmtrain.errors import UserError

# Names under which rewards get something else than a column: rewards/base.py.
RESERVED = frozenset(("self", "prompts", "completions", "completion_ids", "cut_off", "turn_start"))


class PromptRowEncoder(TemplateRows):
    """Encodes a row as one example: the prompt up to where the model begins to generate; the row is stored beside it.

    A text prompt is given to the model unchanged if the tokenizer has no chat template and data.chat_template names
    none, else as a user turn. Messages always go through the template.
    """

    holds = PROMPTS
    learns = False
    kind = "prompts"
    unread_as = "that only rewards read"
    _asks = False  # whether some row has shown that the template has a generation prompt

    def __init__(self, tokenizer: Any, cfg: DataConfig) -> None:
        super().__init__(tokenizer, cfg)
        self.identity = {**self.identity, "prompts": 1 if cfg.on_assistant_first in (None, "raise") else 2}

    def encode(self, row: dict[str, Any], where: str, cfg: DataConfig, question: bool) -> Encoded:
        """Returns the prompt as an example; none if it is too long and data.on_too_long=drop.

        Raises:
            BadRow: there is no prompt, it is longer than data.max_prompt_length, or JSON can't hold a column.
            UserError: the chat template has no generation prompt, or a column has a name of `RESERVED`.
        """
        self.chat.begin_row()
        reading = self.reading_of(row, where, cfg)
        values = reading.values(row, where)
        left = {name: value for name, value in row.items() if name not in (cfg.ignore_columns or ())}
        # What rewards read of the row has to have a name of its own.
        taken = sorted(RESERVED.intersection(left) - {reading.columns["prompt"]})
        if taken:
            found = f"{where}: the rows have the column {taken[0]}, and rewards get something else under this name"
            raise UserError(f"{found}: {leave_out(taken[0])}")
        if values["prompt"] == "" or values["prompt"] == []:
            raise BadRow(where, "the prompt is empty")
        whole_text(left, "the row", where)  # all of it is stored as UTF-8
        # The tokens, unless they are too many.
        ids, dropped = self._ids(values, reading, cfg, where)
        most = cfg.max_prompt_length
        if most is not None and len(ids) > most:
            if cfg.on_too_long == "drop":
                return Encoded([])
            found = f"the prompt has {len(ids)} tokens and data.max_prompt_length is {most}"
            raise BadRow(where, f"{found}: shorten it, or leave such prompts out with data.on_too_long=drop")
        # What the plan says of the row.
        left |= {reading.columns[meaning]: value for meaning, value in values.items()}
        remarks = [*self.chat.remarks, *unread({"prompt": values["prompt"]})]
        if self._is_text(values) and cfg.system_prompt:
            words = "the prompt is text and there is no chat template: name one with data.chat_template"
            remarks.append(Remark(f"data.system_prompt has no effect: {words}"))
        others = [name for name in reading.others if not is_empty(row[name])]
        kept = _kept(left, where)
        return Encoded([(ids, [True] * len(ids))], 0, None, dropped, remarks, others, kept=kept)

    def _is_text(self, values: dict[str, Any]) -> bool:
        """Returns whether the prompt is given to the model unchanged."""
        return isinstance(values["prompt"], str) and self.chat.template is None

    def _ids(self, values: dict[str, Any], reading: RowColumns, cfg: DataConfig, where: str) -> tuple[list[int], int]:
        """Returns the prompt's token ids, and how many turns before the first user turn were dropped."""
        if self._is_text(values):
            reading.refuse(values, BESIDE, "which a text without a chat template has no place for", where)
            return self.chat.prompt_ids(Completion(values["prompt"], "", where)), 0
        asked = _asked(values, reading, cfg, where)
        self.chat.note_prompt(asked)
        ids = self.chat.prompt_ids(asked)
        self._asks = self._asks or ids != self.chat.prompt_ids(asked, ask=False)
        if not self._asks:
            found = "the chat template writes nothing that asks for an answer (add_generation_prompt changes nothing)"
            raise UserError(f"{where}: {found}: name another with data.chat_template, or write prompts as text")
        return ids, asked.dropped_turns

    @staticmethod
    def make_rows(examples: Examples, config: Config, seed: int | None) -> tuple["PromptRows", str]:
        longest = int(examples.lengths.max()) if len(examples) else 0
        return PromptRows(examples), f"{len(examples):,} prompts of up to {longest:,} tokens"


def prompt_column(row: dict[str, Any], cfg: DataConfig) -> str:
    """Returns the name of the column that a row's prompt is in."""
    return detect("prompts", row, cfg).columns["prompt"]


def conversation_of(row: dict[str, Any], cfg: DataConfig, where: str) -> Conversation:
    """Returns a row's prompt as turns, and a last turn in the place of the answer.

    Raises:
        BadRow: the prompt is no conversation.
    """
    reading = detect("prompts", row, cfg)
    return _asked(reading.values(row, where), reading, cfg, where)


def _asked(values: dict[str, Any], reading: RowColumns, cfg: DataConfig, where: str) -> Conversation:
    turns, dropped = opening(values, reading, cfg, where)
    while turns and turns[-1]["role"] == "assistant":  # the data's answer is left out
        turns = turns[:-1]
    asked = check([*turns, {"role": "assistant", "content": "..."}], where)
    tools, options = tools_of(values.get("tools"), where), options_of(values, where)
    return Conversation(asked, tools, where, dropped_turns=dropped, options=options)


def _kept(row: dict[str, Any], where: str) -> str:
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False, default=_plain)
    except (TypeError, ValueError) as error:
        advice = "data.ignore_columns=[...] leaves it out"
        raise BadRow(where, f"a column holds a value that JSON can't represent: {error}; {advice}") from None


def _plain(value: Any) -> Any:
    """Converts values without a JSON type: NumPy's to Python's, dates and decimals to text; TypeError for bytes."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, bytes):
        raise TypeError("bytes")
    return str(value)


class PromptRow(NamedTuple):
    """One of the prompts of an optimizer step."""

    epoch: int
    row: int
    ids: list[int]
    columns: dict[str, Any]  # the row as in the data, including its prompt


class PromptRows(ExampleRows):
    """Rows of prompts: row i is prompt i."""

    unit = "prompts"
    learns = False

    def title(self, example: int) -> str:
        return f"prompt {example + 1:,} of {len(self):,}"

    def prompt(self, epoch: int, row: int) -> PromptRow:
        return PromptRow(epoch, row, self.examples.read(row)[0].tolist(), json.loads(self.examples.texts[row]))

    def read(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Returns a micro-batch of prompts for (epoch, row) pairs [P, 2]; `prompts_of` reads it.

        Returns:
            input_ids int64 [1, N], the concatenated prompts; cu_seqlens int32 [P + 1], their starts and the end; scored
            int64 [0], as prompts are not trained on; texts uint8 [M], the rows as lines of JSON in UTF-8;
            epoch, row int64 [P]; prompts, seen int64 []: P and N.
        """
        ids = [self.examples.read(int(row))[0] for _, row in rows]
        texts = "\n".join(self.examples.texts[int(row)] for _, row in rows)
        return {
            "input_ids": torch.from_numpy(np.concatenate(ids))[None],
            "cu_seqlens": torch.tensor([0, *np.cumsum([len(part) for part in ids]).tolist()], dtype=torch.int32),
            "scored": torch.zeros(0, dtype=torch.int64),
            "texts": torch.frombuffer(bytearray(texts.encode()), dtype=torch.uint8),
            "epoch": torch.from_numpy(rows[:, 0].copy()),
            "row": torch.from_numpy(rows[:, 1].copy()),
            "prompts": torch.tensor(len(rows), dtype=torch.int64),
            "seen": torch.tensor(sum(map(len, ids)), dtype=torch.int64),
        }


def prompts_of(batch: dict[str, torch.Tensor]) -> list[PromptRow]:
    """Returns the prompts of a micro-batch from `PromptRows.read` or `PromptRows.empty`."""
    if not int(batch["prompts"]):
        return []
    ids, starts = batch["input_ids"][0].tolist(), batch["cu_seqlens"].tolist()
    prompts = [ids[start:stop] for start, stop in itertools.pairwise(starts)]
    columns = [json.loads(line) for line in bytes(batch["texts"].tolist()).decode().split("\n")]
    return list(map(PromptRow, batch["epoch"].tolist(), batch["row"].tolist(), prompts, columns))
