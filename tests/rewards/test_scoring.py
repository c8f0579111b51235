"""Rewards: their values for texts, their weights, and how failing, slow or invalid ones are handled."""

import math
import time
from collections.abc import Sequence
from typing import Any

import pytest

from lmtrain.errors import UserError
from lmtrain.rewards.base import FunctionReward, Reward
from lmtrain.rewards.code import CodeTests, code_of
from lmtrain.rewards.environment import EnvironmentReward
from lmtrain.rewards.math_verify import MathVerify, delimited
from lmtrain.rewards.scoring import Part, Scorer, build_rewards
from lmtrain.rewards.text import Equal, ExactNumber, LengthPenalty, Regex, TaggedFormat, final_number


@pytest.mark.parametrize(
    ("text", "number"),
    [("so it is 1,234.50.", "1234.5"), ("$7", "7"), ("-3 or 4", "4"), ("x = -12", "-12"), ("none", None), (".5", "0.5"),
     ("1.000.000", "0"), ("#### 18", "18"), ("3.0e8 m/s", "300000000"), ("2E-3", "0.002"), ("x = \u22125", "-5"),
     ("$.5", "0.5"), ("1e", "1")],
)  # fmt: skip
def test_the_final_number_of_a_text(text: str, number: str | None) -> None:
    found = final_number(text)
    assert (found is None) if number is None else (found == final_number(number))


def test_rewards_of_texts() -> None:
    exact = ExactNumber(after="####", reference_after="####")
    assert exact([0] * 3, ["1 #### 42", "42", "#### 42.0 apples"], answer=["a #### 42", "#### 42", "#### 42"]) == [
        1,
        0,
        1,
    ]
    assert ExactNumber()([0] * 3, ["0.00001", "-5", "1e-5"], answer=[1e-05] * 3) == [1, 0, 1]
    with pytest.raises(ValueError, match="holds no number"):
        exact([0], ["1"], answer=["nothing"])
    assert Regex(r"<\d+>")([0] * 3, ["<12>", "<12> ", "12"]) == [1, 0, 0]
    assert Regex(r"\d", whole=False, right=0.5, wrong=-1)([0] * 2, ["a1", "b"]) == [0.5, -1]
    good = "<think>a\nb</think>\n<answer>3</answer>\n"
    assert TaggedFormat()([0] * 3, [good, good + good, "<answer>3</answer>"]) == [1, 0, 0]
    ids = [[1], [1] * 3, [1] * 8]
    assert LengthPenalty(3, least=2, scale=10)([0] * 3, [""] * 3, completion_ids=ids) == [-0.1, 0, -0.5]
    with pytest.raises(UserError, match="no regular expression"):
        Regex("(")


class Odd(Reward):
    """A reward that raises for `bad` and otherwise returns `values`."""

    def __init__(self, values: Any = None, sleep: float = 0.0) -> None:
        self.values, self.sleep = values, sleep

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> Any:
        time.sleep(self.sleep)
        if "bad" in completions:
            raise ArithmeticError("no  number\nfor it")
        return [1.0] * len(completions) if self.values is None else self.values


def scored(reward: Reward, completions: list[str], **columns: Any) -> Any:
    parts = [Part("odd", 2.0, reward), Part("one", 0.5, Odd())]
    return Scorer(parts, 0.3)([0] * len(completions), completions, columns)


def test_a_completion_that_a_reward_raises_for_is_counted_and_the_others_are_scored() -> None:
    found = Scorer([Part("odd", 2.0, Odd())], 5)([0] * 3, ["a", "bad", "b"], {})
    assert found.failed == [False, True, False]
    assert found.total[0] == found.total[2] == 2.0
    assert math.isnan(found.total[1])
    assert found.reasons == {"odd raised ArithmeticError: no number for it": 1}


def test_what_is_no_finite_number_is_a_failure_and_none_is_no_opinion() -> None:
    found = scored(Odd([math.nan, None, 3, math.inf]), ["a", "b", "c", "d"])
    assert found.failed == [True, False, False, True]
    assert found.total[1:3] == [0.5, 6.5]
    assert found.reasons == {"odd returned nan": 1, "odd returned inf": 1}


def test_one_that_never_ends_is_ended() -> None:
    started = time.monotonic()
    found = scored(Odd(sleep=60), ["a", "b"])
    assert time.monotonic() - started < 40
    assert found.failed == [True, True]
    assert list(found.reasons) == ["odd took longer than objective.reward_timeout=0.3 s"]


@pytest.mark.parametrize(
    ("values", "words"),
    [([1.0], "returned 1 values for 2 completions"), ("good", "a list with a number"),
     (["a", "b"], "a number is needed"), (3.0, "a list with a number")],
)  # fmt: skip
def test_one_that_returns_something_else_is_refused(values: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        scored(Odd(values), ["x", "y"])


def test_a_column_that_no_row_has_is_named() -> None:
    with pytest.raises(UserError, match=r"reads the column answer, and the rows have solution"):
        scored(ExactNumber(), ["1"], solution=["1"])


def test_what_the_config_names() -> None:
    one = build_rewards({"_target_": "lmtrain.rewards.text.Regex", "pattern": "a", "weight": 3}, [])
    assert [(p.name, p.weight, type(p.reward)) for p in one] == [("reward", 3.0, Regex)]
    form = {"_target_": "lmtrain.rewards.text.TaggedFormat", "weight": 0.2}
    parts = {"answer": {"_target_": "lmtrain.rewards.text.ExactNumber"}, "form": form}
    assert [(p.name, p.weight) for p in build_rewards({"parts": parts}, [])] == [("answer", 1.0), ("form", 0.2)]
    for config, words in [
        ({}, "there is none"),
        ({"_target_": "lmtrain.rewards.text.Regex", "pattern": "a", "weight": "much"}, "a number is needed"),
        ({"_target_": "os.system"}, "outside the known packages"),
        ({"parts": {"reward": form}}, "reward.parts.reward: the sum itself is recorded under this name"),
        ({"_target_": "lmtrain.rewards.text.Equal", "parts": {"form": form}}, "reward has a _target_ and parts"),
        ({"parts": {"form": "format"}}, "reward.parts.form=format: a mapping with _target_ is needed"),
        ({"parts": {"form": {**form, "weight": True}}}, "reward.parts.form.weight=True: a number"),
        ({"_target_": "lmtrain.rewards.text.Equal", "weight": math.inf}, "reward.weight=inf: a number"),
        ({"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}, "is not a Reward"),
    ]:
        with pytest.raises(UserError, match=words):
            build_rewards(config, [])


def test_what_an_environment_returns_is_a_reward_beside_those_of_the_config() -> None:
    equal = {"_target_": "lmtrain.rewards.text.Equal", "weight": 3}
    for config, parts in [
        ({}, [("reward", 1.0)]),
        (equal, [("environment", 1.0), ("equal", 3.0)]),
        ({"parts": {"same": equal}}, [("environment", 1.0), ("same", 3.0)]),
    ]:
        found = build_rewards(config, [], with_environment=True)
        assert [(part.name, part.weight) for part in found] == parts
        assert type(found[0].reward) is EnvironmentReward


def test_what_a_reward_says_is_cut() -> None:
    def raises(completions: Sequence[Any], **columns: Any) -> Any:
        raise ValueError("x" * 300)

    found = Scorer([Part("odd", 1.0, FunctionReward(raises, {}, "reward"))], 5)([0], ["a"], {})
    assert list(found.reasons) == [f"odd raised ValueError: {'x' * 188}"], "200 characters of it"
    for length, shown in ((58, repr("x" * 58)), (59, repr("x" * 59)[:60] + "...")):
        with pytest.raises(UserError) as error:
            Scorer([Part("odd", 1.0, Odd("x" * length))], 5)([0], ["a"], {})
        assert f"returned {shown}: a list with" in str(error.value)


def test_a_row_without_a_reference_is_another_rewards() -> None:
    """In a mixture of rows, each reward leaves the rows of the others alone."""
    code, number = CodeTests(network=True), ExactNumber()
    columns = {"tests": ["assert x == 1", None], "answer": [None, "2"]}
    assert code([0] * 2, ["x = 1", "2"], **columns) == [1, None]
    assert number([0] * 2, ["x = 1", "2"], **columns) == [None, 1]
    scores = Scorer([Part("code", 1.0, code), Part("number", 1.0, number)], 60.0)([0] * 2, ["x = 1", "2"], columns)
    assert (scores.total, scores.failed) == ([1, 1], [False, False])
    assert Equal()([0], ["None"], answer=[None]) == [None]


def test_a_completion_that_no_reward_judges_is_not_scored_zero() -> None:
    """Else a column without values would train, without a word, on rewards that are all 0."""
    found = Scorer([Part("number", 1.0, ExactNumber()), Part("odd", 1.0, Odd([None, 0.5, None]))], 60.0)(
        [0] * 3, ["1", "2", "4"], {"answer": [None, None, "3"]}
    )
    assert math.isnan(found.total[0])
    assert (found.total[1:], found.failed) == ([0.5, 0.0], [True, False, False])
    assert [reason.partition(",")[0] for reason in found.reasons] == ["number and odd returned None: no opinion"]


@pytest.mark.parametrize(
    ("reference", "read"),
    [(r"2\pi", r"$2\pi$"), (r"\sqrt{2} \text{ cm}", r"$\sqrt{2} \text{ cm}$"), ("(1, 2)", "$(1, 2)$"), ("1/2", "$1/2$"),
     (r"\boxed{7}", r"\boxed{7}"), ("so it is $2$", "so it is $2$"), ("12 apples", "12 apples")],
)  # fmt: skip
def test_a_reference_is_read_as_a_formula(reference: str, read: str) -> None:
    assert delimited(reference) == read


def test_without_math_verify_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "math_verify" else pytest.fail(name))
    with pytest.raises(UserError, match=r"needs math-verify: pip install 'lmtrain\[math\]'"):
        MathVerify()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert MathVerify("solution").column == "solution"


def test_answers_are_compared_as_formulas() -> None:
    pytest.importorskip("math_verify")
    references = [r"2\pi", r"3\sqrt{2}", "x^2+1", r"\frac{1}{2}", "0.5", r"\text{Tuesday}", "12 apples"]
    answers = [r"$\boxed{2\pi}$", r"it is $3\sqrt{2}$", "$1+x^2$", "0.5", "1/2", r"$\boxed{\text{Tuesday}}$", "12"]
    assert MathVerify()([0] * 7, answers, answer=references) == [1] * 7
    assert MathVerify()([0], ["0.00001"], answer=[1e-05]) == [1]
    assert MathVerify()([0] * 3, ["2", "3", "1"], answer=references[:3]) == [0] * 3
    with pytest.raises(ValueError, match="holds nothing that math-verify can read"):
        MathVerify()([0], ["1"], answer=[""])


@pytest.mark.parametrize(
    "text",
    ["```python\nCODE\n```", "First:\n```bash\npip install x\n```\nNow:\n```python\nCODE\n```\nthen\n```sh\nls\n```\n",
     "```python3\nCODE\n```\nThis is ```inline```.", "```Python\r\nCODE\r\n```\r\n", "So:\n   ``` py\nCODE\n   ```\n",
     "So ```python\nCODE\n```", "```\nold\n```\n```\nCODE```", "CODE"],
)  # fmt: skip
def test_the_code_of_an_answer_is_its_last_block_of_python(text: str) -> None:
    assert code_of(text).strip() == "CODE"


class RaisesThenSleeps(Reward):
    """A reward that raises for several completions; alone, the second never ends."""

    def __call__(self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]) -> list[float]:
        if len(completions) > 1:
            raise ValueError("one at a time")
        if completions[0] == "b":
            time.sleep(60)
        return [1.0]


def test_one_completion_that_never_ends_is_ended_where_others_raise() -> None:
    found = scored(RaisesThenSleeps(), ["a", "b", "c"])
    assert found.failed == [False, True, False]
    assert found.total[0] == found.total[2] == 2.5


def test_a_function_may_find_its_completions_among_its_keywords() -> None:
    reward = FunctionReward(lambda **columns: [len(c) for c in columns["completions"]], {}, "reward")
    assert reward(prompts=["a"], completions=["bcd"], answer=[1]) == [3]


def test_a_total_is_the_weighted_sum_of_what_the_rewards_return() -> None:
    parts = [
        Part("good", 2.0, Odd([1.0, 3.0, None])),
        Part("long", -0.5, Odd([4.0, 0.0, 2.0])),
        Part("off", 0.0, Odd()),
    ]
    found = Scorer(parts, 1.0)([0] * 3, ["a", "b", "c"], {})
    assert found.total == [2 * 1 - 0.5 * 4, 2 * 3.0, -0.5 * 2]
    assert found.failed == [False] * 3
    assert found.parts["long"] == [4.0, 0.0, 2.0]
    assert math.isnan(found.parts["good"][2])


def test_a_completion_equal_to_its_reference() -> None:
    assert Equal(right=2.0, wrong=-1.0)([0] * 3, [" a b\n", "a", "b"], answer=["a b", "b", None]) == [2.0, -1.0, None]
    assert Equal()([0] * 2, ["a", "b"], answer=["a", "a"]) == [1.0, 0.0]


def test_a_function_is_given_its_arguments_and_the_columns_that_it_names() -> None:
    def longer(completions: Sequence[Any], answer: Sequence[Any], least: int = 1) -> list[float]:
        return [float(len(text) - len(own) >= least) for text, own in zip(completions, answer, strict=True)]

    reward = FunctionReward(longer, {"least": 2}, "reward")
    assert reward(["p"] * 2, ["abc", "ab"], answer=["a", "a"], other=[0, 0]) == [1.0, 0.0]
    with pytest.raises(UserError, match="has no parameter most"):
        FunctionReward(longer, {"most": 2}, "reward")
    with pytest.raises(UserError, match="answer"):
        reward(["p"], ["abc"])
