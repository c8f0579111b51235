"""The bin format: written data is read back, at every boundary, and corrupt files are refused."""

import json
import os
import pickle

import numpy as np
import pytest
import torch

from lmtrain.data.store import bins
from lmtrain.data.store.shards import Extent, Shard
from lmtrain.data.store.writer import BinWriter, dtype_for
from lmtrain.data.text.windows import Windows
from lmtrain.errors import RunError, UserError


def write(folder, documents, dtype="uint16", shard_tokens=10, piece=3):
    """Writes documents (lists of ids) in pieces, with meta.json, and opens the split."""
    writer = BinWriter(folder, "train", dtype, shard_tokens)
    for document in documents:
        parts = [document[i : i + piece] for i in range(0, len(document), piece)] or [[]]
        for part in parts:
            writer.append(np.array(part, dtype=np.uint32), ends_document=part is parts[-1], text_bytes=len(part))
    meta = {
        "format_version": bins.FORMAT_VERSION,
        "dtype": dtype,
        "vocab_size": 100,
        "tokenizer_hash": "a" * 64,
        "eos_id": 0,
        "splits": {"train": writer.close()},
        "key": {},
    }
    bins.save_meta(meta, folder)
    return bins.open_bins(folder, "train")


def documents_of(split):
    """Reads documents back shard by shard, from tokens and document ends alone, joining those cut by a shard's end."""
    found, open_document = [], []
    for shard in split.shards:
        start = 0
        for end in shard.document_ends(0, shard.tokens + 1):
            found.append(open_document + shard.read(start, int(end) - start).tolist())
            open_document, start = [], int(end)
        open_document += shard.read(start, shard.tokens - start).tolist()
    assert open_document == []
    return found


@pytest.mark.parametrize("shard_tokens", [1, 2, 7, 10, 11, 1000])
@pytest.mark.parametrize("piece", [1, 3, 100])
def test_documents_survive_any_shard_size(tmp_path, shard_tokens, piece):
    random = np.random.default_rng(0)
    documents = [random.integers(0, 100, n).tolist() for n in (4, 6, 10, 1, 11, 35, 3, 7, 9, 2)]
    split = write(tmp_path, documents, shard_tokens=shard_tokens, piece=piece)
    assert documents_of(split) == documents
    assert split.documents == len(documents)
    assert split.tokens == split.bytes == sum(map(len, documents)) == sum(s.tokens for s in split.shards)
    assert max(s.tokens for s in split.shards) <= shard_tokens


def test_only_documents_longer_than_a_shard_are_cut(tmp_path):
    split = write(tmp_path, [[1] * 4, [2] * 7, [3] * 25, [4] * 3], shard_tokens=10)
    assert [s.read(0, s.tokens).tolist() for s in split.shards] == [
        [1] * 4, [2] * 7, [3] * 10, [3] * 10, [3] * 5 + [4] * 3,
    ]  # fmt: skip
    assert [s.documents for s in split.shards] == [1, 1, 0, 0, 2]


def test_empty_documents_are_not_counted(tmp_path):
    split = write(tmp_path, [[], [1, 2], [], [3]])
    assert split.documents == 2
    assert documents_of(split) == [[1, 2], [3]]


def test_large_vocabularies_take_uint32(tmp_path):
    assert (dtype_for(65_536), dtype_for(65_537)) == ("uint16", "uint32")
    split = write(tmp_path, [[70_000, 1, 4_000_000_000]], dtype="uint32")
    assert split.shards[0].read(0, 3).tolist() == [70_000, 1, 4_000_000_000]


def test_document_ends_against_a_plain_loop(tmp_path):
    random = np.random.default_rng(1)
    lengths = random.integers(1, 9, 3000)
    ends = np.cumsum(lengths)
    split = write(tmp_path, [[1] * n for n in lengths], shard_tokens=10**6)
    shard = split.shards[0]
    for start, stop in [(0, 1), (0, 10**6), (13_000, 13_001), *random.integers(0, shard.tokens + 5, (200, 2)).tolist()]:
        wanted = [e for e in ends.tolist() if start <= e < stop]
        assert shard.document_ends(start, stop).tolist() == wanted
    assert shard.document_ends(0, 5).dtype == np.int64


def test_layout_on_disk_is_the_documented_one(tmp_path):
    write(tmp_path, [[1, 2], [3]])
    assert np.fromfile(tmp_path / "train_00000.bin", "<u2").tolist() == [1, 2, 3]
    assert np.fromfile(tmp_path / "train_00000.docs", "<u8").tolist() == [2, 3]


def test_reading_out_of_range_is_refused(tmp_path):
    shard = write(tmp_path, [[1, 2, 3]]).shards[0]
    for start, count in [(0, 4), (3, 1), (-1, 1), (1, -1)]:
        with pytest.raises(IndexError):
            shard.read(start, count)


def test_shards_pickle_and_survive_a_fork(tmp_path):
    shard = write(tmp_path, [[5, 6, 7]]).shards[0]
    assert shard.read(1, 2).tolist() == [6, 7]
    assert pickle.loads(pickle.dumps(shard)).read(1, 2).tolist() == [6, 7]  # noqa: S301
    child = os.fork()
    if child == 0:
        os._exit(0 if shard.read(0, 3).tolist() == [5, 6, 7] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_more_shards_than_open_files(tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    split = write(tmp_path, [[i] for i in range(600)], shard_tokens=1)
    assert [int(s.read(0, 1)[0]) for s in split.shards] == list(range(600))
    assert len(os.listdir("/proc/self/fd")) - before < 300


def test_a_file_cut_short_while_in_use_is_a_message(tmp_path):
    shard = write(tmp_path, [[1] * 9]).shards[0]
    shard.read(0, 9)
    os.truncate(shard.path, 6)
    with pytest.raises(RunError, match=r"train_00000\.bin ends at byte 6, 12 bytes before"):
        shard.read(0, 9)


def test_a_file_that_disagrees_with_the_sidecar(tmp_path):
    split = write(tmp_path, [[1] * 9])
    os.truncate(split.shards[0].path, 6)
    with pytest.raises(UserError, match="has 6 bytes, but 9 uint16 tokens take 18"):
        bins.open_bins(tmp_path, "train")
    split.shards[0].path.unlink()
    with pytest.raises(UserError, match=r"train_00000\.bin is missing"):
        bins.open_bins(tmp_path, "train")


def test_a_sidecar_that_cannot_be_read(tmp_path):
    write(tmp_path, [[1]])
    text = (tmp_path / "meta.json").read_text()
    (tmp_path / "meta.json").write_text(text[:-9])
    with pytest.raises(UserError, match=r"meta\.json can't be read"):
        bins.open_bins(tmp_path, "train")
    (tmp_path / "meta.json").write_text(json.dumps({**json.loads(text), "splits": 5}))
    with pytest.raises(UserError, match="splits is 5, not a mapping"):
        bins.open_bins(tmp_path, "train")
    (tmp_path / "meta.json").write_text(text.replace('"format_version": 1', '"format_version": 99'))
    with pytest.raises(UserError, match="format version 99"):
        bins.open_bins(tmp_path, "train")


def test_tokens_of_several_files_are_one_sequence(tmp_path):
    """Files of other programs: other dtypes, tokens after a header, in one sequence with the ends of all."""
    parts, ids = [], np.arange(30)
    for number, (dtype, offset) in enumerate([("uint16", 0), ("int32", 12), ("<i8", 1024)]):
        some = ids[10 * number : 10 * number + 10].astype(dtype)
        (tmp_path / f"{number}").write_bytes(bytes(offset) + some.tobytes())
        parts.append(Extent(tmp_path / f"{number}", dtype, offset, 10))
    np.array([3, 12, 30], "<u8").tofile(tmp_path / "docs")
    shard = Shard(tmp_path, "uint16", 30, {"docs": tmp_path / "docs"}, parts)
    for start in range(31):
        for stop in range(start, 31):
            assert shard.read(start, stop - start).tolist() == ids[start:stop].tolist()
    assert shard.document_ends(1, 31).tolist() == [3, 12, 30]
    with pytest.raises(IndexError):
        shard.read(25, 6)
    with pytest.raises(UserError, match="has 52 bytes, but 11 int32 tokens take 56"):
        Shard(tmp_path, "uint16", 31, {}, [parts[0], parts[1]._replace(tokens=11), parts[2]])


def test_shorter_than_one_row(tmp_path):
    np.arange(64, dtype=np.uint16).tofile(tmp_path / "train.bin")
    shards = [Shard(tmp_path / "train.bin", "uint16", 64, {})]
    assert len(Windows(shards, 63, seed=0, isolate_documents=False)) == 1
    with pytest.raises(UserError, match=r"holds 64 tokens.*data\.seq_len=64.*set data\.seq_len=63 or less"):
        Windows(shards, 64, seed=0, isolate_documents=False)


def test_a_sparse_8_gib_bin_is_read_in_place(tmp_path):
    with (tmp_path / "train.bin").open("wb") as file:
        file.seek(8 * 2**30 - 2)
        file.write(b"\x07\x00")
    shard = Shard(tmp_path / "train.bin", "uint16", 4 * 2**30, {})
    before = resident_bytes()
    for start in np.random.default_rng(0).integers(0, shard.tokens - 1024, 3000).tolist():
        shard.read(start, 1024)
    assert shard.read(shard.tokens - 1, 1)[0] == 7
    assert resident_bytes() - before < 20 * 2**20


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def test_the_cuts_move_with_the_epoch_and_every_window_is_seen(tmp_path):
    """Windows of an epoch are one stretch of the text, whose beginning differs between epochs, seeds and shards."""
    shards = write(tmp_path, [list(range(100)), list(range(100, 200))], shard_tokens=100).shards
    assert len(shards) == 2
    begins = {}
    for seed in (0, 1):
        rows = Windows(shards, 8, seed=seed, isolate_documents=False)
        assert len(rows) == 2 * ((100 - 1 - 7) // 8)
        for epoch in range(6):
            batch = rows.read(np.array([[epoch, row] for row in range(len(rows))]))
            assert torch.equal(batch["labels"], batch["input_ids"] + 1)
            for shard, ids in enumerate(batch["input_ids"].flatten().chunk(2)):
                first = int(ids[0])
                assert 100 * shard <= first < 100 * shard + 8
                assert ids.tolist() == list(range(first, first + len(ids)))
                begins[seed, epoch, shard] = first - 100 * shard
    by = {(seed, shard): [begins[seed, e, shard] for e in range(6)] for seed in (0, 1) for shard in (0, 1)}
    assert all(len(set(starts)) >= 3 for starts in by.values())
    assert len(set(map(tuple, by.values()))) == 4
    whole = Windows(shards, 8, seed=None, isolate_documents=False)
    assert len(whole) == 2 * (99 // 8)
    assert whole.read(np.array([[e, 0] for e in range(3)]))["input_ids"][:, 0].tolist() == [0] * 3, (
        "validation rows stay"
    )
