"""Data that several tasks prepare: the same bytes as by one process; datatrove starts them in the slow tests."""

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import processes
from inprocess import run
from lmtrain.config.compose import check, compose
from lmtrain.data.sources import lines
from lmtrain.data.store import parts
from lmtrain.data.tasks import prepare_all
from lmtrain.errors import UserError

TEXT = ["data=jsonl", "data.shard_tokens=3000", "data.val_fraction=0.05", "tokenizer=bpe", "tokenizer.vocab_size=300"]
SFT = ["objective=sft", "data=chat_jsonl", "data.chat_template=vicuna", "data.on_bad_row=skip", "data.seq_len=256",
       "tokenizer=bytes", "data.max_untrained=0.9"]  # fmt: skip
DPO = ["objective=dpo", "data=preference_jsonl", "data.chat_template=vicuna", "data.seq_len=256", "tokenizer=bytes"]


class InTurn:
    """Makes the parts in this process, one after the other; those of `there` exist already."""

    def __init__(self, tasks: int) -> None:
        self.tasks = tasks
        self.made: list[int] = []

    def encode(self, target: Path, begin: Callable[[Path], object], encode: parts.Encode) -> Path:
        folder = parts.folder_of_parts(target, self.tasks)
        parts.begin_once(folder, begin)

        def noted(part: Path, rank: int, tasks: int) -> None:
            self.made.append(rank)
            encode(part, rank, tasks)

        for rank in range(self.tasks):
            with pytest.raises(parts.TaskDone):
                parts.OneTask(target.name, rank, self.tasks).encode(target, begin, noted)
        lines.not_utf8.clear()  # as in the process that joins the parts, which has read none of the files
        return folder


def words(random_: random.Random, most: int) -> str:
    return " ".join(random_.choices([f"word{i}" for i in range(200)], k=random_.randint(0, most)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with files of text, of chats and of pairs, of different lengths, with odd rows in between."""
    found, random_ = tmp_path_factory.mktemp("sources"), random.Random(1)
    for name in ("text", "own_val", "chats", "pairs"):
        (found / name).mkdir()
    for number in range(5):
        texts = [words(random_, 40) for _ in range(40 + 11 * number)]
        texts += [texts[3], "a <|endoftext|> in it", "é" * number]
        rows = [json.dumps({"text": text}) for text in texts]
        (found / "text" / f"{number}.jsonl").write_text("\n".join(rows))
        chats: list[Any] = [
            {"messages": [{"role": "user", "content": words(random_, 9)}, {"role": "assistant", "content": said}]}
            for said in texts
        ]
        chats += [{"instruction": words(random_, 5), "output": "yes", "unread": 1} for _ in range(number)]
        (found / "chats" / f"{number}.jsonl").write_text("\n".join([*map(json.dumps, chats), "{malformed"]))
        pairs = [{"prompt": f"{i}?", "chosen": f"{text} a", "rejected": f"{text} b"} for i, text in enumerate(texts)]
        (found / "pairs" / f"{number}.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (found / "own_val" / "v.jsonl").write_text("\n".join(json.dumps({"text": words(random_, 30)}) for _ in range(9)))
    (found / "plain").mkdir()
    (found / "plain" / "0.txt").write_text(" ".join(words(random_, 40) for _ in range(6000)))  # several segments
    for number in range(1, 24):
        (found / "plain" / f"{number:02d}.txt").write_bytes(f"Café {number} {words(random_, 30)}".encode("latin-1"))
    return found


CASES = {
    "text": [*TEXT, "data.path={}/text"],
    "copies": [*TEXT, "data.path={}/text", "data.dedup=exact", "data.min_length=20"],
    "own_val": [*TEXT, "data.path={}/text", "data.val_path={}/own_val"],
    "no_val": [*TEXT[:2], "data.path={}/text", "data.val_fraction=0", "tokenizer=bytes", "data.append_eos=false"],
    "plain": ["data=text", "data.path={}/plain", "data.val_fraction=0.1", "tokenizer=char"],
    "sft": [*SFT, "data.path={}/chats", "data.val_fraction=0.05"],
    "sft_own_val": [*SFT, "data.path={}/chats", "data.val_path={}/chats/0.jsonl"],
    "dpo": [*DPO, "data.path={}/pairs", "data.val_fraction=0.02"],
    "made_tokenizer": [*DPO[:-1], "tokenizer=bpe", "tokenizer.vocab_size=300", "data.path={}/pairs"],
}


def contents(cache: Path) -> dict[str, bytes]:
    (made,) = (path for path in cache.iterdir() if path.is_dir() and "." not in path.name)
    return {str(p.relative_to(made)): p.read_bytes() for p in sorted(made.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tasks", [2, pytest.param(7, marks=pytest.mark.slow)])
def test_tasks_prepare_what_one_process_prepares(name: str, tasks: int, folder: Path, tmp_path: Path) -> None:
    settings = [word.format(folder) for word in CASES[name]]
    lines.not_utf8.clear()
    alone = prepare_all(check(compose([*settings, f"data.cache_dir={tmp_path / 'one'}"])))
    lines.not_utf8.clear()
    in_turn = InTurn(tasks)
    shared = prepare_all(check(compose([*settings, f"data.cache_dir={tmp_path / 'more'}"])), in_turn)
    assert in_turn.made == list(range(tasks))
    expected = contents(tmp_path / "one")
    assert contents(tmp_path / "more") == expected
    assert any(name.endswith(".bin") for name in expected)
    if not isinstance(alone, list) and not isinstance(shared, list):
        assert (shared.fingerprint, shared.questions) == (alone.fingerprint, alone.questions)


def test_only_missing_parts_are_made_again(folder: Path, tmp_path: Path) -> None:
    config = check(compose([*TEXT, f"data.path={folder / 'text'}", f"data.cache_dir={tmp_path}"]))
    first = InTurn(3)
    prepare_all(config, first)
    (target,) = (path for path in tmp_path.iterdir() if (path / "meta.json").exists())
    before = contents(tmp_path)
    (target / "meta.json").unlink()
    (parts.part_of(parts.folder_of_parts(target, 3), 1)).rename(tmp_path / "lost.part")
    again = InTurn(3)
    prepare_all(config, again)
    assert again.made == [1]
    assert contents(tmp_path) == before


REFUSED = {
    "cuts a document": (["data=text", "data.path={}/plain/0.txt", "tokenizer=bytes"], "cuts one in two"),
    "samples": ([*TEXT, "data.path={}/text", "data.num_samples=9"], "data.num_samples=9 needs one process"),
    "joined rows": ([*TEXT, "data.path={}/text", "data.document_start=^a"], "data.document_start=^a needs one process"),
    "no files": (["data=python_stdlib"], "prepare.tasks divides files, and python_stdlib is read otherwise"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_tasks_can_not_prepare_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    settings, message = REFUSED[name]
    config = check(compose([*(word.format(folder) for word in settings), f"data.cache_dir={tmp_path}"]))
    with pytest.raises(UserError, match=message.replace("^", r"\^")):
        prepare_all(config, InTurn(2))


def test_without_datatrove(monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "datatrove", None)
    settings = [*TEXT, f"data.path={folder / 'text'}", f"data.cache_dir={tmp_path}"]
    done = run("prepare", *settings, "prepare.tasks=2")
    assert done.code == 2
    assert "prepare.executor=local prepare.tasks=2 needs datatrove" in done.err
    assert 'pip install "lmtrain[datatrove]"' in done.err
    assert run("prepare", *settings).code == 0


def by_datatrove(settings: list[str], cache: Path) -> "subprocess.Popen[str]":
    pytest.importorskip("datatrove", reason="needs datatrove")
    command = [sys.executable, "-m", "lmtrain.prepare", *settings, f"data.cache_dir={cache}"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text", "sft"])
def test_datatroves_local_executor(name: str, folder: Path, tmp_path: Path) -> None:
    settings = [word.format(folder) for word in CASES[name]]
    process = by_datatrove([*settings, "prepare.tasks=2"], tmp_path / "two")
    out = process.communicate(timeout=300)[0]
    assert process.returncode == 0, out
    prepare_all(check(compose([*settings, f"data.cache_dir={tmp_path / 'one'}"])))
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert not list((tmp_path / "two").glob("*.tasks-*")), "the parts are removed"


@pytest.mark.slow
def test_a_killed_task_is_run_again_alone(folder: Path, tmp_path: Path) -> None:
    settings = [*(word.format(folder) for word in CASES["text"]), "prepare.tasks=2", "prepare.workers=1"]
    process = by_datatrove(settings, tmp_path / "two")
    while not (second := [p for p in processes.below(process.pid) if "lmtrain.data.task_step 2 1" in p.command]):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    os.kill(second[0].pid, 9)
    out = process.communicate(timeout=300)[0]
    assert process.returncode == 1, out
    assert "task 1 was ended by signal 9" in out
    (first,) = (tmp_path / "two").glob("*.tasks-2/part_*")
    made_at = first.stat().st_mtime_ns
    again = by_datatrove(settings, tmp_path / "two")
    (part,) = (tmp_path / "two").glob("*.tasks-2/part_00000")
    assert part.stat().st_mtime_ns == made_at
    out = again.communicate(timeout=300)[0]
    assert again.returncode == 0, out
    assert "encoding in 2 tasks (local, 1 are done already)" in out
    prepare_all(check(compose([*settings, f"data.cache_dir={tmp_path / 'one'}"])))
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


@pytest.mark.slow
def test_a_task_says_what_is_wrong_with_its_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number, row in enumerate(({"text": "good"}, {"other": "column"})):
        (tmp_path / "text" / f"{number}.jsonl").write_text(json.dumps(row))
    settings = [*TEXT[:3], f"data.path={tmp_path / 'text'}", "tokenizer=bytes", "prepare.tasks=2"]
    process = by_datatrove(settings, tmp_path / "cache")
    out = process.communicate(timeout=300)[0]
    assert process.returncode == 2, out
    assert "has no column 'text'; it has: other" in out
