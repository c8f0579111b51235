"""Rows of every format become the same turns; rows that are no conversation are refused with a reason."""

import json
from pathlib import Path

import pytest

from chats import sample_of
from lmtrain.data.chat.columns import FORMATS, detect
from lmtrain.data.chat.conversations import Completion, Conversation
from lmtrain.data.chat.turns import BadRow
from lmtrain.data.sources.tables import ArrowRow
from lmtrain.errors import UserError
from loopback_hub import HUB

ASKED = [{"role": "user", "content": "Two plus two?"}, {"role": "assistant", "content": "Four."}]
CALL = {"name": "add", "arguments": {"a": 2, "b": 2}}
# (format, row): each row is the conversation ASKED
SAME = [
    ("messages", {"messages": ASKED, "prompt": "Two plus two?", "prompt_id": "1"}),
    ("messages", {"messages": json.dumps(ASKED)}),
    (
        "messages",
        {"messages": [{"role": t["role"], "content": [{"type": "text", "text": t["content"]}]} for t in ASKED]},
    ),
    ("messages", {"messages": [{**t, "tool_calls": None, "name": None} for t in ASKED]}),
    (
        "conversations",
        {"conversations": [{"from": "human", "value": "Two plus two?"}, {"from": "gpt", "value": "Four."}]},
    ),
    ("conversations", {"conversation": ASKED, "system": ""}),
    ("prompt_response", {"prompt": "Two plus two?", "response": "Four."}),
    ("prompt_response", {"question": "Two plus two?", "answer": "Four."}),
    ("prompt_completion", {"prompt": ASKED[:1], "completion": ASKED[1:]}),
    ("alpaca", {"instruction": "Two plus two?", "input": "", "output": "Four.", "text": "Below is"}),
    ("alpaca", {"instruction": "Two plus two?", "context": None, "response": "Four.", "category": "math"}),
]


@pytest.mark.parametrize(("format", "row"), SAME)
def test_the_same_conversation_in_every_format(format: str, row: dict, data_config) -> None:
    cfg = data_config("chat")
    assert detect("conversations", row, cfg).format.name == format
    sample = sample_of(row, cfg, "rows.jsonl, line 3")
    assert sample == Conversation(ASKED, None, "rows.jsonl, line 3", given=int(format == "prompt_completion"))


def test_every_format_is_covered() -> None:
    assert {format for format, _ in SAME} == set(FORMATS["conversations"]) - {"text", "template"}


def test_plain_texts_are_completions(data_config) -> None:
    cfg = data_config("chat")
    assert sample_of({"text": "Once."}, cfg, "here") == Completion("", "Once.", "here")
    row = {"prompt": "Once", "completion": " upon a time."}
    assert sample_of(row, cfg, "here") == Completion("Once", " upon a time.", "here")


def test_alpacas_input_history_and_system(data_config) -> None:
    row = {
        "instruction": "Add.",
        "input": "2 and 2",
        "output": "4",
        "system": "Be brief.",
        "history": [["Hello", "Hi"]],
    }
    sample = sample_of(row, data_config("chat"), "here")
    assert sample.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": "Add.\n\n2 and 2", "instruction": "Add.", "input": "2 and 2"},
        {"role": "assistant", "content": "4"},
    ]


def test_columns_by_other_names(data_config) -> None:
    cfg = data_config("chat", columns={"prompt": "problem", "response": "solution"})
    row = {"problem": "Two plus two?", "solution": "Four.", "text": "x"}
    assert detect("conversations", row, cfg).format.name == "prompt_response"
    assert sample_of(row, cfg, "here").messages == ASKED
    with pytest.raises(UserError, match=r"data.columns.response=answers: the rows have no such column, but q, answer"):
        detect(
            "conversations",
            ["q", "answer"],
            data_config(
                "chat",
                conversation_format="prompt_response",
                columns={"prompt": "q", "answer": "answer", "response": "answers"},
            ),
        )
    with pytest.raises(
        UserError, match=r"data.columns.mood: conversations have no such column, but turns, prompt, resp"
    ):
        detect("conversations", ["messages"], data_config("chat", columns={"mood": "messages"}))
    with pytest.raises(UserError, match=r"fits the columns messages with data.columns={reply: messages}"):
        detect("conversations", ["messages"], data_config("chat", columns={"reply": "messages"}))


def test_columns_through_templates(data_config) -> None:
    cfg = data_config("chat", prompt_template="{a} plus {b}?", response_template="{{{c}}}", columns={"c": "sum"})
    row = {"a": "Two", "b": "{two}", "sum": "four}}"}
    assert detect("conversations", row, cfg).format.name == "template"
    assert [t["content"] for t in sample_of(row, cfg, "here").messages] == ["Two plus {two}?", "{four}}}"]
    with pytest.raises(UserError, match=r"needs the column b, and the rows have a, sum"):
        detect("conversations", ["a", "sum"], cfg)
    with pytest.raises(UserError, match=r"data.response_template"):
        detect("conversations", ["a"], data_config("chat", prompt_template="{a}"))


def test_columns_that_fit_no_format(data_config) -> None:
    with pytest.raises(
        UserError, match=r"fits the columns title, body.*messages \(messages\).*data.columns=.*prompt_temp"
    ):
        detect("conversations", ["title", "body"], data_config("chat"))
    with pytest.raises(UserError, match=r"data.conversation_format=sharegpt is not known .options: auto, messages"):
        detect("conversations", ["conversations"], data_config("chat", conversation_format="sharegpt"))
    with pytest.raises(UserError, match=r"needs the column messages, and the rows have chat: .*\{messages: chat\}"):
        detect("conversations", ["chat"], data_config("chat", conversation_format="messages"))


def test_the_system_prompt_goes_where_there_is_none(data_config) -> None:
    cfg = data_config("chat", system_prompt="Be kind.")
    own = [{"role": "system", "content": "Be brief."}, *ASKED]
    assert sample_of({"messages": ASKED}, cfg, "x").messages[0] == {"role": "system", "content": "Be kind."}
    assert sample_of({"messages": own}, cfg, "x").messages == own
    assert sample_of({"messages": ASKED, "system": "Be."}, cfg, "x").messages[0]["content"] == "Be."


@pytest.mark.parametrize("as_json", [False, True])
def test_tool_calls_of_openai_and_of_sharegpt(as_json: bool, data_config) -> None:
    schema = {"name": "add", "parameters": {"type": "object"}}
    function = {**CALL, "arguments": json.dumps(CALL["arguments"])} if as_json else CALL
    openai = {
        "messages": [
            ASKED[0],
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "1", "type": "function", "function": function}],
            },
            {"role": "tool", "content": "4", "tool_call_id": "1"},
            ASKED[1],
        ],
        "tools": [{"type": "function", "function": schema}],
    }
    sharegpt = {
        "conversations": [
            {"from": "human", "value": "Two plus two?"},
            {"from": "function_call", "value": json.dumps(CALL)},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "Four."},
        ],
        "tools": json.dumps([schema]),
    }
    cfg = data_config("chat")
    first = sample_of(openai, cfg, "x")
    second = sample_of(sharegpt, cfg, "x")
    assert first.tools == second.tools == [{"type": "function", "function": schema}]
    assert first.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": CALL}],
    }
    assert second.messages[1]["tool_calls"] == [{"type": "function", "function": CALL}]
    assert [t["role"] for t in first.messages] == [t["role"] for t in second.messages]


def test_keys_that_arrow_fills_with_none_are_no_arguments(data_config) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 2, "city": None}}}
    row = {"messages": [ASKED[0], {"role": "assistant", "content": "", "tool_calls": [call]}]}
    for made, arguments in ((ArrowRow(row), {"a": 2}), (row, {"a": 2, "city": None})):  # JSON's nulls are the data's
        sample = sample_of(made, data_config("chat"), "x")
        assert sample.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments


def test_null_in_json_text_is_an_argument(data_config) -> None:
    arguments = {"a": 2, "city": None, "deep": {"x": None}}
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"default": None}}}}}
    call = {"function": {"name": "add", "arguments": json.dumps(arguments)}}
    messages = [ASKED[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    sample = sample_of({"messages": messages, "tools": json.dumps([tool])}, data_config("chat"), "x")
    assert sample.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments
    assert sample.tools == [tool]


def test_turns_that_are_shown_and_not_learned(data_config) -> None:
    turns = [{**ASKED[0], "weight": 1}, {**ASKED[1], "weight": 0}, ASKED[0], {**ASKED[1], "train": False}]
    turns += [ASKED[0], {"role": "tool_call", "content": json.dumps(CALL), "loss": False}]
    sample = sample_of({"messages": turns}, data_config("chat"), "x")
    assert [t.get("train", True) for t in sample.messages] == [True, False, True, False, True, False]


USER, ANSWER = ASKED
SYSTEM = {"role": "system", "content": "Be brief."}
BAD = [
    ([{"content": "x"}, ANSWER], r"turn 1 has no role \(its keys: content\)"),
    ([USER, {"role": "robot", "content": "x"}], r"turn 2 has the unknown role 'robot' .*known are system, .*gpt"),
    ([USER, {"role": None, "content": "x"}], "turn 2 has no role"),
    ([USER, {"role": 3, "content": "x"}], r"unknown role 3 \(int\)"),
    ([USER, {"role": "assistant"}], r"turn 2 \(assistant\) has no content \(its keys: role\)"),
    ([USER, {"role": "assistant", "content": None}], "has no content"),
    ([USER, {"role": "assistant", "content": " \n"}], r"turn 2 \(assistant\) is empty"),
    ([{"role": "user", "content": ""}, ANSWER], r"turn 1 \(user\) is empty"),
    ([ANSWER, USER], "turn 1 is from assistant, but the first turn must be the user's"),
    ([SYSTEM, ANSWER], "turn 2 is from assistant"),
    ([SYSTEM, SYSTEM, USER, ANSWER], "turns 1 and 2 are both system turns"),
    ([USER, SYSTEM, ANSWER], "turn 2 is a system turn; it must be the first"),
    ([SYSTEM], "no assistant turn"),
    ([USER], "no assistant turn"),
    ([USER, {"role": "assistant", "content": 4}], r"turn 2 \(assistant\) must be text and is 4 \(int\)"),
    ([USER, {"role": "assistant", "content": ["a"]}], r"must be text and is a list with 'a' \(str\) in it"),
    ([{"role": "user", "content": [{"type": "image"}]}, ANSWER], "part of type 'image'; only text"),
    ([USER, "Four."], r"turn 2 must be a mapping with role and content and is 'Four.'"),
    ("Two plus two?", r"messages must be a list of turns and is 'Two plus two\?' \(str\)"),
    ([], r"messages must be a list of turns and is \[\]"),
    ([USER, {"role": "assistant", "content": "", "tool_calls": ["add"]}], "tool call that isn't"),
    ([USER, {"from": "function_call", "value": "add(2, 2)"}], "tool call that isn't"),
]


@pytest.mark.parametrize(("messages", "reason"), BAD)
def test_bad_rows_are_named_with_a_reason(messages: object, reason: str, data_config) -> None:
    with pytest.raises(BadRow, match=reason) as caught:
        sample_of({"messages": messages}, data_config("chat"), "chats.jsonl, line 7")
    assert caught.value.where == "chats.jsonl, line 7"
    assert str(caught.value) == f"chats.jsonl, line 7: {caught.value.reason}"


@pytest.mark.parametrize(
    ("format", "row", "reason"),
    [
        ("alpaca", {"instruction": "Add.", "output": None}, "there is no output or response"),
        ("alpaca", {"instruction": "Add.", "output": ""}, "output is empty"),
        ("alpaca", {"instruction": "Add.", "output": "4", "history": ["x"]}, "history must be a list of"),
        ("prompt_response", {"prompt": "Add.", "response": 4}, r"response must be text and is 4 \(int\)"),
        ("prompt_completion", {"prompt": "Add.", "completion": None}, "there is no completion"),
        ("text", {"text": " "}, "text is empty"),
        ("messages", {"messages": ASKED, "tools": "add"}, "tools must be a list of function"),
    ],
)
def test_bad_rows_of_other_formats(format: str, row: dict, reason: str, data_config) -> None:
    with pytest.raises(BadRow, match=reason):
        sample_of(row, data_config("chat"), "here")


def test_two_user_turns_in_a_row_are_left_to_the_template(data_config) -> None:
    turns = [USER, USER, ANSWER, ANSWER]
    assert sample_of({"messages": turns}, data_config("chat"), "x").messages == turns


# Real rows: (option of conf/data, file, detected format, number of rows).
FILES = [
    ("alpaca", "hiyouga/llamafactory-demos/alpaca_en_demo.json", "alpaca", 999),
    ("dolly", "databricks/databricks-dolly-15k/databricks-dolly-15k.jsonl", "alpaca", 2996),
    ("chat_jsonl", "databricks/databricks-dolly-15k/databricks-dolly-15k.jsonl", "alpaca", 2996),
    ("chat_jsonl", "hiyouga/llamafactory-demos/glaive_toolcall_en_demo.json", "conversations", 300),
    ("chat_jsonl", "hiyouga/llamafactory-demos/kto_en_demo.json", "messages", 300),
    ("chat_jsonl", "local/sgd-messages/data/train-00000-of-00001.parquet", "messages", 12174),
    ("gsm8k", "openai/gsm8k/main/train-00000-of-00001.parquet", "prompt_response", 7473),
]


@pytest.mark.parametrize(("option", "file", "format", "count"), FILES)
def test_real_rows(option: str, file: str, format: str, count: int, data_config) -> None:
    path = HUB / "datasets" / file
    if not path.exists():
        pytest.skip(f"needs {path}")
    found = _read(path)
    cfg = data_config(option)
    assert detect("conversations", found[0], cfg).format.name == format
    samples = []
    for i, row in enumerate(found):
        samples.append(sample_of(row, cfg, f"{path.name}, row {i}"))
    assert len(samples) == count


def _read(path: Path) -> list[dict]:
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return pq.read_table(path).to_pylist()
    text = path.read_text(encoding="utf-8")
    return json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines() if line]
