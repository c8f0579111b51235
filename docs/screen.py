"""The README's picture: trains for real and draws what the terminal showed. `python docs/screen.py docs/screen.svg`."""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

WIDTH = 110
WORDS = ["run.name=first", "trainer.max_steps=200"]
QUIET = [
    "trainer.val_check_interval=100",
    "callbacks.progress.style=plain",
    "callbacks.progress.plain_every_seconds=60",
]  # lines enough for a picture
# Code hosts load no fonts from elsewhere.
FORMAT = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def shown(folder: str) -> str:
    """What the command prints in a folder of its own, with its colours."""
    environ = os.environ | {"COLUMNS": str(WIDTH), "FORCE_COLOR": "1", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "lmtrain.train", *WORDS, *QUIET]
    done = subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    return shorter(shorter(done.stdout, f"{folder}/", ""), str(Path.home()), "~")


def shorter(text: str, path: str, by: str) -> str:
    """`text` with `path` written as `by`, and the borders of panels where they were."""
    return re.sub(re.escape(path) + r"([^│\n]*)", lambda m: by + m[1] + " " * (len(path) - len(by)), text)


def draw(text: str, to: Path) -> None:
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(width=WIDTH, record=True, file=nowhere, force_terminal=True)
        console.print(f"[bold green]$[/] python -m lmtrain.train {' '.join(WORDS)}", highlight=False)
        console.print(Text.from_ansi(text))
    console.save_svg(str(to), title="lmtrain", code_format=FORMAT)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        draw(shown(folder), Path(sys.argv[1]))
