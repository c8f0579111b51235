"""What follows an answer is what transformers' rendering of the whole conversation has there, however it ended."""

from typing import Any

import pytest
from template_sweep import TOOLS, says, tokenizer_for, trl_template, user

from call_templates import DROPPING, FAMILIES
from lmtrain.data.chat.call_formats import reader_of
from lmtrain.data.chat.jinja_rendering import Template
from lmtrain.data.chat.replies import Replies
from lmtrain.errors import UserError
from lmtrain.rewards.environment import Call, results

TRL = ["qwen3", "qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "phi3", "phi3_5", "gptoss", "diffusion_gemma", "gemma4",
       "glm4moe", "llama3_1", "lfm2_2_5", "nemotron_3_nano", "muse_glimmer", "cohere2", "gemma3"]  # fmt: skip
NO_TOOLS = {"phi3", "phi3_5", "cohere2", "gemma3"}
RESULT = {"role": "tool", "name": "weather", "content": 'It\'s "4 C".', "tool_call_id": "lmtrain00"}


def call(city: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {"city": city}}
    return says("", tool_calls=[{"id": "lmtrain00", "type": "function", "function": function}])


CHATS: list[tuple[list[dict[str, Any]], list[dict[str, Any]]]] = [  # before and after the turn of the environment
    ([user("a"), says("One.")], [user("More?")]),
    ([user("a"), says("One."), user("b"), says("Two.")], [user("More?")]),
    ([user("a"), call("Rome")], [RESULT]),
    ([user("a"), call("Oslo"), RESULT, call("Rome")], [RESULT]),
    ([user("a"), call("Oslo"), RESULT, says("Two.")], [user("More?")]),
    ([user("a"), says("<think>\nHm.\n</think>\n\nOne."), user("b"), says("<think>\nHm.\n</think>\n\nTwo.")],
     [user("c")]),
]  # fmt: skip


@pytest.mark.parametrize("name", [*DROPPING, *FAMILIES, *TRL])
def test_turns_after_an_answer_are_those_of_the_whole_conversation(name: str, tokenizer_config: Any) -> None:
    text = DROPPING[name] if name in DROPPING else FAMILIES[name][0] if name in FAMILIES else trl_template(name)
    template = Template(tokenizer_for(text, tokenizer_config), text, "tried")
    tried = [chat for chat in CHATS if name not in NO_TOOLS or not any("tool_calls" in turn for turn in chat[0])]
    for before, said in tried:
        whole = template.prompt([*before, *said], TOOLS, "")
        replies = Replies(template, TOOLS)
        reply = replies.text(said, replies.ends(with_calls=said == [RESULT]).end or None)
        answer, end = whole[: len(whole) - len(reply)], replies.ends(with_calls=said == [RESULT]).end
        assert answer + reply == whole
        last = answer[answer.rindex(before[-1]["content"][-4:] if before[-1]["content"] else "Rome") :]
        assert last.endswith(end)
        assert last.count(end) == 1 or not end
        assert said[0]["content"][:4] not in last


THINKING = "<|im_start|>assistant\n<think>\n"


@pytest.mark.parametrize(
    ("name", "said", "ended_by", "reply"),
    [
        ("qwen3", user("More?"), "<|im_end|>", "\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", user("More?"), None, "\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", user("More?"), ".", "<|im_end|>\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3", user("M"), "<|endoftext|>", "<|im_end|>\n<|im_start|>user\nM<|im_end|>\n<|im_start|>assistant\n"),
        ("qwen3_5", RESULT, "</tool_call>", "<|im_end|>\n<|im_start|>user\n<tool_response>\nIt's \"4 C\".\n"
         f"</tool_response><|im_end|>\n{THINKING}"),
        ("qwen3_5", RESULT, "<|im_end|>", "\n<|im_start|>user\n<tool_response>\nIt's \"4 C\".\n"
         f"</tool_response><|im_end|>\n{THINKING}"),
        ("gpt_oss", RESULT, "<|call|>", "<|im_start|>tool\nIt's \"4 C\".<|im_end|>\n<|im_start|>assistant\n"),
        ("gpt_oss", RESULT, "<|im_end|>", "<|call|><|im_start|>tool\nIt's \"4 C\".<|im_end|>\n<|im_start|>assistant\n"),
        ("deepseek_v31", RESULT, "<｜tool▁calls▁end｜>",
         "<｜end▁of▁sentence｜><|im_start|>tool\nIt's \"4 C\".<|im_end|>\n<|im_start|>assistant\n"),
    ],
)  # fmt: skip
def test_the_end_of_turn_follows_another_end(
    name: str, said: dict[str, Any], ended_by: str | None, reply: str, tokenizer_config: Any
) -> None:
    text = DROPPING.get(name) or FAMILIES[name][0]
    template = Template(tokenizer_for(text, tokenizer_config), text, "tried")
    assert Replies(template, TOOLS).text([said], ended_by) == reply


def test_a_last_answer_may_end_with_a_token_of_its_own(tokenizer_config: Any) -> None:
    text = trl_template("gptoss")
    replies = Replies(Template(tokenizer_for(text, tokenizer_config), text, "tried"), TOOLS)
    following = "<|start|>user<|message|>b<|end|><|start|>assistant"
    assert replies.text([user("b")], "<|return|>") == replies.text([user("b")], "<|end|>") == following
    assert replies.text([user("b")], "x") == "<|end|>" + following


def test_results_refer_to_the_ids_that_the_model_wrote(tokenizer_config: Any) -> None:
    text = FAMILIES["mistral_ids"][0]
    template = Template(tokenizer_for(text, tokenizer_config), text, "tried")
    call = '{"name": "weather", "arguments": {"city": "Rome"}, "id": "Ab3dE6gH9"}'
    (found,) = reader_of(template, TOOLS).calls(f"[TOOL_CALLS][{call}]")
    (result,) = results([Call(found.name, found.arguments, "4 C", False, found.id)])
    assert (found.id, result["tool_call_id"]) == ("Ab3dE6gH9", "Ab3dE6gH9")
    replies = Replies(template, TOOLS)
    assert replies.text([result]) == "<|im_start|>tool\n4 CAb3dE6gH9<|im_end|>\n<|im_start|>assistant\n"
    # The template refuses other ids: the model's mistake doesn't end the run.
    assert "4 Clmtrain00" in replies.text([{**result, "tool_call_id": "short"}])


def test_several_results_after_a_template_that_allows_one_call(tokenizer_config: Any) -> None:
    text = FAMILIES["llama3"][0]
    reply = Replies(Template(tokenizer_for(text, tokenizer_config), text, "tried"), TOOLS).text([RESULT, RESULT])
    assert reply.count('It\'s "4 C".') == 2


def test_turns_that_a_template_leaves_out_are_refused(tokenizer_config: Any) -> None:
    text = "{% for m in messages if m.role != 'tool' %}<|x|>{{ m.content }}<|y|>{% endfor %}"
    template = Template(tokenizer_for(text, tokenizer_config), text, "tried")
    with pytest.raises(
        UserError, match=r"the chat template \(tried\) leaves out turns of the role tool: choose another"
    ):
        Replies(template, TOOLS).text([RESULT])
