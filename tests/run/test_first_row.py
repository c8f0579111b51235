"""The plan's first row and the prompts taken from a text: what a user sees of the data before and after training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inprocess import run
from lmtrain.config.schema_data import TokenizerConfig
from lmtrain.data import tokenizers
from lmtrain.generation.prompts import a_prompt
from support import TINY


def test_the_first_row_shows_a_question_and_what_is_learned(tmp_path: Path) -> None:
    """Also in a log, with a template whose words stand before the question, and behind a row without an answer."""
    rows = [{"prompt": f"Who is number {i}, of all who ran?", "response": f"It is Mia, {i}."} for i in range(40)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = run("train", *TINY, "objective=sft", "data=chat_jsonl", f"data.path={tmp_path}/pairs.jsonl",
                "data.chat_template=alpaca", "model.max_position_embeddings=512", "data.seq_len=512",
                "trainer.max_steps=1", f"run.dir={tmp_path}/run")  # fmt: skip
    assert ended.code == 0, ended.err
    log = ended.out[ended.out.index("first training row") :].replace("╎", "")
    plan = (tmp_path / "run" / "plan.txt").read_text().replace("╎", "")
    for text in (log, plan[plan.index("first training row") :]):
        assert "Who is number" in text
        assert "⟦It is Mia, " in text


class _Rows:
    """A single row, of a text in bytes."""

    def __init__(self, text: str) -> None:
        self.ids = list(text.encode())

    def __len__(self) -> int:
        return 1

    def read(self, rows: np.ndarray) -> dict[str, Any]:
        return {"input_ids": torch.tensor([self.ids])}


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ("rket with a doll. Then Sam went to the park with a hat.", "Then Sam went to the par"),
        ("rket with a doll and then Sam went to the park", "with a doll and then Sam"),
        ("x = 1\n    return x + 1234567890123456", "return x + 1234567890123"),
        (" the market with a doll and Sam", "the market with a doll a"),
        ("1234567890123456789012345678901234567890", "123456789012345678901234"),
    ],
)
def test_a_prompt_of_a_text_begins_with_a_word(row: str, prompt: str) -> None:
    tokenizer = tokenizers.load_or_train(TokenizerConfig(kind="bytes"), lambda _: iter(()))
    assert a_prompt(_Rows(row), tokenizer) == prompt  # type: ignore[arg-type]
