"""How far preparing is: a bar on a terminal, a plain line every few seconds elsewhere."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_SECONDS_BETWEEN_LINES = 10.0


class PrepareProgress:
    """Counts of the split being tokenized, shown on standard error; silent where `show` is false."""

    def __init__(self, show: bool) -> None:
        self.console = Console(stderr=True, quiet=not show)
        self.bar: Progress | None = None
        if show and self.console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[counts]}"), TimeElapsedColumn(),
                console=self.console, transient=True,
            )  # fmt: skip
            self.bar.start()
        self.text_bytes = self.tokens = 0
        self.total: int | None = None

    def say(self, line: str) -> None:
        self.console.print(line, highlight=False, soft_wrap=True)

    def start(self, name: str, total_bytes: int | None) -> None:
        """A new split of about total_bytes UTF-8 bytes of text, where that is known."""
        self.name, self.total = name, total_bytes
        self.text_bytes = self.tokens = 0
        self.began = self.shown = time.perf_counter()
        if self.bar is not None:
            self.task = self.bar.add_task(f"tokenize {name}", total=total_bytes, counts="")

    def advance(self, text_bytes: int, tokens: int) -> None:
        self.text_bytes += text_bytes
        self.tokens += tokens
        now = time.perf_counter()
        if now - self.shown < (0.2 if self.bar else _SECONDS_BETWEEN_LINES):
            return
        self.shown = now
        if self.bar is not None:
            self.bar.update(self.task, completed=self.text_bytes, counts=self._counts())
        else:
            self.say(f"tokenize {self.name}: {self._counts()}")

    def finish(self) -> None:
        if self.bar is not None:
            self.bar.remove_task(self.task)
        self.total = None
        self.say(f"tokenized {self.name}: {self._counts()}")

    def stop(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        sys.stderr.flush()

    def _counts(self) -> str:
        seconds = max(time.perf_counter() - self.began, 1e-6)
        if not self.text_bytes:  # rows, not text
            return f"{self.tokens:,} tokens, {self.tokens / seconds:,.0f} tokens/s"
        of = f" of {self.total / 1e6:,.1f}" if self.total and self.total >= self.text_bytes else ""
        speed = self.text_bytes / 1e6 / seconds
        return f"{self.text_bytes / 1e6:,.1f}{of} MB, {self.tokens:,} tokens, {speed:.1f} MB/s"
