"""Tool calls are read back from what chat templates render, with arguments of every kind; what can't be is refused."""

import json
import re
import time
from typing import Any, Literal

import pytest
from template_sweep import tokenizer_for, trl_template
from transformers.utils import get_json_schema

from call_templates import FAMILIES, skeleton
from lmtrain.data.chat.arguments import Misfit, fitted, typed
from lmtrain.data.chat.call_formats import reader_of
from lmtrain.data.chat.jinja_rendering import Template
from lmtrain.data.chat.thoughts import thought_marks
from lmtrain.data.chat.tool_calls import CallReader
from lmtrain.errors import UserError

# Templates of TRL's that show tools, each the only one that writes calls or ends turns in its way.
TRL = ["qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8",
       "nemotron_3_nano", "nemotron_3_5_lightning", "glm4moe", "gptoss", "llama3_1", "llama3_2", "lfm2_2_5", "lfm2_v2",
       "gemma4", "gemma4_v2", "gemma4_v5", "diffusion_gemma", "muse_glimmer"]  # fmt: skip
ONE_CALL = {"gptoss", "llama3_1", "llama3_2"}


def search(
    text: str, count: int, share: float, exact: bool, near: str | None, tags: list[str], more: dict[str, Any],
    order: Literal["up", "down"], place: int | str, anything: Any,
) -> str:  # fmt: skip
    """Looks for something.

    Args:
        text: what.
        count: how many.
        share: how much.
        exact: whether exactly.
        near: where.
        tags: labels.
        more: other conditions.
        order: the order.
        place: the place.
        anything: whatever.
    """
    return text


def ping() -> str:
    """Answers."""
    return "pong"


TOOLS = [get_json_schema(search), get_json_schema(ping)]
ARGUMENTS: dict[str, dict[str, Any]] = {
    "text": {"text": 'He said: "it\'s {1}, [2]",\nthen\t<b>left</b> = C:\\new, é 漢'},
    "texts that look like other types": {"text": "12", "near": "1.5", "tags": ["true", "null", "3"]},
    "number": {"count": -12, "share": 2.5e-7, "place": 7},
    "bool and null": {"exact": True, "near": None},
    "false": {"exact": False, "count": 0},
    "nested": {"more": {"a": [1, {"b": ["x, y", 'q"t', None, False]}], "c": {}, "d e": ""},
               "tags": ["it's", "a, b=1)"]},
    "list": {"tags": [], "order": "down", "more": {}},
    "none": {},
    "all": {"text": "", "count": 3, "share": 0.5, "exact": False, "near": "x", "tags": ["y"], "more": {"k": 1},
            "order": "up", "place": "here", "anything": [True]},
}  # fmt: skip


def read(template: Template, calls: list[tuple[str, Any]], content: str = "", **options: Any) -> list[tuple[str, Any]]:
    """Returns what is read of an answer as transformers renders it, without the token that ends it."""
    asked = {"role": "user", "content": "q"}
    made = [
        {"type": "function", "id": f"{i:09d}", "function": {"name": n, "arguments": a}}
        for i, (n, a) in enumerate(calls)
    ]
    answer = {"role": "assistant", "content": content, "tool_calls": made, **options}
    whole = template.render_texts([[asked, answer]], TOOLS, "")[0]
    text = whole[whole.rindex("q") + 1 :] if content or options else whole[len(template.prompt([asked], TOOLS, "")) :]
    ends = "|".join(
        map(re.escape, (token for token in template.special_tokens if re.search("end|eot|call>|sp", token)))
    )
    return pairs_of(reader_of(template, TOOLS), re.sub(rf"(?:{ends})\s*\Z", "", text))


def pairs_of(reader: CallReader, text: str) -> list[tuple[str, Any]]:
    return [call[:2] for call in reader.calls(text)]


def template_of(text: str, tokenizer_config: Any) -> Template:
    return Template(tokenizer_for(text, tokenizer_config), text, "tried")


@pytest.mark.parametrize("name", [*FAMILIES, *TRL])
def test_calls_are_read_back_as_they_are_rendered(name: str, tokenizer_config: Any) -> None:
    text, several = FAMILIES[name] if name in FAMILIES else (trl_template(name), name not in ONE_CALL)
    template = template_of(text, tokenizer_config)
    for arguments in ARGUMENTS.values():
        check(read(template, [("search", arguments)]), [("search", arguments)])
    check(read(template, [("ping", {})]), [("ping", {})])
    if several:
        calls = [("search", arguments) for arguments in ARGUMENTS.values()]
        check(read(template, [("ping", {}), *calls, ("ping", {})]), [("ping", {}), *calls, ("ping", {})])


def check(found: list[tuple[str, Any]], calls: list[tuple[str, Any]]) -> None:
    assert json.dumps(found, sort_keys=True) == json.dumps(calls, sort_keys=True)  # tells True from 1
    assert all(type(v) in (str, int, float, bool, list, dict, type(None)) for _, args in found for v in args.values())


THOUGHTS = {"hermes": ("<think>", "</think>"), "qwen3_coder": ("<think>", "</think>"), "lfm2": ("<think>", "</think>"),
            "llama3": ("<think>", "</think>")}  # fmt: skip


@pytest.mark.parametrize("name", THOUGHTS)
def test_a_call_inside_a_thought_is_none(name: str, tokenizer_config: Any) -> None:
    template = template_of(FAMILIES[name][0], tokenizer_config)
    opening, closing = THOUGHTS[name]
    call = ("search", {"text": "Oslo"})
    asked = template.prompt([{"role": "user", "content": "q"}], TOOLS, "")
    (whole,) = template.render_texts([[{"role": "user", "content": "q"}, answer([call])]], TOOLS, "")
    text = whole.removeprefix(asked).partition("<|im_end|>")[0].partition("<|eot_id|>")[0]
    reader = reader_of(template, TOOLS)
    assert pairs_of(reader, f"{opening}\nI could write {text}, but why?\n{closing}\n\nIt is 4.") == []
    assert pairs_of(reader, f"{opening}\nI could write {text}.\n{closing}\n\n{text}") == [call]
    assert pairs_of(reader, f"{opening}\nI could write {text}") == []
    assert pairs_of(reader, text.replace("Oslo", "a <think> tag")) == [("search", {"text": "a <think> tag"})]


def answer(calls: list[tuple[str, Any]]) -> dict[str, Any]:
    made = [{"type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    return {"role": "assistant", "content": "", "tool_calls": made}


def test_the_thoughts_of_gpt_oss_and_gemma_have_marks_of_their_own(tokenizer_config: Any) -> None:
    marks = {name: thought_marks(template_of(trl_template(name), tokenizer_config)) for name in ("gptoss", "gemma4")}
    assert marks["gptoss"] == ("<|channel|>analysis<|message|>", "<|end|>")
    assert marks["gemma4"] == ("<|channel>thought", "<channel|>")
    reader = reader_of(template_of(trl_template("gptoss"), tokenizer_config), TOOLS)
    call = '{}<|channel|>commentary json<|message|>{{"text": "x"}}<|call|>'.format
    thought = f"<|channel|>analysis<|message|>to=functions.search{call('')}<|end|>"
    assert pairs_of(reader, thought + "<|channel|>final<|message|>4<|return|>") == []
    assert pairs_of(reader, f"{thought}<|start|>assistant{call(' to=functions.search')}") == [("search", {"text": "x"})]
    # As OpenAI's models write it.
    own = 'commentary to=functions.search <|constrain|>json<|message|>{"count": 2}'
    assert pairs_of(reader, f"{thought}<|start|>assistant<|channel|>{own}") == [("search", {"count": 2})]
    assert pairs_of(reader, "<|channel|>final<|message|>Write to=functions.search and then {a}.") == []


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", 'So <tool_call>{"name":"ping","arguments":{}}</tool_call> now', [("ping", {})]),
        ("hermes", '<tool_call>\n{"name": "ping"}', [("ping", {})]),  # ended by a stop token
        ("hermes", '<tool_call>{"name": "ping"} and more</tool_call>', [("ping", {})]),
        ("hermes", "<tool_call>{broken</tool_call> a <tool_call>{}</tool_call>", [("", "{broken"), ("", "{}")]),
        ("hermes", '{"name": "ping"}', []),
        ("qwen3_coder",
         "<tool_call><function=search><parameter=text>a\n b</parameter><parameter=count>\n3\n</parameter>",
         [("search", {"text": "a\n b", "count": 3})]),
        ("qwen3_coder", "<tool_call>\n<function=ping>\n</function>", [("ping", {})]),
        ("qwen3_coder", '<tool_call>\n{"name": "ping"}\n</tool_call>', [("", '{"name": "ping"}')]),
        ("qwen3_coder",
         "<tool_call>\n<function=search>\n<parameter=exact>\nTrue\n</parameter>\n<parameter=near>\nNone\n"
         "</parameter>\n<parameter=tags>\n['a', 1]\n</parameter>\n</function>\n</tool_call>",
         [("search", {"exact": True, "near": None, "tags": ["a", 1]})]),
        ("qwen3_coder",
         "<tool_call>\n<function=search>\n<parameter=count>\nmany\n</parameter>\n</function>\n</tool_call>",
         [("search", {"count": "many"})]),
        ("lfm2", '<|tool_call_start|>[search(text="it\'s, a=1)", count=2), ping()]<|tool_call_end|> I call.',
         [("search", {"text": "it's, a=1)", "count": 2}), ("ping", {})]),
        ("lfm2", "<|tool_call_start|>[search(text=Oslo)]<|tool_call_end|>", [("", "search(text=Oslo")]),
        ("llama4", "I can call [ping()].", []),
        ("llama4", " [ping()]", [("ping", {})]),
        ("llama3", '<|python_tag|>{"name": "ping", "parameters": {}}; {"name": "ping"}', [("ping", {}), ("ping", {})]),
        ("llama3", 'Write {"name": "ping"}', []),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>ping<｜tool▁sep｜>nothing<｜tool▁call▁end｜>",
         [("", "ping<｜tool▁sep｜>nothing")]),
    ],
)  # fmt: skip
def test_what_models_write_otherwise(name: str, text: str, calls: list[tuple[str, Any]], tokenizer_config: Any) -> None:
    assert pairs_of(reader_of(template_of(FAMILIES[name][0], tokenizer_config), TOOLS), text) == calls


def test_the_model_is_shown_a_whole_call(tokenizer_config: Any) -> None:
    """Also if the mark that ends it is a special token, as a token that ends the turn is."""
    text = FAMILIES["glm"][0].replace("<|im_end|>\\n", "")
    tokenizer = tokenizer_for(text, tokenizer_config)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool_call>", "</tool_call>"]})
    reader = reader_of(Template(tokenizer, text, "tried"), [get_json_schema(ping), TOOLS[0]])
    assert reader.example == "<tool_call>ping\n</tool_call>"
    example = reader_of(template_of(FAMILIES["lfm2"][0], tokenizer_config), TOOLS).example
    assert example.startswith("<|tool_call_start|>[search(text='Oslo', count=7, ")
    assert example.endswith(")]<|tool_call_end|>")


def test_a_template_whose_thoughts_hide_its_calls_is_refused(tokenizer_config: Any) -> None:
    odd = FAMILIES["hermes"][0].replace("'<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n'",
                                        "'[thought] ' + m.reasoning_content + '\\n'")  # fmt: skip
    assert odd != FAMILIES["hermes"][0]
    with pytest.raises(UserError, match=r"lmtrain-thought.*which can't be read back"):
        reader_of(template_of(odd, tokenizer_config), TOOLS)


def test_a_template_whose_calls_are_lost_is_refused(tokenizer_config: Any) -> None:
    silent = template_of(skeleton(""), tokenizer_config)
    with pytest.raises(UserError, match=r"writes a tool call as '<\|im_end\|>\\n', which can't be read back"):
        reader_of(silent, TOOLS)
    unquoted = "{% for c in m.tool_calls %}<call>{{ c.function.name }}{{ c.function.arguments.values() }}{% endfor %}"
    with pytest.raises(UserError, match=r"which can't be read back.*choose another template with data.chat_template"):
        reader_of(template_of(skeleton(unquoted), tokenizer_config), TOOLS)
    refusing = skeleton("{{ raise_exception('no tools here') }}")
    with pytest.raises(UserError, match="refuses it: no tools here"):
        reader_of(template_of(refusing, tokenizer_config), TOOLS)


def test_arguments_are_held_against_the_type_hints() -> None:
    schemas = TOOLS[0]["function"]["parameters"]["properties"]
    kept: list[tuple[str, Any]] = [
        ("text", "2"), ("count", 2), ("share", 2), ("share", 2.5), ("exact", True), ("near", None), ("tags", ["a"]),
        ("more", {"a": 1}), ("order", "up"),
        ("place", 1), ("place", "1"), ("anything", None),
    ]  # fmt: skip
    for name, value in kept:
        found = fitted(value, schemas[name], name)
        assert (found, type(found)) == (value, type(value))
    assert repr(fitted(2.0, schemas["count"], "count")) == "2"
    for name, value, words in [
        ("count", "2", 'count must be integer, and "2" is string'), ("count", True, "true is boolean"),
        ("count", 2.5, "2.5 is number"), ("count", None, "null is null"), ("text", 2, "text must be string"),
        ("near", 1, "near must be string or null"), ("tags", "a", "tags must be array"),
        ("tags", [1], r"tags\[0\] must be"),
        ("order", "left", 'order must be one of "up", "down"'), ("place", [], "place must be integer or string"),
    ]:  # fmt: skip
        with pytest.raises(Misfit, match=words):
            fitted(value, schemas[name], name)
    texts = {"count": ("12", 12), "text": ("12", "12"), "near": ("null", None), "exact": ("True", True),
             "place": ("1", 1), "order": ("up", "up"), "share": ("much", "much"), "anything": ("[1]", [1])}  # fmt: skip
    for name, (text, value) in texts.items():
        found = typed(text, schemas[name])
        assert (found, type(found)) == (value, type(value))


def test_degenerate_text_is_read_in_no_time(tokenizer_config: Any) -> None:
    """As a model writes that repeats itself."""
    texts = {
        "mistral_args": "[TOOL_CALLS]" + "a" * 40_000,
        "lfm2": "<|tool_call_start|>[search(text=" + "b, c=" * 8_000,
        "qwen3_coder": "<tool_call>\n<function=search>\n<parameter=text>\n" * 1_000,
        "gemma4": "<|tool_call>call:search{" + "a:" * 20_000,
        "hermes": "<tool_call>" + '{"name": ' * 5_000,
    }
    for name, text in texts.items():
        reader = reader_of(template_of(FAMILIES[name][0], tokenizer_config), TOOLS)
        started = time.perf_counter()
        assert all(not call.name for call in reader.calls(text))
        assert time.perf_counter() - started < 2
