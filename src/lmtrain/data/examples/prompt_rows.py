"""Prompt rows {prompt, any other columns}: the prompts for a model, and the columns that rewards may use."""

import itertools
import json
from typing import Any, NamedTuple

import numpy as np
import torch

from lmtrain.config.schema import Config
from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat.conversations import Completion, Conversation, Format, check_renamed, column_of, values_of
from lmtrain.data.chat.pairs import opening
from lmtrain.data.chat.turns import BadRow, Remark, check, tools_of, whole_text
from lmtrain.data.examples.documents import ExampleRows, Examples
from lmtrain.data.examples.row_format import Encoded, TemplateRows
from lmtrain.errors import UserError

PROMPT = "prompt|question|instruction|messages"
_FORMAT = Format([PROMPT])
# Names under which rewards get something else than a column: rewards/base.py.
RESERVED = frozenset(("self", "prompts", "completions", "completion_ids", "cut_off"))


class PromptRowEncoder(TemplateRows):
    """Encodes a row as one example: the prompt up to where the model begins to generate; the row is stored beside it.

    A text prompt is given to the model unchanged if the tokenizer has no chat template and data.chat_template names
    none, else as a user turn. Messages always go through the template.
    """

    words = "prompts"
    learns = False
    _asks = False  # whether some row has shown that the template has a generation prompt

    def __init__(self, tokenizer: Any, cfg: DataConfig) -> None:
        """Raises UserError for a column in data.columns that such rows don't have."""
        check_renamed(cfg, "prompts have", _FORMAT.required)
        super().__init__(tokenizer, cfg)
        self.identity = {**self.identity, "prompts": 1 if cfg.on_assistant_first in (None, "raise") else 2}

    def encode(self, row: dict[str, Any], where: str, cfg: DataConfig, question: bool) -> Encoded:
        """Returns the prompt as an example; none if it is too long and data.on_too_long=drop.

        Raises:
            BadRow: there is no prompt, it is longer than data.max_prompt_length, or JSON can't hold a column.
            UserError: the chat template has no generation prompt, or a column has a name of `RESERVED`.
        """
        self.chat.begin_row()
        taken = sorted(RESERVED.intersection(row) - {column_of(PROMPT, row, cfg)})
        if taken:
            raise UserError(
                f"{where}: the rows have the column {taken[0]}, and rewards get something else under this name: rename "
                f"or remove it in the data (of a hub data set, save a copy: load_dataset(NAME, split='train')"
                f".remove_columns({taken}).to_json('prompts.jsonl'))"
            )
        prompt = values_of(row, _FORMAT, cfg, where)["prompt"]
        if prompt == "" or prompt == []:
            raise BadRow(where, "the prompt is empty")
        whole_text(row, "the row", where)  # all of it is stored as UTF-8
        ids, dropped = self._ids(prompt, row, where, cfg)
        most = cfg.max_prompt_length
        if most is not None and len(ids) > most:
            if cfg.on_too_long == "drop":
                return Encoded([])
            found = f"the prompt has {len(ids)} tokens and data.max_prompt_length is {most}"
            raise BadRow(where, f"{found}: shorten it, or leave such prompts out with data.on_too_long=drop")
        try:
            kept = json.dumps(row, ensure_ascii=False, allow_nan=False, default=_plain)
        except (TypeError, ValueError) as error:
            raise BadRow(where, f"a column holds a value that JSON can't represent: {error}") from None
        remarks = [*self.chat.remarks]
        if self._is_text(prompt) and cfg.system_prompt:
            words = "the prompt is text and there is no chat template: name one with data.chat_template"
            remarks.append(Remark(f"data.system_prompt has no effect: {words}"))
        return Encoded([(ids, [True] * len(ids))], dropped_turns=dropped, remarks=remarks, kept=kept)

    def _is_text(self, prompt: Any) -> bool:
        """Returns whether the prompt is given to the model unchanged."""
        return isinstance(prompt, str) and self.chat.template is None

    def _ids(self, prompt: Any, row: dict[str, Any], where: str, cfg: DataConfig) -> tuple[list[int], int]:
        """Returns the prompt's token ids, and how many turns before the first user turn were dropped."""
        if self._is_text(prompt):
            return self.chat.prompt_ids(Completion(prompt, "", where)), 0
        turns, dropped = opening(prompt, cfg, where)
        while turns and turns[-1]["role"] == "assistant":  # the data's answer is left out
            turns = turns[:-1]
        answer = {"role": "assistant", "content": "..."}
        check([*turns, answer], where)
        asked = Conversation([*turns, answer], tools_of(row.get("tools"), where), where)
        ids = self.chat.prompt_ids(asked)
        self._asks = self._asks or ids != self.chat.prompt_ids(asked, ask=False)
        if not self._asks:
            found = "the chat template writes nothing that asks for an answer (add_generation_prompt changes nothing)"
            raise UserError(f"{where}: {found}: name another with data.chat_template, or write prompts as text")
        return ids, dropped

    @staticmethod
    def make_rows(examples: Examples, config: Config, seed: int | None) -> tuple["PromptRows", str]:
        longest = int(examples.lengths.max()) if len(examples) else 0
        return PromptRows(examples), f"{len(examples):,} prompts of up to {longest:,} tokens"


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
            "prompts": torch.tensor(len(rows)),
            "seen": torch.tensor(sum(map(len, ids))),
        }


def prompts_of(batch: dict[str, torch.Tensor]) -> list[PromptRow]:
    """Returns the prompts of a micro-batch from `PromptRows.read` or `PromptRows.empty`."""
    if not int(batch["prompts"]):
        return []
    ids, starts = batch["input_ids"][0].tolist(), batch["cu_seqlens"].tolist()
    prompts = [ids[start:stop] for start, stop in itertools.pairwise(starts)]
    columns = [json.loads(line) for line in bytes(batch["texts"].tolist()).decode().split("\n")]
    return list(map(PromptRow, batch["epoch"].tolist(), batch["row"].tolist(), prompts, columns))
