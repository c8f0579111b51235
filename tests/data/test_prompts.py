"""Prompts: what the model reads of a row, what rewards get of it, and how a micro-batch of them is taken apart."""

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from example_files import ExampleWriter
from lmtrain.config import compose as rules
from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat.turns import BadRow
from lmtrain.data.examples.prompt_rows import PromptRowEncoder, PromptRows, conversation_of, prompt_column, prompts_of
from lmtrain.errors import UserError
from tiny_pretrained import save_pretrained


def config(*words: str) -> DataConfig:
    data = ["objective=grpo", "data=prompts_jsonl", "data.path=x", "model=pretrained", "model.name_or_path=y"]
    return rules.check(rules.compose([*data, "reward=exact_number", *words])).data


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pretrained(tmp_path_factory.mktemp("llama"), max_position_embeddings=256)


def encoder(folder: Path, *words: str) -> tuple[PromptRowEncoder, DataConfig, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if "data.chat_template=vicuna" not in words:
        tokenizer.chat_template = None
    cfg = config(*words)
    return PromptRowEncoder(tokenizer, cfg), cfg, tokenizer


def test_a_text_is_given_unchanged_and_kept_with_its_columns(folder: Path) -> None:
    made, cfg, tokenizer = encoder(folder)
    row = {"prompt": "2+3=", "answer": "5", "more": {"a": [1, None]}}
    found = made.encode(row, "row 1", cfg, False)
    ((ids, learned),) = found.examples
    assert list(ids) == tokenizer("2+3=", add_special_tokens=False)["input_ids"]
    assert list(learned) == [True] * len(ids)
    assert json.loads(found.kept) == row
    assert found.unread == ["answer", "more"], "read by rewards only"
    with pytest.raises(BadRow, match="the prompt is empty"):
        made.encode({"prompt": "", "answer": "5"}, "row 1", cfg, False)
    assert [r.text for r in found.remarks] == []
    spoken = encoder(folder, "data.system_prompt=Count.")
    assert "data.system_prompt has no effect" in spoken[0].encode(row, "row 1", spoken[1], False).remarks[-1].text


def test_turns_end_where_the_model_begins_to_generate(folder: Path) -> None:
    made, cfg, tokenizer = encoder(folder, "data.chat_template=vicuna", "data.system_prompt=Count.")
    turns = [{"role": "user", "content": "two plus three?"}]
    texts = [
        tokenizer.decode(made.encode({"prompt": prompt}, "row 1", cfg, False).examples[0][0])
        for prompt in (turns, [*turns, {"role": "assistant", "content": "5"}], "two plus three?")
    ]
    assert len(set(texts)) == 1, "the data's answer is left out, and a text is a user's turn"
    assert texts[0].removeprefix(tokenizer.eos_token) == "Count. USER: two plus three? ASSISTANT:"
    asked = conversation_of({"prompt": turns}, cfg, "row 1").messages
    assert [turn["role"] for turn in asked] == ["system", "user", "assistant"]
    assert prompt_column({"prompt": "x", "answer": "y"}, cfg) == "prompt"


def test_a_prompt_that_is_too_long_is_an_error_or_left_out(folder: Path) -> None:
    for most, how, kept in ((4, "raise", 1), (3, "raise", None), (4, "drop", 1), (3, "drop", 0)):
        made, cfg, _ = encoder(folder, f"data.max_prompt_length={most}", f"data.on_too_long={how}")
        if kept is None:
            with pytest.raises(BadRow, match=r"has 4 tokens and data\.max_prompt_length is 3"):
                made.encode({"prompt": "2+3="}, "row 1", cfg, False)
        else:
            assert len(made.encode({"prompt": "2+3="}, "row 1", cfg, False).examples) == kept


def test_columns_keep_what_json_can_say(folder: Path) -> None:
    made, cfg, _ = encoder(folder)
    row = {"prompt": "a", "n": np.int64(3), "list": np.array([1.5, 2.0]), "day": datetime.date(2026, 1, 2),
           "much": decimal.Decimal("1.10")}  # fmt: skip
    kept = json.loads(made.encode(row, "row 1", cfg, False).kept)
    assert kept == {"prompt": "a", "n": 3, "list": [1.5, 2.0], "day": "2026-01-02", "much": "1.10"}
    for value in (b"x", float("nan")):
        with pytest.raises(BadRow, match=r"a column holds a value that JSON can't represent"):
            made.encode({"prompt": "a", "odd": value}, "row 1", cfg, False)
    with pytest.raises(UserError, match=r"the rows have the column completions, and rewards get something else"):
        made.encode({"prompt": "a", "completions": "b"}, "row 1", cfg, False)
    without, cfg, _ = encoder(folder, "data.ignore_columns=[completions]")
    assert json.loads(without.encode({"prompt": "a", "completions": "b"}, "row 1", cfg, False).kept) == {"prompt": "a"}


def test_a_micro_batch_holds_each_prompt_with_its_row(tmp_path: Path) -> None:
    writer, columns = ExampleWriter(tmp_path), [{"prompt": "a", "é": 1}, {"prompt": "bc"}, {"prompt": "d\n"}]
    for number, length in enumerate((2, 5, 1)):
        writer.append([10 * number + i for i in range(length)], [True] * length, kept=json.dumps(columns[number]))
    rows = PromptRows(writer.close())
    batch = rows.read(np.array([[0, 2], [3, 1]]))
    assert batch["input_ids"].tolist() == [[20, 10, 11, 12, 13, 14]]
    assert batch["cu_seqlens"].tolist() == [0, 1, 6]
    assert (int(batch["prompts"]), int(batch["seen"]), batch["scored"].numel()) == (2, 6, 0)
    assert [tuple(prompt) for prompt in prompts_of(batch)] == [
        (0, 2, [20], columns[2]),
        (3, 1, [10, 11, 12, 13, 14], columns[1]),
    ]
    assert prompts_of(batch) == [rows.prompt(0, 2), rows.prompt(3, 1)]
    assert rows.title(1) == "prompt 2 of 3"
    assert prompts_of({**batch, "prompts": torch.tensor(0)}) == []
    assert prompts_of(rows.empty()) == []
