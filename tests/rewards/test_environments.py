"""Environments: the tool calls of an answer, what a tool's result or mistake tells the model, and the games."""

from typing import Any

import pytest

import odd_environments
from lmtrain.data.chat.thoughts import ThoughtMarks
from lmtrain.data.chat.tool_calls import CallFormat, CallReader, NamedJSON, Objects
from lmtrain.errors import UserError
from lmtrain.rewards import games
from lmtrain.rewards.environment import (
    LONGEST,
    Adapted,
    Call,
    Environment,
    EnvironmentReward,
    build_environment,
    execute,
    results,
    schemas,
)


def reads(format: CallFormat, environment: Environment | None = None) -> CallReader:
    tools = [tool["function"] for tool in schemas(environment)] if environment else []
    known = {tool["name"]: tool["parameters"] for tool in tools}
    return CallReader(format, known, ThoughtMarks(), "<tool_call>{...}</tool_call>")


HERMES, BARE, MISTRAL = Objects("<tool_call>", "</tool_call>"), Objects(""), Objects("[TOOL_CALLS]")


def test_the_calculator_rewards_what_the_tool_computed() -> None:
    game = games.Calculator()
    game.reset({"answer": "57234"}, 0)
    calls = execute(
        '<tool_call>{"name": "calculator", "arguments": {"expression": "48213+9021"}}</tool_call>',
        game.tools,
        1,
        reads(HERMES),
    )
    said, reward = game.step("", calls)
    assert (said, reward) == ([{"role": "tool", "name": "calculator", "content": "57234"}], 0.0)
    assert [game.step(text, []) for text in (" 57234", "57235")] == [(None, 1.0), (None, 0.0)]
    (call,) = execute('{"name": "calculator", "arguments": {"expression": "two+2"}}', game.tools, 1, reads(BARE))
    assert call.result.startswith("error: ValueError")


def test_binary_search_guesses_the_number_as_often_as_it_should() -> None:
    counts = []
    for seed in range(31):
        game, low, high, said = games.GuessNumber(), 1, 31, [{}]
        assert list(game.reset({}, seed)) == [{"role": "user", "content": "1 to 31"}]
        while said is not None:
            middle = (low + high) // 2
            said, reward = game.step(str(middle), [])
            low, high = (middle + 1, high) if said and said[0]["content"] == "higher" else (low, middle - 1)
        assert reward == pytest.approx(1 - 0.1 * (game.guesses - 1))
        counts.append(game.guesses)
    assert sum(counts) == sum(depth * 2 ** (depth - 1) for depth in range(1, 6))  # of a full tree of 31 numbers
    for answer, hint in (("I think 3", "a number"), ("9" * 9, "lower"), ("9" * 10, "a number"), (" 0\n", "higher")):
        assert game.step(answer, []) == ([{"role": "user", "content": hint}], 0.0)


@pytest.mark.parametrize(
    ("format", "answer", "calls"),
    [
        (HERMES, 'So <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
         [("add", {"a": 1, "b": 2})]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n<tool_call>{"name": "g"}</tool_call>',
         [("f", {}), ("g", {})]),
        (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}',  # as OpenAI writes them; cut off
         [("f", {"a": 1})]),
        (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
         [("f", {"a": 1}), ("g", {})]),
        (NamedJSON("[TOOL_CALLS]", "[ARGS]"), '[TOOL_CALLS]f[ARGS]{"a": {"b": 1}}[TOOL_CALLS]g[ARGS]{}',
         [("f", {"a": {"b": 1}}), ("g", {})]),
        (BARE, '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
         [("f", {"a": 1}), ("g", {})]),
        (BARE, '{"name": "f", "parameters": {"a": 1}}', [("f", {"a": 1})]),
        (BARE, '[{"type": "function", "function": {"name": "f", "arguments": "{}"}}]', [("f", {})]),
        (BARE, "{not a call}", []),
        (BARE, '{"name": "f", broken', []),
        (BARE, "The answer is 3.", []),
        (HERMES, "<tool_call>{broken</tool_call>", [("", "{broken")]),
        (HERMES, '<tool_call>["f"]</tool_call>', [("", '["f"]')]),
    ],
)  # fmt: skip
def test_tool_calls_are_read_in_the_formats_of_templates(
    format: CallFormat, answer: str, calls: list[tuple[str, Any]]
) -> None:
    assert [call[:2] for call in reads(format).calls(answer)] == calls


def test_what_a_tool_does_wrong_is_told_to_the_model() -> None:
    def told(name: str, arguments: str = "{}") -> tuple[str, bool]:
        answer = f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'
        (call,) = execute(answer, odd_environments.Adds.tools, 0.05, reads(HERMES, odd_environments.Adds()))
        return call.result, call.failed

    assert told("add", '{"a": 2, "b": 3}') == ("5", False)
    assert told("add", '{"a": 2}') == ("error: missing a required argument: 'b'", True)
    assert told("add", "[2, 3]") == ("error: arguments must be a JSON object", True)
    assert told("sub") == ("error: there is no tool 'sub'; there are add, hang, fail, much, binary", True)
    assert told("fail") == ("error: ZeroDivisionError: oh dear", True)
    assert told("hang") == ("error: hang took longer than 0.05 s", True)
    assert told("much") == ("x" * LONGEST + "... (5,000,000 characters)", False)
    assert told("binary") == ("��\x00ok", False)
    (call,) = execute("<tool_call>{</tool_call>", odd_environments.Adds.tools, 1.0, reads(HERMES))
    assert call.failed
    assert "must be written like <tool_call>" in call.result
    assert told("add", '{"a": "2", "b": "2"}') == ('error: a must be integer, and "2" is string', True)
    assert told("add", '{"a": 2.0, "b": 2}') == ("4", False)


def test_results_follow_an_answer_in_the_order_of_its_calls() -> None:
    calls = [Call("a", {}, "1", False), Call("b", {}, "error: no", True)]
    told = [{"role": "tool", "name": "a", "content": "1"}, {"role": "tool", "name": "b", "content": "error: no"}]
    assert results(calls) == told
    assert Environment().step("x", calls) == (told, None)
    assert Environment().step("x", []) == (None, None), "an answer without calls ends the episode"
    assert Environment().reset({}, 0) is None
    answer = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    assert [call.result for call in execute(answer * 2, odd_environments.Adds.tools, 1, reads(HERMES))] == ["3", "3"]


def test_long_texts_are_cut_and_what_is_no_text_is_json() -> None:
    def say(value: Any) -> str:
        def tool() -> Any:
            return value

        (call,) = execute('{"name": "tool", "arguments": {}}', [tool], 1, reads(BARE))
        assert not call.failed
        return call.result

    assert LONGEST == 4000, "as docs/rewards.md says"
    assert say("x" * LONGEST) == "x" * LONGEST
    assert say("x" * (LONGEST + 1)) == "x" * LONGEST + f"... ({LONGEST + 1:,} characters)"
    assert say({"a": [1, None], "é": {3}}) == '{"a": [1, null], "é": "{3}"}'
    assert say("\ud800!") == "?!", "what UTF-8 can't hold"
    (call,) = execute(f'{{"name": "{"x" * 200}", "arguments": {{}}}}', odd_environments.Adds.tools, 1, reads(BARE))
    assert len(call.result) < 200


def test_the_reward_of_an_environment_is_the_column_that_a_rollout_adds() -> None:
    assert EnvironmentReward()([0] * 3, [""] * 3, environment_reward=[1.0, None, 0.5]) == [1.0, None, 0.5]
    with pytest.raises(RuntimeError, match="step raised"):
        EnvironmentReward()([0] * 2, [""] * 2, environment_reward=[1.0, "step raised"])


def test_an_environment_is_built_from_its_class_and_arguments() -> None:
    make = build_environment({"_target_": "lmtrain.rewards.games.GuessNumber", "most": 7, "cost": 0.5}, [])
    found = make()
    assert isinstance(found, games.GuessNumber)
    assert list(found.reset({}, 20)) == [{"role": "user", "content": "1 to 7"}]
    assert (found.number, found.step("6", [])[1]) == (1 + 20 % 7, 0.0)
    assert found.step(str(found.number), []) == (None, 0.5)
    (described,) = schemas(games.Calculator())
    assert described["function"]["name"] == "calculator"
    assert described["function"]["parameters"]["required"] == ["expression"]
    with pytest.raises(UserError, match="the tool undescribed can't be described"):
        build_environment({"_target_": "odd_environments.Undescribed"}, ["odd_environments"])
    with pytest.raises(UserError, match="is not"):
        build_environment({"_target_": "lmtrain.rewards.text.Equal"}, [])


def test_a_process_of_a_tool_starts_before_its_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(games.calculator, "start_process", lambda: started.append("calculator"), raising=False)
    build_environment({"_target_": "lmtrain.rewards.games.Calculator"}, [])
    assert started == ["calculator"]


class Trls:
    """As TRL's environment_factory makes them."""

    def reset(self, answer: str, seed: int) -> str:
        self.answer, self.seed = answer, seed
        return "guess"

    def look(self) -> str:
        """Shows the answer."""
        return self.answer

    def _hidden(self) -> str:
        return "no tool"

    def get_reward(self) -> float:
        return float(self.seed)


def test_a_class_for_trl_has_its_public_methods_as_tools() -> None:
    played = Adapted(Trls())
    assert [tool.__name__ for tool in played.tools] == ["look"]
    assert played.reset({"answer": "7", "other": 1}, 3) == "guess"
    (call,) = execute('{"name": "look", "arguments": {}}', played.tools, 1, reads(BARE))
    assert call.result == "7"
    assert played.step("7", []) == (None, None)
    assert played.step("7", [call])[0] == results([call])
    assert played.get_reward() == 3.0
    assert Adapted(odd_environments.Echo()).steps
