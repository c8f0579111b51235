"""What can't be evaluated gives one message and exit code 2, or 1 for damage; earlier scores are kept."""

import json
import shutil
from pathlib import Path

import pytest

from inprocess import Ended, message, run, train_tiny
from support import EXPORT


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained") / "run"
    ended = train_tiny(corpus, EXPORT, f"run.dir={folder}", "data.val_fraction=0.2")
    assert ended.code == 0, ended.err
    return folder


@pytest.fixture
def text(tmp_path: Path) -> list[str]:
    """Writes a text to evaluate on and returns the settings that name it."""
    (tmp_path / "text.txt").write_text("line 3 of file 4: the number 12 is even\n" * 5)
    return ["data=text", f"data.val_path={tmp_path / 'text.txt'}"]


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to, symlinks=True)
    return to


def refused(ended: Ended, code: int, *words: str) -> None:
    assert ended.code == code, ended.err
    for word in words:
        assert word in message(ended.err)


def test_an_export_of_another_library(tmp_path: Path, text: list[str]) -> None:
    for name, content in (("params.json", {"dim": 64, "n_layers": 2}), ("config.json", {"dim": 64})):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text(json.dumps(content))
        refused(run("evaluate", f"run_dir={folder}", *text), 2, str(folder))


def test_a_missing_tokenizer(trained: Path, tmp_path: Path, text: list[str]) -> None:
    export = copied(trained / "export", tmp_path / "export")
    for file in export.glob("tokenizer*"):
        file.unlink()
    refused(run("evaluate", f"run_dir={export}", *text), 2, str(export), "tokenizer")


def test_an_empty_split(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    named = ["data=text", f"data.val_path={tmp_path / 'empty.txt'}"]
    refused(run("evaluate", f"run_dir={trained}", *named), 2, "empty")


def test_a_metric_without_references(corpus: Path, tmp_path: Path) -> None:
    ended = train_tiny(corpus, "callbacks.samples.metrics=[bleu]", "callbacks.samples.every_n_validations=0",
                       f"run.dir={tmp_path / 'run'}")  # fmt: skip
    refused(ended, 2, "callbacks.samples.metrics has no effect", "set callbacks.samples.every_n_validations=1")


def test_a_run_that_has_no_checkpoint_yet(trained: Path, tmp_path: Path, text: list[str]) -> None:
    folder = tmp_path / "young"
    (folder / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "metrics.jsonl"):
        shutil.copyfile(trained / name, folder / name)
    refused(run("evaluate", f"run_dir={folder}", *text), 2, str(folder), "checkpoint")


@pytest.mark.parametrize("name", ["nothing", "empty", "file.txt"])
def test_a_folder_that_is_no_run(name: str, tmp_path: Path, text: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("no model")
    refused(run("evaluate", f"run_dir={tmp_path / name}", *text), 2, name)


def damaged(folder: Path) -> Path:
    """Cuts every file of weights in the folder to half its size; returns the folder."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.suffix in (".safetensors", ".pt", ".bin")]
    assert files
    for file in files:
        data = bytearray(file.read_bytes())
        file.write_bytes(data[: len(data) // 2])
    return folder


def test_damaged_weights(trained: Path, tmp_path: Path, text: list[str]) -> None:
    whole = damaged(copied(trained, tmp_path / "run"))
    refused(run("evaluate", f"run_dir={whole}", *text), 1, str(whole))
    refused(run("evaluate", f"run_dir={whole / 'export'}", *text), 1, str(whole))


def test_what_was_scored_before_the_second_model_failed_is_kept(trained: Path, tmp_path: Path, text: list[str]) -> None:
    export = damaged(copied(trained / "export", tmp_path / "export"))
    words = [f"evaluate.against={export}", f"evaluate.dir={tmp_path}", "evaluate.name=half"]
    refused(run("evaluate", f"run_dir={trained}", *text, *words), 1, "alone are kept", "half.json")
    written = json.loads((tmp_path / "half.json").read_text())
    assert written["scores"]["loss"] > 0
    assert "against" not in written
