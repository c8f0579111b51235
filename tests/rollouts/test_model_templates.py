"""Episodes and rewards under chat templates as models ship them: calls, thoughts that prompts begin, ends of turns."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils import get_json_schema

import lmtrain
import odd_environments
from call_templates import DROPPING, FAMILIES, skeleton
from inprocess import run
from lmtrain.data.chat.special_text import AnswerDecoder
from lmtrain.data.chat.templates import ChatEncoder
from lmtrain.data.examples.prompt_rows import PromptRow
from lmtrain.errors import UserError
from lmtrain.rewards.environment import Environment, results
from lmtrain.rewards.text import Regex, TaggedFormat
from lmtrain.rollouts.engine import SampledText, Sampling
from lmtrain.rollouts.episodes import Episode, Limits, Player
from support import rows
from tiny_pretrained import save_pretrained

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|call|>", "<|tool_response>", "<|message|>", "<|channel|>"]


class Adds(Environment):
    tools = (odd_environments.add,)

    def step(self, answer: str, calls: Any) -> Any:
        return (results(calls), None) if calls else (None, float(answer.endswith("5")))


class Script:
    """An engine that writes given answers, and notes the prompts and the ids that may end an answer."""

    def __init__(self, tokenizer: Any, answers: list[str]) -> None:
        self.tokenizer, self.answers = tokenizer, answers
        self.prompts: list[list[int]] = []
        self.ends: tuple[int, ...] = ()

    def generate(self, requests: Any, sampling: Sampling, kept: Any = None) -> list[SampledText]:
        self.ends = sampling.end_ids
        self.prompts.append(list(requests[0].prompt))
        ids = self.tokenizer(self.answers[len(self.prompts) - 1], add_special_tokens=False)["input_ids"]
        return [SampledText(ids, [0.0] * len(ids), 0.0, ids[-1] in sampling.end_ids) for _ in requests]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pretrained(tmp_path_factory.mktemp("llama"), max_position_embeddings=256)


@pytest.fixture(scope="module")
def tokenizer(llama: Path) -> Any:
    found = AutoTokenizer.from_pretrained(llama)
    found.add_special_tokens({"additional_special_tokens": SPECIAL})
    return found


def play(tokenizer: Any, template: str, answers: list[str]) -> tuple[Episode, Script]:
    tokenizer.chat_template = template
    config = lmtrain.compose(["objective=grpo", "data.path=x.jsonl", "reward=format", "data.seq_len=64"])
    chat = ChatEncoder(tokenizer, config.data)
    ends = chat.end_of_turn_ids()
    player = Player(Adds, chat, AnswerDecoder(tokenizer, ends), Limits(len(answers), 10_000, 1.0))
    engine: Any = Script(tokenizer, answers)
    row = PromptRow(epoch=0, row=0, ids=[], columns={"prompt": "2 and 3?"})
    sampling = Sampling(64, 1.0, 1.0, tuple(ends), len(tokenizer))
    ((episode,),) = player.play(engine, sampling, [row], [row], [[1]], 0)
    return episode, engine


CALL = {"id": "lmtrain00", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}


@pytest.mark.parametrize("name", [*DROPPING, "hermes", "gpt_oss", "gemma4", "lfm2", "glm", "qwen3_coder"])
def test_an_episode_is_the_templates_text_of_the_conversation(name: str, tokenizer: Any) -> None:
    """The answers are sampled as the template renders them, with a thought where it keeps thoughts."""
    template = tokenizer.chat_template = DROPPING.get(name) or FAMILIES[name][0]
    thought = {"reasoning_content": "Hm."} if name in ("qwen3", "qwen3_5") else {}
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "2 and 3?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], **thought},
        {"role": "tool", "name": "add", "content": "5", "tool_call_id": "lmtrain00"},
        {"role": "assistant", "content": "It is 5", **thought},
    ]
    tools = [get_json_schema(odd_environments.add)]

    def text(messages: list[dict[str, Any]], ask: bool = False) -> str:
        return str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=ask))

    whole, answers = text(chat), []
    for k in (1, 3):
        asked = text(chat[:k], ask=True)
        assert whole.startswith(asked)
        following = text(chat[: k + 2], ask=True) if k == 1 else whole
        end = {"gpt_oss": "<|call|>", "gemma4": "<|tool_response>"}.get(name, "<|im_end|>") if k == 1 else "<|im_end|>"
        answers.append(following[len(asked) :].partition(end)[0] + end)
    episode, engine = play(tokenizer, template, answers)
    assert tokenizer.decode(episode.prompt + episode.ids) == whole.rstrip()
    assert (episode.tool_calls, episode.failed_tool_calls, episode.ended, episode.reward) == (1, 0, True, 1.0)
    sampled = [i for i, own in zip(episode.ids, episode.sampled, strict=True) if own]
    assert tokenizer.decode(sampled) == "".join(answers)
    assert engine.prompts[1] == (episode.prompt + episode.ids)[: len(engine.prompts[1])]
    assert episode.begun == {"qwen3_5": "<think>\n", "qwen3_5_nothink": "<think>\n\n</think>\n\n"}.get(name, "")


def test_a_call_inside_the_thought_that_the_prompt_begins_is_none(tokenizer: Any) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    episode, _ = play(tokenizer, DROPPING["qwen3_5"], [f"I could write {call}.\n</think>\n\nIt is 5<|im_end|>"])
    assert (episode.tool_calls, episode.reward) == (0, 1.0)
    episode, _ = play(tokenizer, DROPPING["qwen3_5"], [f"I could write {call}.<|im_end|>"])
    assert episode.tool_calls == 0
    episode, _ = play(tokenizer, DROPPING["qwen3"], [f"{call}<|im_end|>", "5<|im_end|>"])
    assert (episode.tool_calls, episode.failed_tool_calls) == (1, 0)


def test_wrong_types_are_counted_and_told(tokenizer: Any) -> None:
    wrong = FAMILIES["qwen3_coder"][0]
    call = "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\ntwo\n</parameter>\n</function>"
    episode, _ = play(tokenizer, wrong, [f"{call}\n</tool_call><|im_end|>", "5<|im_end|>"])
    assert episode.turns[1]["content"] == 'error: b must be integer, and "two" is string'
    assert (episode.tool_calls, episode.failed_tool_calls) == (1, 1)
    episode, _ = play(tokenizer, wrong, ["<tool_call>{}</tool_call><|im_end|>", "5<|im_end|>"])
    assert episode.turns[1]["content"].startswith(
        "error: the call can't be read: it must be written like <tool_call>\n<f"
    )


def test_a_template_that_cant_be_played_is_refused_before_anything_is_sampled(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="which can't be read back"):
        play(tokenizer, skeleton(""), ["x"])
    without = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(UserError, match=r"the row has tools, which the chat template .* never shows the model"):
        play(tokenizer, without, ["x"])


@pytest.fixture(scope="module")
def settings(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("prompts")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(20)))
    (folder / "silent.jinja").write_text(skeleton(""))
    (folder / "thinking.jinja").write_text(DROPPING["qwen3_5"])
    return ["objective=grpo", f"data.path={folder}/prompts.jsonl", "model=pretrained", f"model.name_or_path={llama}",
            "tokenizer.add_tokens=[<|im_start|>,<|im_end|>]", "data.seq_len=64", "data.global_batch_size=2",
            "data.micro_batch_size=2", "data.val_fraction=0.2", "objective.max_new_tokens=8", "logger=none",
            "run.allow_target=[odd_environments]", "trainer.max_steps=1", "export.enabled=false",
            f"data.chat_template={folder}/thinking.jinja"]  # fmt: skip


def test_the_refusal_comes_before_the_plan(settings: list[str], tmp_path: Path) -> None:
    adds = "objective.environment._target_=odd_environments.Adds"
    silent = settings[-1].replace("thinking", "silent")
    ended = run("train", *settings[:-1], silent, adds, f"run.dir={tmp_path}/run")
    assert ended.code == 2
    assert "which can't be read back, so the model's calls would be lost" in " ".join(ended.err.split())
    assert "rollouts" not in ended.out


@pytest.mark.parametrize("played", [False, True])
def test_rewards_get_what_the_prompt_has_written_of_an_answer(
    played: bool, settings: list[str], tmp_path: Path
) -> None:
    more = ["objective.environment._target_=odd_environments.NeverEnds", "objective.max_turns=2"] if played else []
    custom = ["reward=custom", "reward._target_=odd_environments.begun"]
    ended = run("train", *settings, *custom, *more, f"run.dir={tmp_path}/run")
    assert ended.code == 0, ended.err
    record = next(row for row in rows(tmp_path / "run" / "metrics.jsonl") if "train/reward" in row)
    assert record["train/reward/begun" if played else "train/reward"] == 1


def test_rewards_of_form_read_the_turn_from_its_start() -> None:
    said = ["So.\n</think>\n<answer>4</answer>", "<think>So.</think><answer>4</answer>", "<answer>4</answer>"]
    starts = ["<think>\n", "", "<think>\n\n</think>\n\n"]
    assert TaggedFormat()([0] * 3, said, turn_start=starts) == [1, 1, 1]
    assert TaggedFormat()([0] * 3, said, turn_start=["<think>\n"] * 3) == [1, 0, 0]
    assert TaggedFormat()([0] * 3, said) == [0, 1, 0]
    assert Regex(r"<think>.*</think>.*")([0] * 3, said, turn_start=starts) == [1, 1, 1]
    assert Regex(r"<answer>\d</answer>")([0] * 3, said, turn_start=starts) == [0, 0, 1]
