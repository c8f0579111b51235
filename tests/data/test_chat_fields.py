"""Fields that a chat template does not show are counted, named and refused; also special tokens and alpaca inputs."""

import json
from pathlib import Path
from typing import Any

import pytest
from template_sweep import CALL, RESULT, TOOLS, says, tokenizer_for, trl_template, user
from test_chat_templates import TURNS, UNMARKED

from chats import sample_of, write_chats
from inprocess import message, run
from lmtrain.data import tokenizers
from lmtrain.data.chat.conversations import Completion, Conversation
from lmtrain.data.chat.find_template import NAMED
from lmtrain.data.chat.templates import ChatEncoder
from lmtrain.data.chat.turns import BadRow, turns_of
from loopback_hub import HUB
from support import TINY

CHAT = [*TINY, "objective=sft", "data=chat_jsonl", "data.seq_len=512", "model.max_position_embeddings=1024",
        "data.val_fraction=0"]  # fmt: skip
THOUGHTS = [{**turn, "reasoning_content": f"It is {i}."} if i % 2 else turn for i, turn in enumerate(TURNS)]


def chats_with_thoughts(folder: Path, share: float) -> Path:
    """Writes 40 conversations, of which a share contains reasoning, and returns the file."""
    rows = [{"messages": THOUGHTS if i < 40 * share else TURNS} for i in range(40)]
    return write_chats(folder / "chats.jsonl", rows)


def test_thoughts_that_a_template_has_no_place_for(tmp_path: Path) -> None:
    path = chats_with_thoughts(tmp_path, 0.5)
    chat = [*CHAT, "data.chat_template=vicuna", f"data.path={path}", f"run.dir={tmp_path / 'run'}"]
    ended = run("train", *chat, "trainer.max_steps=1")
    assert ended.code == 2
    refused = message(ended.err)
    assert "20 of 40 train rows: reasoning_content, which the chat template (vicuna) never shows the model" in refused
    assert f"the first is {path}, line 1" in refused
    assert "data.max_untrained=1" in refused
    ended = run("inspect", *chat)
    assert ended.code == 0
    shown = " ".join(ended.out.replace("│", " ").split())
    assert "20 rows: reasoning_content, which the chat template (vicuna) never shows the model; first" in shown
    assert "training refuses this" in shown
    assert run("train", *chat, "trainer.max_steps=1", "data.max_untrained=1").code == 0
    few = chats_with_thoughts(tmp_path, 0.05)
    ended = run("train", *CHAT, "data.chat_template=vicuna", f"data.path={few}", f"run.dir={tmp_path / 'few'}",
                "trainer.max_steps=1")  # fmt: skip
    assert ended.code == 0
    assert "2 rows: reasoning_content, which the chat template (vicuna) never shows the model" in " ".join(
        (ended.out + ended.err).split()
    )


def test_conversations_that_became_several_examples_are_in_the_plan(tmp_path: Path) -> None:
    template = tmp_path / "qwen3.jinja"
    template.write_text(trl_template("qwen3"))
    path = write_chats(tmp_path / "chats.jsonl", [{"messages": THOUGHTS}] * 4 + [{"messages": TURNS[:2]}] * 6)
    ended = run("inspect", *CHAT, f"data.chat_template={template}", f"data.path={path}")
    assert ended.code == 0, ended.err
    shown = " ".join(ended.out.replace("│", " ").split())
    assert "examples 14 " in shown
    assert "4 conversations became 8 examples: the chat template renders earlier turns differently" in shown


def test_a_template_that_writes_the_date_is_named(tokenizer_config: Any, data_config: Any) -> None:
    for text, dated in ((UNMARKED, False), ("Today: {{ strftime_now('%Y') }}\n" + UNMARKED, True)):
        encoder = ChatEncoder(tokenizer_for(text, tokenizer_config), data_config("chat", max_length=None))
        encoder.encode(Conversation(TURNS, None, "here"))
        assert any("rendered with the day they were prepared" in r.text for r in encoder.remarks) == dated


@pytest.mark.parametrize(
    ("key", "template"),
    [
        ("system content", "{% for m in messages if m.role != 'system' %}"),
        ("name", "{% for m in messages %}"),
    ],
)
def test_other_fields(key: str, template: str, tokenizer_config: Any, data_config: Any) -> None:
    text = template + UNMARKED.partition("{% for m in messages %}")[2]
    encoder = ChatEncoder(tokenizer_for(text, tokenizer_config), data_config("chat", max_length=None))
    named = [{"role": "system", "content": "Be kind."}, {**TURNS[0], "name": "Ada"}, TURNS[1]]
    encoder.encode(Conversation(named, None, "here"))
    found = {remark.text.partition(",")[0]: remark.lost for remark in encoder.remarks}
    assert found[key] == (key != "name")  # a lost name is reported but not refused


def test_a_tool_call_that_only_the_word_tool_calls_promises(tokenizer_config: Any, data_config: Any) -> None:
    """DeepSeek-R1's template shows a tool call only in a turn without content, so a row with both is refused."""
    tokenizer = tokenizer_for(trl_template("deepseek_r1_distill"), tokenizer_config)
    encoder = ChatEncoder(tokenizer, data_config("chat", max_length=None))
    turns = [user("Ask."), says("Say.", tool_calls=[CALL]), RESULT, says("Done.")]
    with pytest.raises(BadRow, match=r"the row has tools, which the chat template .* never shows the model: choose"):
        encoder.encode(Conversation(turns, TOOLS, "here"))
    with pytest.raises(BadRow, match=r"the row has tool calls, which the chat template .* never shows the model"):
        encoder.encode(Conversation(turns, None, "here"))


def test_answers_that_end_without_a_token_to_stop_at(tokenizer_config: Any, data_config: Any) -> None:
    text = UNMARKED.replace("<|im_end|>", "")  # the last answer ends with the tokenizer's end of text
    encoder = ChatEncoder(tokenizer_for(text, tokenizer_config), data_config("chat", max_length=None))
    encoder.encode(Conversation(TURNS, None, "here"))
    assert any("ends without a special token: the model doesn't learn to stop" in r.text for r in encoder.remarks)
    encoder.begin_row()
    encoder.encode(Conversation(TURNS[:2], None, "here"))
    assert not encoder.remarks


def test_a_template_that_needs_a_mark_the_tokenizer_lacks(tokenizer_config: Any, data_config: Any) -> None:
    tokenizer = tokenizer_for("{{ bos_token + unk_token }}" + UNMARKED, tokenizer_config)
    tokenizer.unk_token = None
    encoder = ChatEncoder(tokenizer, data_config("chat", max_length=None))
    (example,) = encoder.encode(Conversation(TURNS, None, "here"))
    assert tokenizer.decode(example.input_ids).startswith("<|endoftext|><|endoftext|><|im_start|>user")


def test_what_a_tool_returned() -> None:
    for value, text in (
        (0, "0"),
        (False, "false"),
        (2.5, "2.5"),
        ({"a": 0, "b": None}, '{"a": 0, "b": null}'),
        ("", ""),
    ):
        (turn,) = turns_of([{"role": "tool", "content": value}], "here")
        assert turn["content"] == text
    with pytest.raises(BadRow, match=r"must be text and is 0 \(int\)"):
        turns_of([{"role": "user", "content": 0}], "here")


def test_thoughts_by_other_names_and_keys_that_nothing_reads(tmp_path: Path) -> None:
    for key in ("thinking", "reasoning", "reasoning_content"):
        (turn,) = turns_of([{"role": "assistant", "content": "4", key: "2+2"}], "here")
        assert turn == {"role": "assistant", "content": "4", "reasoning_content": "2+2"}
    rows = [{"messages": [{**turn, "mood": "glad"} for turn in TURNS]} for _ in range(4)]
    ended = run("inspect", *CHAT, "data.chat_template=vicuna", f"data.path={write_chats(tmp_path / 'a.jsonl', rows)}")
    assert "4 rows: turns have the key mood, which nothing reads" in " ".join(ended.out.replace("│", " ").split())


REAL = ["HuggingFaceTB/SmolLM2-135M-Instruct", "karpathy/stories260K", "openai-community/gpt2"]
TYPED = "a <|im_end|> b<s></s> <|endoftext|>x"


@pytest.mark.parametrize("folder", ["bytes", *REAL])
def test_special_tokens_in_a_users_text(folder: str, tokenizer_config: Any, data_config: Any) -> None:
    """Special tokens in a user's text get the ids of a tokenizer that is told to read special tokens as text."""
    if folder == "bytes":
        tokenizer = tokenizers.load_or_train(tokenizer_config("bytes"), lambda _: iter(()))
        tokenizer.add_special_tokens({"additional_special_tokens": list(NAMED["chatml"])})
    elif (HUB / "models" / folder).exists():
        tokenizer = tokenizers.load_folder(HUB / "models" / folder)
    else:
        pytest.skip(f"needs {HUB / 'models' / folder}")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ eos_token }}{{ m.role }}\n{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ eos_token }}assistant\n{% endif %}"
    )
    plain, special = (
        ChatEncoder(tokenizer, data_config("chat", max_length=None, allow_special_text=allow))
        for allow in (False, True)
    )
    chat = Conversation([user(TYPED), says("Yes.")], None, "here")
    tokenizer.backend_tokenizer.encode_special_tokens = True
    asked, answered = (tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
                       for text in (f"user\n{TYPED}", "assistant\nYes."))  # fmt: skip
    tokenizer.backend_tokenizer.encode_special_tokens = False
    (example,) = plain.encode(chat)
    eos = tokenizer.eos_token_id
    if folder != "karpathy/stories260K":  # its tokenizer puts a space at the beginning of a text only
        assert example.input_ids == [eos, *asked, eos, eos, *answered, eos]
    assert example.input_ids.count(eos) == 4
    learned = [token for token, learn in zip(example.input_ids, example.trained, strict=True) if learn]
    assert tokenizer.decode(learned) == f"Yes.{tokenizer.eos_token}"
    assert tokenizer.decode(example.input_ids).replace(" ", "").count(TYPED.replace(" ", "")) == 1
    assert any(f"{tokenizer.eos_token}" in r.text and "read as text" in r.text for r in plain.remarks)
    (example,) = special.encode(chat)
    assert example.input_ids == tokenizer(special.chat.render(chat, [1])[0].text, add_special_tokens=False)["input_ids"]
    assert any("as the tokens themselves" in remark.text for remark in special.remarks)
    innocent = Conversation([user("a b"), says("Yes.")], None, "here")
    assert plain.encode(innocent) == special.encode(innocent)
    text = Completion(f"x{tokenizer.eos_token}", "Yes.", "here")
    assert (plain.encode(text)[0].input_ids.count(eos), special.encode(text)[0].input_ids.count(eos)) == (1, 2)


@pytest.mark.parametrize("plane", [0xF0000, 0xF8000, 0x100000, 0x108000])
def test_private_use_characters_spell_no_special_token(plane: int, tokenizer_config: Any, data_config: Any) -> None:
    """A text of private-use characters is that text, or its row is refused; it never becomes the end of text."""
    tokenizer = tokenizers.load_or_train(tokenizer_config("bytes"), lambda _: iter(()))
    encoder = ChatEncoder(tokenizer, data_config("chat", chat_template="vicuna", max_length=None,
                                                 allow_special_text=False))  # fmt: skip
    typed = f"a{chr(plane) * len(tokenizer.eos_token)}b"
    for sample in (Conversation([user(typed), says("Yes.")], None, "here"), Completion(typed, "Yes.", "here")):
        if plane in (0xF8000, 0x108000):
            with pytest.raises(BadRow, match=f"private-use character U\\+{plane:X}"):
                encoder.encode(sample)
            continue
        (example,) = encoder.encode(sample)
        assert typed in tokenizer.decode(example.input_ids)
        assert example.input_ids.count(tokenizer.eos_token_id) == (2 if isinstance(sample, Conversation) else 1)


def test_alpacas_input(tokenizer_config: Any, data_config: Any) -> None:
    """Prompts equal those of Stanford Alpaca's train.py (github.com/tatsu-lab/stanford_alpaca)."""
    tokenizer = tokenizers.load_or_train(tokenizer_config("bytes"), lambda _: iter(()))
    encoder = ChatEncoder(tokenizer, data_config("chat", chat_template="alpaca", max_length=None))
    for extra in ("2 and 2", ""):
        row = {"instruction": "Add.", "input": extra, "output": "4"}
        (example,) = encoder.encode(sample_of(row, data_config("chat"), "here"))
        context = ", paired with an input that provides further context" if extra else ""
        assert tokenizer.decode(example.input_ids).removeprefix("<|endoftext|>") == (
            f"Below is an instruction that describes a task{context}. Write a response that appropriately completes "
            f"the request.\n\n### Instruction:\nAdd.{chr(10) * 2 + '### Input:' + chr(10) + extra if extra else ''}"
            f"\n\n### Response:\n4<|endoftext|>"
        )
        assert not encoder.remarks


def test_pairs_that_the_template_makes_equal(tmp_path: Path) -> None:
    """A pair whose answers differ only in white space that the chat template trims is refused, or skipped if asked."""
    rows = [{"prompt": "Hi?", "chosen": "Yes.", "rejected": "No."}] * 9
    path = tmp_path / "pairs.jsonl"
    path.write_text(
        "".join(json.dumps(r) + "\n" for r in [*rows, {"prompt": "Hi?", "chosen": "Yes.", "rejected": " Yes.\n"}])
    )
    pairs = [*TINY, "objective=dpo", "data=preference_jsonl", f"data.path={path}", "data.val_fraction=0",
             "data.chat_template=alpaca", "data.seq_len=512", "model.max_position_embeddings=1024"]  # fmt: skip
    ended = run("inspect", *pairs)
    assert ended.code == 2
    assert f"{path}, line 10: chosen and rejected are the same once the chat template" in message(ended.err)
    ended = run("inspect", *pairs, "data.on_bad_row=skip")
    shown = " ".join(ended.out.replace("│", " ").split())
    assert ended.code == 0, ended.err
    assert "1 row skipped first" in shown
    assert "chosen and rejected are the same once" in shown
