"""Environments that need no network: sums with a calculator, and guessing a number."""

from collections.abc import Mapping, Sequence
from typing import Any

from lmtrain.rewards.environment import Call, Environment, Messages, results


def calculator(expression: str) -> int:
    """Adds whole numbers.

    Args:
        expression: numbers with + between them.
    """
    return sum(map(int, expression.split("+")))


class Calculator(Environment):
    """Sums with a tool that computes them; the reward is 1 for the row's column `answer`, else 0."""

    tools = (calculator,)

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        self.right = str(row["answer"])

    def step(self, answer: str, calls: Sequence[Call]) -> tuple[Messages | None, float | None]:
        return results(calls) or None, float(not calls and answer.strip() == self.right)


class GuessNumber(Environment):
    """A number from 1 to `most`, to be found by guesses, which are answered with "higher" or "lower".

    The reward is 1 for the right number, less `cost` for each guess before it; 0 if it isn't found.
    """

    def __init__(self, most: int = 31, cost: float = 0.1) -> None:
        self.most, self.cost = most, cost

    def reset(self, row: Mapping[str, Any], seed: int) -> Messages:
        self.number, self.guesses = 1 + seed % self.most, 0
        return [{"role": "user", "content": f"1 to {self.most}"}]

    def step(self, answer: str, calls: Sequence[Call]) -> tuple[Messages | None, float | None]:
        self.guesses += 1
        guess = int(answer) if answer.strip().isdecimal() and len(answer) < 10 else None
        if guess == self.number:
            return None, 1.0 - self.cost * (self.guesses - 1)
        hint = "a number" if guess is None else "higher" if guess < self.number else "lower"
        return [{"role": "user", "content": hint}], 0.0
