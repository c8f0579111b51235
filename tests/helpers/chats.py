"""Generated conversations for tests: of different lengths, with words that repeat."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.chat.columns import detect
from lmtrain.data.chat.conversations import to_sample
from lmtrain.data.chat.pairs import Pair, to_pair

CITIES = ["Oslo", "Rome", "Lima", "Cairo", "Quito"]


def conversation(number: int) -> dict[str, Any]:
    """Returns a conversation of one to three questions and answers."""
    turns = []
    for turn in range(1 + number % 3):
        city = CITIES[(number + turn) % len(CITIES)]
        turns.append({"role": "user", "content": f"{'Please tell me: ' * (number % 4)}how far is {city}?"})
        turns.append({"role": "assistant", "content": f"{city} is {number * 7 % 90 + 10} miles away."})
    return {"messages": turns}


def pair(number: int) -> dict[str, Any]:
    """Returns a question with a good and a bad answer."""
    *before, answer = conversation(number)["messages"]
    return {"prompt": before, "chosen": [answer], "rejected": [{**answer, "content": "I do not know that city."}]}


# The same data in the columns of well-known formats.
def alpaca(number: int) -> dict[str, Any]:
    ask, answer = conversation(3 * number)["messages"]
    return {"instruction": ask["content"], "input": "", "output": answer["content"], "context": "",
            "response": answer["content"], "question": ask["content"], "answer": answer["content"]}  # fmt: skip


def hh(number: int) -> dict[str, Any]:
    ask, answer = conversation(3 * number)["messages"]
    start = f"\n\nHuman: {ask['content']}\n\nAssistant: "
    return {"chosen": start + answer["content"], "rejected": start + "I do not know that city."}


# Row generators for the options of conf/data for conversations or preferences.
ROWS: dict[str, Callable[[int], dict[str, Any]]] = {
    "chat_jsonl": conversation, "ultrachat": conversation, "alpaca": alpaca, "dolly": alpaca,
    "gsm8k": alpaca, "preference_jsonl": pair, "ultrafeedback": pair, "hh_rlhf": hh,
    "unpaired_jsonl": lambda i: {"prompt": f"What is {i} and 1?", "completion": f"{i + i % 2}.", "label": i % 2 == 1},
}  # fmt: skip


def write_rows(path: Path, option: str, number: int = 40) -> Path:
    return write_chats(path, [ROWS[option](i) for i in range(number)])


def write_chats(path: Path, rows: list[dict[str, Any]] | int = 40) -> Path:
    """Writes the rows, or that many of `conversation`, as JSON lines."""
    rows = [conversation(i) for i in range(rows)] if isinstance(rows, int) else rows
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sample_of(row: dict[str, Any], cfg: DataConfig, where: str) -> Any:
    """Returns a row as a conversation or a completion, in the format that its columns fit."""
    return to_sample(row, detect("conversations", row, cfg), cfg, where)


def pair_of(row: dict[str, Any], cfg: DataConfig, where: str) -> Pair:
    return to_pair(row, detect("pairs", row, cfg), cfg, where)
