"""Token ids and labels of conversations, compared with lists written by hand and with transformers' own masks."""

import dataclasses
from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from lmtrain.data import tokenizers
from lmtrain.data.chat import jinja_rendering
from lmtrain.data.chat.conversations import Completion, Conversation
from lmtrain.data.chat.find_template import NAMED, find_template
from lmtrain.data.chat.jinja_rendering import Template
from lmtrain.data.chat.rendering import ChatTemplate
from lmtrain.data.chat.templates import ChatEncoder, Example, own_template
from lmtrain.data.chat.turns import BadRow
from lmtrain.data.examples.row_format import TemplateRows
from lmtrain.errors import UserError
from loopback_hub import HUB

EOS = 256  # end of text of the bytes tokenizer, whose other ids are the bytes themselves
SYSTEM = {"role": "system", "content": "Be brief."}
TURNS = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "Four — 4"},
    {"role": "user", "content": "Sure?\n"},
    {"role": "assistant", "content": "\nYes "},
]
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.fixture
def bytes_tokenizer(tokenizer_config):
    """Returns a factory: bytes_tokenizer("<|a|>", ...) has bytes as their own ids, and the named tokens from 257 on."""

    def make(
        *tokens: str, template: str | None = None, adds_bos: bool = False, adds_eos: bool = False
    ) -> PreTrainedTokenizerFast:
        tokenizer = tokenizers.load_or_train(tokenizer_config("bytes"), lambda _: iter(()))
        tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
        tokenizer.chat_template = template
        if adds_bos or adds_eos:
            bos = tokenizer.bos_token
            tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
                single=f"{bos} $A" if adds_bos else f"$A {bos}", special_tokens=[(bos, tokenizer.bos_token_id)]
            )
        return tokenizer

    return make


@pytest.fixture
def chatml(bytes_tokenizer, data_config):
    """Returns a factory: chatml(template=..., train_on=...) is an encoder of bytes with ChatML's tokens 257 and 258."""

    def make(template: str | None = None, **settings) -> ChatEncoder:
        tokenizer = bytes_tokenizer(*NAMED["chatml"], template=template)
        name = None if template else "chatml"
        return ChatEncoder(tokenizer, data_config("chat", **{"chat_template": name, "max_length": None, **settings}))

    return make


def conversation(*turns: dict, tools: list | None = None) -> Conversation:
    return Conversation(list(turns), tools, "chats.jsonl, line 1")


def chatml_tokens(turns: list[dict]) -> tuple[list[int], list[bool]]:
    """Returns hand-made ChatML ids and mask: <|im_start|> is 257, <|im_end|> 258; an answer and its end are learned."""
    ids, trained = [], []
    for turn in turns:
        head, said = [257, *f"{turn['role']}\n".encode()], [*turn["content"].encode(), 258]
        ids += head + said + [10]
        trained += [False] * len(head) + [turn["role"] == "assistant"] * len(said) + [False]
    return ids, trained


def test_chatml_by_hand(chatml) -> None:
    for turns in (TURNS, [SYSTEM, *TURNS], TURNS[:2], TURNS[:3]):
        (example,) = chatml().encode(conversation(*turns))
        assert (example.input_ids, example.trained) == chatml_tokens(turns)


def test_llama3_by_hand(bytes_tokenizer, data_config) -> None:
    tokenizer = bytes_tokenizer(*NAMED["llama3"], adds_bos=True)
    (example,) = ChatEncoder(tokenizer, data_config("chat", chat_template="llama3", max_length=None)).encode(
        conversation(SYSTEM, *TURNS)
    )
    ids, trained = [EOS], [False]  # a single BOS, though the tokenizer would add another
    for turn in [SYSTEM, *TURNS]:
        head, said = [257, *turn["role"].encode(), 258, 10, 10], [*turn["content"].strip().encode(), 259]
        ids += head + said
        trained += [False] * len(head) + [turn["role"] == "assistant"] * len(said)
    assert (example.input_ids, example.trained) == (ids, trained)


EXPECTED = {  # <E> is the beginning and end of text; [ ] encloses learned text
    "alpaca": "<E>Be brief.\n\n### Instruction:\nHi\n\n### Response:\n[Yes<E>]\n\n### Instruction:\nBye\n\n"
    "### Response:\n[No<E>]",
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    "[Yes<|im_end|>]\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[No<|im_end|>]\n",
    "compact": "<|system|> Be brief.<|user|> Hi<|assistant|>[ Yes<E>]<|user|> Bye<|assistant|>[ No<E>]",
    "gemma": "<E><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n[Yes<end_of_turn>]\n"
    "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n[No<end_of_turn>]\n",
    "llama3": "<E><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[Yes<|eot_id|>]"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[No<|eot_id|>]",
    "mistral": "<E>[INST] Be brief.\n\nHi [/INST][ Yes<E>][INST] Bye [/INST][ No<E>]",
    "phi3": "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n[Yes<|end|>]\n<|user|>\nBye<|end|>\n"
    "<|assistant|>\n[No<|end|>]\n",
    "vicuna": "<E>Be brief. USER: Hi ASSISTANT:[ Yes<E>]USER: Bye ASSISTANT:[ No<E>]",  # as FastChat writes it
    "zephyr": "<|system|>\nBe brief.<E>\n<|user|>\nHi<E>\n<|assistant|>\n[Yes<E>]\n<|user|>\nBye<E>\n<|assistant|>\n"
    "[No<E>]\n",
}


@pytest.mark.parametrize("name", NAMED)
def test_every_named_template(name: str, bytes_tokenizer, data_config) -> None:
    tokenizer = bytes_tokenizer(*NAMED[name])
    encoder = ChatEncoder(tokenizer, data_config("chat", chat_template=name, max_length=None))
    said = ("Hi", "Yes", "Bye", "No")
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    (example,) = encoder.encode(conversation(SYSTEM, *turns))
    shown, inside = "", False
    for token, learned in zip([*example.input_ids, -1], [*example.trained, False], strict=True):
        if learned != inside:
            shown, inside = shown + ("[" if learned else "]"), learned
        shown += "" if token == -1 else tokenizer.decode([token])
    assert shown == EXPECTED[name].replace("<E>", tokenizer.eos_token)
    assert example.input_ids.count(EOS) == EXPECTED[name].count("<E>")
    assert (
        encoder.end_of_turn_ids()[0] == example.input_ids[len(example.trained) - 1 - example.trained[::-1].index(True)]
    )
    # The prompt that the model is given is the beginning of the text it is trained on.
    given = encoder.prompt_ids(conversation(SYSTEM, *turns))
    assert example.input_ids[: len(given)] == given
    assert example.trained[len(given) - 1 : len(given) + 1] == [False, True]


def test_markers_and_prefixes_agree_with_transformers_mask(chatml) -> None:
    marked, unmarked = chatml(MARKED), chatml(UNMARKED)
    for turns in (TURNS, [SYSTEM, *TURNS], TURNS[:2]):
        expected = marked.tokenizer.apply_chat_template(turns, return_assistant_tokens_mask=True, return_dict=True)
        for encoder in (marked, unmarked):
            (example,) = encoder.encode(conversation(*turns))
            assert example.input_ids == expected["input_ids"]
            assert example.trained == [bool(m) for m in expected["assistant_masks"]]


def test_a_marker_that_stops_before_the_end_of_turn_is_carried_over_it(chatml) -> None:
    short = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    (example,) = chatml(short).encode(conversation(*TURNS))
    (right,) = chatml(MARKED).encode(conversation(*TURNS))
    assert example == right


def test_markers_that_miss_turns_are_refused(chatml) -> None:
    last_only = MARKED.replace("== 'assistant'", "== 'assistant' and loop.last")
    with pytest.raises(UserError, match=r"line 1: .*marks 1 stretches .* has 2 assistant turns"):
        chatml(last_only).encode(conversation(*TURNS))


def real_turns() -> list[list[dict]]:
    path = HUB / "datasets/local/sgd-messages/data/test-00000-of-00001.parquet"
    if not path.exists():
        pytest.skip(f"needs {path}")
    import pyarrow.parquet as pq

    return pq.read_table(path).to_pylist()[:200]


@pytest.mark.parametrize(
    "folder", ["HuggingFaceTB/SmolLM2-135M-Instruct", "karpathy/stories260K", "openai-community/gpt2"]
)
def test_real_conversations_and_tokenizers_against_transformers_mask(folder: str, data_config) -> None:
    """Ids and masks equal transformers' with byte-level and sentencepiece-like tokenizers; SmolLM2 has <|im_end|>."""
    rows = real_turns()
    tokenizer = tokenizers.load_folder(HUB / "models" / folder)
    marked = MARKED if "Smol" in folder else MARKED.replace("<|im_end|>", "{{ eos_token }}")
    tokenizer.chat_template = marked
    cfg = data_config("chat", max_length=None)
    by_markers = ChatEncoder(tokenizer, cfg)
    tokenizer.chat_template = marked.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    by_prefixes = ChatEncoder(tokenizer, cfg)
    for row in rows:
        expected = tokenizer.apply_chat_template(
            row["messages"], chat_template=marked, return_assistant_tokens_mask=True, return_dict=True
        )
        for encoder in (by_markers, by_prefixes):
            (example,) = encoder.encode(conversation(*row["messages"]))
            assert example.input_ids == expected["input_ids"]
            assert example.trained == [bool(m) for m in expected["assistant_masks"]]


# The behavior of Qwen3's template in short: it keeps the reasoning of the last answer only.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and not loop.last %}"
    "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THOUGHT = [{**t, "content": f"<think>Hm.</think>{t['content']}"} if t["role"] == "assistant" else t for t in TURNS]


def test_a_template_that_is_no_prefix_of_itself(chatml) -> None:
    """Each answer is learned from a rendering of its own, in which the reasoning of earlier answers is removed."""
    encoder = chatml(FORGETFUL)
    before = [TURNS[0], {**TURNS[1], "content": "Four — 4"}, TURNS[2]]  # as the template shows the answer later on
    found = [(e.input_ids, e.trained) for e in encoder.encode(conversation(*THOUGHT))]
    (_, untrained), (ids, trained) = chatml_tokens(before), chatml_tokens(THOUGHT[3:])
    untrained = [False] * len(untrained)
    assert found == [chatml_tokens(THOUGHT[:2]), (chatml_tokens(before)[0] + ids, untrained + trained)]
    assert encoder.texts == 2
    with pytest.raises(
        UserError, match=r"its 1 answers can't be learned from one text. Possible fixes: .*=last_assistant"
    ):
        chatml(FORGETFUL, train_on="completion").encode(conversation(*THOUGHT))
    (example,) = chatml(FORGETFUL, train_on="last_assistant").encode(conversation(*THOUGHT))
    last = [i for i, learned in enumerate(example.trained) if learned]
    assert bytes(example.input_ids[last[0] : last[-1]]) == b"<think>Hm.</think>\nYes "
    assert example.input_ids[last[-1]] == 258


def test_no_token_counts_twice_where_a_conversation_becomes_several(chatml) -> None:
    """Answers that one rendering shows unchanged share an example, and an untrained answer gets none of its own."""
    plain = [TURNS[0], {**TURNS[1], "content": "Four"}, *THOUGHT[2:], *TURNS]
    encoder = chatml(FORGETFUL)
    examples = encoder.encode(conversation(*plain))
    runs = [stretches(example, encoder.tokenizer) for example in examples]
    # The whole text shows the first and the last two answers unchanged; it lacks the second answer's reasoning.
    assert runs == [
        ["<think>Hm.</think>\nYes <|im_end|>"],
        ["Four<|im_end|>", "Four — 4<|im_end|>", "\nYes <|im_end|>"],
    ]
    unlearned = [*THOUGHT[:1], {**THOUGHT[1], "train": False}, *THOUGHT[2:]]
    (example,) = encoder.encode(conversation(*unlearned))
    assert stretches(example, encoder.tokenizer) == ["<think>Hm.</think>\nYes <|im_end|>"]


def test_a_generation_prompt_that_the_answer_doesnt_begin_with(chatml) -> None:
    """A <think> that only the generation prompt has (DeepSeek-R1) is closed in the answer; another text is refused."""
    asks = UNMARKED.replace("assistant\n{% endif", "assistant\n<think>{% endif")
    encoder = chatml(asks)
    (example,) = encoder.encode(conversation(*TURNS[:2]))
    assert stretches(example, encoder.tokenizer) == ["\n</think>\n\nFour — 4<|im_end|>"]
    assert "empty thought" in encoder.remarks[0].text
    (example,) = encoder.encode(conversation(TURNS[0], {**TURNS[1], "reasoning_content": "Two and two"}))
    assert stretches(example, encoder.tokenizer) == ["Two and two\n</think>\n\nFour — 4<|im_end|>"]
    (example,) = encoder.encode(conversation(TURNS[0], {**TURNS[1], "content": "Two and two</think>4"}))
    assert stretches(example, encoder.tokenizer) == ["Two and two</think>4<|im_end|>"]
    asks = UNMARKED.replace("assistant\n{% endif", "assistant\nWell: {% endif")
    with pytest.raises(UserError, match=r"with 'Well: ', where the text with .* has 'Four.*Possible fixes: mark"):
        chatml(asks).encode(conversation(*TURNS[:2]))


def test_what_only_the_end_of_a_conversation_has_is_no_answer(chatml) -> None:
    """An end of text that ends only the conversation, as in Phi-3's own template, is not learned."""
    text = UNMARKED + "{% if not add_generation_prompt %}{{ eos_token }}{% endif %}"
    (example,) = chatml(text).encode(conversation(*TURNS))
    ids, trained = chatml_tokens(TURNS)
    assert (example.input_ids, example.trained) == ([EOS, *ids, EOS], [False, *trained, False])


def test_a_template_without_an_end_of_turn_gets_the_end_of_text(chatml) -> None:
    bare = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    bare += "{% if add_generation_prompt %}assistant: {% endif %}"
    encoder = chatml(bare)
    (example,) = encoder.encode(conversation(*TURNS))
    last = b"\nYes "
    assert (
        bytes(example.input_ids[:-1])
        == b"user: 2+2?\n\nassistant: Four \xe2\x80\x94 4\n\nuser: Sure?\n\n\nassistant: " + last
    )
    assert example.input_ids[-1] == EOS
    assert example.trained[-len(last) - 2 :] == [False] + [True] * (len(last) + 1)
    assert encoder.end_of_turn_ids() == [EOS]
    (unanswered,) = encoder.encode(conversation(*TURNS[:3]))
    assert EOS not in unanswered.input_ids


@pytest.mark.parametrize(
    ("train_on", "learned"),
    [
        ("assistant", ["Four — 4<|im_end|>", "\nYes <|im_end|>"]),
        ("last_assistant", ["\nYes <|im_end|>"]),
        (
            "completion",
            ["Four — 4<|im_end|>\n<|im_start|>user\nSure?\n<|im_end|>\n<|im_start|>assistant\n\nYes <|im_end|>\n"],
        ),
    ],
)
def test_what_is_learned(train_on: str, learned: list[str], chatml) -> None:
    encoder = chatml(train_on=train_on)
    (example,) = encoder.encode(conversation(*TURNS))
    assert stretches(example, encoder.tokenizer) == learned


@pytest.mark.parametrize("template", ["mistral", "vicuna", "gemma"])
def test_an_answer_is_not_looked_for_in_its_question(template: str, bytes_tokenizer, data_config) -> None:
    """Questions contain their answers, the names of roles and the signs of the template."""
    said = [("user", "not yes"), ("assistant", "yes"), ("user", "assistant ASSISTANT: [/INST]"), ("assistant", "yes")]
    turns = [{"role": role, "content": content} for role, content in said]
    for train_on, learned in (("assistant", 2), ("last_assistant", 1)):
        cfg = data_config("chat", chat_template=template, train_on=train_on, max_length=None)
        encoder = ChatEncoder(bytes_tokenizer(*NAMED[template]), cfg)
        (example,) = encoder.encode(conversation(*turns))
        found = stretches(example, encoder.tokenizer)
        assert [text.strip().removeprefix("yes") for text in found] == [encoder.chat.end_of_turn] * learned


def test_everything_is_learned_but_the_first_token(chatml) -> None:
    (example,) = chatml(train_on="all").encode(conversation(*TURNS))
    assert example.trained == [False] + [True] * (len(example.input_ids) - 1)


def test_turns_that_are_not_to_be_learned(chatml) -> None:
    turns = [TURNS[0], {**TURNS[1], "train": False}, *TURNS[2:]]
    encoder = chatml()
    assert stretches(encoder.encode(conversation(*turns))[0], encoder.tokenizer) == ["\nYes <|im_end|>"]


def stretches(example: Example, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Returns the runs of learned tokens as text."""
    found: list[list[int]] = []
    for before, token, learned in zip([False, *example.trained], example.input_ids, example.trained, strict=False):
        if learned and not before:
            found.append([])
        if learned:
            found[-1].append(token)
    return [tokenizer.decode(ids) for ids in found]


def test_completions(bytes_tokenizer, data_config) -> None:
    cfg = data_config("chat", max_length=None)
    plain, with_bos = ChatEncoder(bytes_tokenizer(), cfg), ChatEncoder(bytes_tokenizer(adds_bos=True), cfg)
    sample = Completion("1+1=", "2", "here")
    assert plain.encode(sample) == [Example([*b"1+1=2", EOS], [False] * 4 + [True] * 2)]
    assert with_bos.encode(sample) == [Example([EOS, *b"1+1=2", EOS], [False] * 5 + [True] * 2)]
    marked = Completion("<|endoftext|>1+1=", "2", "here")  # the row has its own beginning of text
    assert with_bos.encode(marked) == with_bos.encode(sample)
    text = Completion("", "abc", "here")
    assert plain.encode(text) == [Example([*b"abc", EOS], [False, True, True, True])]
    everything = ChatEncoder(bytes_tokenizer(), dataclasses.replace(cfg, train_on="all"))
    assert everything.encode(sample) == [Example([*b"1+1=2", EOS], [False] + [True] * 5)]
    assert with_bos.prompt_ids(sample) == [EOS, *b"1+1="]
    assert TemplateRows(plain.tokenizer, cfg).question(sample)["reference"] == "2"
    assert plain.end_of_turn_ids() == [EOS]
    assert plain.template is None
    with pytest.raises(UserError, match=r"no chat template: choose one with data.chat_template \(alpaca, chatml"):
        plain.encode(conversation(*TURNS))


def test_a_tokenizer_that_ends_every_text_ends_no_prompt(bytes_tokenizer, data_config) -> None:
    encoder = ChatEncoder(bytes_tokenizer(adds_eos=True), data_config("chat", max_length=None))
    sample = Completion("1+1=", "2", "here")
    assert encoder.prompt_ids(sample) == [*b"1+1="]
    assert encoder.encode(sample) == [Example([*b"1+1=2", EOS], [False] * 4 + [True] * 2)]


def test_a_token_across_the_border_of_prompt_and_completion_is_learned(data_config) -> None:
    path = HUB / "models/openai-community/gpt2"
    if not path.exists():
        pytest.skip(f"needs {path}")
    tokenizer = tokenizers.load_folder(path)
    (example,) = ChatEncoder(tokenizer, data_config("chat", max_length=None)).encode(Completion("It is ", "new", ""))
    assert [tokenizer.decode([i]) for i in example.input_ids] == ["It", " is", " new", "<|endoftext|>"]
    assert example.trained == [False, False, True, True]


def test_lengths(chatml) -> None:
    ids, trained = chatml_tokens(TURNS)
    n, most = len(ids), 40
    sample = conversation(*TURNS)

    def cut(policy: str, length: int = most) -> list[Example]:
        return chatml(on_too_long=policy, max_length=length).encode(sample)

    assert cut("truncate_right") == [Example(ids[:most], trained[:most], n - most)]
    left = [False, *trained[n - most + 1 :]]
    assert cut("truncate_left") == [Example(ids[-most:], left, n - most)]
    assert cut("drop") == []
    with pytest.raises(BadRow, match=rf"line 1: it has {n} tokens and data.max_length is {most}"):
        cut("raise")
    for policy in ("truncate_right", "truncate_left", "drop", "split", "raise"):
        assert cut(policy, n) == [Example(ids, trained)]
    first = len(chatml_tokens(TURNS[:2])[0])  # length of the first question and answer
    assert cut("split", n - 1) == [Example(ids[:first], trained[:first]), Example(ids[first:], trained[first:])]
    pieces = cut("split", 10)
    assert [i for p in pieces for i in p.input_ids] == ids
    assert {p.cut for p in pieces} == {0}
    assert max(len(p.input_ids) for p in pieces) == 10
    assert not any(p.trained[0] for p in pieces)
    starts = [sum(len(p.input_ids) for p in pieces[:i]) for i in range(len(pieces))]
    assert first in starts
    assert [t for p in pieces for t in p.trained] == [t and i not in starts for i, t in enumerate(trained)]


def test_an_example_whose_answer_is_cut_away_stays_and_is_untrained(chatml) -> None:
    (example,) = chatml(max_length=10).encode(conversation(*TURNS))
    assert not any(example.trained)
    assert example.cut == len(chatml_tokens(TURNS)[0]) - 10


SCHEMA = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WITH_CALL = [
    TURNS[0],
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
    },
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "4"},
]


def test_tool_calls_are_learned_and_results_are_not(chatml) -> None:
    encoder = chatml()
    (example,) = encoder.encode(conversation(*WITH_CALL, tools=[SCHEMA]))
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>'
    assert stretches(example, encoder.tokenizer) == [call, "4<|im_end|>"]
    text = encoder.tokenizer.decode(example.input_ids)
    assert '<tools>\n{"type": "function", "function": {"name": "add", ' in text
    assert "<|im_start|>tool\n<tool_response>\n4\n</tool_response><|im_end|>" in text


def test_a_template_without_a_place_for_tools(chatml) -> None:
    with pytest.raises(BadRow, match=r"the row has tool calls, which .* never shows .*data.chat_template=chatml"):
        chatml(UNMARKED).encode(conversation(*WITH_CALL))
    with pytest.raises(BadRow, match=r"the row has tools, which"):
        chatml(UNMARKED).encode(conversation(*TURNS, tools=[SCHEMA]))


def test_a_row_that_the_template_refuses(chatml) -> None:
    strict = "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    strict += "{{ raise_exception('roles must alternate') }}{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(
        BadRow, match=r"line 1: the chat template \(the tokenizer's own\) refuses it: roles must alternate"
    ):
        chatml(strict).encode(conversation(TURNS[0], *TURNS))
    (example,) = chatml().encode(conversation(TURNS[0], *TURNS))  # ChatML accepts two user turns in a row
    assert (example.input_ids, example.trained) == chatml_tokens([TURNS[0], *TURNS])


def test_templates_that_cant_be_used(bytes_tokenizer, data_config, tmp_path: Path) -> None:
    def make(name: str | None) -> ChatEncoder:
        return ChatEncoder(bytes_tokenizer("<|im_end|>"), data_config("chat", chat_template=name))

    with pytest.raises(
        UserError, match=r"has no <\|im_start\|>: add them with 'tokenizer.add_tokens=\[<\|im_start\|>\]'"
    ):
        make("chatml")
    with pytest.raises(UserError, match=r"chat_template=mine is neither a file nor one of alpaca, chatml"):
        make("mine")
    broken = {
        "{% if %}": "can't render question and answer",
        "{{ messages[0].content }}": "doesn't write out the turns",
        "{{ raise_exception('no') }}": "refuses it: no",
    }
    for text, reason in broken.items():
        (tmp_path / "own.jinja").write_text(text)
        with pytest.raises(UserError, match=reason):
            make(str(tmp_path / "own.jinja"))
    (tmp_path / "own.jinja").write_text(UNMARKED)
    assert make(str(tmp_path / "own.jinja")).template == UNMARKED


def test_prompt_and_answer_of_the_last_turn(chatml) -> None:
    encoder = chatml()
    sample = conversation(*TURNS)
    ids, _ = chatml_tokens(TURNS[:3])
    assert encoder.prompt_ids(sample) == [*ids, 257, *b"assistant\n"]
    assert TemplateRows(encoder.tokenizer, encoder.cfg).question(sample)["reference"] == "\nYes "
    assert encoder.end_of_turn_ids() == [258, EOS]


def test_the_identity_names_the_template_whatever_its_name(chatml) -> None:
    assert chatml().identity == chatml().identity != chatml(UNMARKED).identity


def test_end_of_turn_is_the_first_special_token_after_an_answer(bytes_tokenizer) -> None:
    tokenizer = bytes_tokenizer("<|im_end|>")
    text = "{% for m in messages %}{{ m.content }} <|im_end|>\n{{ eos_token }}{% endfor %}"
    assert ChatTemplate(tokenizer, text, "own").end_of_turn == " <|im_end|>"


COSTLY = {
    "a power": "{{ 9**(9**9) }}",
    "squares": "{% set ns = namespace(a=9**99) %}{% for i in range(99) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
    "a long text": "{{ 'a' * 10**10 }}",
    "a long list": "{{ 10**10 * [1] }}",
    "a wide number": "{{ '%10000000000d' % 1 }}",
    "no memory": "{{ ''.join(range(99999)|map('center', 10**12)) }}",
}


@pytest.mark.parametrize("name", COSTLY)
def test_an_operation_that_costs_too_much_is_refused(name: str, bytes_tokenizer) -> None:
    with pytest.raises(UserError, match=r"can't render .*(too large for a chat template|more memory than there is)"):
        ChatTemplate(bytes_tokenizer("<|im_end|>"), COSTLY[name] + UNMARKED, "own")


@pytest.mark.parametrize("text", ["{{ '-' * 40 }}", "{{ 40 * [1] }}", "{{ '%5d' % 3 }}", "{{ 2**10 * 3 % 7 }}"])
def test_an_operation_of_every_day_is_done(text: str, bytes_tokenizer) -> None:
    assert ChatTemplate(bytes_tokenizer("<|im_end|>"), text + UNMARKED, "own").end_of_turn == "<|im_end|>"


def test_a_template_that_is_no_text_is_refused(bytes_tokenizer) -> None:
    tokenizer = bytes_tokenizer("<|im_end|>")
    tokenizer.chat_template = 17
    with pytest.raises(UserError, match=r"chat_template of the tokenizer is 17, and no Jinja text"):
        own_template(tokenizer)


@pytest.fixture
def rendered(monkeypatch) -> list[tuple[int, bool]]:
    """What goes through a template from here on: the number of messages, and whether an answer is asked for."""
    found, real = [], jinja_rendering.render_jinja_template

    def counted(conversations, **options):
        found.extend((len(chat), options.get("add_generation_prompt", False)) for chat in conversations)
        return real(conversations, **options)

    monkeypatch.setattr(jinja_rendering, "render_jinja_template", counted)
    return found


def test_no_text_of_a_row_is_rendered_twice(chatml, rendered):
    """All answers are found in the whole conversation's text, and both answers of a pair share their prompt's."""
    encoder = chatml(template=UNMARKED)
    rendered.clear()
    encoder.encode(Conversation([{"role": "user", "content": "1+1?"}, *TURNS[1:]], None, ""))
    assert sorted(rendered) == [(3, True), (4, False)]
    rendered.clear()
    for answer in ("Two", "2"):
        asked = [{"role": "user", "content": "One and one?"}, {"role": "assistant", "content": answer}]
        encoder.pair(Conversation(asked, None, "here"), 1)
    assert sorted(rendered) == [(1, True), (2, False), (2, False)]


SAID = "{% for message in messages %}{{ message.role + message.content }}<|im_end|>"
LOCAL = {  # templates whose text of the first turns is the beginning of the text of all, whatever else is there
    **dict.fromkeys(NAMED),
    "loop": SAID + "{{ loop.index ~ loop.first ~ (loop.previtem is defined) }}{% endfor %}",
    "before": SAID + "{{ messages[loop.index0 - 1].role if not loop.first }}{% endfor %}{{ messages[0].content }}",
    "slice": "{{ messages[0].content }}{% set rest = messages[1:] %}"
    "{% for m in rest %}{{ m.content ~ rest[0].role }}<|im_end|>{% endfor %}",
    "set": "{% set x = 'x' %}" + SAID + "{% set x = 'y' %}{% endfor %}{{ x }}",
    "asked": SAID + "{{ 'a' if add_generation_prompt }}{% endfor %}{{ 'b' if add_generation_prompt }}",
    "macro": "{% macro f(m) %}{{ m.content }}{% endmacro %}{% for m in messages %}{{ f(m) }}<|im_end|>{% endfor %}",
}
AHEAD = {  # templates that say, at the end or before it, something about all messages
    "last": SAID + "{{ '!' if loop.last }}{% endfor %}",
    "attr": SAID + "{{ (loop | attr('last')) ~ loop['last'] }}{% endfor %}",
    "next": SAID + "{{ loop.nextitem.role if loop.nextitem is defined }}{% endfor %}",
    "filter": SAID.replace("messages", "messages | selectattr('content')") + "{% endfor %}",
    "length": SAID + "{{ loop.length }}{% endfor %}",
    "revindex": SAID + "{{ loop.revindex }}{% endfor %}",
    "-1": SAID + "{% endfor %}{{ messages[-1].role }}",
    "-1:": SAID + "{% endfor %}{{ messages[-1:] | map(attribute='role') | join }}",
    "4": SAID + "{{ 4 if messages[4] }}{% endfor %}",
    "count": SAID + "{% endfor %}{{ messages | length }}",
    "namespace": "{% set n = namespace(i=0) %}" + SAID + "{% set n.i = n.i + 1 %}{% endfor %}{{ n.i }}",
    "cycler": "{% set c = cycler('a', 'b', 'c') %}" + SAID + "{% set x = c.next() %}{% endfor %}{{ c.current }}",
    "break": SAID + "{% if loop.index0 == 3 %}{% break %}{% endif %}{% endfor %}",
    "captured": "{% set all %}" + SAID + "{% endfor %}{% endset %}{{ all }}",
    "twice": SAID + "{% endfor %}" + SAID + "{% endfor %}",
    "sequence": SAID + "{% endfor %}{{ messages is sequence }}",
    "list": SAID.replace("messages", "messages | list") + "{% endfor %}",
    "equal": "{{ messages == [] }}" + SAID + "{% endfor %}",
    "json": SAID + "{% endfor %}{{ messages | tojson }}",
    "text": SAID + "{% endfor %}{{ messages }}",
    "first": SAID + "{% endfor %}{{ (messages | first).role }}",
    "unwritten": SAID.replace("{{", "{% if message.role != 'user' or loop.first %}{{") + "{% endif %}{% endfor %}",
    "refused": SAID + "{{ raise_exception('no') if loop.index0 == 6 }}{% endfor %}",
}


@pytest.mark.parametrize("name", [*LOCAL, *AHEAD])
def test_the_beginnings_of_a_conversation(name, bytes_tokenizer, rendered):
    """Where a template allows it, they are read off one rendering; they always are those of transformers."""
    tokenizer = bytes_tokenizer(*{token for tokens in NAMED.values() for token in tokens})
    text = (LOCAL | AHEAD)[name] or find_template(name, tokenizer)[0]
    template = Template(tokenizer, text, name)
    chat = [{"role": ("user", "assistant")[i % 2], "content": f"said {i}"} for i in range(8)]
    for ends in ([3, 5, 7], [2, 4, 6, 8]):
        for ask in (False, True):
            rendered.clear()
            try:
                found = template.render_beginnings(chat, ends, None, "", add_generation_prompt=ask)
            except BadRow:
                assert name == "refused"
                continue
            asked = {"chat_template": text, "tokenize": False, "add_generation_prompt": ask}
            assert found == [tokenizer.apply_chat_template(chat[:end], **asked) for end in ends]
            assert (len(rendered) == 1) == (name in LOCAL)
