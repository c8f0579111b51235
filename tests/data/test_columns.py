"""Every column of a row is in its prompt, named or refused, in every row format and whatever the column means."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from chats import sample_of
from inprocess import run
from lmtrain.config.schema_data import DataConfig
from lmtrain.data import tokenizers
from lmtrain.data.chat.columns import BESIDE, FORMATS, NAMES, detect, plain
from lmtrain.data.chat.find_template import NAMED
from lmtrain.data.chat.turns import BadRow
from lmtrain.data.examples.pair_rows import PairRowEncoder
from lmtrain.data.examples.prompt_rows import PromptRowEncoder
from lmtrain.data.examples.row_format import ChatRows, Encoded
from lmtrain.data.examples.unpaired_rows import UnpairedRowEncoder
from lmtrain.data.sources.files import read_records
from lmtrain.data.sources.tables import ArrowRow
from lmtrain.errors import UserError
from support import TINY

U, A, B = (
    {"role": role, "content": text} for role, text in (("user", "Why?"), ("assistant", "So."), ("assistant", "No."))
)
PAIR = {"prompt": "Why?", "chosen": "So.", "rejected": "No."}
ENCODERS: dict[str, Any] = {
    "conversations": (ChatRows, "chat"),
    "pairs": (PairRowEncoder, "preference"),
    "unpaired": (UnpairedRowEncoder, "unpaired_jsonl"),
    "prompts": (PromptRowEncoder, "prompts_jsonl"),
}
# A row of every format, by its kind and name, and further forms of some; with the settings that it needs.
ROWS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    ("conversations", "messages", {"messages": [U, A]}, {}),
    ("conversations", "conversations", {"conversations": [U, A]}, {}),
    ("conversations", "alpaca", {"instruction": "Why?", "output": "So."}, {}),
    ("conversations", "prompt_completion", {"prompt": "Why?", "completion": "So."}, {}),
    ("conversations", "prompt_completion", {"prompt": "Why?", "completion": "So."},
     {"conversation_format": "prompt_completion"}),
    ("conversations", "prompt_completion", {"prompt": [U], "completion": [A]}, {}),
    ("conversations", "prompt_response", {"question": "Why?", "answer": "So."}, {}),
    ("conversations", "text", {"text": "Why? So."}, {}),
    ("conversations", "template", {"a": "Why?", "b": "So."}, {"prompt_template": "{a}", "response_template": "{b}"}),
    ("pairs", "preference", PAIR, {}),
    ("pairs", "preference", {"prompt": [U], "chosen": [A], "rejected": [B]}, {}),
    ("pairs", "preference", {"prompt": "Why?", "chosen": [U, A], "rejected": [U, B]}, {}),
    ("pairs", "preference", {"a": "Why?", "chosen": "So.", "rejected": "No."}, {"prompt_template": "{a}"}),
    ("pairs", "preference_text", PAIR, {"conversation_format": "preference_text"}),
    ("pairs", "implicit_prompt", {"chosen": [U, A], "rejected": [U, B]}, {}),
    ("pairs", "implicit_prompt", {"chosen": "Human: Why?\n\nAssistant: So.",
                                  "rejected": "Human: Why?\n\nAssistant: No."}, {}),
    ("unpaired", "answer", {"prompt": "Why?", "completion": "So.", "label": True}, {}),
    ("unpaired", "answer", {"prompt": [U], "completion": [A], "label": False}, {}),
    ("unpaired", "conversation", {"messages": [U, A], "label": True}, {}),
    ("prompts", "prompt", {"prompt": "Why?"}, {}),
    ("prompts", "prompt", {"prompt": [U]}, {}),
    ("prompts", "prompt", {"prompt": "Why?"}, {"chat_template": None}),
]  # fmt: skip
VALUES: dict[str, Any] = {
    "tools": [{"name": "f", "description": "MARK", "parameters": {"type": "object", "properties": {}}}],
    "history": [["MARK", "Ah."]],
    "chat_template_kwargs": {"mood": "MARK"},
}
COLUMNS = [(meaning, name) for meaning in (*BESIDE, "media", "quality") for name in NAMES[meaning]] + [("", "colour")]


@pytest.fixture
def encoder(data_config: Any, tokenizer_config: Any) -> Any:
    def make(kind: str, **settings: Any) -> Any:
        made, option = ENCODERS[kind]
        cfg = data_config(option, **{"chat_template": "chatml", "max_length": None, "seq_len": 4096, **settings})
        tokenizer = tokenizers.load_or_train(tokenizer_config("bytes", add_tokens=NAMED["chatml"]), lambda _: iter(()))
        return made(tokenizer, cfg), cfg

    return make


def test_there_is_a_row_of_every_format() -> None:
    assert {(kind, name) for kind, name, *_ in ROWS} == {(kind, name) for kind in FORMATS for name in FORMATS[kind]}


@pytest.mark.parametrize(("kind", "name", "row", "settings"), ROWS)
def test_no_column_is_silent(kind: str, name: str, row: dict, settings: dict, encoder: Any) -> None:
    made, cfg = encoder(kind, **settings)
    bare, ignoring = text_of(made.encode(row, "row 1", cfg, False), made), []
    assert made.words.partition(" ")[0] == name
    for meaning, column in COLUMNS:
        if column in row:
            continue
        more = {**row, column: VALUES.get(meaning, "MARK" if column != "margin" else 2)}
        ignoring.append(dataclasses.replace(cfg, ignore_columns=[column]))
        left_out = made.encode(more, "row 1", ignoring[-1], False)
        assert text_of(left_out, made) == bare
        assert left_out.unread == [column]
        said = said_of(made, more, cfg)
        if f"data.ignore_columns=[{column}] leaves it out" in said:
            assert f"the row has {column}, " in said or f"the prompt, 'MARK' in the column {column}" in said
            assert meaning in (*BESIDE, "media")
            continue
        is_read = "MARK" in said or detect(kind, more, cfg).columns.get("margin") == column
        assert is_read or f"{column}\n" in said or f"the column {column} is" in said or f" of {meaning}, which" in said
        # What a prompt could be made of is only named if text or templates say all of it, or the template is asked.
        has_said_all = name in ("text", "template") or cfg.prompt_template or meaning == "chat_template_kwargs"
        assert is_read or has_said_all or meaning not in (*BESIDE, "media")


def said_of(encoder: Any, row: dict[str, Any], cfg: DataConfig) -> str:
    """Returns the text of a row's first example with the columns that aren't read and the remarks, or the refusal."""
    try:
        found = encoder.encode(row, "row 1", cfg, False)
    except BadRow as bad:
        return bad.reason
    return "\n".join([text_of(found, encoder), *found.unread, *(remark.text for remark in found.remarks), ""])


def text_of(encoded: Encoded, encoder: Any) -> str:
    return str(encoder.decode(encoded.examples[0][0]))


@pytest.mark.parametrize(("kind", "row", "prompt"), [
    # Open-Orca, SQuAD, KTO's rows as LLaMA-Factory's, and so on: what is in the prompt beside the question.
    ("conversations", {"id": "1", "system_prompt": "Be a pirate.", "question": "Why?", "response": "Arr."},
     [("system", "Be a pirate."), ("user", "Why?")]),
    ("conversations", {"context": "It is blue.", "question": "What colour?", "answer": "blue"},
     [("user", "What colour?\n\nIt is blue.")]),
    ("conversations", {"system": "Be brief.", "prompt": "Hello ", "completion": "World"},
     [("system", "Be brief."), ("user", "Hello ")]),
    ("conversations", {"messages": [U, A], "system_message": "Be brief."}, [("system", "Be brief."), ("user", "Why?")]),
    ("conversations", {"question": "Why?", "response": "So.", "history": [["a", "b"]]},
     [("user", "a"), ("assistant", "b"), ("user", "Why?")]),
    ("unpaired", {"instruction": "Sum up", "input": "this.", "response": "Short.", "label": False},
     [("user", "Sum up\n\nthis.")]),
    ("unpaired", {"prompt": "Why?", "completion": "So.", "system": "Be brief.", "label": True},
     [("system", "Be brief."), ("user", "Why?")]),
    ("pairs", {**PAIR, "history": [["a", "b"]], "context": "c"},
     [("user", "a"), ("assistant", "b"), ("user", "Why?\n\nc")]),
    ("pairs", {"system": "Be brief.", "input": "Why?", "chosen": "So.", "rejected": "No."},  # distilabel's
     [("system", "Be brief."), ("user", "Why?")]),
    ("prompts", {"question": "Why?", "system": "Be brief.", "answer": "So."},
     [("system", "Be brief."), ("user", "Why?")]),
])  # fmt: skip
def test_what_a_prompt_is_made_of(kind: str, row: dict, prompt: list, encoder: Any) -> None:
    made, cfg = encoder(kind)
    found = made.encode(row, "row 1", cfg, False)
    written = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in prompt)
    assert text_of(found, made).startswith(f"{written}<|im_start|>assistant\n")
    assert found.unread == [name for name in ("id", "answer") if name in row and (name == "id" or kind == "prompts")]


def test_tools_are_shown_whatever_the_format(encoder: Any) -> None:
    called = [U, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]
    for kind, row in (
        ("conversations", {"instruction": "Why?", "output": "So."}),
        ("unpaired", {"prompt": "Why?", "completion": "So.", "label": True}),
        ("unpaired", {"messages": called, "label": True}),
        ("pairs", PAIR),
        ("prompts", {"prompt": "Why?"}),
    ):
        for tools in (VALUES["tools"], json.dumps(VALUES["tools"])):
            made, cfg = encoder(kind)
            assert "MARK" in text_of(made.encode({**row, "tools": tools}, "row 1", cfg, False), made)


def test_two_system_turns_that_differ_are_refused(data_config: Any) -> None:
    said = [{"role": "system", "content": "Be brief."}, U, A]
    cfg = data_config("chat")
    assert sample_of({"messages": said, "system": "Be brief."}, cfg, "here").messages == said
    with pytest.raises(BadRow, match=r"a system column, 'Be kind.' .*, and a system turn, 'Be brief.'"):
        sample_of({"messages": said, "system": "Be kind."}, cfg, "here")
    with pytest.raises(BadRow, match=r"the row has system_prompt, which the format messages has no place for"):
        sample_of({"messages": [U, A], "system": "Be kind.", "system_prompt": "Be brief."}, cfg, "here")


@pytest.mark.parametrize(("columns", "prompt", "response"), [
    *((pair, *pair.split(",")) for pair in (
        "Question,Answer", "input,output", "user,assistant", "Frage,Antwort", "PREGUNTA,Respuesta", "question,Réponse",
        "问题,回答", "Вопрос,Ответ", "質問,回答", "Câu hỏi,Trả lời")),
    ("Q,A", "Q", "A"), ("query,response,type", "query", "response"), ("problem,solution,level", "problem", "solution"),
    ("instruction,question,answer", "question", "answer"), ("instruction,input,output,prompt", "instruction", "output"),
])  # fmt: skip
def test_names_of_questions_and_answers(columns: str, prompt: str, response: str, data_config: Any) -> None:
    reading = detect("conversations", columns.split(","), data_config("chat"))
    assert (reading.columns["prompt"], reading.columns["response"]) == (prompt, response)
    usual = {"question", "prompt", "instruction"} >= {prompt} and response in ("answer", "response", "output")
    assert (f"prompt: {prompt}" in reading.words or f"response: {response}" in reading.words) == (not usual)


def test_names_are_told_apart_by_what_people_mean(data_config: Any) -> None:
    assert plain(" System Prompt") == plain("system-prompt") == "system_prompt"
    assert detect("conversations", ["TEXT", "id"], data_config("chat")).columns == {"text": "TEXT"}
    reading = detect("conversations", ["Question", "question", "answer"], data_config("chat"))
    assert reading.columns["prompt"] == "question"
    assert list(reading.others) == ["Question"]


def test_nulls_that_arrow_filled_in_and_nulls_of_the_data(tmp_path: Path, data_config: Any) -> None:
    """Arrow gives each row every key that another has; in JSON lines a null is what the user wrote."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"page": {"default": None}}}}}
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ({"page": None}, {"city": "Rome"})]
    rows = [
        {"messages": [U, {"role": "assistant", "content": "", "tool_calls": [call]},
                      {"role": "tool", "content": "4"}, A], "tools": [tool]} for call in calls
    ]  # fmt: skip
    lines, table = tmp_path / "a.jsonl", tmp_path / "a.parquet"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(pa.Table.from_pylist(rows), table)
    cfg, found = data_config("chat"), {}
    for path, format in ((lines, "jsonl"), (table, "parquet")):
        samples = [sample_of(row, cfg, where) for where, row in read_records([(path, format)]) if isinstance(row, dict)]
        found[format] = [(s.messages[1]["tool_calls"][0]["function"]["arguments"], s.tools) for s in samples]
    assert found["jsonl"] == [({"page": None}, [tool]), ({"city": "Rome"}, [tool])]
    bare = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"page": {}}}}}]
    assert found["parquet"] == [({}, bare), ({"city": "Rome"}, bare)]
    own = ArrowRow(rows[0], frozenset(["messages"]))  # as of a column of JSON
    assert sample_of(own, cfg, "here").messages[1]["tool_calls"][0]["function"]["arguments"] == {"page": None}


THINKS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


def test_variables_of_the_template(tmp_path: Path, encoder: Any) -> None:
    """Rows, data.template_options and the saved tokenizer: each renders as transformers does with the same variable."""
    template = tmp_path / "thinks.jinja"
    template.write_text(THINKS)
    row = {"question": "Why?"}
    for settings, kwargs, thinks in (
        ({}, {}, None),
        ({"template_options": {"enable_thinking": False}}, {}, False),
        ({}, {"enable_thinking": False}, False),
        ({"template_options": {"enable_thinking": False}}, {"enable_thinking": True}, True),
        ({}, '{"enable_thinking": false}', False),
    ):
        made, cfg = encoder("prompts", chat_template=str(template), **settings)
        tokenizer = made.chat.tokenizer
        tokenizer.chat_template = THINKS
        options = {} if thinks is None else {"enable_thinking": thinks}
        expected = tokenizer.apply_chat_template([U], tokenize=False, add_generation_prompt=True, **options)
        found = made.encode({**row, "chat_template_kwargs": kwargs} if kwargs else row, "row 1", cfg, False)
        assert text_of(found, made) == expected
        assert ("</think>" in expected) == (thinks is False)
        made.finish_tokenizer(tokenizer)
        saved = tokenizer.apply_chat_template([U], tokenize=False, add_generation_prompt=True)
        assert ("</think>" in saved) == bool(settings)


def test_variables_that_a_template_does_not_read(encoder: Any) -> None:
    with pytest.raises(UserError, match=r"template_options.enable_thinking: the chat template \(chatml\) reads no var"):
        encoder("prompts", template_options={"enable_thinking": False})
    made, cfg = encoder("conversations")
    row = {"question": "Why?", "answer": "So."}
    (remark,) = made.encode({**row, "chat_template_kwargs": {"mood": 1}}, "here", cfg, False).remarks
    assert remark.lost
    assert remark.text == "mood of chat_template_kwargs, which the chat template (chatml) never shows the model"
    for wrong, said in (
        ({"messages": []}, "has messages, which is not"),
        ("x", "must be a mapping"),
        ([1], "must be a map"),
    ):
        with pytest.raises(BadRow, match=said):
            made.encode({**row, "chat_template_kwargs": wrong}, "here", cfg, False)


def test_the_plan_and_inspect_count_the_columns_that_are_not_read(tmp_path: Path) -> None:
    rows = [
        {"Frage": f"Wie viel ist {i}?", "Antwort": "Vier.", "id": i, "source": "web" if i % 2 else ""} for i in range(8)
    ]
    path = tmp_path / "faq.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*TINY, "objective=sft", "data=chat_jsonl", "data.seq_len=512", "model.max_position_embeddings=512",
             "data.val_fraction=0", "data.chat_template=alpaca", f"data.path={path}"]  # fmt: skip
    ended = run("inspect", *words)
    assert ended.code == 0, ended.err
    shown = " ".join(ended.out.replace("│", " ").split())
    assert "columns that nothing reads: id (8 rows), source (4 rows)" in shown
    assert "prompt_response (prompt: Frage, response: Antwort)" in shown
    ended = run("train", *words, "trainer.max_steps=1", f"run.dir={tmp_path / 'run'}")
    assert ended.code == 0, ended.err
    plan = " ".join((tmp_path / "run" / "plan.txt").read_text().split())
    assert "columns that nothing reads: id (8 rows), source (4 rows)" in plan
    assert "rows of prompt_response (prompt: Frage, response: Antwort)" in plan


def test_a_hub_data_set_with_images_is_read_without_decoding(tmp_path: Path, data_config: Any) -> None:
    import datasets

    from lmtrain.data.sources.hub import HubSource

    held = {"bytes": b"not an image", "path": None}
    one = {"question": "Why?", "answer": "So.", "photo": held, "pages": [held], "voice": held}
    data = datasets.Dataset.from_list([one] * 3)
    kinds = {"photo": datasets.Image(), "pages": datasets.List(datasets.Image()), "voice": datasets.Audio()}
    data = data.cast(datasets.Features({**data.features, **kinds}))
    (tmp_path / "hub" / "data").mkdir(parents=True)
    data.to_parquet(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet")
    for streaming in (False, True):
        cfg: DataConfig = data_config("dolly", name=str(tmp_path / "hub"), streaming=streaming, path=None)
        found = [row for _, row in HubSource(cfg).records("train") or ()]
        assert len(found) == 3
        assert found[0]["photo"] == held
        assert found[0]["pages"] == [held]
        assert found[0]["voice"]["bytes"] == held["bytes"]


def test_places_of_images_are_named(encoder: Any) -> None:
    made, cfg = encoder("conversations", ignore_columns=["images"])
    asked = [{"role": "user", "content": "<image>What is this?"}, A]
    for row in ({"messages": asked, "images": ["cat.jpg"]}, {"question": "What is <image>?", "answer": "A cat."}):
        assert "<image> is written in the text and learned as text" in said_of(made, row, cfg)
    made, cfg = encoder("prompts")
    assert "<image> is written in the text" in said_of(made, {"prompt": asked[:1]}, cfg)


def test_a_name_for_one_column_leaves_the_others_theirs(encoder: Any) -> None:
    """LLaMA-Factory's dataset_info asks for all columns as soon as it names one."""
    made, cfg = encoder("conversations", columns={"tools": "schemas"})
    row = {"conversations": [U, A], "schemas": VALUES["tools"], "system": "Be brief."}
    text = said_of(made, row, cfg)
    assert "MARK" in text
    assert "Be brief." in text
    lacking = {"conversations": [U, A]}
    assert "data.columns.tools=schemas: there is no such column" in said_of(made, lacking, cfg)


@pytest.mark.parametrize("kind", ["conversations", "pairs"])
def test_a_template_over_columns_of_which_one_is_null(kind: str, encoder: Any) -> None:
    more = {"response_template": "{chosen}"} if kind == "conversations" else {}
    made, cfg = encoder(kind, prompt_template="{system}: {title}", columns={"title": "heading"}, **more)
    for system, begin in (("Be brief.", "Be brief.: Why?"), (None, ": Why?")):
        row = {"system": system, "heading": "Why?", "chosen": "So.", "rejected": "No."}
        assert f"<|im_start|>user\n{begin}<|im_end|>" in said_of(made, row, cfg)


def test_arguments_of_several_types_spoil_no_other(encoder: Any, tmp_path: Path) -> None:
    """Arrow gives a key of all calls one type, and refuses the file if they have two."""
    path, times = tmp_path / "calls.jsonl", ["2025-08-01", 1690876800, None, {"at": 1}]
    call = {"role": "assistant", "content": ""}
    rows = [
        {"messages": [U, {**call, "tool_calls": [{"function": {"name": "f", "arguments": {"time": time}}}]}]}
        for time in times
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made, cfg = encoder("conversations")
    for time, (_, row) in zip(times, read_records([(path, "jsonl")]), strict=True):
        assert isinstance(row, dict)
        assert json.dumps({"name": "f", "arguments": {"time": time}}) in said_of(made, row, cfg)
