"""Tokenizing processes end when their work ends and when the process that started them ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lmtrain.data.byte_bpe.processes import EncodeProcesses
from lmtrain.data.sources.pieces import Piece
from lmtrain.data.text import encode
from lmtrain.data.text.encode import Encoder
from lmtrain.errors import RunError
from processes import Process, started_by, wait_until_gone

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")
ENDLESS = f"""
import itertools, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1] / "helpers")!r}]
from test_encode_processes import Piece, encoder
for _ in encoder().encode(Piece("some words\\n" * 9000, True) for _ in itertools.count()):
    print(flush=True)
"""


def byte_tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: n for n, letter in enumerate([*letters, "so"])}, [("s", "o")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


def encoder() -> Encoder:
    return Encoder(PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()), None, processes=2)


def of(parent: int) -> list[Process]:
    return started_by(parent, "lmtrain.data.byte_bpe.processes")


def test_nothing_is_started_for_a_short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    assert sum(len(part.ids) for part in encoder().encode([Piece("so it is", True)])) == 7


@LINUX
def test_they_end_with_the_text_or_where_no_more_is_asked_for() -> None:
    text = [Piece("some words\n" * 9000, True)] * (4 * encode.PART // 99000)
    parts = list(encoder().encode(text))
    assert sum(len(part.ids) for part in parts) == len(text) * 9000 * (len("some words\n") - 1)
    asking = encoder().encode(text * 20)
    next(asking)
    processes = of(os.getpid())
    assert processes
    asking.close()
    assert not any(process.alive() for process in processes)


@LINUX
def test_one_that_was_killed_is_said() -> None:
    with EncodeProcesses(byte_tokenizer()) as processes:
        assert [ids.tolist() for ids in processes.encode(["so", ""])] == [[256], []]
        for process in of(os.getpid()):
            os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(RunError, match=r"exit code -9: out of memory, most likely; lower data\.num_proc"):
            processes.encode(["so"])


@LINUX
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_they_end_with_the_process_that_started_them(end: int) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", ENDLESS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    while not (processes := of(parent.pid)):
        assert parent.stdout.readline(), "it has ended"
    os.kill(parent.pid, end)
    _, err = parent.communicate(timeout=60)
    wait_until_gone(processes, 60)
    assert err.count("Traceback") == (end == signal.SIGINT), err  # only the parent prints one
