"""An output whose reader leaves, whose disk is full, or that is closed: training goes on, other commands end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import TINY

SAYS = """
import os, sys
from lmtrain import cli, terminal
def action():
    os.write(int(sys.argv[1]), b"begins ")
    for n in range(2000):
        print("line", n, flush=True)
        terminal.console().print("of rich", n)
        print("error", n, file=sys.stderr)
    os.write(int(sys.argv[1]), b"ends ")
    return 0
code = cli.plain(action, goes_on=sys.argv[2] == "goes_on")
os.write(int(sys.argv[1]), f"code {code} open {os.fstat(1).st_rdev == os.stat(os.devnull).st_rdev}".encode())
sys.exit(code)
"""
WAYS = {
    "a reader that leaves": '"$@" | head -1',
    "a reader of both": '"$@" 2>&1 | head -1',
    "a tee that dies": '"$@" 2>&1 | (tee /dev/null & sleep 0.3; kill $!)',
    "a full disk": '"$@" > /dev/full',
    "closed": '"$@" >&-',
    "all closed": '"$@" <&- >&- 2>&-',
}


def through(way: str, *argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Runs a command in bash in one of WAYS; its exit code is that of the command."""
    text = f"set -o pipefail; {WAYS[way]}" if "tee" not in way else f"{WAYS[way]}; exit ${{PIPESTATUS[0]}}"
    return subprocess.run(["bash", "-c", text, "bash", *argv], capture_output=True, text=True, cwd=cwd, timeout=300)


def says(way: str, mode: str, folder: Path) -> tuple[str, str, int]:
    """Returns what the process says to a file, its stderr, and its exit code."""
    with (folder / "said").open("w+b") as file:
        os.set_inheritable(file.fileno(), True)
        kept = [sys.executable, "-c", SAYS, str(file.fileno()), mode]
        text = f"set -o pipefail; {WAYS[way]}"
        done = subprocess.run(
            ["bash", "-c", text, "bash", *kept], capture_output=True, text=True, close_fds=False, timeout=100
        )
    return (folder / "said").read_text(), done.stderr, done.returncode


@pytest.mark.parametrize("way", WAYS)
def test_a_run_goes_on_without_its_output(way: str, tmp_path: Path) -> None:
    said, err, _ = says(way, "goes_on", tmp_path)
    assert said == "begins ends code 0 open True"
    assert "Traceback" not in err
    if way == "a full disk":
        assert "note: the output can't be written (No space left on device): the run goes on" in err


def test_a_command_that_only_prints_ends_with_its_reader(tmp_path: Path) -> None:
    said, err, code = says("a reader that leaves", "prints", tmp_path)
    assert (said, code) == ("begins code 0 open True", 0)
    assert "Traceback" not in err


def test_a_command_that_only_prints_to_a_full_disk_fails(tmp_path: Path) -> None:
    said, err, code = says("a full disk", "prints", tmp_path)
    assert (said, code) == ("begins code 1 open True", 1)
    assert err.splitlines()[-1] == "error: the output can't be written: No space left on device"
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_without_its_output(way: str, corpus: Path, tmp_path: Path) -> None:
    words = [*TINY, "data=text", f"data.path={corpus}", "trainer.max_steps=3", "trainer.val_check_interval=1"]
    done = through(way, sys.executable, "-m", "lmtrain.train", *words, "run.name=it", cwd=tmp_path)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert json.loads((tmp_path / "outputs/it/summary.json").read_text())["status"] == "finished"
    assert (tmp_path / "outputs/it/checkpoints/step_00000003").is_dir()
