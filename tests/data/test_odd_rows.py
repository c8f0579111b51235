"""About 160 odd rows: each is read correctly, skipped and counted with a reason, or refused with its file and line."""

import bz2
import gc
import gzip
import json
import lzma
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from chats import sample_of
from lmtrain.data.chat.conversations import Conversation
from lmtrain.data.chat.turns import ROLES
from lmtrain.data.examples.pair_rows import PairRowEncoder, margins_of
from lmtrain.data.examples.prepare import PreparedExamples, prepare_examples
from lmtrain.data.examples.prompt_rows import PromptRowEncoder
from lmtrain.data.examples.row_counts import Counts, bad_lines, summary
from lmtrain.data.examples.row_format import ChatRows
from lmtrain.data.examples.unpaired_rows import UnpairedRowEncoder
from lmtrain.errors import UserError

U, A = {"role": "user", "content": "Two plus two?"}, {"role": "assistant", "content": "Four."}
S = {"role": "system", "content": "Be brief."}
TEXT = "<|user|>\nTwo plus two?$\n<|assistant|>\nFour.$"  # [U, A] in zephyr's template; $ stands for the end of a turn
CALL = {"name": "add", "arguments": {"a": 2}}
DEEP = "[" * 5000 + "]" * 5000
COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
            ".zst": lambda data: pa.compress(data, codec="zstd", asbytes=True)}  # fmt: skip


def messages(*turns: Any, **more: Any) -> dict[str, Any]:
    return {"messages": list(turns), **more}


def says(content: Any, **more: Any) -> dict[str, Any]:
    """Returns a conversation whose answer has this content."""
    return messages(U, {"role": "assistant", "content": content, **more})


def asks(content: Any, **more: Any) -> dict[str, Any]:
    return messages({"role": "user", "content": content, **more}, A)


def named(role: Any) -> dict[str, Any]:
    return messages(U, {"role": role, "content": "Four."})


def calls(call: Any) -> dict[str, Any]:
    return messages(U, {"role": "assistant", "content": "", "tool_calls": call}, A)


def returns(content: Any) -> dict[str, Any]:
    return messages(U, {"from": "function_call", "value": json.dumps(CALL)}, {"role": "tool", "content": content}, A)


# name: (row as an object or as the line itself, its rendered text (a str) or the reason for its refusal (a tuple))
ODD: dict[str, tuple[Any, str | tuple[str]]] = {
    # Whole lines.
    "a good row": (messages(U, A), TEXT),
    "spaces around": ("  " + json.dumps(messages(U, A)) + " \t", TEXT),
    "CRLF": (json.dumps(messages(U, A)) + "\r", TEXT),
    "indented keys": (messages(U, A, id=None, extra={"deep": [1, {"x": None}]}), TEXT),
    "an empty object": ("{}", ("no format of conversations fits the columns",)),
    "a list": ("[1, 2]", ("a JSON object with columns is needed, found [1, 2]",)),
    "a list of turns": (json.dumps([U, A]), ("a JSON object with columns is needed",)),
    "a string": ('"hello"', ("a JSON object with columns is needed",)),
    "a number": ("17", ("a JSON object with columns is needed",)),
    "null": ("null", ("a JSON object with columns is needed",)),
    "true": ("true", ("a JSON object with columns is needed",)),
    "NaN alone": ("NaN", ("a JSON object with columns is needed",)),
    "not JSON": ("hello there", ("malformed JSON",)),
    "single quotes": ("{'messages': []}", ("malformed JSON",)),
    "cut off": ('{"messages": [{"role": "us', ("malformed JSON",)),
    "two objects in a line": ("{} {}", ("malformed JSON (Extra data",)),
    "a comma too many": ('{"messages": [],}', ("malformed JSON",)),
    "a raw newline's kin in a string": ('{"text": "a\tb"}', ("malformed JSON",)),
    "a raw NUL in a string": ('{"text": "a\0b"}', ("malformed JSON",)),
    "a NUL line": ("\0\0\0", ("malformed JSON",)),
    "5,000 digits": ('{"text": ' + "9" * 5000 + "}", ("a number of more than 4,300 digits",)),
    "5,000 digits beside": (json.dumps(messages(U, A))[:-1] + ', "id": ' + "9" * 5000 + "}", ("4,300 digits",)),
    "4,000 digits": ('{"text": ' + "9" * 4000 + "}", ("text must be text",)),
    "5,000 deep": ('{"text": ' + DEEP + "}", ("nested too deep",)),
    "5,000 deep and open": ('{"text": ' + "[" * 5000 + "}", ("nested too deep",)),
    "500 deep": ('{"text": ' + "[" * 500 + "]" * 500 + "}", ("text must be text",)),
    "a key twice": ('{"text": "a", "text": "b"}', ("the key 'text' appears twice",)),
    "the second key twice": ('{"id": 1, "text": "a", "text": "b"}', ("the key 'text' appears twice",)),
    "a key twice in a turn": (
        '{"messages": [{"role": "user", "role": "assistant", "content": "x"}]}', ("the key 'role' appears twice",)),
    "infinity": ('{"text": Infinity}', ("text must be text and is inf (float)",)),
    "not a number": ('{"text": NaN}', ("text must be text and is nan (float)",)),
    "1e999": ('{"text": 1e999}', ("text must be text and is inf",)),
    # Columns.
    "other columns": ({"title": "a", "body": "b"}, ("no format of conversations fits the columns title, body",)),
    "an empty column name": ({"": "a"}, ("no format of conversations fits",)),
    "messages is null": ({"messages": None}, ("there is no messages",)),
    "messages is a number": ({"messages": 5}, ("messages must be a list of turns and is 5 (int)",)),
    "messages is true": ({"messages": True}, ("messages must be a list of turns",)),
    "messages is an object": ({"messages": U}, ("messages must be a list of turns",)),
    "messages is empty": ({"messages": []}, ("messages must be a list of turns and is []",)),
    "messages is a text": ({"messages": "Two plus two? Four."}, ("messages must be a list of turns",)),
    "messages is JSON": ({"messages": json.dumps([U, A])}, TEXT),
    "messages is deep JSON": ({"messages": DEEP}, ("messages must be a list of turns",)),
    "a list of strings": ({"messages": ["Two plus two?", "Four."]}, TEXT),
    "LIMA's list of strings": ({"conversations": ["Two plus two?", "Four."], "source": "x"}, TEXT),
    "DailyDialog's": ({"dialog": ["Two plus two?", "Four."]}, TEXT),
    "a list of one string": ({"messages": ["Two plus two?"]}, ("no assistant turn",)),
    "a list with an empty string": ({"messages": ["Two plus two?", ""]}, ("turn 2 (assistant) is empty",)),
    "strings and objects": ({"messages": [U, "Four."]}, ("turn 2 must be a mapping",)),
    "a list of numbers": ({"messages": [1, 2]}, ("turn 1 must be a mapping",)),
    "a list of lists": ({"messages": [["user", "hi"], ["assistant", "x"]]}, ("turn 1 must be a mapping",)),
    "a list of nulls": ({"messages": [None, None]}, ("turn 1 must be a mapping",)),
    # Roles.
    "a capital role": (named("Assistant"), TEXT),
    "gpt": (named("gpt"), TEXT),
    "model": (named("MODEL"), TEXT),
    "misspelt": (named("asistant"), ("turn 2 has the unknown role 'asistant'",)),
    "German": (named("Assistentin"), ("unknown role 'Assistentin'",)),
    "Chinese": (named("助手"), ("unknown role '助手'",)),
    "an empty role": (named(""), ("unknown role ''",)),
    "a number for a role": (named(3), ("unknown role 3",)),
    "a list for a role": (named(["assistant"]), ("unknown role ['assistant']",)),
    "true for a role": (named(True), ("unknown role True",)),
    "no role": (messages(U, {"content": "x"}), ("turn 2 has no role (its keys: content)",)),
    "an empty turn": (messages(U, {}), ("turn 2 has no role (its keys: none)",)),
    "role and from agree": (messages(U, {**A, "from": "assistant"}), TEXT),
    "role and from differ": (messages(U, {**A, "from": "human"}), ("turn 2 has role and from, and they differ",)),
    "content and value differ": (messages(U, {**A, "value": "Five."}), ("has content and value, and they differ",)),
    "mixed spellings": (
        messages({"from": "human", "content": "Two plus two?"}, {"role": "gpt", "value": "Four."}), TEXT),
    "ShareGPT in messages": (
        messages({"from": "human", "value": "Two plus two?"}, {"from": "gpt", "value": "Four."}), TEXT),
    # Contents.
    "null content": (says(None), ("turn 2 (assistant) has no content",)),
    "empty content": (says(""), ("turn 2 (assistant) is empty",)),
    "white space": (says(" \n\t\u00a0\u2003"), ("turn 2 (assistant) is empty",)),
    "zero": (says(0), ("turn 2 (assistant) must be text and is 0 (int)",)),
    "a float": (says(4.5), ("must be text and is 4.5 (float)",)),
    "NaN content": (says(float("nan")), ("must be text and is nan (float)",)),
    "true content": (says(True), ("must be text and is True (bool)",)),
    "false content": (says(False), ("must be text and is False (bool)",)),
    "an object": (says({"text": "Four."}), ("must be text and is {'text': 'Four.'} (dict)",)),
    "an empty object for content": (says({}), ("must be text and is {} (dict)",)),
    "an empty list": (says([]), ("turn 2 (assistant) is empty",)),
    "a list of strings for content": (says(["Four."]), ("must be text and is a list with 'Four.'",)),
    "a part": (says([{"type": "text", "text": "Four."}]), TEXT),
    "two parts": (says([{"type": "text", "text": "Fo"}, {"type": "text", "text": "ur."}]), TEXT),
    "an image": (asks([{"type": "image_url", "image_url": {"url": "x"}}]), ("has a part of type 'image_url'",)),
    "text and image": (asks([{"type": "text", "text": "?"}, {"type": "image"}]), ("has a part of type 'image'",)),
    "a part without text": (says([{"type": "text"}]), ("has a part of type 'text'",)),
    "a part whose text is null": (says([{"type": "text", "text": None}]), ("has a part of type 'text'",)),
    "a part without a type": (says([{"text": "Four."}]), ("is a list with {'text': 'Four.'}",)),
    "a part with a list for a type": (says([{"type": [], "text": "x"}]), ("has a part of type []",)),
    "half a surrogate pair": ('{"messages": [{"role": "user", "content": "\\ud83d"}]}', ("half a surrogate pair",)),
    "a whole pair": ('{"text": "\\ud83d\\ude42"}', "🙂$"),
    "an escaped NUL": (says("Fo\0ur."), TEXT.replace("Four", "Fo\0ur")),
    "right to left and marks": (says("\u202e\u200bعربى e\u0301"), TEXT.replace("Four.", "\u202e\u200bعربى e\u0301")),
    "a line separator": (says("a\u2028b\x85c"), TEXT.replace("Four.", "a\u2028b\x85c")),
    "a BOM inside": (says("\ufeffFour."), TEXT.replace("Four.", "\ufeffFour.")),
    "Jinja in a turn": (asks("{{ 1/0 }}{% raise %}"), TEXT.replace("Two plus two?", "{{ 1/0 }}{% raise %}")),
    "20,000 words": (says("word " * 20000 + "."), TEXT.replace("Four.", "word " * 20000 + ".")),
    # Order.
    "system first": (messages(S, U, A), "<|system|>\nBe brief.$\n" + TEXT),
    "system later": (messages(U, S, A), ("turn 2 is a system turn; it must be the first",)),
    "two systems": (messages(S, S, U, A), ("turns 1 and 2 are both system turns",)),
    "a system column": (messages(U, A, system="Be brief."), "<|system|>\nBe brief.$\n" + TEXT),
    "a blank system column": (messages(U, A, system=" \n"), TEXT),
    "a number for system": (messages(U, A, system=5), ("system must be text and is 5",)),
    "the assistant first": (messages(A, U, A), ("data.on_assistant_first=drop_turn",)),
    "only the assistant": (messages(A), ("the first turn must be the user's",)),
    "only the user": (messages(U), ("no assistant turn",)),
    "a tool first": (messages({"role": "tool", "content": "4"}, A), ("turn 1 is from tool",)),
    # Tools and flags.
    "a call of nothing": (calls([{}]), ("tool call that isn't {name, arguments}",)),
    "a call by a number": (calls([{"name": 5, "arguments": {}}]), ("tool call that isn't",)),
    "a call with a list": (calls([{"name": "add", "arguments": [2]}]), ("tool call that isn't",)),
    "calls that are a number": (calls(7), ("tool call that isn't",)),
    "a call with half a pair": (
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", '
        '"tool_calls": [{"name": "\\ud800", "arguments": {}}]}]}', ("half a surrogate pair",)),
    "tools that are a number": (messages(U, A, tools=3), ("tools must be a list of function descriptions",)),
    "tools that are a text": (messages(U, A, tools="add"), ("tools must be a list of function descriptions",)),
    "a list of tool names": (messages(U, A, tools=["add"]), ("tools must be a list of function descriptions",)),
    "train is 0.5": (says("Four.", train=0.5), ('turn 2 has "train": 0.5 (float); a turn is learned',)),
    "weight is 0.5": (says("Four.", weight=0.5), ('turn 2 has "weight": 0.5 (float)',)),
    "train is maybe": (says("Four.", train="maybe"), ("\"train\": 'maybe' (str)",)),
    "train is a list": (says("Four.", train=[]), ('"train": [] (list)',)),
    "train and weight differ": (says("Four.", train=True, weight=0), ("train and weight, and they differ",)),
    # Other formats.
    "alpaca": ({"instruction": "Two plus two?", "input": "", "output": "Four."}, TEXT),
    "alpaca without an answer": ({"instruction": "Two plus two?", "output": ""}, ("output is empty",)),
    "alpaca with a null": ({"instruction": None, "output": "x"}, ("there is no instruction",)),
    "alpaca with NaN": ({"instruction": "a", "input": float("nan"), "output": "x"}, ("input must be text and is nan",)),
    "a history that is a number": ({"instruction": "a", "output": "x", "history": 5}, ("history must be a list",)),
    "a history of strings": ({"instruction": "a", "output": "x", "history": ["ab"]}, ("history must be a list",)),
    "a history with a null": ({"instruction": "a", "output": "x", "history": [["a", None]]}, ("history must be text",)),
    "a number for an answer": ({"question": "a", "answer": 4}, ("answer must be text and is 4",)),
    "prompt and completion mixed": ({"prompt": [U], "completion": "Four."}, TEXT),
    "mixed the other way": ({"prompt": "a", "completion": [A]}, ("completion must be text",)),
    "an empty text": ({"text": ""}, ("text is empty",)),
    "a list for text": ({"text": ["a"]}, ("text must be text and is a list with 'a'",)),
}  # fmt: skip
PROMPT = {"prompt": "Two plus two?", "chosen": "Four.", "rejected": "Five."}
HH = "\n\nHuman: Two plus two?\n\nAssistant: "
ODD_PAIRS: dict[str, tuple[Any, str | tuple[str]]] = {
    "a good pair": (PROMPT, TEXT),
    "lists of strings": ({"chosen": ["Two plus two?", "Four."], "rejected": ["Two plus two?", "Five."]}, TEXT),
    "equal scores": ({**PROMPT, "score_chosen": 3, "score_rejected": 3}, TEXT),
    "scores the wrong way round": (
        {**PROMPT, "score_chosen": 2, "score_rejected": 4}, ("score_chosen is 2, below score_rejected, 4",)),
    "a NaN score": ({**PROMPT, "score_chosen": float("nan"), "score_rejected": 1}, ("score_chosen is NaN",)),
    "a NaN in words": ({**PROMPT, "score_chosen": 1, "score_rejected": "nan"}, ("score_rejected is NaN",)),
    "an infinite score": ({**PROMPT, "score_chosen": float("inf"), "score_rejected": 1}, ("must be a number",)),
    "a score of 400 digits": ({**PROMPT, "score_chosen": 10**400, "score_rejected": 1}, ("must be a number",)),
    "true for a score": ({**PROMPT, "score_chosen": True, "score_rejected": 1}, ("must be a number and is True",)),
    "a list for a score": ({**PROMPT, "score_chosen": [1], "score_rejected": 1}, ("must be a number",)),
    "equal answers": ({**PROMPT, "rejected": "Four."}, ("chosen and rejected are the same",)),
    "another prompt than the conversations": (
        {"prompt": "Three?", "chosen": [U, A], "rejected": [U, {**A, "content": "5"}]},
        ("'Three?' in the column prompt: fix it",)),
    "the prompt they begin with": (
        {"prompt": " Two plus two?", "chosen": [U, A], "rejected": [U, {**A, "content": "Five."}]}, TEXT),
    "the whole conversation as messages": (
        {"messages": [U, A], "chosen": [U, A], "rejected": [U, {**A, "content": "Five."}]}, TEXT),
    "a list of one answer": ({"prompt": "a", "chosen": ["b"], "rejected": ["c"]}, ("a list of one string",)),
    "no words from Human": (
        {"prompt": "\n\nAssistant:", "chosen": "a", "rejected": "b"}, ("prompt is empty",)),
    "hh": ({"chosen": HH + "Four.", "rejected": HH + "Five."}, TEXT),
    "hh with an empty answer": ({"chosen": HH + "Four.", "rejected": HH}, ("rejected, turn 2 is empty",)),
    "chosen is null": ({**PROMPT, "chosen": None}, ("there is no chosen",)),
    "chosen is a number": ({**PROMPT, "chosen": 5}, ("chosen must be a list of turns and is 5",)),
    "columns of nothing": ({"better": "a", "worse": "b"}, ("no format of pairs fits the columns better, worse",)),
}  # fmt: skip


def line_of(row: Any) -> str:
    return row if isinstance(row, str) else json.dumps(row)


@pytest.fixture
def read(tmp_path: Path, data_config: Any, tokenizer_config: Any) -> Any:
    def prepare(
        content: bytes, name: str = "odd.jsonl", option: str = "chat_jsonl", encoder: Any = None, **more: Any
    ) -> PreparedExamples:
        (tmp_path / name).write_bytes(content)
        settings = {"path": str(tmp_path / name), "val_fraction": 0, "chat_template": "zephyr", "max_length": None}
        encoder = encoder or (PairRowEncoder if option == "preference_jsonl" else ChatRows)
        cfg = data_config(option, **{**settings, **more})
        return prepare_examples(cfg, tokenizer_config("bytes"), encoder, progress=False)

    return prepare


def text_of(prepared: PreparedExamples, index: int = 0, learned: bool = False) -> str:
    """Returns an example's text, with $ for the end of a turn."""
    split = prepared.split("train")
    assert split is not None
    ids, trained = split.read(index)
    kept = [int(i) for i, t in zip(ids, trained, strict=True) if t or not learned]
    return bytes(i if i < 256 else ord("$") for i in kept).decode()


def check(row: Any, expected: str | tuple[str], read: Any, option: str) -> None:
    """Checks that a row between two good ones is read as expected, or refused by its line, or skipped alone."""
    good = json.dumps(PROMPT if option == "preference_jsonl" else messages(U, A))
    content = "\n".join([good, line_of(row), good, ""]).encode()
    group = 2 if option == "preference_jsonl" else 1
    if isinstance(expected, str):
        prepared = read(content, option=option, on_bad_row="raise")
        assert text_of(prepared, group).strip("\n") == expected.strip("\n")
        assert prepared.counts["train"]["examples"] == 3 * group
        return
    with pytest.raises(UserError) as caught:
        read(content, option=option, on_bad_row="raise")
    said = str(caught.value)
    assert expected[0] in said
    assert re.search(r"odd\.jsonl, line 2: ", said), said
    assert said.count("odd.jsonl") == 1
    assert len(said) < 1200
    counts = read(content, option=option, on_bad_row="skip").counts["train"]
    assert (counts["rows"], counts["examples"], sum(counts["bad"].values())) == (3, 2 * group, 1)
    assert expected[0] in "".join(counts["bad_first"].values())
    assert "".join(counts["bad_at"].values()).endswith("odd.jsonl, line 2")


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turns off garbage collection: deep JSON is read near the recursion limit, where destructors would fail."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ODD)
def test_an_odd_conversation(name: str, read: Any) -> None:
    with no_garbage_collection() if "deep" in name else nullcontext():
        check(*ODD[name], read, "chat_jsonl")


@pytest.mark.parametrize("name", ODD_PAIRS)
def test_an_odd_pair(name: str, read: Any) -> None:
    check(*ODD_PAIRS[name], read, "preference_jsonl")


def lines(*rows: Any) -> bytes:
    return "".join(line_of(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize(("option", "encoder", "row", "said"), [
    ("prompts_jsonl", PromptRowEncoder, {"ask": "a"},
     "no format of prompts fits the columns ask. Formats: prompt (prompt or question or query). Say what yours"),
    ("prompts_jsonl", PromptRowEncoder, {"prompt": None},
     "there is no prompt or question or query (the row has prompt); fix the row"),
    ("unpaired_jsonl", UnpairedRowEncoder, {"prompt": "a", "completion": "b", "good": True},
     "no format of unpaired answers fits the columns prompt, completion, good. Formats: answer (prompt or question"),
    ("unpaired_jsonl", UnpairedRowEncoder, {"prompt": "a", "answer": None, "label": True},
     "there is no response or answer or output (the row has prompt, answer, label); fix the row"),
])  # fmt: skip
def test_a_column_that_is_absent_or_null(option: str, encoder: Any, row: Any, said: str, read: Any) -> None:
    with pytest.raises(UserError, match=rf"odd\.jsonl, line 1: {re.escape(said)}"):
        read(lines(row), option=option, encoder=encoder, on_bad_row="raise")


@pytest.mark.parametrize(("label", "desirable"), [
    (True, 1), (0, 0), (1.0, 1), ("true", 1), (" False ", 0), ("1", 1), ("0.0", 0), ("yes", None), (2, None), ([], None)
])  # fmt: skip
def test_labels_of_unpaired_answers(label: Any, desirable: int | None, read: Any) -> None:
    """Of a CSV file all values are text."""
    rows = {"option": "unpaired_jsonl", "encoder": UnpairedRowEncoder}
    row = lines({"prompt": "a", "completion": "b", "label": label})
    if desirable is None:
        with pytest.raises(UserError, match=re.escape(f"must be true (desirable) or false, and is {label!r}")):
            read(row, **rows)
    else:
        assert read(row, **rows).split("train").labels.tolist() == [desirable]


def test_answers_that_the_template_trims_to_the_same(read: Any) -> None:
    rows = lines(PROMPT, {**PROMPT, "rejected": "Four. "})
    with pytest.raises(UserError, match=r"line 2: chosen and rejected are the same once the chat template has"):
        read(rows, option="preference_jsonl", chat_template="vicuna")
    rows = lines({**PROMPT, "chosen": "Four. And so.", "rejected": "Four. Or five."}, PROMPT)
    with pytest.raises(UserError, match=r"line 1: chosen and rejected are the same within data\.max_length"):
        read(rows, option="preference_jsonl", max_length=43, on_too_long="truncate_right")


def test_pairs_without_a_learned_token_are_a_share_of_the_pairs(read: Any) -> None:
    mute = {**PROMPT, "chosen": [{**A, "train": False}]}
    rows = lines(*[PROMPT] * 28, mute, mute)
    with pytest.raises(UserError, match=r"2 of 30 train rows have no learned token, the first is .*line 29"):
        read(rows, option="preference_jsonl")
    counts = read(rows, option="preference_jsonl", max_untrained=2 / 30).counts["train"]
    assert (counts["examples"], counts["untrained"]) == (56, 2)


@pytest.mark.parametrize(("option", "encoder", "row", "said"), [
    ("prompts_jsonl", PromptRowEncoder, {"prompt": "a"}, "prompts have no such column, but prompt, system,"),
    ("unpaired_jsonl", UnpairedRowEncoder, {"prompt": "a", "completion": "b", "label": True},
     "unpaired answers have no such column, but prompt, response, label, turns, system, tools, history, input,"),
    ("preference_jsonl", PairRowEncoder, PROMPT, "pairs have no such column, but prompt,"),
])  # fmt: skip
def test_a_name_for_a_column_that_no_row_has(option: str, encoder: Any, row: Any, said: str, read: Any) -> None:
    with pytest.raises(UserError, match=re.escape(f"data.columns.margn: {said}")):
        read(lines({**row, "gap": 1}), option=option, encoder=encoder, columns={"margn": "gap"})


def test_the_margin_of_a_pair_is_its_column_s(read: Any) -> None:
    rows = lines({**PROMPT, "gap": 2.5}, PROMPT)
    made = read(rows, option="preference_jsonl", columns={"margin": "gap"})
    assert margins_of(made.split("train")).tolist() == [2.5, 0]
    assert made.counts["train"]["remarks"] == {"data.columns.margin=gap: there is no such column": 1}


FLAGS = [({}, True), *(({"train": v}, True) for v in (True, 1, 1.0, "true", "True", "1", None)),
         *(({"train": v}, False) for v in (False, 0, 0.0, "false", "False", "FALSE", "0")),
         *(({"weight": v}, v == 1) for v in (1, 1.0, 0, 0.0)), ({"train": 0, "weight": 0}, False),
         ({"loss": False}, False), ({"loss": True}, True)]  # fmt: skip


@pytest.mark.parametrize(("flags", "learned"), FLAGS, ids=str)
def test_turns_that_say_whether_they_are_learned(flags: dict[str, Any], learned: bool, read: Any) -> None:
    prepared = read(lines(messages(U, {**A, **flags}, U, {**A, "content": "Still four."})))
    assert text_of(prepared, learned=True) == ("Four.$Still four.$" if learned else "Still four.$")


@pytest.mark.parametrize(("content", "shown"), [
    (0, "0"), (4.5, "4.5"), (False, "false"), ("", ""), ("0", "0"), ([1, 2], "[1, 2]"), ([], "[]"),
    ({"sum": "vier ü"}, '{"sum": "vier ü"}'), ([{"type": "text", "text": "four"}], "four"),
])  # fmt: skip
def test_what_a_tool_returned(content: Any, shown: str, data_config: Any) -> None:
    sample = sample_of(returns(content), data_config("chat"), "here")
    assert isinstance(sample, Conversation)
    assert sample.messages[2] == {"role": "tool", "content": shown}


def test_conversations_that_begin_with_the_assistant(read: Any) -> None:
    late = messages(S, {"role": "assistant", "content": "Welcome."}, {"role": "tool", "content": "x"}, U, A)
    rows = lines(late, messages(U, A), messages(A, U, A))
    with pytest.raises(UserError, match=r"line 1: turn 2 is from assistant.*data\.on_assistant_first=drop_turn"):
        read(rows)
    dropped = read(rows, on_assistant_first="drop_turn")
    assert text_of(dropped).strip() == "<|system|>\nBe brief.$\n" + TEXT
    assert text_of(dropped, 2).strip() == TEXT
    counts = dropped.counts["train"]
    assert (counts["examples"], counts["assistant_first"], counts["bad"]) == (3, 2, {})
    assert "2 began with the assistant" in summary("train", Counts(**counts))[0]
    skipped = read(rows, on_assistant_first="skip").counts["train"]
    assert (skipped["rows"], skipped["examples"], sum(skipped["bad"].values())) == (3, 1, 2)
    with pytest.raises(UserError, match="no assistant turn to learn from"):
        read(lines(messages(A, U)), on_assistant_first="drop_turn")


def test_rows_that_are_split_are_counted(read: Any) -> None:
    rows = lines(messages(U, A), messages(U, {**A, "content": "Four. " * 30}))
    counts = read(rows, max_length=100, on_too_long="split").counts["train"]
    assert (counts["examples"], counts["shortened"]) == (4, 0)
    assert counts["remarks"] == {"became several examples, as they are longer than data.max_length": 1}


def test_a_question_is_the_one_that_is_answered_last(read: Any, tmp_path: Path) -> None:
    (tmp_path / "val.jsonl").write_bytes(lines(messages(U, A, {**U, "content": "And five?"})))
    found = read(lines(messages(U, A)), val_path=str(tmp_path / "val.jsonl"), val_fraction=0.1)
    [question] = found.meta["questions"]
    assert (question["prompt"], question["reference"]) == (U["content"], A["content"])


def test_validation_rows_that_are_all_left_out_are_noted(read: Any, tmp_path: Path) -> None:
    (tmp_path / "val.jsonl").write_bytes(lines(messages(U, {**A, "content": "y" * 600})) * 5)
    val = {"val_path": str(tmp_path / "val.jsonl"), "max_length": 500, "on_too_long": "drop"}
    for _ in range(2):  # also of data that is prepared already
        found = read(lines(messages(U, A)), **val)
        assert found.split("val") is None
        assert found.notes == ["no row is left to validate on: val: 5 rows -> 0 examples, 0 tokens, 0% learned, 5 too "
                               "long and dropped"]  # fmt: skip


def test_pairs_whose_prompt_begins_with_the_assistant(read: Any) -> None:
    rows = lines({"chosen": [A, U, A], "rejected": [A, U, {**A, "content": "Five."}]})
    with pytest.raises(UserError, match="the first turn must be the user's"):
        read(rows, option="preference_jsonl")
    dropped = read(rows, option="preference_jsonl", on_assistant_first="drop_turn")
    assert text_of(dropped).strip() == TEXT
    assert dropped.counts["train"]["assistant_first"] == 1


@pytest.mark.parametrize(("option", "encoder", "answer"), [
    ("prompts_jsonl", PromptRowEncoder, {}),
    ("unpaired_jsonl", UnpairedRowEncoder, {"completion": "Four.", "label": True}),
])  # fmt: skip
def test_prompts_that_begin_with_the_assistant(option: str, encoder: Any, answer: Any, read: Any) -> None:
    rows = lines({"prompt": [S, A, U], **answer}, {"prompt": [U], **answer})
    with pytest.raises(UserError, match=r"line 1: turn 2 is from assistant.*data\.on_assistant_first=drop_turn"):
        read(rows, option=option, encoder=encoder)
    dropped = read(rows, option=option, encoder=encoder, on_assistant_first="drop_turn")
    expected = TEXT if answer else TEXT.partition("Four.")[0]
    assert text_of(dropped).strip("\n") == "<|system|>\nBe brief.$\n" + expected.strip("\n")
    assert text_of(dropped, 1).strip("\n") == expected.strip("\n")
    assert dropped.counts["train"]["assistant_first"] == 1
    skipped = read(rows, option=option, encoder=encoder, on_assistant_first="skip").counts["train"]
    assert (skipped["examples"], sum(skipped["bad"].values())) == (1, 1)


@pytest.mark.parametrize("template", ["zephyr", None])
@pytest.mark.parametrize("row", [{"prompt": "a\ud800"}, {"prompt": "a", "answer": ["\udc00"]}])
def test_a_prompt_s_row_must_be_text(row: Any, template: str | None, read: Any) -> None:
    rows = {"option": "prompts_jsonl", "encoder": PromptRowEncoder, "chat_template": template}
    with pytest.raises(UserError, match=r"odd\.jsonl, line 2: .*half a surrogate pair"):
        read(lines({"prompt": "a"}, row), **rows)
    counts = read(lines({"prompt": "a"}, row), **rows, on_bad_row="skip").counts["train"]
    assert (counts["examples"], sum(counts["bad"].values())) == (1, 1)


@pytest.mark.parametrize(("option", "encoder", "row", "more"), [
    ("prompts_jsonl", PromptRowEncoder, {"prompt": "a"}, {"chat_template": None}),
    ("preference_jsonl", PairRowEncoder, PROMPT, {"conversation_format": "preference_text"}),
])  # fmt: skip
def test_a_system_prompt_that_plain_text_leaves_out(option: str, encoder: Any, row: Any, more: Any, read: Any) -> None:
    made = read(lines(row), option=option, encoder=encoder, system_prompt="Be brief.", **more)
    assert "data.system_prompt has no effect" in next(iter(made.counts["train"]["remarks"]))


def test_a_reason_is_one_line_with_a_count(read: Any) -> None:
    empty = [messages(U, A, U, {**A, "content": ""}), says(" "), says("")]
    unknown = [named("robot"), named("narrator")]
    malformed = ['{"a', '{"messages": [}', "no JSON at all"]
    many = read(lines(messages(U, A), *unknown, *empty * 3, *malformed), on_bad_row="skip")
    counts = Counts(**many.counts["train"])
    numbers, *reasons = summary("train", counts)
    assert numbers.endswith("14 bad rows skipped")
    assert [re.sub(r"/\S*/", "", line) for line in reasons] == [
        "train: 9 rows skipped, first odd.jsonl, line 4: turn 4 (assistant) is empty",
        'train: 3 rows skipped, first odd.jsonl, line 13: malformed JSON (Invalid control character at, column 4): {"a',
        "train: 2 rows skipped, first odd.jsonl, line 2: turn 2 has the unknown role 'robot' (str); known are "
        + ", ".join(ROLES),
    ]


def test_reasons_without_end_are_one_line(read: Any) -> None:
    columns = [{f"column {'abcdefgh'[i % 8] * (1 + i // 8)}": "x"} for i in range(150)]
    kinds = Counts()
    for i in range(150):
        kinds.add_bad(f"a reason of its own, {'x' * i}", f"line {i}")
    assert len(kinds.bad) <= 101
    assert sum(kinds.bad.values()) == 150
    assert len(bad_lines(kinds)) == 9
    counts = Counts(**read(lines(messages(U, A), *columns), on_bad_row="skip").counts["train"])
    assert [number for number, _ in bad_lines(counts)] == ["150 rows skipped"]


def test_alpaca_leaves_out_rows_without_an_answer(read: Any) -> None:
    good = {"instruction": "Two plus two?", "input": "", "output": "Four."}
    counts = read(lines(good, {**good, "output": ""}, good), option="alpaca").counts["train"]
    assert (counts["examples"], counts["bad"]) == (2, {"output is empty": 1})


SETTINGS = [
    ("chat_jsonl", {"system_prompt": "Be brief."}), ("chat_jsonl", {"on_assistant_first": "drop_turn"}),
    ("chat_jsonl", {"prompt_template": "{messages}!", "response_template": "{messages}"}),
    ("preference_jsonl", {"prompt_template": "{prompt}!"}),
]  # fmt: skip


@pytest.mark.parametrize(("option", "setting"), SETTINGS)
def test_what_shapes_rows_prepares_them_again(option: str, setting: dict[str, str], read: Any) -> None:
    rows = lines(PROMPT if option == "preference_jsonl" else {"messages": json.dumps([U, A])})
    assert read(rows, option=option).folder != read(rows, option=option, **setting).folder


def test_windows_files(read: Any) -> None:
    rows = lines(messages(U, A), messages(U, A)).replace(b"\n", b"\r\n")
    for name, content in {
        "a.jsonl": rows,
        "b.json": rows,
        "c.json": b"[" + rows.strip().replace(b"\r\n", b",\r\n") + b"]",
    }.items():
        prepared = read(b"\xef\xbb\xbf" + content, name)
        assert prepared.counts["train"]["examples"] == 2
        assert text_of(prepared).strip() == TEXT
    with pytest.raises(UserError, match=r"utf16\.jsonl, line 1: not UTF-8.*iconv"):
        read(rows.decode().encode("utf-16"), "utf16.jsonl")


def test_odd_entries_of_a_json_list(read: Any) -> None:
    rows = [messages(U, A), 5, [], None, messages(U, A)]
    content = json.dumps(rows, indent=1).encode()
    line = content[: content.index(b" 5,")].count(b"\n") + 1
    with pytest.raises(UserError, match=rf"list\.json, entry 1 \(line {line}\): a JSON object .* found 5; fix"):
        read(content, "list.json")
    counts = read(content, "list.json", on_bad_row="skip").counts["train"]
    assert (counts["rows"], counts["examples"], sum(counts["bad"].values())) == (5, 2, 3)
    twice = b'[{"text": "a", "text": "b"},\n {"text": "c"}]'
    assert read(twice, "list.json", on_bad_row="skip").counts["train"]["examples"] == 1
    for content, said in {
        b'[{"text": "a"},\n {"text": ' + b"9" * 5000 + b"}]": r"entry 1 \(line 2\): JSON with a number of more than",
        b'[{"text": "a"},\n\n {"text": ' + DEEP.encode() + b"}]": r"entry 1 \(line 3\): JSON that is nested too deep",
        b'[{"text": "a"}\n {"text": "b"}]': r"line 2: malformed JSON \(Expecting ','",
        b'[{"text": "a"},\n]': r"line 2: malformed JSON",
        b'[{"text": "a"}': r"line 1: malformed JSON \(Expecting ','",
        b'[{"text": "a"}] x': r"after the list there is more\): x",
        b"[": r"line 1: malformed JSON",
        b"[]": r"holds no rows to train on",
    }.items():
        with pytest.raises(UserError, match=said) as caught:
            read(content, "list.json")
        assert len(str(caught.value)) < 400


def test_csv_and_tsv(read: Any) -> None:
    head, good = b"instruction,input,output,score\r\n", b'Two plus two?,,"Four.",4\r\n'
    prepared = read(b"\xef\xbb\xbf" + head + good + b"\r\n" + b'"a, ""b""\nand c",,"d",\n', "rows.csv")
    assert text_of(prepared).strip() == TEXT
    assert '<|user|>\na, "b"\nand c$' in text_of(prepared, 1)
    tabs = (head + good).replace(b",", b"\t")
    assert text_of(read(tabs, "rows.tsv")).strip() == TEXT
    odd = head + good + b"one,two\r\n" + b'"a" b,,x,1\r\n' + b"NA,,,\r\n" + good
    counts = read(odd, "odd.csv", on_bad_row="skip").counts["train"]
    assert (counts["rows"], counts["examples"], sum(counts["bad"].values())) == (5, 2, 3)
    for content, said in {
        head + good + b"one,two\r\n": r"odd\.csv, line 3: the line has 2 fields, and the first line names 4 columns",
        head + good + b'"a" b,,x,1\n': r"odd\.csv, line 3: malformed CSV \(",
        head + b'"a,,x,1\n' + good * 3: r"odd\.csv, line 2: malformed CSV \(.*isn't closed, so 2 lines are lost",
        head
        + b'"a,,x,1\n'
        + good.replace(b'"', b"") * 50: r"odd\.csv, line 2: malformed CSV .*is a quote opened and never closed",
        head + b"a,,,\n": r"odd\.csv, line 2: output is empty",
        b"a,a\n1,2\n": r"odd\.csv, line 1: the first line must name columns",
        head: r"holds no rows",
    }.items():
        with pytest.raises(UserError, match=said):
            read(content, "odd.csv")


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_compressed_rows(suffix: str, read: Any) -> None:
    packed = COMPRESS[suffix](lines(messages(U, A)) * 500)
    prepared = read(packed, f"rows.jsonl{suffix}")
    assert prepared.counts["train"]["examples"] == 500
    for name, content in {"cut": packed[:-9], "no": b"plain text, and no more"}.items():
        with pytest.raises(UserError, match=rf"{name}\.jsonl\{suffix} can't be read: "):
            read(content, f"{name}.jsonl{suffix}", on_bad_row="skip")
