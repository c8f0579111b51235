"""A working folder whose name is not UTF-8: configs, TensorBoard and Rust libraries take no such path."""

import os
from pathlib import Path

import pytest

from inprocess import run, train_tiny
from lmtrain.checkpoints import store
from support import EXPORT, SAMPLES, rows


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / os.fsdecode(b"bad\xff")
    try:
        folder.mkdir()
    except OSError:
        pytest.skip("this file system has UTF-8 names only")
    monkeypatch.chdir(folder)
    return folder


def test_a_run(odd: Path) -> None:
    Path("book.txt").write_text("".join(f"line {i} of a book\n" for i in range(400)))
    ended = train_tiny(Path("book.txt"), "run.name=it", "logger=tensorboard")
    assert ended.code == 0, ended.err


@pytest.mark.slow
def test_a_run_and_what_comes_after_it(odd: Path) -> None:
    book = Path("book.txt")
    book.write_text("".join(f"line {i} of a book\n" for i in range(400)))
    words = ["run.name=it", EXPORT, SAMPLES, "logger=[tensorboard,csv]", "report.enabled=true"]
    ended = train_tiny(book, *words)
    assert ended.code == 0, ended.err
    assert train_tiny(book, *words, "trainer.max_steps=3").code == 0, "it is continued"
    assert [row["step"] for row in rows(Path("outputs/it/metrics.jsonl")) if "train/loss" in row] == [1, 2, 3]
    assert [store.step_of(path) for path in store.scan(Path("outputs/it/checkpoints"))][-1] == 3
    assert "is finished: nothing to do" in train_tiny(book, *words, "trainer.max_steps=3").out
    for verb, *more in (
        ["evaluate", "outputs/it"], ["export", "run_dir=outputs/it"], ["report", "outputs/it"], ["runs"],
        *(["generate", it, "generate.max_new_tokens=2", "--prompt", "a"] for it in ("outputs/it", "outputs/it/export")),
    ):  # fmt: skip
        ended = run(verb, *more)
        assert ended.code == 0, (verb, ended.err)
    further = [
        "model=./outputs/it/export",
        "data=text",
        "data.path=book.txt",
        "trainer.max_steps=1",
        "run.name=further",
    ]
    ended = run("train", *further, "data.global_batch_size=1", "data.micro_batch_size=1", "logger=none")
    assert ended.code == 0, ended.err
