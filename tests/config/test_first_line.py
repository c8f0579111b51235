"""The first status line is shown before anything slow is imported, on a terminal only, and is erased afterwards."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from lmtrain import cli

AT_THE_FIRST_LINE = """
import importlib, json, sys
verb = sys.argv[1]
import lmtrain.terminal
lmtrain.terminal._Output.isatty = lambda self: True

def seen(self, sign):
    print(json.dumps([self._text, sorted(sys.modules)]))
    raise SystemExit

lmtrain.terminal.Status._draw = seen
importlib.import_module(f"lmtrain.{verb}").main(sys.argv[2:])
"""
MODULES = 145  # 136 at present, of which 32 are loaded by Python itself, and 8 by taking signals from the first line on
FIRST = dict.fromkeys(cli.VERBS, "reading the config") | {
    "doctor": "trying out torch and devices",
    "pipeline": "reading the configs of all stages",
    "report": "reading the runs",
}


@pytest.mark.parametrize("verb", FIRST)
def test_little_is_imported_before_the_first_line(verb: str) -> None:
    """Few modules are imported before the first line; they are counted, since import time varies on a busy machine."""
    words = {"report": ["outputs"], "pipeline": ["pipeline=laptop"]}.get(verb, [])
    command = [sys.executable, "-c", AT_THE_FIRST_LINE, verb, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    text, modules = json.loads(done.stdout)
    assert text == FIRST[verb]
    heavy = ("hydra", "omegaconf", "yaml", "rich", "torch", "numpy", "lightning", "transformers")
    assert [m for m in heavy if m in modules] == []
    assert len(modules) <= MODULES, [m for m in modules if "." not in m]


def on_a_terminal(*argv: str, cwd: Path) -> str:
    """Returns everything that `python -m lmtrain.train` writes to a terminal."""
    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "lmtrain.train", *argv],
        stdout=its, stderr=its, stdin=its, cwd=cwd, env={**os.environ, "TERM": "xterm", "NO_COLOR": "1"},
    )  # fmt: skip
    os.close(its)
    seen = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        seen += part
    process.wait()
    os.close(ours)
    return seen.decode()


def test_a_terminal_shows_it_and_it_goes_away(tmp_path: Path) -> None:
    seen = on_a_terminal("optimizer.lrr=1", cwd=tmp_path)
    assert seen.startswith("\r\x1b[K- reading the config")
    assert "\r\x1b[Kerror: there is no key 'optimizer.lrr'" in seen
    assert seen.count("error:") == 1


@pytest.mark.slow
def test_slow_imports_are_named(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    seen = on_a_terminal("data=text", "data.path=empty.txt", cwd=tmp_path)
    said = ("reading the config", "loading torch", "loading transformers and lightning", "opening data", "error: ")
    places = [seen.index(words) for words in said]
    assert places == sorted(places)


def test_a_status_line_ends_with_what_is_printed_next(capfd: pytest.CaptureFixture[str]) -> None:
    """Whoever prints, through whichever stream, on the terminal that shows the line."""
    code = (
        "import sys; from lmtrain import terminal; terminal._has_status_line = lambda: True; "
        "terminal.prepare_output(False); terminal.status.say('busy'); print('a result'); "
        "terminal.status.say('busy again'); print('a warning', file=sys.stderr)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    out, err = capfd.readouterr()
    assert out == "a result\n"
    assert err.endswith("\r\x1b[Ka warning\n")
    assert "busy" in err


def test_a_log_says_at_once_what_begins_and_stdout_does_not(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lmtrain.chat"], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    first, last = done.stderr.splitlines()
    assert first == "lmtrain chat: reading the config"
    assert last.startswith("error: which model? python -m lmtrain.chat outputs/NAME")
    assert (done.returncode, done.stdout) == (2, "")
