"""Conversations made up for tests: of different lengths, with words that repeat."""

import json
from pathlib import Path
from typing import Any

CITIES = ["Oslo", "Rome", "Lima", "Cairo", "Quito"]


def conversation(number: int) -> dict[str, Any]:
    """One to three questions and answers."""
    turns = []
    for turn in range(1 + number % 3):
        city = CITIES[(number + turn) % len(CITIES)]
        turns.append({"role": "user", "content": f"{'Please tell me: ' * (number % 4)}how far is {city}?"})
        turns.append({"role": "assistant", "content": f"{city} is {number * 7 % 90 + 10} miles away."})
    return {"messages": turns}


def write_chats(path: Path, rows: list[dict[str, Any]] | int = 40) -> Path:
    """Rows, or so many of `conversation`, as JSON lines."""
    rows = [conversation(i) for i in range(rows)] if isinstance(rows, int) else rows
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
