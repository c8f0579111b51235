"""Tools and environments of users: coroutines, exits, what can't be copied, and classes without our base class."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoTokenizer

import lmtrain
import odd_environments
import own_tools
from lmtrain.data.chat.special_text import AnswerDecoder
from lmtrain.data.chat.templates import ChatEncoder
from lmtrain.data.chat.time_limits import TookTooLong, time_limit
from lmtrain.data.chat.tool_calls import CallFormat, NamedJSON, Objects
from lmtrain.data.examples.prompt_rows import PromptRow
from lmtrain.errors import UserError
from lmtrain.rewards.base import FunctionReward
from lmtrain.rewards.environment import Call, Environment, build_environment, execute
from lmtrain.rewards.scoring import Part, Scorer
from lmtrain.rollouts.engine import SampledText, Sampling
from lmtrain.rollouts.episodes import Episode, Limits, Player, columns_of
from tiny_pretrained import save_pretrained

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Script:
    """An engine that writes given answers."""

    def __init__(self, tokenizer: Any, answers: list[str]) -> None:
        self.tokenizer, self.answers = tokenizer, answers

    def generate(self, requests: Sequence[Any], sampling: Any, kept: Any = None) -> list[SampledText]:
        ids = self.tokenizer(self.answers.pop(0), add_special_tokens=False)["input_ids"]
        ids.append(self.tokenizer.convert_tokens_to_ids("<|im_end|>"))
        return [SampledText(ids, [0.0] * len(ids), 0.0, True) for _ in requests]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    found = AutoTokenizer.from_pretrained(save_pretrained(tmp_path_factory.mktemp("llama")))
    found.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    found.chat_template = TEMPLATE
    return found


def play(tokenizer: Any, make: Callable[[], Environment], *answers: str, size: int = 1) -> list[Episode]:
    chat = ChatEncoder(
        tokenizer, lmtrain.compose(["objective=grpo", "data.path=x.jsonl", "reward=format", "data.seq_len=64"]).data
    )
    ends = chat.end_of_turn_ids()
    player = Player(make, chat, AnswerDecoder(tokenizer, ends), Limits(len(answers), 10_000, 1.0))
    row = PromptRow(epoch=0, row=0, ids=[], columns={"prompt": "Begin.", "answer": "3"})
    sampling = Sampling(64, 1.0, 1.0, tuple(ends), len(tokenizer))
    engine: Any = Script(tokenizer, list(answers))
    return player.play(engine, sampling, [row], [row], [list(range(size))], 0)[0]


def named(name: str, **arguments: Any) -> Callable[[], Environment]:
    return build_environment({"_target_": f"odd_environments.{name}", **arguments}, ["odd_environments"])


@pytest.mark.parametrize("name", ["Locked", "Coroutines", "Plain"])
def test_what_can_be_no_copy_waits_or_has_no_base_class_is_played_as_the_plain_one(tokenizer: Any, name: str) -> None:
    played = [play(tokenizer, named(n), "one", "two", "three", size=2) for n in ("Echo", name)]
    assert [(e.ids, e.turns, e.reward) for e in played[0]] == [(e.ids, e.turns, e.reward) for e in played[1]]
    assert played[0][0].environment is not played[0][1].environment
    assert len(played[0][0].turns) == 5


def tool_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_class_for_trls_environment_factory(tokenizer: Any) -> None:
    """Its methods are the tools, its reset adds to the prompt, and its state gives the reward, if turns run out too."""
    first, second = play(tokenizer, named("Counting", start=2), tool_call("add", number=3), "Five.", size=2)
    prompt = tokenizer.decode(first.prompt)
    assert "Adds to the count." in prompt
    assert "hidden" not in prompt
    assert "get_reward" not in prompt
    assert "user\nBegin. Count!<|im_end|>" in prompt
    assert [turn["content"] for turn in first.turns][1:] == ["5", "Five."]
    assert first.reward == second.reward == 5.0
    (cut,) = play(tokenizer, named("Counting"), tool_call("add", number=3))
    assert cut.reward == 3.0
    counts = FunctionReward(lambda completions, environments: [e.count for e in environments], {}, "reward")
    assert counts(prompts=["", ""], completions=["", ""], **columns_of([first, cut])) == [5, 3]


def test_what_has_no_reset_or_follows_no_seed_is_said(tokenizer: Any) -> None:
    with pytest.raises(UserError, match="NoReset has no method reset"):
        named("NoReset")
    with pytest.raises(UserError, match=r"CannotBeMade raised SystemExit: 0"):
        named("CannotBeMade")
    with pytest.raises(UserError, match=r"Forgets\.reset began the completions of one prompt with different messages"):
        play(tokenizer, named("Forgets"), "one", size=2)


def test_an_environment_that_exits_fails_its_completion_only(tokenizer: Any) -> None:
    (episode,) = play(tokenizer, named("Exits"), "one")
    assert episode.reward == "Exits.step raised SystemExit: 0"


def told(body: str, seconds: float = 1.0) -> Call:
    """Executes a call of a function `t` with this body."""
    names: dict[str, Any] = {}
    exec(f"import asyncio, argparse, sys, time\n{body}", names)  # noqa: S102
    (call,) = execute('{"name": "t", "arguments": {}}', [names["t"]], seconds, odd_environments.BARE)
    return call


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def t(): sys.exit(3)", "error: SystemExit: 3"),
        ("def t(): argparse.ArgumentParser().parse_args(['--no'])", "error: SystemExit: 2"),
        ("def t(): raise KeyboardInterrupt", "error: KeyboardInterrupt: "),
        ("async def t(): sys.exit(3)", "error: SystemExit: 3"),
        (
            "class B(Exception):\n    def __str__(self): raise ValueError\ndef t(): raise B",
            "error: B: its text",
        ),
        ("def t(): return 10**5000", "error: ValueError: Exceeds the limit"),
        ("async def t():\n    await asyncio.sleep(0)\n    return 'Paris'", "Paris"),
        ("async def t(): await asyncio.sleep(60)", "error: t took longer than 0.2 s"),
        ("async def t(): time.sleep(3)", "error: t took longer than 0.2 s"),
        ("async def t(): raise TimeoutError('own')", "error: TimeoutError: own"),
    ],
)
def test_what_a_tool_raises_or_awaits_is_text(body: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    began = time.monotonic()
    assert told(body, 0.2).result.startswith(words)
    assert time.monotonic() - began < 3
    assert told("async def t(): return 'next'").result == "next"


def test_coroutines_share_a_loop() -> None:
    """Clients of asyncio belong to the loop that they were made in."""
    loop = "async def t(): return id(asyncio.get_running_loop())"
    assert told(loop).result == told(loop).result


def test_ctrl_c_in_a_tool_is_no_error_of_the_tool() -> None:
    with pytest.raises(KeyboardInterrupt):
        told("import signal\ndef t():\n    signal.raise_signal(signal.SIGINT)\n    time.sleep(9)")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize(
    ("format", "form"),
    [
        (Objects("<tool_call>", "</tool_call>"), "<tool_call>{}</tool_call>"),
        (Objects(""), "{}"),
        (Objects(""), "<|python_tag|>{}"),
        (Objects("[TOOL_CALLS]"), "[TOOL_CALLS][{}]"),
        (NamedJSON("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]t[ARGS]{}"),
    ],
)
def test_a_number_of_thousands_of_digits_is_a_call_that_cannot_be_read(format: CallFormat, form: str) -> None:
    number = f'{{"x": {"1" * 5000}}}'
    call = form.format(number if "ARGS" in form else f'{{"name": "t", "arguments": {number}}}')
    found = execute(call, [odd_environments.add], 1.0, replace(odd_environments.BARE, format=format))
    assert all(one.failed for one in found)
    assert not found or found[0].failed


def test_an_async_reward_is_awaited() -> None:
    async def counted(completions: list[str], **columns: Any) -> list[int]:
        return [len(text) for text in completions]

    async def exits(completions: list[str], **columns: Any) -> list[int]:
        raise SystemExit(0)

    assert Scorer([Part("n", 1.0, FunctionReward(counted, {}, "reward"))], 5.0)(["", ""], ["a", "bc"], {}).total == [
        1,
        2,
    ]
    failed = Scorer([Part("n", 1.0, FunctionReward(exits, {}, "reward"))], 5.0)([""], ["a"], {})
    assert failed.reasons == {"n raised SystemExit: 0": 1}


def test_tools_in_their_own_process_are_ended_whatever_they_do() -> None:
    tools = (own_tools.count, own_tools.later, own_tools.crash, own_tools.leave, own_tools.hold, own_tools.compute)
    for tool in tools:
        tool.start_process()  # type: ignore[attr-defined]

    def said(name: str, seconds: float = 20.0, arguments: str = "{}") -> str:
        (call,) = execute(f'{{"name": "{name}", "arguments": {arguments}}}', tools, seconds, odd_environments.BARE)
        return call.result

    assert [said("count"), said("count", arguments='{"step": 2}')] == ["1", "3"]
    assert json.loads(said("later"))["process"] != str(os.getpid())
    assert said("leave") == "error: SystemExit: 3"
    assert said("crash") == f"error: the process of crash ended with exit code {-signal.SIGSEGV}"
    for name in ("hold", "compute"):  # their processes have started meanwhile
        began, process = time.monotonic(), process_of(name)
        assert said(name, 0.5) == f"error: {name} took longer than 0.5 s"
        assert time.monotonic() - began < 5
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
    assert said("count") == "4"


def process_of(tool: str) -> int:
    found = subprocess.run(
        ["pgrep", "-P", str(os.getpid()), "-f", f"own_tools {tool}$"], capture_output=True, text=True
    )
    return int(found.stdout)


def test_a_time_limit_holds_in_other_threads_and_ends_with_its_context() -> None:
    found = []

    def loop() -> None:
        try:
            with time_limit(0.2):
                while True:
                    pass
        except TookTooLong:
            found.append("ended")
        with time_limit(0.1):
            pass
        time.sleep(0.2)
        found.append("and goes on")

    thread = threading.Thread(target=loop, daemon=True)
    thread.start()
    thread.join(10)
    assert found == ["ended", "and goes on"]


UNUSED = """
import cProfile, threading
from lmtrain.data.chat.time_limits import time_limit

def within():
    with time_limit(5):
        pass

thread = threading.Thread(target=within)
thread.start()
thread.join()
profile = cProfile.Profile()
profile.enable()
(lambda: [])()
profile.disable()
print("ended")
"""


def test_a_limit_of_a_thread_that_was_not_reached_leaves_nothing_behind() -> None:
    """An exception that is set and taken back keeps CPython 3.11 looking for it: under a profiler, for ever."""
    said = subprocess.run([sys.executable, "-c", UNUSED], capture_output=True, text=True, timeout=120, check=True)
    assert said.stdout == "ended\n"


def test_a_time_limit_inside_another_leaves_the_outer_one_in_force() -> None:
    """A reward model renders its chat template, which has a limit of its own, within that of the reward."""

    def nested(inner: float) -> None:
        with time_limit(inner):
            pass
        time.sleep(5)

    began = time.monotonic()
    for inner in (0.01, 60.0):
        with pytest.raises(TookTooLong), time_limit(0.3):
            nested(inner)
    with pytest.raises(TookTooLong), time_limit(0.2), time_limit(60.0):
        time.sleep(5)
    assert time.monotonic() - began < 3
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
