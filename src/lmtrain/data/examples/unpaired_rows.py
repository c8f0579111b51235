"""Unpaired preferences {prompt, completion, label}, or {messages, label}: an answer and whether it is desirable."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from lmtrain.config.schema import Config
from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat.conversations import Conversation, options_of
from lmtrain.data.chat.pairs import answer_turns, opening
from lmtrain.data.chat.templates import fit
from lmtrain.data.chat.turns import BadRow, check, tools_of, truth_of, turns_of, unread
from lmtrain.data.examples.documents import ExampleRows, Examples
from lmtrain.data.examples.pair_rows import Answer, lay_answers, pad_answers
from lmtrain.data.examples.row_format import ANSWERS, Encoded, TemplateRows


class UnpairedRowEncoder(TemplateRows):
    """Encodes a row as one example, the prompt with its answer; the label is 1 if the answer is desirable, else 0."""

    holds = ANSWERS
    independent, kind = True, "unpaired"

    def __init__(self, tokenizer: Any, cfg: DataConfig) -> None:
        super().__init__(tokenizer, cfg)
        drops = cfg.on_assistant_first not in (None, "raise")
        self.identity = {**self.identity, "unpaired": 3 if drops else 2 if cfg.system_prompt else 1}

    def encode(self, row: dict[str, Any], where: str, cfg: DataConfig, question: bool) -> Encoded:
        """Returns the row's examples; strings become user and assistant turns, lists of turns remain turns.

        Of a conversation, the last turn is the answer.

        Raises:
            BadRow: a column is missing or null, the label isn't true or false, or the chat template refuses the row.
        """
        self.chat.begin_row()
        reading = self.reading_of(row, where, cfg)
        values = reading.values(row, where)
        if "turns" in values:
            values |= _parted(values["turns"], where)
        label = truth_of(values["label"])
        if label is None:
            raise BadRow(where, f"label must be true (desirable) or false, and is {values['label']!r}")
        turns, dropped = opening(values, reading, cfg, where)
        answer = answer_turns(values["response"], reading.name("response"), where)
        check([*turns, *answer], where)
        tools, options = tools_of(values.get("tools"), where), options_of(values, where)
        conversation = Conversation([*turns, *answer], tools, where, options=options)
        ids, trained = self.chat.pair(conversation, len(turns))
        fitted = fit(ids, trained, [], cfg, where, self.chat.beginning(ids))
        examples = [(e.input_ids, e.trained, int(label)) for e in fitted]
        first = replace(conversation, messages=[*turns, answer[0]])
        asked = self.question(first) if question and label else None
        others, remarks = reading.unread(row)
        remarks = [*self.chat.remarks, *unread(row), *remarks]
        return Encoded(examples, sum(e.cut for e in fitted), asked, dropped, remarks, others)  # type: ignore[arg-type]

    @staticmethod
    def to_evaluate(examples: Examples) -> Examples:
        """Returns the examples that lmtrain.evaluate scores: the desirable answers."""
        return examples.of(examples.labels == 1)

    @staticmethod
    def make_rows(examples: Examples, config: Config, seed: int | None) -> tuple["UnpairedRows", str]:
        good = int(examples.labels.sum())
        words = f"{good:,} desirable and {len(examples) - good:,} undesirable answers; no padding"
        return UnpairedRows(examples), words


def _parted(turns: Any, where: str) -> dict[str, Any]:
    """Returns the prompt and the response of a conversation: its last turn, which has to be the assistant's."""
    *before, last = turns_of(turns, where)
    if last["role"] != "assistant":
        raise BadRow(where, f"the conversation ends with a turn from {last['role']}, not with an answer to label")
    return {"prompt": before, "response": [last]}


class UnpairedRows(ExampleRows):
    """Rows of answers: row i is answer i. A micro-batch has no padding, unless `pad` gives each answer its own row."""

    unit = "answers"
    coupled = True  # each prompt is also read with the completion of another row
    padded = False

    def pad(self) -> None:
        self.padded = True

    def title(self, example: int) -> str:
        label = "desirable" if self.examples.labels[example] else "undesirable"
        return f"answer {example + 1:,} of {len(self):,}, {label}"

    def read(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """Returns a micro-batch for (epoch, row, other row) [A, 3]; for [A, 2] the other row is the one before it.

        Returns:
            input_ids, position_ids, cu_seqlens, scored, before, answer, lengths as in `PairRows.read`, for A answers;
            the same with the prefix kl_ for their prompts, each with the completion of the other row; label bool [A];
            answers, seen int64 []: A and the number of tokens in the A answers with their prompts.
        """
        index = rows[:, 1]
        other_rows = rows[:, 2] if rows.shape[1] == 3 else np.roll(index, 1)
        own, other = ([self.examples.read(int(row)) for row in some] for some in (index, other_rows))
        others = [_with_completion(prompt, answer) for prompt, answer in zip(own, other, strict=True)]
        return {
            **self._lay(own),
            **{f"kl_{name}": value for name, value in self._lay(others).items()},
            "label": torch.from_numpy(self.examples.labels[index] == 1),
            "answers": torch.tensor(len(rows), dtype=torch.int64),
            "seen": torch.tensor(sum(len(ids) for ids, _ in own), dtype=torch.int64),
        }

    def _lay(self, answers: list[Answer]) -> dict[str, torch.Tensor]:
        batch = lay_answers(answers)
        if self.padded:
            pad_answers(batch)
        return batch


def _with_completion(prompt: Answer, other: Answer) -> Answer:
    """Returns the prompt of one example with everything that follows the prompt of another."""
    (ids, trained), (other_ids, other_trained) = prompt, other
    end, start = int(trained.argmax()), int(other_trained.argmax())
    return np.concatenate([ids[:end], other_ids[start:]]), np.concatenate([trained[:end], other_trained[start:]])
