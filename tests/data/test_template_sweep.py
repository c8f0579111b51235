"""Every available chat template with every kind of conversation: the labels are right, or the conversation is refused.

The reference is transformers' `apply_chat_template`: the text before an answer equals its rendering with the generation
prompt, the text up to the answer's end its rendering with the answer; {% generation %} marks, where present, its mask.
"""

import re
from typing import Any

import pytest
from jinja2 import TemplateError
from template_sweep import CHATS, every_template, tokenizer_for, trl_template, user
from transformers import PreTrainedTokenizerFast

from lmtrain.data.chat.conversations import Conversation
from lmtrain.data.chat.templates import ChatEncoder, Example
from lmtrain.data.chat.turns import BadRow
from lmtrain.errors import UserError

# Templates that behave differently; the slow test tries all others.
QUICK = ["qwen3", "gptoss", "deepseek_r1_distill", "nemotron_3_nano", "qwen2_5", "llama3", "gemma3", "glm4moe",
         "phi3", "lfm2_2_5", "qwen3_training"]  # fmt: skip
_TEXTS = re.compile(r"(?:Ask|Say|Think) (?:one|two|three)\.|Rule zero\.|Result of a tool\.")


@pytest.mark.parametrize("name", QUICK)
def test_templates_of_models(name: str, tokenizer_config: Any, data_config: Any) -> None:
    _try(trl_template(name), tokenizer_config, data_config)


@pytest.mark.slow
def test_every_template(tokenizer_config: Any, data_config: Any) -> None:
    found = every_template()
    if len(found) < 20:
        pytest.skip("needs TRL's templates: make env-trl")
    taken = 0
    for name, text in found.items():
        try:
            taken += _try(text, tokenizer_config, data_config)
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error
    assert taken > 0.7 * len(found) * len(CHATS)  # not mostly refusals


def _try(text: str, tokenizer_config: Any, data_config: Any) -> int:
    """Tries all conversations and returns how many were accepted."""
    tokenizer = tokenizer_for(text, tokenizer_config)
    encoder = ChatEncoder(tokenizer, data_config("chat", max_length=None))
    return sum(_check(encoder, tokenizer, chat) for chat in CHATS.values())


def _check(encoder: ChatEncoder, tokenizer: PreTrainedTokenizerFast, chat: Conversation) -> bool:
    refusal = _refusal(encoder, chat)
    if refusal:
        clear = "the chat template .* (refuses it: |never shows the model: choose|Possible fixes: |fix its markers, or)"
        assert re.search(clear, refusal)
        return False
    encoder.begin_row()
    examples = encoder.encode(chat)
    said = [t["content"].partition("</think>")[2].strip() or t["content"] for t in chat.messages[chat.given :]
            if t["role"] == "assistant"]  # fmt: skip
    remarks = " ".join(remark.text for remark in encoder.remarks)
    runs = [run for example in examples for run in _runs(example, tokenizer)]
    assert len(runs) == len(said)
    for (before, answer), words in zip(sorted(runs, key=_place(said)), said, strict=True):
        found = set(_TEXTS.findall(answer))
        thought = words.replace("Say", "Think") or "Think nothing."
        is_silent = not words or "assistant content, which" in remarks  # an answer with a tool call may be empty
        assert words in answer or is_silent
        assert found <= {words, thought}  # no question, result or other answer
        if not re.search(r"(reasoning_content|<think> block), which .* never shows", remarks):
            assert (thought in found) == _thinks(chat, thought)
        if "without a special token" not in remarks:
            assert answer.rstrip().endswith(tuple(tokenizer.all_special_tokens))
        _compare(tokenizer, chat, before, answer, remarks)
    ends = chat.messages[-1]["role"] == "assistant"
    if "generation %}" in tokenizer.chat_template and len(examples) == 1 and ends and not chat.given:
        _compare_masks(tokenizer, chat, examples[0])
    return True


def _refusal(encoder: ChatEncoder, chat: Conversation) -> str | None:
    try:
        encoder.encode(chat)
    except BadRow as bad:
        return bad.reason
    except UserError as error:
        return str(error)
    return None


def _runs(example: Example, tokenizer: PreTrainedTokenizerFast) -> list[tuple[str, str]]:
    """Returns (all the text before, the text of the run) for each run of learned tokens."""
    edges = [i for i, (a, b) in enumerate(zip([False, *example.trained], [*example.trained, False], strict=True))
             if a != b]  # fmt: skip
    text = [tokenizer.decode(example.input_ids[a:b]) for a, b in zip([0, *edges], edges, strict=False)]
    return [("".join(text[:i]), text[i]) for i in range(1, len(text), 2)]


def _place(said: list[str]) -> Any:
    return lambda run: next((i for i, words in enumerate(said) if words and words in run[1]), 0)


def _thinks(chat: Conversation, thought: str) -> bool:
    return any(thought in turn["content"] + turn.get("reasoning_content", "") for turn in chat.messages)


def _compare(tokenizer: PreTrainedTokenizerFast, chat: Conversation, before: str, answer: str, remarks: str) -> None:
    """Compares with transformers' renderings that ask for the answer and that include it."""
    if "generation %}" in tokenizer.chat_template:
        return
    modes: list[dict[str, Any]] = [{}]
    modes += [{"enable_thinking": value} for value in (True, False) if "rendered with enable_thinking" in remarks]
    for turn, message in enumerate(chat.messages):
        if message["role"] != "assistant":
            continue
        for mode in modes:
            given, written = (
                tokenizer.apply_chat_template(_spelt(tokenizer, chat.messages[:end]), tools=chat.tools, tokenize=False,
                                              add_generation_prompt=asks, **mode)
                for end, asks in ((turn, True), (turn + 1, False))
            )  # fmt: skip
            if before == given:
                put = "put behind the <think>" in remarks or "learned from that" in remarks
                whole = (before + answer).removesuffix(tokenizer.eos_token)  # added to templates without an end of turn
                assert put or written.startswith(whole)
                return
    raise AssertionError(f"no answer is asked for by {before!r}")


def _spelt(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns messages as the template reads them: gpt-oss has its own key for reasoning, vision models take parts."""
    messages = [{**m, "thinking": m["reasoning_content"]} if "reasoning_content" in m else m for m in messages]
    try:
        takes_text = "Ask." in str(tokenizer.apply_chat_template([user("Ask.")], tokenize=False))
    except TemplateError:
        takes_text = False
    return messages if takes_text else [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages]


def _compare_masks(tokenizer: PreTrainedTokenizerFast, chat: Conversation, example: Example) -> None:
    """Compares with transformers' own mask plus end-of-turn tokens, where the template's marks stop before them."""
    found = tokenizer.apply_chat_template(
        _spelt(tokenizer, chat.messages), tools=chat.tools, return_assistant_tokens_mask=True, return_dict=True
    )
    whole = example.input_ids[: len(found["input_ids"])]
    assert whole == found["input_ids"]
    more = [token for token, ours, mask in zip(example.input_ids, example.trained, found["assistant_masks"],
                                               strict=False) if ours != bool(mask)]  # fmt: skip
    assert set(more) <= set(tokenizer.all_special_ids)
