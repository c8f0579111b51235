"""Progress of data preparation: a bar on a terminal, a line every few seconds elsewhere."""

import sys
import time
from collections.abc import Iterator
from typing import Self

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from lmtrain import terminal

_SECONDS_BETWEEN_LINES = 10.0


class PrepareProgress:
    """Counts of the text being read or tokenized, shown on standard error; silent if `show` is false."""

    def __init__(self, show: bool) -> None:
        self.console = terminal.console(stderr=True, quiet=not show)
        self.live = show and self.console.is_terminal
        self.bar = Progress(  # of one task at a time; draws nothing if disabled
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[counts]}"), TimeElapsedColumn(),
            console=self.console, transient=True, disable=not self.live,
        )  # fmt: skip
        if self.live:
            self.bar.start()
        self.text_bytes = self.tokens = 0
        self.total: int | None = None

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)

    def watch(self, text: Iterator[str], total_bytes: int | None) -> Iterator[str]:
        """Passes on the text for training a tokenizer; shows how much was read, then that the vocabulary is learned."""
        self.start("text", total_bytes, doing="read")
        for part in text:
            yield part
            self.advance(len(part.encode()), 0)
        self.finish_bar()
        self.bar.add_task("learn the vocabulary", total=None, counts="")  # how long it takes is unknown

    def start(self, name: str, total_bytes: int | None, doing: str = "tokenize") -> None:
        """Starts a new split of about total_bytes UTF-8 bytes of text; None if unknown."""
        self.finish_bar()
        self.title = f"{doing} {name}"
        self.name = name
        self.total = total_bytes
        self.text_bytes = self.tokens = 0
        self.began = self.shown = time.perf_counter()
        self.task = self.bar.add_task(self.title, total=total_bytes, counts="")

    def advance(self, text_bytes: int, tokens: int) -> None:
        self.text_bytes += text_bytes
        self.tokens += tokens
        now = time.perf_counter()
        if now - self.shown < (0.2 if self.live else _SECONDS_BETWEEN_LINES):
            return
        self.shown = now
        if self.live:
            self.bar.update(self.task, completed=self.text_bytes, counts=self._counts())
        else:
            self.say(f"{self.title}: {self._counts()}")

    def finish_bar(self) -> None:
        for task in self.bar.task_ids:
            self.bar.remove_task(task)

    def finish(self, by: str = "") -> None:
        """Says what was done; by: the library that tokenized it."""
        self.finish_bar()
        self.total = None
        self.say(f"tokenized {self.name}: {self._counts()}{f' (by {by})' if by else ''}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.bar.stop()
        sys.stderr.flush()

    def _counts(self) -> str:
        seconds = max(time.perf_counter() - self.began, 1e-6)
        if not self.text_bytes:  # for rows, only tokens are counted
            return f"{self.tokens:,} tokens, {self.tokens / seconds:,.0f} tokens/s"
        speed = self.text_bytes / 1e6 / seconds
        words = [_size(self.text_bytes), *([f"{self.tokens:,} tokens"] if self.tokens else []), f"{speed:.1f} MB/s"]
        if self.total and self.total >= self.text_bytes:
            words[0] = f"{self.text_bytes / 1e6:,.1f} of {self.total / 1e6:,.1f} MB"
            words.append(f"{(self.total - self.text_bytes) / 1e6 / speed:,.0f} s left")
        return ", ".join(words)


def _size(size: float) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e5 else f"{size / 1e3:,.1f} kB"


class RowProgress(PrepareProgress):
    """Progress over a known number of rows: `start("rows", n, doing="score")`, then `advance(n, 0)`."""

    def finish(self, by: str = "") -> None:
        self.finish_bar()
        self.say(f"{self.title}: {self._counts()}")

    def _counts(self) -> str:
        seconds = max(time.perf_counter() - self.began, 1e-6)
        speed, left = self.text_bytes / seconds, (self.total or 0) - self.text_bytes
        words = f"{self.text_bytes:,} of {self.total:,}, {speed:,.0f} rows/s"
        return f"{words}, {left / speed:,.0f} s left" if left and speed else words
