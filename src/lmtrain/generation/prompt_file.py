"""Prompts from a file or from standard input, and their answers as JSON lines that a killed command continues."""

import fcntl
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

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
    """JSON lines in a file, or printed where there is none; `done` counts those of an earlier command.

    A batch of which a kill left a part is answered again: what is sampled follows from where its batch begins.
    """

    def __init__(self, file: str | None, batch_size: int) -> None:
        """UserError where the file can't be written, or another command writes it now."""
        self.name, self.done = file, 0
        self._file = None if file is None else self._open(Path(file).expanduser())
        if self._file is not None:
            whole = [line for line in self._file if line.endswith(b"\n")]
            self.done = len(whole) // batch_size * batch_size
            self._file.seek(sum(map(len, whole[: self.done])))
            self._file.truncate()

    def _open(self, path: Path) -> BinaryIO:
        try:
            path.touch()
            file = path.open("r+b")
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until this process ends, however it ends
        except BlockingIOError:
            raise UserError(f"generate.out={path} is being written by another command: wait for it") from None
        except OSError as error:
            raise self._unwritable(error) from None
        return file

    def add(self, rows: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        if self._file is None:
            print(text, end="", flush=True)
            return
        try:
            self._file.write(text.encode())
            self._file.flush()
        except OSError as error:
            raise self._unwritable(error) from None

    def _unwritable(self, error: OSError) -> UserError:
        return UserError(f"generate.out={self.name} can't be written: {reason(error)}")
