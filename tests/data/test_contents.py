"""Changed tokens are detected wherever in the files they are, without reading large files whole at every start."""

import json
import os
import shutil
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from chats import write_chats
from inprocess import message, run
from lmtrain.data.store import bins, contents
from lmtrain.data.store.writer import BinWriter
from lmtrain.data.text.prepare import prepare
from lmtrain.errors import UserError
from support import TINY, rows

MIB = 2**20


def edit(path: Path, at: int, size: int = 64) -> None:
    """Reorders the numbers at byte `at` of a file and keeps its size and dates."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at)
        found = file.read(size)
        file.seek(at)
        assert found[8:] + found[:8] != found
        file.write(found[8:] + found[:8])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def write_plain(folder: Path, tokens: int = MIB) -> Path:
    folder.mkdir()
    random = np.random.default_rng(0)
    for name in ("train", "val"):
        random.integers(0, 257, tokens, dtype=np.uint16).tofile(folder / f"{name}.bin")
    return folder


@pytest.mark.parametrize("shard_tokens", [7, 50, 1000])
def test_hashes_made_while_writing_are_those_of_the_files(shard_tokens: int, tmp_path: Path) -> None:
    random = np.random.default_rng(shard_tokens)
    writer = BinWriter(tmp_path, "train", "uint16", shard_tokens)
    for _ in range(60):
        for piece in range(int(random.integers(1, 4))):
            ids = random.integers(0, 99, int(random.integers(1, 20)), dtype=np.uint16)
            writer.append(ids, ends_document=piece == 0)
    split = writer.close()
    for shard in split["shards"]:
        file = tmp_path / shard["file"]
        assert shard["sha256"] == sha256(file.read_bytes()).hexdigest()
        assert shard["docs_sha256"] == sha256(file.with_suffix(".docs").read_bytes()).hexdigest()
    assert len(split["shards"]) > 1 or shard_tokens == 1000


@pytest.mark.parametrize("megabytes", [2, 34], ids=["small", "remembered"])
def test_an_edit_anywhere_in_ready_bins_gives_another_fingerprint(
    megabytes: int, tmp_path: Path, data_config, tokenizer_config
) -> None:
    folder = write_plain(tmp_path / "bins", megabytes * MIB // 4)
    found = lambda: prepare(data_config("bins", path=str(folder)), tokenizer_config("bytes"), False).fingerprint  # noqa: E731
    names = [found()]
    assert found() == names[0]
    for at in (3 * MIB // 4 + 16, 300_000, 0):
        edit(folder / "train.bin", at)
        names.append(found())
    edit(folder / "val.bin", 12_344)
    names.append(found())
    assert len(set(names)) == len(names)


def test_large_bins_are_read_whole_once(tmp_path: Path, data_config, tokenizer_config, monkeypatch) -> None:
    folder = write_plain(tmp_path / "bins", 10 * MIB)
    read = []
    whole = contents._sha256
    monkeypatch.setattr(contents, "_sha256", lambda path, advance: read.append(path.name) or whole(path, advance))
    monkeypatch.setattr(contents, "_SAY_FROM", MIB)
    said: list[str] = []
    names = ["train.bin", "val.bin"]
    for _ in range(3):
        contents.check(folder, dict.fromkeys(names), tmp_path / "cache", said.append)
    assert sorted(read) == names
    assert said == ["reading 0.0 GB of token data to identify it (once, until the files change)"]
    edit(folder / "val.bin", 0)
    contents.check(folder, dict.fromkeys(names), tmp_path / "cache", said.append)
    assert sorted(read) == ["train.bin", "val.bin", "val.bin"]
    (tmp_path / "file").touch()
    contents.check(folder, dict.fromkeys(names), tmp_path / "file" / "below", said.append)
    assert "files.json can't be written: the files are read again at the next start" in said[-1]


@pytest.mark.parametrize("files", [3, 30])
def test_the_hashes_of_many_files_are_stored_at_once(files: int, tmp_path: Path, monkeypatch) -> None:
    """A start on n files read and wrote the cache of their hashes n times, so that its cost grew with n^2."""
    monkeypatch.setattr(contents, "REMEMBER_FROM", 1)
    used: list[str] = []
    load, write = contents.Facts._load, contents.write_atomic
    monkeypatch.setattr(contents.Facts, "_load", lambda facts: used.append("read") or load(facts))
    monkeypatch.setattr(contents, "write_atomic", lambda *given: used.append("written") or write(*given))
    paths = [tmp_path / f"{i}.txt" for i in range(files)]
    for i, path in enumerate(paths):
        path.write_text(f"text {i}")
    hashes = "".join(sha256(path.read_bytes()).hexdigest() for path in paths)
    facts = contents.Facts(tmp_path / "cache")
    assert facts.digest(paths) == sha256(hashes.encode()).hexdigest()
    assert used == ["read"] * 3 + ["written"]
    used.clear()
    monkeypatch.setattr(contents, "_sha256", None)
    assert facts.digest(paths[::-1]) != facts.digest(paths)
    assert used == ["read"] * 2


def test_what_was_just_written_is_not_read_again(tmp_path: Path, data_config, tokenizer_config, monkeypatch) -> None:
    monkeypatch.setattr(contents, "REMEMBER_FROM", 1)
    read, whole = list[str](), contents._sha256
    monkeypatch.setattr(contents, "_sha256", lambda path, *given: read.append(path.name) or whole(path, *given))
    (tmp_path / "a.txt").write_text("one line\nand another\n" * 300)
    cfg = data_config(path=str(tmp_path / "a.txt"))
    first = prepare(cfg, tokenizer_config(), progress=False)
    assert prepare(cfg, tokenizer_config(), progress=False).fingerprint == first.fingerprint
    assert read == ["a.txt", "a.txt"]  # to find its folder, and once more before the folder is published


@pytest.mark.parametrize("remember_from", [1, 1 << 24])
@pytest.mark.parametrize("name", ["train_00000.bin", "val_00000.bin", "train_00000.docs"])
def test_prepared_bins_that_were_changed_are_refused(
    name: str, remember_from: int, tmp_path: Path, data_config, tokenizer_config, monkeypatch
) -> None:
    monkeypatch.setattr(contents, "REMEMBER_FROM", remember_from)
    (tmp_path / "a.txt").write_text("".join(f"line {i} of many\n" for i in range(3000)))
    cfg = data_config(path=str(tmp_path / "a.txt"), sample_by="line")
    folder = prepare(cfg, tokenizer_config(), progress=False).folder
    recorded = bins.recorded_hashes(bins.load_meta(folder))[name]
    edit(folder / name, 40)
    now = sha256((folder / name).read_bytes()).hexdigest()
    for again in (cfg, data_config("bins", path=str(folder))):
        said = rf"{name} was changed .* {recorded[:16]}.* {now[:16]}.*delete .*{folder.name}"
        with pytest.raises(UserError, match=said):
            prepare(again, tokenizer_config(), progress=False)


def without_hashes(folder: Path) -> None:
    """Turns a prepared folder into one that an earlier version wrote, which has no hashes."""
    if (folder / "meta.json").exists():
        meta = json.loads((folder / "meta.json").read_text())
        for split in meta["splits"].values():
            for shard in split["shards"]:
                del shard["sha256"], shard["docs_sha256"]
        (folder / "meta.json").write_text(json.dumps(meta))


def test_a_folder_of_an_earlier_version_is_used(tmp_path: Path, data_config, tokenizer_config) -> None:
    (tmp_path / "a.txt").write_text("one line\nand another\n" * 300)
    cfg = data_config(path=str(tmp_path / "a.txt"))
    first = prepare(cfg, tokenizer_config(), progress=False)
    without_hashes(first.folder)
    again = prepare(cfg, tokenizer_config(), progress=False)
    assert (again.folder, again.fingerprint) == (first.folder, first.fingerprint)
    edit(first.folder / "train_00000.bin", 40)
    assert prepare(cfg, tokenizer_config(), progress=False).fingerprint != first.fingerprint


def test_the_same_tokens_elsewhere_have_the_same_name(tmp_path: Path, data_config, tokenizer_config) -> None:
    first = write_plain(tmp_path / "bins")
    moved = shutil.copytree(first, tmp_path / "moved")
    of = lambda folder: prepare(data_config("bins", path=str(folder)), tokenizer_config("bytes"), False).fingerprint  # noqa: E731
    assert of(first) == of(moved)


def kinds(corpus: Path, folder: Path) -> dict[str, tuple[list[str], str]]:
    """Returns, by kind of data, the settings and the name of the file to edit."""
    plain, chats = write_plain(folder / "bins"), write_chats(folder / "chats.jsonl")
    chat = [f"data.path={chats}", "objective=sft", "data=chat_jsonl", "data.chat_template=vicuna", "data.seq_len=512",
            "model.max_position_embeddings=1024", "data.val_fraction=0.1"]  # fmt: skip
    return {
        "bins": (["data=bins", f"data.path={plain}", "data.append_eos=false"], "train.bin"),
        "text": (["data=text", f"data.path={corpus}"], "train_00000.bin"),
        "chats": (chat, "train_00000.bin"),
    }


@pytest.mark.parametrize("kind", ["bins", "text", "chats"])
def test_a_run_goes_on_over_unchanged_data_only(kind: str, corpus: Path, tmp_path: Path) -> None:
    """A run resumes over the same data, whether or not hashes were recorded, and every change is detected."""
    settings, file = kinds(corpus, tmp_path)[kind]
    common = [*TINY, *settings, f"data.cache_dir={tmp_path / 'cache'}", f"run.dir={tmp_path / 'run'}",
              "run.resume=auto", "trainer.limit_val_batches=1", "callbacks.samples.every_n_validations=0",
              "export.enabled=false"]  # fmt: skip
    first = run("train", *common, "trainer.max_steps=1")
    assert first.code == 0, first.err
    path = next(p for p in tmp_path.rglob(file) if "run" not in p.relative_to(tmp_path).parts)
    without_hashes(path.parent)
    second = run("train", *common, "trainer.max_steps=2")
    assert second.code == 0, second.err
    assert [r["step"] for r in rows(tmp_path / "run" / "metrics.jsonl") if "train/loss" in r] == [1, 2]
    edit(path, 300_000 if kind == "bins" else 304)
    refused = run("train", *common, "trainer.max_steps=3")
    assert refused.code == 2
    assert "data (then sha256:" in message(refused.err)


def test_it_says_how_much_of_large_files_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.touch()
        os.truncate(file, 1_500_000_000)  # sparse, and not read
    monkeypatch.setattr(contents, "_SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(contents, "_sha256", lambda path, advance: advance(1_500_000_000) or path.name)
    said: list[str] = []
    found = contents._read_all(files, contents.Facts(tmp_path / "cache"), said.append)
    assert found == {files[0]: "a", files[1]: "b"}
    assert said[0] == "reading 3.0 GB of token data to identify it (once, until the files change)"
    assert said[1:] == ["read 1.5 of 3.0 GB", "read 3.0 of 3.0 GB"]
