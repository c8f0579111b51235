"""Runs on a stream that are killed, cut off or on two ranks equal the plain one; the disk holds only the ring."""

import gzip
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import assert_equal_runs, environment, kill_at, stable_rows, train
from test_kill_matrix import SIGKILLED

from inprocess import message, run
from lmtrain.data.stream.ring import Producer
from lmtrain.data.text import encode
from lmtrain.files import read_jsonl
from ranks_again import run_ranks
from support import SAMPLES, TINY

RING = 16_000
# Windows of 3 x 31 rows: a new one every 12 or 15 steps.
STREAM = [
    "data.streaming=true", f"data.ring_bytes={RING}", "data.ring_shard_tokens=1000", "data.ring_window=3",
    "data.ring_val_tokens=500", "data.ring_patience=0",
]  # fmt: skip


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes four files of lines, with less text than the run reads."""
    folder = tmp_path_factory.mktemp("stream")
    for number in range(4):
        draw = random.Random(number)
        lines = [" ".join(draw.choices(["even", "odd", "line", "number", "12"], k=9)) for _ in range(48)]
        with gzip.open(folder / f"{number}.txt.gz", "wt") as file:
            file.write("\n".join(lines))
    return folder


def command(text: Path, run_dir: Path, *more: str) -> list[str]:
    """Returns the command-line arguments of a run in this process."""
    ends = ["trainer.max_steps=40", "trainer.val_check_interval=20", "trainer.limit_val_batches=2"]
    data = ["data=text", f"data.path={text}", "data.sample_by=line", "data.global_batch_size=8"]
    quiet = [SAMPLES, "run.resume=auto", f"run.dir={run_dir}"]
    return [*TINY, *ends, *quiet, *data, *STREAM, *more]


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    ended = run("train", *command(text, run_dir))
    assert ended.code == 0, ended.err
    return run_dir


@pytest.mark.slow
def test_one_that_breaks_off_is_saved_and_goes_on(text: Path, whole: Path, tmp_path: Path) -> None:
    assert not (whole / "ring").exists()
    broken = sorted(text.iterdir())[2]
    content = broken.read_bytes()
    broken.write_bytes(content[:300] + bytes(50) + content[350:])  # the decompressor detects this
    try:
        ended = run("train", *command(text, tmp_path / "run"))
    finally:
        broken.write_bytes(content)
    assert ended.code == 75, ended.err
    assert "stopped by the stream, which broke off" in ended.out
    assert broken.name in ended.out
    done = len([row for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if "train/loss" in row])
    assert 0 < done < 40
    ended = run("train", *command(text, tmp_path / "run"))
    assert ended.code == 0, ended.err
    assert stable_rows(tmp_path / "run") == stable_rows(whole)


def test_stopped_before_the_first_rows_it_ends_as_a_stopped_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_comes(self: Producer) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped)

    monkeypatch.setattr(Producer, "_produce", nothing_comes)
    ended = run("train", *command(text, tmp_path / "run", "run.time_limit=0:00:01"))
    assert ended.code == 75, ended.err
    assert "stopped by run.time_limit at step 0 of 40; there is no checkpoint yet" in " ".join(ended.out.split())
    assert not (tmp_path / "run" / "ring").exists()


WRONG = {
    f"data.ring_bytes={RING // 4}": "holds less than two windows",
    "data.ring_bytes=100": "Set data.ring_bytes=",
    "data.streaming=false": "Set data.streaming=true, or data.ring_bytes=null",
    "trainer.max_epochs=1": "Set trainer.max_steps=... and trainer.max_epochs=null",
    "data.packing=first_fit": "data.packing=first_fit does not go with data.ring_bytes=",
    "data.num_samples=9": "it is read. Leave one of the two out",
    "data.ring_shard_tokens=20": "set data.ring_shard_tokens=33 or more",
    "data.global_batch_size=120": "may need 240 at once",
    "data.num_workers=8": "and data.num_workers=8 may need 136",
    "data.ring_val_tokens=1000000": "are held out for validation",
    "tokenizer=char": "is made from all of the text",
    "data=python_stdlib": "or choose data=text data.path=folder",
    "data=text_mixture": "or choose data=text data.path=folder",
    "data=bins": "or choose data=text data.path=folder",
}


@pytest.mark.parametrize("override", WRONG)
def test_what_makes_no_sense_is_said(override: str, text: Path, tmp_path: Path) -> None:
    ended = run("train", *command(text, tmp_path / "run", override))
    assert ended.code == 2, ended.out
    assert WRONG[override] in message(ended.err)
    assert not (tmp_path / "run").exists()


def test_a_ring_too_small_is_said_before_anything_is_read(text: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    ended = run("train", *command(text, tmp_path / "run", "data.ring_bytes=100", f"data.cache_dir={cache}"))
    assert "holds less than two windows" in message(ended.err)
    assert not cache.exists()


def test_conversations_are_not_streamed(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"messages": []}\n')
    chats = ["objective=sft", "data=chat_jsonl", f"data.path={tmp_path}/chats.jsonl", "data.ring_bytes=1000"]
    ended = run("train", *TINY, *chats, "data.streaming=true", f"run.dir={tmp_path}/run")
    assert ended.code == 2
    assert message(ended.err).startswith("data.ring_bytes has no meaning with the data chosen here")


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[list[int]]:
    """Yields a list that repeatedly gets the number of bytes in the ring of the run in tmp_path/run."""
    sizes, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            try:
                sizes.append(sum(file.stat().st_size for file in (tmp_path / "run" / "ring").iterdir()))
            except FileNotFoundError:  # removed in the meantime
                continue

    thread = threading.Thread(target=watch)
    thread.start()
    yield sizes
    done.set()
    thread.join()


@pytest.mark.slow
def test_killed_again_and_again(corpus: Path, tmp_path: Path, watched: list[int]) -> None:
    steps = ["trainer.max_steps=50", "data.micro_batch_size=2", *STREAM]
    done = train(corpus, tmp_path / "whole", *steps)
    assert done.returncode == 0, done.stderr
    for place, step, workers in (("mid_save", 18, 1), ("mid_step", 33, 0)):
        died = train(corpus, tmp_path / "run", *steps, f"data.num_workers={workers}", *kill_at(place, step))
        assert died.returncode == SIGKILLED, died.stderr
    done = train(corpus, tmp_path / "run", *steps)
    assert done.returncode == 0, done.stderr
    assert_equal_runs(tmp_path / "whole", tmp_path / "run")
    assert RING // 2 < max(watched) <= RING


@pytest.mark.slow
def test_two_ranks_read_what_one_reads(text: Path, whole: Path, tmp_path: Path) -> None:
    settings = command(text, tmp_path / "run", "trainer.devices=2")
    line = ["-m", "lmtrain.train", *settings]
    done = run_ranks(line, environment(), lambda: shutil.rmtree(tmp_path / "run", ignore_errors=True))
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = (list(read_jsonl(folder / "metrics.jsonl")) for folder in (whole, tmp_path / "run"))
    assert len(one) == len(two) == 42
    for a, b in zip(one, two, strict=True):
        assert a.get("rows") == b.get("rows")
        for key in ("train/loss", "val/loss", "grad_norm"):
            if key in a:
                # Two ranks sum in another order, and 40 steps of AdamW propagate the rounding.
                assert b[key] == pytest.approx(a[key], rel=1e-4), (a["step"], key)


@pytest.mark.slow
def test_two_ranks_say_once_what_keeps_the_first_rows_from_them(text: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(text, tmp_path / "text")
    broken = sorted(folder.iterdir())[1]  # after the head, in the first window
    content = broken.read_bytes()
    broken.write_bytes(content[:30] + b"\xff" * 50 + content[80:])
    line = ["-m", "lmtrain.train", *command(folder, tmp_path / "run", "trainer.devices=2")]
    done = run_ranks(line, environment(), lambda: shutil.rmtree(tmp_path / "run", ignore_errors=True))
    assert done.returncode == 2, done.stderr
    assert broken.name in message(done.stderr)
    assert not (tmp_path / "run" / "ring").exists()


@pytest.mark.slow
def test_a_malformed_row_far_into_a_stream_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "PART", 1000)  # characters that are tokenized together
    rows = [f'{{"text": "line {n} of some text with a few words"}}' for n in range(400)]
    rows[200] = '{"text": broken'
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    ended = run("train", *command(tmp_path, tmp_path / "run", "data=jsonl"))
    assert ended.code == 1, ended.err
    said = message(ended.err)
    assert "malformed JSON" in said
    saved = sorted((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert saved
    assert f"the last checkpoint is untouched ({saved[-1].name})" in said
