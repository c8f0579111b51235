"""Two processes never train in one folder at the same time."""

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import assert_equal_runs, command, environment, train_here
from test_preemption import LONG, start, wait_for_step

import forked
from lmtrain.errors import RunError
from lmtrain.run_folder import lock as run_lock
from lmtrain.run_folder.folder import RunDir
from support import lingers


@pytest.mark.slow
def test_the_same_command_again_waits_and_goes_on(corpus: Path, tmp_path: Path) -> None:
    """This happens if a launcher was killed while its ranks are still saving."""
    assert train_here(corpus, tmp_path / "whole", *LONG).code == 0
    run_dir = tmp_path / "run"
    first = start(corpus, run_dir, *LONG, *lingers(5))
    wait_for_step(first, run_dir, 5)
    first.send_signal(signal.SIGSTOP)  # stands for a save that takes long
    second = start(corpus, run_dir, *LONG)
    second.wait_for("another process is still training in")
    first.send_signal(signal.SIGCONT)
    first.send_signal(signal.SIGTERM)
    first.communicate(timeout=60)
    assert first.returncode == 75
    output, _ = second.communicate(timeout=600)
    assert second.returncode == 0, output
    assert "continues after step" in output
    assert_equal_runs(tmp_path / "whole", run_dir)


def start_behind(folder: Path, corpus: Path) -> forked.Started:
    """Starts a run that waits for this process, which holds the folder's lock; it resumes nothing."""
    words = [word for word in command(corpus, folder, "data.micro_batch_size=6") if word != "run.resume=auto"]
    late = forked.Started(words[1:], environment())
    late.wait_for("another process is still training in")
    return late


@pytest.mark.slow
def test_a_run_that_was_waited_for_is_not_overwritten(corpus: Path, tmp_path: Path) -> None:
    """There was no run yet when the second command looked."""
    folder = tmp_path / "run"
    folder.mkdir()
    with run_lock.held(folder):
        late = start_behind(folder, corpus)
        (folder / "config.yaml").write_text("of the first\n")
        (folder / "checkpoints" / "step_00000009").mkdir()
    output, _ = late.communicate(timeout=600)
    assert late.returncode == 2, output
    assert "holds a run already, and nothing in it is overwritten" in output
    assert (folder / "config.yaml").read_text() == "of the first\n"
    assert (folder / "checkpoints" / "step_00000009").exists()


@pytest.mark.slow
def test_a_folder_that_goes_while_one_waits_is_a_message(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    with run_lock.held(folder):
        late = start_behind(folder, corpus)
        folder.rename(tmp_path / "gone")  # at once: the waiting run touches the lock file five times a second
        shutil.rmtree(tmp_path / "gone")
    output, _ = late.communicate(timeout=600)
    assert late.returncode == 1, output
    assert f"error: the run that this one waited for did not begin, and removed {folder}" in output
    assert not folder.exists()


def test_a_folder_that_goes_before_one_waits_is_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    process = hold(folder)
    monkeypatch.setattr("builtins.print", lambda *_, **__: shutil.rmtree(folder))  # between the first look and the wait
    with pytest.raises(RunError, match="did not begin, and removed"), run_lock.held(folder):
        pass
    process.kill()
    process.wait()
    assert not folder.exists()


HOLDS = """
import sys, time
from pathlib import Path
from lmtrain.run_folder import lock

with lock.held(Path(sys.argv[1])):
    Path(sys.argv[1], "held").touch()
    time.sleep(60)
"""


def hold(folder: Path) -> "subprocess.Popen[bytes]":
    """Starts a process and returns once it holds the folder's lock."""
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(folder)])
    while not (folder / "held").exists():
        assert process.poll() is None
        time.sleep(0.05)
    return process


def test_patience_ends(tmp_path: Path) -> None:
    process = hold(tmp_path)
    with pytest.raises(RunError, match="another process has been training"), run_lock.held(tmp_path, patience=0.3):
        pass
    new = RunDir(tmp_path)
    new.existed = tmp_path.parent
    new.discard_if_unused()
    assert (tmp_path / "held").exists(), "what the other process has begun stays"
    process.kill()
    process.wait()
    with run_lock.held(tmp_path, patience=0.0):
        assert run_lock.taken(tmp_path)
    assert not run_lock.taken(tmp_path)
