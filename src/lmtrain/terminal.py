"""Safe terminal output: control characters in text from data, files and names are made visible, and secrets hidden.

Everything that lmtrain prints about data passes through `visible`, either directly (error messages) or through a
Console of this module (plans, tables and notes). Imports nothing slow.
"""

import contextlib
import io
import itertools
import os
import sys
import threading
import unicodedata
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lmtrain.secrets import hide

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_JOINERS = "\u200c\u200d"  # join letters of some scripts, and emoji
_STEERING = ("Cc", "Cf", "Cs", "Zl", "Zp")  # categories: control, format (bidi), surrogates, line separators


def visible(text: str) -> str:
    """Returns `text` with secrets hidden, and control characters other than newlines replaced by visible symbols."""
    text = hide(text)
    if text.isprintable():
        return text
    return "".join(_sign(c) if unicodedata.category(c) in _STEERING else c for c in text)


def _sign(character: str) -> str:
    if character in "\n" + _JOINERS:
        return character
    if character == "\t":
        return "    "
    if ord(character) < 0x20:
        return chr(0x2400 + ord(character))  # control pictures: ␛ for escape
    return f"\\u{ord(character):04x}"


_SI = ((1e18, "E"), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def si(value: float, unit: str = "") -> str:
    """Formats a number with an SI prefix: 1234567 -> '1.23 M'."""
    for size, letter in _SI:
        if abs(value) >= 0.9995 * size:  # what rounds to 1,000 of one unit is 1 of the next
            return f"{value / size:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}".strip()


def counted(number: int, noun: str) -> str:
    """Formats a number with its noun: '1 row', '1,200 rows'."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def a_or_an(noun: str) -> str:
    """Returns the noun with its indefinite article: 'a schedule', 'an objective'."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


class OutputGone(Exception):
    """Raised on writing to an output whose reader has left, or to a full disk; `left` says whether it is the former."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"the output can't be written: {error.strerror}")
        self.left = isinstance(error, BrokenPipeError)


class _Output(io.FileIO):
    """Standard output or error that becomes /dev/null when it can't be written: its reader left, or its disk is full.

    What else writes to it, such as C libraries, then writes there too.
    """

    def __init__(self, fd: int, goes_on: bool) -> None:
        super().__init__(fd, "wb", closefd=False)
        self.goes_on = goes_on  # whether the process then goes on; otherwise OutputGone is raised

    def write(self, data: Any) -> int:
        status.stop()
        try:
            return super().write(data)
        except OSError as error:
            _to_null(self.fileno())
            if not self.goes_on:
                raise OutputGone(error) from None
            with contextlib.suppress(OSError):
                os.write(2, f"note: the output can't be written ({error.strerror}): the run goes on\n".encode())
            return len(data)


def _to_null(fd: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    if null != fd:
        os.dup2(null, fd)
        os.close(null)
    os.set_inheritable(fd, True)


def _reopen_closed() -> None:
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        try:
            os.fstat(fd)
            fd = os.open(os.devnull, os.O_RDWR)  # its number is that of another file by now
        except OSError:
            _to_null(fd)
        raw = io.FileIO(fd, "rb" if name == "stdin" else "wb", closefd=False)
        setattr(sys, name, io.TextIOWrapper(io.BufferedReader(raw) if name == "stdin" else io.BufferedWriter(raw)))


def prepare_output(goes_on: bool) -> None:
    """Lets stdout and stderr outlive their readers, be closed, lack characters, and flush each line.

    Characters missing in their encoding (latin-1) are written as \\u..... A closed one becomes /dev/null: otherwise the
    next file that is opened would take its number, and what is printed.

    Args:
        goes_on: whether the process goes on when its output can't be written any more; otherwise OutputGone is raised.
    """
    _reopen_closed()
    for fd, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name)
        if not isinstance(stream, io.TextIOWrapper):
            continue
        raw = getattr(stream.buffer, "raw", stream.buffer)
        if type(raw) is io.FileIO and raw.fileno() == fd:
            with contextlib.suppress(OSError):
                stream.flush()
            stream = io.TextIOWrapper(io.BufferedWriter(_Output(fd, goes_on)), stream.encoding)
            setattr(sys, name, stream)
        elif isinstance(raw, _Output):
            raw.goes_on = goes_on
        stream.reconfigure(errors="backslashreplace", line_buffering=True)


_quiet = False
LOG_WIDTH = 120  # width of output to a pipe or a file if COLUMNS is not set


def be_quiet(quiet: bool) -> None:
    """Sets whether consoles created from now on print nothing (run.quiet)."""
    global _quiet
    _quiet = quiet


def say_in_log(line: str) -> None:
    """Prints a line to stderr at once where there is no status line, so that logs show early that something runs."""
    if isinstance(sys.stderr, io.TextIOWrapper) and not _quiet and not _has_status_line():
        print(line, file=sys.stderr, flush=True)


def _has_status_line() -> bool:
    """Returns whether stderr is a terminal on which a line can be replaced."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def say_once(line: str) -> None:
    """Prints a line to stderr, on a terminal too, where it replaces the status line."""
    if isinstance(sys.stderr, io.TextIOWrapper):
        print(visible(line), file=sys.stderr, flush=True)


class Status:
    """A temporary status line on a terminal, shown until something else is printed; pipes and logs get nothing.

    It is written to the file descriptor, as what goes through sys.stdout or sys.stderr (`_Output`) removes it. It
    doesn't use rich, whose import is itself slow.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self._text = ""

    def say(self, text: str) -> None:
        """Shows `text` immediately, with a spinner, replacing the previous text."""
        if _quiet or not _has_status_line() or os.environ.get("RANK", "0") != "0":
            return
        self._text = visible(text)
        self._draw("-")
        if self._thread is None:
            self._ended.clear()
            self._thread = threading.Thread(target=self._turn, daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Removes the status line from the screen."""
        if self._thread is not None:
            self._ended.set()
            self._thread.join()
            self._thread = None
            self._write("")

    def _turn(self) -> None:
        for sign in itertools.cycle("\\|/-"):
            if self._ended.wait(0.15):
                return
            self._draw(sign)

    def _draw(self, sign: str) -> None:
        self._write(f"{sign} {self._text}")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"\r\033[K{text}".encode(errors="replace"))


status = Status()


def console(**options: Any) -> "Console":
    """Creates a rich Console that passes all text through `visible` and keeps its own colours.

    In a notebook it prints plain lines: rich would turn every output into an HTML block, even output to a file, and
    would store every redraw of a progress bar.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Safe(Console):
        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else visible(text), style, control)

    in_notebook = type(sys.stdout).__module__.startswith("ipykernel")
    fixed = {"force_jupyter": False, **({"force_terminal": False} if in_notebook else {})}
    made = Safe(**{**fixed, **options, "quiet": (_quiet and "file" not in options) or bool(options.get("quiet"))})
    if not made.is_terminal and "width" not in options and "COLUMNS" not in os.environ:
        made.width = LOG_WIDTH
    return made


def facts(rows: Iterable[tuple[str, "str | Text"]], title: str | None = None) -> "Table":
    """Builds a two-column table of names, in bold, and their descriptions."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None) if title else Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))  # else brackets are markup
    return table


def time_in_words(seconds: float) -> str:
    """Formats a duration: 75 -> '1 min 15 s'."""
    whole = max(1, round(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"


def note(text: str) -> None:
    """Prints "note: " and the text to stdout; brackets and colons in it, of a path or an error, are not markup."""
    console().print(f"note: {text}", highlight=False, markup=False, emoji=False)


def quiet_libraries() -> None:
    """Silences tips and progress bars of Lightning and transformers; the plan reports once what matters."""
    import logging
    import warnings

    import transformers

    libraries = ("lightning.pytorch", "lightning.fabric", "lightning", "transformers", "datasets", "httpx", "lm_eval")
    # The last one warns for each parameter of a checkpoint that gathering it takes two collectives.
    for name in (*libraries, "bitsandbytes", "torch.distributed.tensor._redistribute"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()
    # Saving a model imports DeepSpeed if it is installed, which sets its logger's level itself.
    logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    # The loss is a view of a larger tensor, which is safe since nothing writes to it in place.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
