"""Environments for tests: well-behaved ones, and ones that fail."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lmtrain.data.chat.thoughts import ThoughtMarks
from lmtrain.data.chat.tool_calls import CallReader, Objects
from lmtrain.rewards.environment import Call, Environment, execute, results

KILL_AT = "LMTRAIN_TEST_KILL_AT"  # "PATH N": ends the process at the N-th call of `Echo.step`, counted in the file


class Echo(Environment):
    """Repeats the beginning of each answer twice, then ends; rewards depend on the answers' lengths and on the seed."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        self.seed, self.told = seed, 0
        return [{"role": "user", "content": f"{row['prompt']} with {seed % 10}"}]

    def step(self, answer: str, calls: Sequence[Call]) -> Any:
        self._count()
        self.told += 1
        reward = (len(answer) + self.seed) % 5 / 4
        if self.told > 2:
            return None, reward
        return [{"role": "user", "content": f"{self.told}: {answer[:3]}"}], reward

    def _count(self) -> None:
        path, _, most = os.environ.get(KILL_AT, "").partition(" ")
        if path:
            count = int(Path(path).read_text() or 0) + 1 if Path(path).exists() else 1
            Path(path).write_text(str(count))
            if count == int(most):
                os._exit(137)


class Raises(Echo):
    def step(self, answer: str, calls: Sequence[Call]) -> Any:
        raise ZeroDivisionError("oh dear")


class NeverStarts(Echo):
    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        raise ZeroDivisionError("oh dear")


class Sleeps(Echo):
    def step(self, answer: str, calls: Sequence[Call]) -> Any:
        time.sleep(600)


class NoPair(Echo):
    def step(self, answer: str, calls: Sequence[Call]) -> Any:
        return "well done"


class NeverEnds(Echo):
    def step(self, answer: str, calls: Sequence[Call]) -> Any:
        return [{"role": "user", "content": "go on"}], 0.0


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return a + b


def hang() -> None:
    """Never returns."""
    time.sleep(600)


def fail() -> None:
    """Always fails."""
    raise ZeroDivisionError("oh dear")


def much() -> str:
    """Returns megabytes."""
    return "x" * 5_000_000


def binary() -> bytes:
    """Returns bytes that are no UTF-8."""
    return b"\xff\xfe\x00ok"


BARE = CallReader(Objects(""), {}, ThoughtMarks(), "")


class Calls(Echo):
    """Calls a tool itself after each answer, as a model might."""

    tools = (add,)

    def step(self, answer: str, calls: Sequence[Call]) -> Any:
        said, reward = super().step(answer, calls)
        call = f'{{"name": "add", "arguments": {{"a": {len(answer)}, "b": {self.told}}}}}'
        return said and [*said[:-1], *results(execute(call, self.tools, 10.0, BARE))], reward


def undescribed(a, b):  # type: ignore[no-untyped-def]
    return a + b


class Adds(Environment):
    """Tools only: an answer without calls ends the episode."""

    tools = (add, hang, fail, much, binary)

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        return None

    def step(self, answer: str, calls: Sequence[Call]) -> Any:
        return results(calls) or None, 1.0


class Undescribed(Environment):
    tools = (undescribed,)


class Locked(Echo):
    """Holds what can't be copied."""

    def __init__(self) -> None:
        self.lock, self.numbers = threading.Lock(), iter(range(3))


class Coroutines(Echo):
    """Waits for its own coroutine in each step, and calls a tool that is one."""

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(row, seed)

    async def step(self, answer: str, calls: Sequence[Call]) -> Any:
        await asyncio.sleep(0)
        return super().step(answer, calls)


class Plain:
    """Echo without a base class."""

    def __init__(self) -> None:
        self.echo = Echo()

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        return self.echo.reset(row, seed)

    def step(self, answer: str, calls: Sequence[Call]) -> Any:
        return self.echo.step(answer, calls)


class Counting:
    """An environment as TRL's documentation writes them: methods are tools, the reward is read from its state."""

    def __init__(self, start: int = 0) -> None:
        self.start = start

    def reset(self, **columns: Any) -> str:
        self.count, self.asked = self.start, columns["prompt"]
        return " Count!"

    async def add(self, number: int) -> str:
        """
        Adds to the count.

        Args:
            number: what is added.

        Returns:
            The count.
        """
        self.count += number
        return str(self.count)

    def get_reward(self) -> float:
        return float(self.count)

    def _hidden(self) -> None: ...


class Forgets(Echo):
    """Follows something else than its seed."""

    made = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        Forgets.made += 1
        return super().reset(row, Forgets.made)


class Exits(Echo):
    def step(self, answer: str, calls: Sequence[Call]) -> Any:
        sys.exit(0)


class NoReset:
    pass


class CannotBeMade(Echo):
    def __init__(self) -> None:
        sys.exit(0)


def begun(completions: Sequence[str], turn_start: Sequence[str], **columns: Any) -> list[float]:
    """A reward: 1 for answers that the chat template has begun with a thought."""
    return [float(start == "<think>\n") for start in turn_start]
