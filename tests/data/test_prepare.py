"""From text to bins: exact tokens, a cache keyed by all that shapes them, and no partial results after failures."""

import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from texts import documents

from lmtrain.data import tokenizers
from lmtrain.data.store import bins
from lmtrain.data.store.cache import build_once
from lmtrain.data.text.prepare import prepare
from lmtrain.errors import RunError, UserError

WORDS = [
    "def",
    "return",
    "class",
    "self",
    "import",
    "print",
    "value",
    "index",
    "result",
    "while",
    "yield",
    "lambda",
    "naïve",
    "日本",
    "=",
    "(",
    ")",
    ":",
    "+",
    "12",
    "3.5",
]


def some_text(seed, lines):
    random = np.random.default_rng(seed)
    counts = random.integers(1, 12, lines)
    words = [WORDS[i] for i in random.integers(0, len(WORDS), int(counts.sum()))]
    ends = np.cumsum(counts)
    return "".join(" ".join(words[e - c : e]) + "\n" for c, e in zip(counts, ends, strict=True))


@pytest.fixture
def corpus_dir(tmp_path):
    """Returns a folder of thirty text files, one of them long enough to be tokenized in segments."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i:02d}.txt").write_text(some_text(i, 4000 if i == 7 else 20))
    return folder


def decoded(prepared, split):
    """Returns the text of a split's documents, from tokens and document ends alone."""
    texts = []
    for shard in bins.open_bins(prepared.folder, split).shards:
        start = 0
        for end in shard.document_ends(0, shard.tokens + 1).tolist():
            ids = shard.read(start, end - start).tolist()
            if ids[-1] == prepared.meta["eos_id"]:
                ids = ids[:-1]
            texts.append(prepared.tokenizer.decode(ids))
            start = end
    return texts


@pytest.mark.parametrize("option", ["bpe", "bytes", "char"])
@pytest.mark.parametrize("shard_tokens", [20_000, 10**9])
def test_bins_hold_exactly_the_text(option, shard_tokens, corpus_dir, data_config, tokenizer_config):
    cfg = data_config(path=str(corpus_dir), shard_tokens=shard_tokens, val_fraction=0.1)
    settings = {"vocab_size": 500} if option == "bpe" else {}
    prepared = prepare(cfg, tokenizer_config(option, **settings), progress=False)
    for split in ("train", "val"):
        wanted = list(documents(cfg, split))
        counts = prepared.meta["splits"][split]
        opened = bins.open_bins(prepared.folder, split)
        assert counts["documents"] == len(wanted)
        assert counts["bytes"] == sum(len(t.encode()) for t in wanted)
        # The tokenizer itself encodes all documents in one go, with an eos after each.
        ids = [prepared.tokenizer(t, add_special_tokens=False).input_ids for t in wanted]
        flat = [i for document in ids for i in [*document, prepared.meta["eos_id"]]]
        assert np.concatenate([s.read(0, s.tokens) for s in opened.shards]).tolist() == flat
        if shard_tokens > 10**6:
            assert len(opened.shards) == 1
            assert decoded(prepared, split) == wanted
        else:
            assert split == "val" or len(opened.shards) > 1
            assert all(s.tokens <= shard_tokens for s in opened.shards)
    assert prepared.meta["vocab_size"] == len(prepared.tokenizer)
    assert prepared.meta["tokenizer_hash"] == tokenizers.tokenizer_hash(prepared.tokenizer)


def test_without_eos_the_documents_touch(corpus_dir, data_config, tokenizer_config):
    cfg = data_config(path=str(corpus_dir), append_eos=False, val_fraction=0)
    prepared = prepare(cfg, tokenizer_config("bytes"), progress=False)
    (shard,) = bins.open_bins(prepared.folder, "train").shards
    assert bytes(shard.read(0, shard.tokens).tolist()) == "".join(documents(cfg, "train")).encode()
    assert list(prepared.meta["splits"]) == ["train"]


def test_one_long_text_is_cut_as_nanogpt_cuts_it(tmp_path, data_config, tokenizer_config):
    text = some_text(0, 5000)
    (tmp_path / "input.txt").write_text(text)
    cfg = data_config("tiny_shakespeare", path=str(tmp_path / "input.txt"))
    prepared = prepare(cfg, tokenizer_config("char"), progress=False)
    characters = sorted(set(text))
    ids = np.array([characters.index(c) for c in text], dtype=np.uint16)
    cut = int(len(text) * 0.9)
    assert np.array_equal(np.fromfile(prepared.folder / "train_00000.bin", "<u2"), ids[:cut])
    assert np.array_equal(np.fromfile(prepared.folder / "val_00000.bin", "<u2"), ids[cut:])


def test_large_vocabularies_are_kept(tmp_path, data_config, tokenizer_config):
    """Vocabularies of more than 65,536 ids are stored as uint32, since uint16 would overflow."""
    text = "".join(chr(c) for c in range(0x20, 0x12000) if not 0xD800 <= c <= 0xDFFF)
    (tmp_path / "all.txt").write_bytes(text.encode())
    prepared = prepare(data_config(path=str(tmp_path / "all.txt"), val_fraction=0), tokenizer_config("char"), False)
    assert prepared.meta["dtype"] == "uint32"
    (shard,) = bins.open_bins(prepared.folder, "train").shards
    assert shard.read(0, shard.tokens)[:-1].tolist() == list(range(len(text)))


def test_everything_that_shapes_tokens_is_in_the_key(corpus_dir, data_config, tokenizer_config):
    def folder(tokenizer="bytes", **settings):
        cfg = data_config(**{"path": str(corpus_dir), **settings})
        return prepare(cfg, tokenizer_config(tokenizer), progress=False).folder

    first = folder()
    os.utime(corpus_dir / "00.txt")
    assert folder() == first
    assert folder(seq_len=7, global_batch_size=3, num_proc=2) == first  # settings that do not change the tokens
    moved = shutil.copytree(corpus_dir, corpus_dir.with_name("moved"))
    assert folder(path=str(moved)).name.split("-")[-1] == first.name.split("-")[-1]
    others = [
        folder(tokenizer="char"),
        folder(min_length=700),
        folder(append_eos=False),
        folder(val_fraction=0.2),
        folder(sample_by="line"),
        folder(document_start="^def"),
        folder(num_samples=3),
        folder(shard_tokens=1000),
    ]
    (corpus_dir / "00.txt").write_text((corpus_dir / "00.txt").read_text().replace("def", "dex", 1))
    others.append(folder())
    assert len({first, *others}) == len(others) + 1


def test_a_prepared_folder_is_used_again_at_once(data_config, tokenizer_config):
    cfg, tokenizer = data_config("python_stdlib"), tokenizer_config("bytes")
    first = prepare(cfg, tokenizer, progress=False)
    written = (first.folder / "meta.json").stat().st_mtime_ns
    began = time.process_time()
    again = prepare(cfg, tokenizer, progress=False)
    assert time.process_time() - began < 5  # takes about 0.1 s; preparing again takes over 5 s even on a busy machine
    assert (again.folder, again.fingerprint, again.meta) == (first.folder, first.fingerprint, first.meta)
    assert (again.folder / "meta.json").stat().st_mtime_ns == written


def test_a_large_file_is_hashed_once_and_again_when_it_changes(tmp_path, data_config, tokenizer_config):
    path = tmp_path / "large.txt"
    path.write_text("0123456789abcdef\n" * 1_100_000)
    cfg = data_config(path=str(path), sample_by="line", num_samples=50)
    first = prepare(cfg, tokenizer_config(), progress=False).folder
    known = json.loads((tmp_path / "cache" / "files.json").read_text())
    assert list(known) == [str(path)]
    with path.open("r+b") as file:  # the size stays the same
        file.seek(17 * 10**6)
        file.write(b"X")
    assert prepare(cfg, tokenizer_config(), progress=False).folder != first


def test_nothing_left_to_train_on(corpus_dir, data_config, tokenizer_config):
    with pytest.raises(UserError, match=r"no text is left to train on \(data\.min_length=10000000"):
        prepare(data_config(path=str(corpus_dir), min_length=10_000_000), tokenizer_config(), progress=False)
    assert [p for p in (corpus_dir.parent / "cache").iterdir() if not p.name.startswith(".")] == []


def test_a_tokenizer_without_end_of_text(tmp_path, corpus_dir, data_config, tokenizer_config):
    tokenizers.save(tokenizers.numbers(50), tmp_path / "numbers")
    cfg = tokenizer_config("hub", name_or_path=str(tmp_path / "numbers"))
    with pytest.raises(UserError, match=r"no end-of-text token.*data\.append_eos=false"):
        prepare(data_config(path=str(corpus_dir)), cfg, progress=False)


def test_a_cache_that_cannot_be_written(corpus_dir, data_config, tokenizer_config):
    cfg = data_config(path=str(corpus_dir), cache_dir=str(corpus_dir / "00.txt" / "below"))
    with pytest.raises(UserError, match=r"data\.cache_dir=.*can't be written"):
        prepare(cfg, tokenizer_config(), progress=False)


def test_a_full_disk_is_said_and_cleaned_up(tmp_path, data_config, tokenizer_config):
    """A full disk, imitated by a limit on file sizes, is reported and leaves no partial data."""
    (tmp_path / "a.txt").write_text(some_text(0, 60_000))
    cfg = data_config(path=str(tmp_path / "a.txt"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(
            RunError, match=r"the disk is full: preparing needs about .* MB in .*cache.*data\.cache_dir"
        ):
            prepare(cfg, tokenizer_config(), progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list((tmp_path / "cache").iterdir()) == [tmp_path / "cache" / ".locks"]
    prepare(cfg, tokenizer_config(), progress=False)


CHILD = """
import json, sys
from pathlib import Path
from lmtrain.data.text.prepare import prepare
from lmtrain.config.schema import DataConfig, TokenizerConfig

def peak():
    # ru_maxrss would begin with the parent's, which is larger than what is looked for.
    status = Path("/proc/self/status")
    return int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024 if status.exists() else 0

settings = json.loads(sys.argv[1])
tokenizer = TokenizerConfig(kind="bytes")
if settings.get("warm_up"):
    prepare(DataConfig(**{**settings["data"], "path": settings["warm_up"]}), tokenizer, progress=False)
before = peak()
print("ready", flush=True)
prepared = prepare(DataConfig(**settings["data"]), tokenizer)
grown = peak() - before
held = b"x" * settings.get("held", 0)
print(json.dumps({"grown": grown, "seen": peak() - before, "of": prepared.fingerprint}))
"""


def child(cfg, **settings):
    data = {name: value for name, value in vars(cfg).items() if not dataclasses.is_dataclass(value)}
    argument = json.dumps({"data": data, **settings})
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", CHILD, argument], stdout=pipe, stderr=pipe, text=True)


def wait_for_bytes(folder, count):
    """Waits until the bin of a temporary folder has at least `count` bytes."""
    deadline = time.time() + 60
    while time.time() < deadline:
        if any(p.stat().st_size >= count for p in folder.glob("*.tmp-*/train_00000.bin")):
            return
        time.sleep(0.005)
    raise AssertionError("the child wrote nothing")


@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_an_interrupted_prepare_leaves_nothing_that_looks_complete(end, tmp_path, data_config, tokenizer_config):
    (tmp_path / "a.txt").write_text(some_text(0, 60_000) * 4)
    cfg, cache = data_config(path=str(tmp_path / "a.txt")), tmp_path / "cache"
    process = child(cfg)
    wait_for_bytes(cache, 2 << 20)
    process.send_signal(end)
    assert process.wait(30) != 0
    assert list(cache.glob("*/meta.json")) == []
    leftovers = list(cache.glob("*.tmp-*"))
    assert len(leftovers) == (1 if end == signal.SIGKILL else 0)
    # Preparing other data removes what the killed writer left; preparing the same data starts over.
    prepare(data_config(path=str(tmp_path / "a.txt"), num_samples=1, sample_by="line"), tokenizer_config(), False)
    assert list(cache.glob("*.tmp-*")) == []
    prepared = prepare(cfg, tokenizer_config(), progress=False)
    assert prepared.meta["splits"]["train"]["bytes"] + prepared.meta["splits"]["val"]["bytes"] == os.path.getsize(
        cfg.path
    )


@pytest.mark.slow
def test_two_at_once_prepare_it_once(tmp_path, data_config):
    (tmp_path / "a.txt").write_text(some_text(0, 60_000) * 4)
    processes = [child(data_config(path=str(tmp_path / "a.txt"))) for _ in range(2)]
    outputs = [p.communicate(timeout=600) for p in processes]
    assert [p.returncode for p in processes] == [0, 0], outputs
    fingerprints = {json.loads(out.splitlines()[-1])["of"] for out, _ in outputs}
    assert len(fingerprints) == 1
    assert sum(err.count("tokenized train") for _, err in outputs) == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_machines_whose_locks_the_other_does_not_see_leave_one_whole_folder(tmp_path, monkeypatch):
    """On a network file system with locks per node, a node that starts and ends meanwhile leaves one whole folder."""
    target = tmp_path / "made"

    def is_complete(folder):
        return (folder / "whole").exists()

    def other_node(folder):
        (folder / "by").write_text("two")
        (folder / "whole").touch()

    def build(folder):
        (folder / "by").write_text("one")
        shutil.rmtree(tmp_path / ".locks")  # so that the other node locks another file
        with monkeypatch.context() as patch:
            patch.setattr("platform.node", lambda: "node-2")
            build_once(target, is_complete, other_node, print)
        assert (folder / "by").read_text() == "one", "the other node removed what was being written"
        (folder / "whole").touch()

    build_once(target, is_complete, build, print)
    assert (target / "by").read_text() == "two"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".locks", "made"]


@pytest.mark.slow
def test_memory_is_bounded_for_one_long_document(tmp_path, data_config):
    small = tmp_path / "small.txt"
    small.write_text(some_text(1, 60_000))
    with (tmp_path / "a.txt").open("w") as file:
        for _ in range(16):
            file.write(some_text(0, 60_000))
    size = os.path.getsize(tmp_path / "a.txt")
    assert size > 28e6
    process = child(data_config(path=str(tmp_path / "a.txt")), warm_up=str(small), held=200_000_000)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found["grown"] < 50e6
    assert found["seen"] > 150e6, "what is held is seen"
