"""What a launcher hears of ranks that end before the first step: one message, and 75 after a signal."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest

from lmtrain.distributed import ranks
from lmtrain.distributed.stop_signals import Preempted, preempted_by_signals
from lmtrain.errors import PREEMPTED, WRONG_INPUT, UserError
from ports import free_port
from support import TINY

TRAIN = [sys.executable, "-m", "lmtrain.train"]


def srun(*words: str, cwd: Path, late: float) -> tuple[list[int], list[str]]:
    """Starts two tasks as srun --kill-on-bad-exit=1 does, rank 0 `late` seconds later: the first bad exit ends both.

    Returns:
        their exit codes and their standard errors.
    """
    job = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2", "SLURM_NODELIST": "localhost", "SLURM_JOB_ID": "7",
           "MASTER_PORT": str(free_port())}  # fmt: skip
    tasks: dict[int, subprocess.Popen[str]] = {}
    for rank in (1, 0):
        own = {"SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank)}
        tasks[rank] = subprocess.Popen([*TRAIN, *words], stderr=PIPE, stdout=DEVNULL, text=True, cwd=cwd,
                                       env=os.environ | job | own)  # fmt: skip
        time.sleep(late if rank else 0)
    while not any(task.poll() for task in tasks.values()) and any(task.poll() is None for task in tasks.values()):
        time.sleep(0.01)
    for task in tasks.values():
        task.kill()
    said = [tasks[rank].communicate()[1] for rank in (0, 1)]
    return [tasks[rank].returncode for rank in (0, 1)], said


def test_a_mistake_is_said_though_the_first_bad_exit_ends_all(tmp_path: Path) -> None:
    codes, (first, other) = srun("trainer.max_stepz=3", cwd=tmp_path, late=1.0)
    assert codes == [WRONG_INPUT, -signal.SIGKILL]
    assert first.splitlines()[-1].startswith("error: there is no key 'trainer.max_stepz'; did you mean")
    assert "error" not in other


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["data=text", "data.path=gone.txt"], ["objective=sft", "data=chat_jsonl", "data.path=gone.jsonl"]]
)
def test_a_mistake_that_the_session_meets_is_said_once(words: list[str], tmp_path: Path) -> None:
    codes, said = srun(*TINY, "data.global_batch_size=8", *words, "run.name=it", cwd=tmp_path, late=0.0)
    assert WRONG_INPUT in codes
    assert "".join(said).count("error: ") == 1
    assert f"{words[-1]}: no such file" in "".join(said)


@pytest.mark.parametrize("shared", [False, True])
def test_a_rank_that_is_left_alone_says_it_itself(
    shared: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """If all ranks have exchanged the error, rank 0 has it too."""
    said_before: list[str] = []
    monkeypatch.setattr(ranks.time, "sleep", lambda _: said_before.append(capsys.readouterr().err))
    monkeypatch.setenv("RANK", "3")
    error = UserError("no such file here")
    error.shared = shared
    ranks.print_in_turn(error)
    assert said_before == [""]
    assert capsys.readouterr().err == ("" if shared else "error: no such file here\n")
    monkeypatch.setenv("RANK", "0")
    ranks.print_in_turn(error)
    assert said_before == [""]
    assert capsys.readouterr().err == "error: no such file here\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("after", [0.0, 1.5])
def test_a_signal_in_the_first_seconds(number: signal.Signals, after: float, corpus: Path, tmp_path: Path) -> None:
    """While torch is being imported, say: the documented script starts the job again after 75 only."""
    words = [*TRAIN, *TINY, "data=text", f"data.path={corpus}", "run.name=it"]
    process = subprocess.Popen(words, stderr=PIPE, stdout=DEVNULL, text=True, cwd=tmp_path)
    assert process.stderr is not None
    assert process.stderr.readline() == "lmtrain train: reading the config, then the data; the plan follows\n"
    time.sleep(after)
    process.send_signal(number)
    _, said = process.communicate(timeout=60)
    assert process.returncode == PREEMPTED, said
    assert said.splitlines()[-1] == f"error: stopped by {number.name} outside of training; the same command goes on"
    assert not (tmp_path / "outputs").exists()


def test_a_signal_in_c_code_that_does_not_return() -> None:
    code = """
import hashlib, os, signal, threading
from lmtrain.distributed import stop_signals
stop_signals._GRACE_SECONDS = 0.5
with stop_signals.preempted_by_signals():
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=False)
    assert (done.returncode, time.monotonic() - began < 30) == (PREEMPTED, True)


def test_handlers_are_put_back_and_others_are_left() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    with pytest.raises(Preempted, match="SIGUSR1"), preempted_by_signals():
        subprocess.run(["kill", "-USR1", str(os.getpid())], check=True)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        with preempted_by_signals():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.05)
    finally:
        signal.signal(signal.SIGTERM, before[0])
    assert came == [signal.SIGTERM]
