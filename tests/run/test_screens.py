"""Output during and after training: the progress bar at four widths, lines in a pipe, and what is kept."""

import io
import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from inprocess import run, train_tiny
from lmtrain.callbacks.progress import PlainLines, RichBar, duration
from lmtrain.config import compose
from lmtrain.config.override_text import Command
from lmtrain.run import next_commands
from lmtrain.run.next_commands import longer
from lmtrain.run.repository import git_state
from lmtrain.terminal import visible
from support import EXPORT, SAMPLES, TINY

ROW = {"step": 250, "train/loss": 2.34567, "lr": 6e-4, "tokens_per_s": 12345.6, "grad_norm": 1.0}
SCREENS = {  # after 100 s at 2.5 steps a second, without the bar's own characters
    60: "train 250/1000  25% loss 2.3457 left 0:05:00",
    80: "train 250/1000  25% loss 2.3457  val 2.5000 left 0:05:00",
    120: "train 250/1000  25% loss 2.3457  val 2.5000  lr 6.00e-04  tok/s 12,346  after 0:01:40 left 0:05:00",
    200: "train 250/1000  25% loss 2.3457  val 2.5000  lr 6.00e-04  tok/s 12,346  after 0:01:40 left 0:05:00",
}


def screen(width: int, *, validated: bool) -> str:
    """Returns the bar's line as rich draws it, a quarter of the way through, with a simulated clock."""
    now = [0.0]
    console = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=True)
    bar = RichBar(console, 1000, clock=lambda: now[0])
    trainer: Any = SimpleNamespace(global_step=0)
    bar.on_train_start(trainer, None)  # type: ignore[arg-type]
    bar.progress.stop()
    for step in range(10, 251, 10):
        now[0] += 4.0
        bar.listen(ROW | {"step": step})
    if validated:
        bar.listen({"step": 250, "val/loss": 2.5})
    recorder = Console(width=width, file=io.StringIO(), color_system=None, record=True)
    recorder.print(bar.progress)
    return recorder.export_text().rstrip("\n")


@pytest.mark.parametrize("width", SCREENS)
def test_the_bar_keeps_step_percentage_and_time_left(width: int) -> None:
    line = screen(width, validated=True)
    assert "\n" not in line
    assert len(line) <= width
    words = " ".join(line.replace("\u2501", "").replace("\u2578", "").replace("\u257a", "").split())
    assert words == " ".join(SCREENS[width].split())
    before = screen(width, validated=False)
    assert "250/1000" in before
    assert "25%" in before
    assert before.endswith("0:05:00")


def test_lines_in_a_pipe_carry_elapsed_and_left() -> None:
    out = io.StringIO()
    lines = PlainLines(Console(width=200, file=out), 1000, every_seconds=0)
    lines.on_train_start(SimpleNamespace(global_step=0), None)  # type: ignore[arg-type]
    lines.listen(ROW | {"step": 50})  # code is compiled before it
    assert out.getvalue().endswith(" elapsed\n")
    lines._began -= 100
    lines.listen(ROW)
    last = out.getvalue().splitlines()[-1]
    assert last.startswith("step  250/1000  loss 2.3457  lr 6.00e-04  tok/s 12,346  0:01:40 elapsed, 0:06:15")
    assert last.endswith(" left")
    assert duration(3725.9) == "1:02:05"


def test_a_line_has_the_numbers_of_its_own_step_only() -> None:
    """A validation at a step that isn't logged must not show the loss, rate and speed of an earlier step."""
    plain, rich = io.StringIO(), io.StringIO()
    lines = PlainLines(Console(width=200, file=plain), 1000, every_seconds=0)
    bar = RichBar(Console(width=80, file=rich, color_system=None, force_terminal=True), 1000)
    trainer: Any = SimpleNamespace(global_step=0)
    for shows in (lines, bar):
        shows.on_train_start(trainer, None)  # type: ignore[arg-type]
        for row in (ROW, {"step": 250, "val/loss": 2.5}, {"step": 275, "val/loss": 2.4}):
            shows.listen(row)
        shows.on_train_end(SimpleNamespace(global_step=275), None)  # type: ignore[arg-type]
    at_logged, alone = plain.getvalue().splitlines()[1:]
    assert at_logged.startswith("step  250/1000  loss 2.3457  val 2.5000  lr 6.00e-04  tok/s 12,346")
    assert alone.startswith("step  275/1000  val 2.4000  0:00:0")
    assert "step  250  loss 2.3457  val 2.5000\n" in rich.getvalue()
    assert "step  275  val 2.4000\n" in rich.getvalue()


def test_a_long_run_has_few_lines_in_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    now, out = [0.0], io.StringIO()
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    lines = PlainLines(Console(width=40, file=out), 1000, every_seconds=10)
    lines.on_train_start(SimpleNamespace(global_step=0), None)  # type: ignore[arg-type]
    for step in range(10, 1001, 10):
        now[0] += 42.0
        lines.listen(ROW | {"step": step})
        if step % 250 == 0:
            lines.listen({"step": step, "val/loss": 2.5})
    lines.on_train_end(SimpleNamespace(), None)  # type: ignore[arg-type]
    shown = out.getvalue().splitlines()
    assert len(shown) <= 7 + 4 + 3
    assert all(line.startswith("step ") and line.endswith(" left") for line in shown[1:])
    assert [line.partition("  ")[0] for line in shown if "1000/" in line] == ["step 1000/1000"]
    assert "loss 2.3457  val 2.5000" in shown[-1]


def test_validations_stay_above_the_bar_and_an_interrupted_one_leaves_a_single_bar() -> None:
    out = io.StringIO()
    console = Console(width=80, file=out, color_system=None, force_terminal=True)
    bar = RichBar(console, 1000)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=SimpleNamespace(max_batches=[3])))
    trainer: Any = SimpleNamespace(global_step=0, fit_loop=loop)
    bar.on_train_start(trainer, None)  # type: ignore[arg-type]
    bar.listen(ROW)
    bar.listen({"step": 250, "val/loss": 2.5})
    assert "step  250  loss 2.3457  val 2.5000\n" in out.getvalue()
    bar.on_validation_start(trainer, None)  # type: ignore[arg-type]
    bar.on_exception(trainer, None, KeyboardInterrupt())  # type: ignore[arg-type]
    assert [task.description for task in bar.progress.tasks] == ["train"]


def test_a_quiet_run_prints_its_result_alone(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = train_tiny(corpus, EXPORT, SAMPLES, "run.quiet=true", "run.name=a")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.startswith("finished at step 2, val/bits_per_byte ")
    assert ended.out.count("\n") == 1
    assert (tmp_path / "outputs" / "a" / "plan.txt").read_text().count("plan")


def test_a_log_is_short(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS")
    ended = train_tiny(
        corpus, EXPORT, SAMPLES, "run.name=a", "callbacks.samples.max_new_tokens=64", "trainer.max_steps=8"
    )
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    assert len(lines) < 80
    assert not [line for line in lines if line.strip() == "left"]
    assert sum(line.startswith("sample at step ") for line in lines) == 8


def test_a_run_keeps_its_plan_and_where_it_was_made(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (
        ["init", "-q"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "--allow-empty", "-m", "x"],
    ):
        subprocess.run(["git", *words], check=True)
    ended = train_tiny(corpus, "report.enabled=true", "run.name=a")
    assert ended.code == 0, ended.err
    plan = (tmp_path / "outputs" / "a" / "plan.txt").read_text()
    assert plan.startswith("\u256d\u2500 plan ")
    assert "first training row" in plan
    assert max(map(len, plan.splitlines())) == 120
    summary = json.loads((tmp_path / "outputs" / "a" / "summary.json").read_text())
    assert summary["command"].startswith("python -m lmtrain.train tokenizer=bytes ")
    assert summary["command"].endswith(" run.name=a")
    assert summary["host"]
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    assert summary["git"] == {"commit": commit, "dirty": False}
    assert summary["peak_memory_gib"] > 0.1
    for words in ("wall time", "best", "val/loss ", " at step ", "peak memory", "tokens/s", "report.html"):
        assert words in ended.out
    following = [line.strip() for line in ended.out.partition("next:\n")[2].splitlines()]
    verb, prompt = shlex.split(following[0])[2:4], shlex.split(following[0])[4]
    assert verb == ["lmtrain.generate", "outputs/a"]
    assert set(prompt.split()[1:-1]) <= {word for file in corpus.glob("*.txt") for word in file.read_text().split()}
    assert following[1] == "python -m lmtrain.evaluate outputs/a"
    assert following[2].endswith(" run.name=a trainer.max_steps=4")
    assert run("train", *shlex.split(following[2])[3:]).code == 0, "as it is printed, it trains this run further"
    assert json.loads((tmp_path / "outputs" / "a" / "summary.json").read_text())["step"] == 4
    (tmp_path / "file").write_text("x")
    subprocess.run(["git", "add", "file"], check=True)
    state = git_state()
    assert state is not None
    assert state["dirty"]


def test_outside_a_repository_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_state() is None


@pytest.mark.parametrize(
    ("words", "changes", "wanted"),
    [
        (["run.name=a", "optimizer.lr=0.1"], [], ["run.name=a", "optimizer.lr=0.1"]),
        (["run.name=a", "trainer.max_steps=2"], ["trainer.max_steps=4"], ["run.name=a", "trainer.max_steps=4"]),
        (["model.name_or_path=my model"], [], ["model.name_or_path=my model", "run.dir=out/1", "run.resume=auto"]),
        (["run.name=a", "run.resume=none"], [], ["run.name=a", "run.dir=out/1", "run.resume=auto"]),
        (["run.resume=b/step_00000006"], [], ["run.resume=b/step_00000006", "run.dir=out/1"]),  # stopped before a save
        (["--config-dir", "c", "run.dir=out/1"], [], ["--config-dir", "c", "run.dir=out/1", "run.resume=auto"]),
        (["run.name=a", "budget.minutes=5"], ["trainer.max_steps=8"], ["run.name=a", "trainer.max_steps=8"]),
        (["run.name=a", "budget.minutes=5"], [], ["run.name=a", "budget.minutes=5"]),
    ],
)
def test_the_command_that_continues(words: list[str], changes: list[str], wanted: list[str]) -> None:
    name = "a" if "run.name=a" in words else None
    named = SimpleNamespace(run=SimpleNamespace(name=name), command=Command(tuple(words)))
    made = SimpleNamespace(config=named, dir=SimpleNamespace(path=Path("out/1")))
    said = next_commands.continuing(made, *changes)  # type: ignore[arg-type]
    assert shlex.split(said) == ["python", "-m", "lmtrain.train", *wanted]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_command_with_control_characters_is_read_by_a_shell_as_it_is_shown() -> None:
    words = ["run.name=a", "data.path=\x1b[1m\x85it's\\ é\u202e日本", "data.val_path=\udcff\n\t"]
    config = SimpleNamespace(run=SimpleNamespace(name="a"), command=Command(tuple(words)))
    made = SimpleNamespace(config=config, dir=SimpleNamespace(path=Path("a")))
    shown = visible(next_commands.continuing(made))  # type: ignore[arg-type]
    read = subprocess.run(["bash", "-c", shown.replace("python", "printf '%s\\0'", 1)], capture_output=True, check=True)
    assert read.stdout.split(b"\0")[2:-1] == [os.fsencode(word) for word in words]


@pytest.mark.parametrize(
    ("length", "wanted"),
    [
        (["trainer.max_steps=2"], ["trainer.max_steps=4"]),
        (["trainer.max_steps=null", "trainer.max_epochs=1"], ["trainer.max_epochs=2"]),
        (["trainer.max_steps=9", "trainer.max_epochs=1"], ["trainer.max_epochs=2"]),
        (["trainer.max_steps=5", "trainer.max_epochs=1"], ["trainer.max_epochs=2", "trainer.max_steps=null"]),
        (["trainer.max_steps=3", "trainer.max_epochs=1"], ["trainer.max_steps=6", "trainer.max_epochs=null"]),
    ],
)
def test_what_ended_a_run_makes_it_longer(length: list[str], wanted: list[str]) -> None:
    config = compose.check(compose.compose([*TINY, *length]))
    steps = 4 if "max_epochs=1" in length[-1] else 2
    steps = 3 if "trainer.max_steps=3" in length else steps
    data = SimpleNamespace(train_rows=range(4 * 6))
    made = SimpleNamespace(config=config, total_steps=steps, data=data, ended_by=None)
    assert longer(made) == wanted  # type: ignore[arg-type]
