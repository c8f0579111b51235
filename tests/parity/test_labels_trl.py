"""Token ids and labels of conversations against TRL's SFTTrainer(assistant_only_loss=True), token for token."""

from pathlib import Path

import pytest
from helpers_trl import LLAMA3_TOKENS, Messages, ask_trl, dialogues, smollm2_tokenizer, tokenizer_on
from transformers import PreTrainedTokenizerFast
from workload import MARKED_CHATML

from chats import sample_of
from lmtrain.config import compose as config
from lmtrain.data.chat.conversations import Conversation
from lmtrain.data.chat.templates import ChatEncoder
from loopback_hub import HUB

pytestmark = pytest.mark.slow

Row = Messages | dict[str, Messages]
Labelled = tuple[list[int], list[int]]  # input ids; labels, -100 where a token is not learned


def ours(
    rows: list[Row], tokenizer: PreTrainedTokenizerFast, template: str, max_length: int, train_on: str = "assistant"
) -> list[Labelled]:
    """Returns lmtrain's ids and labels, without rows in which truncation leaves nothing to learn, as TRL does."""
    overrides = [
        "objective=sft",
        "data=chat_jsonl",
        "data.path=none.jsonl",
        "data.seq_len=256",
        f"data.max_length={max_length}",
    ]
    words = [*overrides, f"data.chat_template={template}", f"data.train_on={train_on}"]
    cfg = config.check(config.compose(words)).data
    encoder = ChatEncoder(tokenizer, cfg)
    samples = [Conversation(row, None, "row") if isinstance(row, list) else sample_of(row, cfg, "row") for row in rows]
    examples = [encoder.encode(sample) for sample in samples]
    assert all(len(example) == 1 for example in examples)
    found = [(e.input_ids, labels_of(e.input_ids, e.trained)) for (e,) in examples]
    return [(ids, labels) for ids, labels in found if set(labels) != {-100}]


def labels_of(ids: list[int], trained: list[bool]) -> list[int]:
    return [token if learned else -100 for token, learned in zip(ids, trained, strict=True)]


def theirs(
    folder: Path, rows: list[Row], tokenizer: PreTrainedTokenizerFast, max_length: int, **more: str | bool
) -> list[Labelled]:
    tokenizer.save_pretrained(folder / "tokenizer")
    names = {"tokenizer": str(folder / "tokenizer"), "max_length": max_length, **more}
    answer = ask_trl(folder, "labels", rows=rows, **names)
    return list(zip(answer["input_ids"], answer["labels"], strict=True))


def of_kind(kind: str, folder: Path) -> tuple[list[Messages], PreTrainedTokenizerFast]:
    if kind == "real":
        return dialogues(200, real=True), smollm2_tokenizer()
    rows = dialogues(200, real=False)
    return rows, tokenizer_on(rows, folder / "made")


@pytest.fixture
def rows_and_tokenizer(tmp_path: Path) -> tuple[list[Messages], PreTrainedTokenizerFast]:
    """Returns real conversations, or generated ones if there are none, and a tokenizer."""
    return of_kind("real" if HUB.is_dir() else "made", tmp_path)


@pytest.mark.parametrize("max_length", [1024, 60])
@pytest.mark.parametrize("kind", [pytest.param("real", marks=pytest.mark.nightly), "made"])
def test_chatml(kind: str, max_length: int, tmp_path: Path) -> None:
    rows, tokenizer = of_kind(kind, tmp_path)
    reference = theirs(tmp_path, rows, tokenizer, max_length, template=MARKED_CHATML)
    assert ours(rows, tokenizer, "chatml", max_length) == reference
    if max_length == 1024:
        assert len(reference) == 200
        end_of_turn = tokenizer.convert_tokens_to_ids("<|im_end|>")
        answers = sum(turn["role"] == "assistant" for row in rows for turn in row)
        assert sum(labels.count(end_of_turn) for _, labels in reference) == answers


def test_llama3(rows_and_tokenizer: tuple[list[Messages], PreTrainedTokenizerFast], tmp_path: Path) -> None:
    """Labels equal those of TRL's own template of that name."""
    rows, tokenizer = rows_and_tokenizer
    tokenizer.add_special_tokens(
        {
            "bos_token": LLAMA3_TOKENS[0],
            "eos_token": LLAMA3_TOKENS[-1],
            "additional_special_tokens": LLAMA3_TOKENS[1:-1],
        }
    )
    reference = theirs(tmp_path, rows, tokenizer, 1024, trl_template="llama3.jinja")
    assert ours(rows, tokenizer, "llama3", 1024) == reference
    assert len(reference) == 200


def test_newlines_around_an_answer(
    rows_and_tokenizer: tuple[list[Messages], PreTrainedTokenizerFast], tmp_path: Path
) -> None:
    """Labels differ from TRL's ChatML template (Qwen 2.5's) in newlines only.

    That template also marks the newline before an answer, which the model is given, and the one after its end-of-turn
    token, which it is never asked for. With TRL's marked template, lmtrain's labels equal TRL's.
    """
    rows, tokenizer = rows_and_tokenizer
    reference = theirs(tmp_path, rows, tokenizer, 1024, trl_template="qwen2_5.jinja")
    answer = ask_trl(tmp_path, "templates", trl_template="qwen2_5.jinja")
    plain, marked = tmp_path / "plain.jinja", tmp_path / "marked.jinja"
    plain.write_text(answer["plain"])
    marked.write_text(answer["marked"])
    assert ours(rows, tokenizer, str(marked), 1024) == reference

    newline = tokenizer("\n", add_special_tokens=False)["input_ids"]
    assert len(newline) == 1
    for (ids, labels), (their_ids, their_labels), row in zip(
        ours(rows, tokenizer, str(plain), 1024), reference, rows, strict=True
    ):
        assert ids == their_ids
        differ = [t for t, (a, b) in enumerate(zip(labels, their_labels, strict=True)) if a != b]
        assert {their_labels[t] for t in differ} == set(newline)
        assert {labels[t] for t in differ} == {-100}
        assert len(differ) == 2 * sum(turn["role"] == "assistant" for turn in row)


@pytest.mark.parametrize("train_on", ["assistant", "completion"])
def test_prompts_with_answers_of_their_own(
    rows_and_tokenizer: tuple[list[Messages], PreTrainedTokenizerFast], train_on: str, tmp_path: Path
) -> None:
    """Nothing of a row's prompt is learned, including its few-shot answers."""
    rows, tokenizer = rows_and_tokenizer
    rows = [row for row in rows if row[-1]["role"] == "assistant"]
    # The last answer is the completion; in every third row, it is the last question and two answers.
    cuts = [-3 if i % 3 == 0 and len(row) > 3 else -1 for i, row in enumerate(rows)]
    split = [{"prompt": row[:cut], "completion": row[cut:]} for row, cut in zip(rows, cuts, strict=True)]
    assert sum(any(t["role"] == "assistant" for t in row["prompt"]) for row in split) > 50
    reference = theirs(
        tmp_path, split, tokenizer, 1024, template=MARKED_CHATML, assistant_only_loss=train_on == "assistant"
    )
    assert ours(split, tokenizer, "chatml", 1024, train_on) == reference
