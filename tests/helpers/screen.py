"""The README's picture: trains in a terminal of its own and draws what it shows at the end, a real run each time.

python tests/helpers/screen.py docs/screen.svg
"""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

WIDTH, HEIGHT = 100, 30  # of the terminal, in characters
TALLEST = 500  # pixels of the picture
WORDS = ["run.name=first", "trainer.max_steps=200", "trainer.val_check_interval=50"]
# Code hosts load no fonts from elsewhere.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def shown(folder: str) -> list[str]:
    """The last screen of the command, run in a folder of its own: its lines, with their colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    environ = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    environ |= {"TERM": "xterm-256color", "COLORTERM": "truecolor"}
    command = [sys.executable, "-m", "lmtrain.train", *WORDS]
    process = subprocess.Popen(command, cwd=folder, env=environ, stdout=theirs, stderr=theirs, stdin=theirs)
    os.close(theirs)
    written = bytearray()
    while process.poll() is None or select.select([ours], [], [], 0.2)[0]:
        if select.select([ours], [], [], 0.2)[0]:
            try:
                written += os.read(ours, 1 << 16)
            except OSError:  # it has ended
                break
    if process.wait() != 0:
        raise SystemExit(written.decode(errors="replace"))
    lines = screen(written.decode().replace(f"{folder}/", "").replace(str(Path.home()), "~"))
    return [f"\x1b[1;32m$\x1b[0m python -m lmtrain.train {' '.join(WORDS)}", "...", *lines[4 - HEIGHT :]]


def screen(text: str) -> list[str]:
    """The lines that a terminal has once it was sent `text`; of its commands those that rich writes are known."""
    lines, row = [""], 0
    for part in re.split(r"(\x1b\[[0-9;?]*[A-Za-ln-z]|\r\n|\r|\n)", text):
        if part in ("\n", "\r\n"):
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part == "\r":
            lines[row] = ""  # what follows writes the line again
        elif part.startswith("\x1b[") and part.endswith("A"):
            row = max(0, row - int(part[2:-1] or 1))
        elif part.startswith("\x1b[") and part.endswith("K"):
            lines[row] = ""
        elif not re.fullmatch(r"\x1b\[[0-9;?]*[A-Za-ln-z]", part):
            lines[row] += part
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def draw(lines: list[str], to: Path) -> None:
    """An SVG at most TALLEST pixels tall."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(width=WIDTH, record=True, file=nowhere, force_terminal=True)
        for line in [*lines, ""]:
            console.print(Text.from_ansi(line), soft_wrap=True)
    svg = console.export_svg(title="lmtrain", code_format=FORMAT)
    found = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert found is not None
    width, height = map(float, found.groups())
    scale = min(1.0, TALLEST / height)
    size = f'width="{width * scale:.0f}" height="{height * scale:.0f}"'
    to.write_text(svg.replace(found[0], f"{found[0]} {size}", 1), encoding="utf-8")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        draw(shown(folder), Path(sys.argv[1]))
