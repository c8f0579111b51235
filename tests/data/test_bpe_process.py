"""BPE training in a separate process: it gives the same tokenizer and ends at once when the command is stopped."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from lmtrain.data import bpe_training as training
from lmtrain.data.tokenizers import END_OF_TEXT
from lmtrain.errors import RunError
from processes import Process, started_by, wait_until_gone

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="finds processes in /proc")


def words(count: int) -> str:
    """Returns words that hardly repeat, so that merging them takes long."""
    draw = random.Random(0)
    return "\n".join("".join(draw.choices("abcdefghijklmnopqrstuvwxyzé", k=draw.randint(3, 12))) for _ in range(count))


def test_it_is_the_tokenizer_that_the_library_trains() -> None:
    parts = [words(3000), "", "\U0001f600 \x00\r\n" * 9, words(2000)[::-1]]
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer, plain.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    plain.train_from_iterator(iter(parts), trainer=trainer)
    assert training.train(iter(parts), 600, 2, END_OF_TEXT).to_str() == plain.to_str()


def test_an_error_while_the_text_is_read_comes_through() -> None:
    def text():
        yield words(100)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        training.train(text(), 600, 2, END_OF_TEXT)


def trainers_of(parent: int) -> list[Process]:
    """Returns the processes that train a BPE for the process `parent`."""
    return started_by(parent, "lmtrain.data.bpe_training")


@LINUX
def test_a_trainer_that_was_killed_is_said() -> None:
    def text():
        yield words(100)
        while not (trainer := trainers_of(os.getpid())):  # its command line is empty for a moment after it starts
            time.sleep(0.01)
        os.kill(trainer[0].pid, signal.SIGKILL)

    with pytest.raises(RunError, match=r"trained the tokenizer ended.*lower tokenizer\.train_characters"):
        training.train(text(), 600, 2, END_OF_TEXT)


@LINUX
@pytest.mark.parametrize("end", [signal.SIGINT, *(pytest.param(s, marks=pytest.mark.slow) for s in (15, 9))])
def test_a_signal_ends_the_training_at_once(end: int, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(words(400_000))  # training takes about half a minute
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "lmtrain.prepare", "data=text", f"data.path={tmp_path / 'a.txt'}", "tokenizer=bpe",
               "tokenizer.vocab_size=30000", f"data.cache_dir={cache}"]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while not process.stderr.readline().startswith("training a BPE of 30,000 tokens"):
        assert process.poll() is None, "it ended before it trained"
    time.sleep(2)  # it has read the text by now
    trainer = trainers_of(process.pid)
    process.send_signal(end)
    began = time.monotonic()
    process.communicate(timeout=60)
    assert time.monotonic() - began < 25
    assert process.returncode == (130 if end == signal.SIGINT else -end)
    assert len(trainer) == 1, "it was trained in another process, which had not ended"
    wait_until_gone(trainer, 60)
    assert end == signal.SIGKILL or [p.name for p in cache.iterdir() if p.name != "files.json"] == [".locks"]
