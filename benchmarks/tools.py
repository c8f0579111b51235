"""Writes the rows of benchmarks/tools.sh: sums and games as conversations for SFT, and as prompts for GRPO.

python benchmarks/tools.py FOLDER
"""

import itertools
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers.utils import get_json_schema

from lmtrain.rewards.games import GuessNumber, calculator

CALLS = 0.3  # share of the conversations in which the tool is called; in the others the answer is a wrong number
WITHIN = 0.7  # share of the guesses that lie within what the hints have left; the others are any number
TOOLS = [get_json_schema(calculator)]


def sums(rng: random.Random) -> Iterator[dict[str, Any]]:
    while True:
        a, b = rng.randrange(10_000, 100_000), rng.randrange(10_000, 100_000)
        question, answer = f"{a}+{b}", str(a + b)
        call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": question}}}
        turns: list[dict[str, Any]] = [{"role": "user", "content": question}]
        if rng.random() < CALLS:
            turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
            turns.append({"role": "tool", "name": "calculator", "content": answer})
            turns.append({"role": "assistant", "content": answer})
        else:
            turns.append({"role": "assistant", "content": str(a + b + rng.randrange(1, 1000))})
        yield {"messages": turns, "tools": TOOLS, "prompt": question, "answer": answer}


def games(rng: random.Random) -> Iterator[dict[str, Any]]:
    while True:
        game = GuessNumber()
        turns: list[dict[str, Any]] = [dict(turn) for turn in game.reset({}, rng.randrange(2**60))]
        low, high = 1, game.most
        for _ in range(8):
            guess = rng.randint(low, high) if rng.random() < WITHIN else rng.randint(1, game.most)
            turns.append({"role": "assistant", "content": str(guess)})
            said, _ = game.step(str(guess), [])
            if said is None:
                break
            turns += map(dict, said)
            low, high = (max(low, guess + 1), high) if guess < game.number else (low, min(high, guess - 1))
        yield {"messages": turns if turns[-1]["role"] == "assistant" else turns[:-1], "prompt": turns[0]["content"]}


def write(path: Path, rows: Iterator[dict[str, Any]], count: int, *names: str) -> None:
    some = itertools.islice(rows, count)
    path.write_text("".join(json.dumps({name: row[name] for name in names}) + "\n" for row in some))


if __name__ == "__main__":
    folder, rng = Path(sys.argv[1]), random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    write(folder / "sums_chats.jsonl", sums(rng), 20_000, "messages", "tools")
    write(folder / "sums_prompts.jsonl", sums(rng), 5_000, "prompt", "answer")
    write(folder / "games_chats.jsonl", games(rng), 20_000, "messages")
    write(folder / "games_prompts.jsonl", games(rng), 5_000, "prompt")
