"""Prompts from a file or from standard input, and their answers as JSON lines that a killed command continues."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmtrain.errors import UserError, reason


def read_prompts(name: str) -> Iterator[str]:
    """The prompts of a file, a line each; of a .jsonl file their "prompt"; of standard input (-) either.

    Raises:
        UserError: the file can't be read, or a line of JSON has no prompt.
    """
    try:
        text = sys.stdin.read() if name == "-" else Path(name).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"generate.prompts_file={name} can't be read: {reason(error)}") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    as_json = name.endswith((".jsonl", ".ndjson")) or (name == "-" and bool(lines) and lines[0][1].startswith("{"))
    for number, line in lines:
        yield _of_json(line, f"{name}, line {number}") if as_json else line


def _of_json(line: str, where: str) -> str:
    try:
        row: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is no JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
        raise UserError(f'{where} has no "prompt" that is a text')
    return row["prompt"]


class Answers:
    """JSON lines in a file, or printed where there is none; `done` counts those of an earlier command."""

    def __init__(self, file: str | None) -> None:
        self.path = Path(file).expanduser() if file else None
        self.done = 0
        if self.path is not None and self.path.exists():
            whole = [line for line in self.path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
            self.path.write_bytes(b"".join(whole))  # without a last line that was cut short
            self.done = len(whole)

    def add(self, rows: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if self.path is None:
            print(text, end="", flush=True)
            return
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise UserError(f"generate.out={self.path} can't be written: {reason(error)}") from None
