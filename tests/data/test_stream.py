"""Streams: reading from any position gives what reading from the beginning gives, through a ring of bounded size."""

import gzip
import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmtrain.config.batch import Stages
from lmtrain.config.schema_data import DataConfig
from lmtrain.data.loaders import StepDataset
from lmtrain.data.sources import files
from lmtrain.data.stream import ring as producing
from lmtrain.data.stream import source as reading
from lmtrain.data.stream.head import Head, prepare_head
from lmtrain.data.stream.ring import Producer, Ring, StreamRows
from lmtrain.data.stream.source import Block, Place, StreamSource, cut_shards, endless, open_stream, segments
from lmtrain.data.text.encode import Encoder
from lmtrain.data.tokenizers import load_or_train
from lmtrain.errors import ReadError, UserError

WORDS = ["the", "cat", "sees", "a", "house", "größer", "as", "12", "dogs", "日本"]


def lines(seed: int, count: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(3, 12))) for _ in range(count)]


def write_text(folder: Path) -> None:
    for i, count in enumerate((3000, 5, 8000)):  # the last is longer than a block, as the tests set it
        encoding = "utf-8" if i == 1 else "utf-8-sig"  # with a byte order mark, which is no text
        (folder / f"{i}.txt").write_text("\n".join(lines(i, count)), encoding=encoding)
    (folder / "3.txt").write_text("", encoding="utf-8-sig")


def write_gzip(folder: Path) -> None:
    for i in range(2):
        with gzip.open(folder / f"{i}.txt.gz", "wt", encoding=("utf-8", "utf-8-sig")[i]) as file:
            file.write("\n".join(lines(i, 500)))


def rows(seed: int) -> list[str]:
    """Returns short rows, an empty one, and one long enough to be cut into segments."""
    return [*lines(seed, 200), "", "\n".join(lines(seed + 9, 1200)), *lines(seed + 5, 200)]


def write_jsonl(folder: Path) -> None:
    for i in range(2):
        written = "\n".join(json.dumps({"text": row}, ensure_ascii=i == 0) for row in rows(i))
        (folder / f"{i}.jsonl").write_text("\ufeff" * i + written + "\n\n")


def write_parquet(folder: Path) -> None:
    for i in range(2):
        pq.write_table(pa.table({"n": list(range(len(rows(i)))), "text": rows(i)}), folder / f"{i}.parquet", 150)


def write_csv(folder: Path) -> None:
    (folder / "a.csv").write_text("text,n\n" + "".join(f'"{line}",1\n' for line in lines(3, 300)))


KINDS: dict[str, tuple[Callable[[Path], None], str, dict]] = {
    "documents": (write_text, "text", {}),
    "lines of gzip": (write_gzip, "text", {"sample_by": "line"}),
    "paragraphs": (write_gzip, "text", {"sample_by": "paragraph"}),
    "jsonl": (write_jsonl, "jsonl", {"min_length": 20}),
    "parquet": (write_parquet, "parquet", {}),
    "csv": (write_csv, "jsonl", {}),
}


@pytest.fixture
def encoder(tokenizer_config: Callable[..., object]) -> Encoder:
    tokenizer = load_or_train(tokenizer_config("bytes"), lambda _: iter(()))  # type: ignore[arg-type]
    return Encoder(tokenizer, tokenizer.eos_token_id)


@pytest.mark.parametrize("kind", KINDS)
def test_from_any_place_on_it_is_the_text_that_is_prepared(
    kind: str,
    tmp_path: Path,
    data_config: Callable[..., DataConfig],
    encoder: Encoder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (files, reading):
        monkeypatch.setattr(module, "_BLOCK", 1 << 16)
    write, option, settings = KINDS[kind]
    (tmp_path / "text").mkdir()
    write(tmp_path / "text")
    cfg = data_config(option, path=str(tmp_path / "text"), **settings)
    found, _ = files.find_files(cfg.path, cfg.format)
    prepared = list(encoder.encode(files.read_pieces(found, cfg)))
    shortest = cfg.min_length or 1
    wanted = np.concatenate([p.ids for p in prepared if p.characters >= shortest])
    source = open_stream(cfg)
    read = list(segments(source, encoder, Place()))
    assert np.array_equal(np.concatenate([s.ids for s in read]), wanted)
    assert [s.ends for s in read] == [p.ends for p in prepared if p.characters >= shortest]
    cut = list(itertools.islice(cut_shards(endless(source, encoder, Place(), Place()), 4999), 1 + len(wanted) // 4999))
    twice = np.concatenate([wanted, wanted])
    assert np.array_equal(np.concatenate([s.ids for s in cut]), twice[: len(cut) * 4999])
    for number in random.Random(0).sample(range(len(cut) - 1), min(8, len(cut) - 1)):
        after = next(cut_shards(endless(source, encoder, Place(), cut[number].end), 4999))
        assert np.array_equal(after.ids, cut[number + 1].ids), cut[number].end
        assert np.array_equal(after.document_ends, cut[number + 1].document_ends)
        assert after.end == cut[number + 1].end


def test_shards_of_the_hub_from_any_row(
    data_config: Callable[..., DataConfig], tmp_path: Path, encoder: Encoder
) -> None:
    (tmp_path / "repo" / "data").mkdir(parents=True)
    for number in range(3):
        texts = [f"{number} {line}" for line in lines(number, 300)]
        pq.write_table(pa.table({"text": texts}), tmp_path / "repo" / "data" / f"train-{number}.parquet", 100)
    source = open_stream(data_config("c4", name=str(tmp_path / "repo"), config_name=None))
    assert source.parts == 3
    for part, start in ((0, 0), (1, 150), (2, 299)):
        wanted = [Block(n, f"{part} {line}", True) for n, line in enumerate(lines(part, 300))][start:]
        assert list(source.rows(part, start)) == wanted
    read = b"".join(segment.ids.astype("u1").tobytes() for segment in segments(source, encoder, Place(0, 1, 150)))
    assert read.startswith(b"1 " + lines(1, 300)[150].encode())


def test_documents_end_in_shards_where_their_last_token_is(
    data_config: Callable[..., DataConfig], tmp_path: Path, encoder: Encoder
) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": "x" * n}) for n in (3, 5, 1, 14)))
    stream = endless(open_stream(data_config("jsonl", path=str(tmp_path))), encoder, Place(), Place())
    first = list(itertools.islice(cut_shards(stream, 10), 3))
    # Documents of 4, 6, 2 and 15 tokens, the end-of-text token included.
    assert [s.document_ends.tolist() for s in first] == [[4, 10], [2], [7]]


@pytest.fixture
def head(tmp_path: Path, data_config: Callable[..., DataConfig], tokenizer_config: Callable[..., object]) -> Head:
    (tmp_path / "text").mkdir()
    write_jsonl(tmp_path / "text")
    cfg = data_config("jsonl", path=str(tmp_path / "text"), ring_val_tokens=500)
    return prepare_head(cfg, tokenizer_config("bytes"), progress=False)  # type: ignore[arg-type]


def test_the_head_is_what_training_leaves_out(head: Head) -> None:
    held = head.prepared.splits["val"]
    first = held.shards[0].read(0, held.tokens)
    after = np.concatenate([s.ids for s in segments(head.source, head.encoder, head.begin)])
    whole = np.concatenate([s.ids for s in segments(head.source, head.encoder, Place())])
    assert np.array_equal(np.concatenate([first, after]), whole)
    assert 500 <= held.tokens < 600
    assert held.shards[0].document_ends(1, held.tokens + 1)[-1] == held.tokens


RING = Ring(
    bytes=20_000,
    shard_rows=24,
    window_shards=4,
    seq_len=32,
    global_batch_size=10,
    dtype="uint16",
    isolate_documents=True,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ring").mkdir()
    return tmp_path / "ring"


@pytest.fixture
def stop() -> Iterator[list[Producer]]:
    """Yields a list of producers; those that a test appends are stopped at its end."""
    started: list[Producer] = []
    yield started
    for producer in started:
        producer.stop()


def begin(
    head: Head, ring: Ring, folder: Path, stop: list[Producer], window: int = 0, place: Place | None = None
) -> Producer:
    producer = Producer(head, ring, folder, window, place or head.begin, patience=0.0)
    stop.append(producer)
    producer.start()
    return producer


def reference(head: Head, ring: Ring, count: int) -> np.ndarray:
    """Returns the first rows after the head, int64 [count, seq_len + 1], from the text of two epochs."""
    first = [s.ids for s in segments(head.source, head.encoder, head.begin)]
    tokens = np.concatenate([*first, *first]).astype(np.int64)
    starts = [n // ring.shard_rows * ring.shard_tokens + n % ring.shard_rows * ring.seq_len for n in range(count)]
    return np.stack([tokens[s : s + ring.seq_len + 1] for s in starts])


def steps(
    folder: Path, producer: Producer, ring: Ring, first: int, last: int, rank: int = 0, ranks: int = 1
) -> list[dict]:
    found = StreamRows(ring)
    found.folder = folder
    sizes = Stages.constant(ring.global_batch_size)
    dataset = StepDataset(found, seed=3, sizes=sizes, micro_batch_size=5, max_epochs=None, rank=rank, world_size=ranks)
    read = []
    for step in range(first, last):
        assert producer.wait_for(ring.window_after(step), 60)
        read.append(dataset[step])
        if rank == ranks - 1:
            producer.discard_before(ring.window_of(step + 1))
    return read


def tokens_of(step: dict) -> np.ndarray:
    batches = [np.concatenate([b["input_ids"], b["labels"][:, -1:]], axis=1) for b in step["micro_batches"]]
    return np.concatenate(batches)


def test_each_row_of_a_window_once_and_never_more_than_the_ring(
    head: Head, folder: Path, stop: list[Producer], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []

    def replace_and_look(source: Path, target: Path) -> None:
        sizes.append(sum(file.stat().st_size for file in folder.iterdir()))
        os.rename(source, target)

    ring = replace(RING, isolate_documents=False, bytes=2 * 4 * (24 * 32 + 1) * 2)
    monkeypatch.setattr(producing.os, "replace", replace_and_look)
    producer = begin(head, ring, folder, stop)
    count = 5 * ring.window_rows
    read = np.concatenate([tokens_of(s) for s in steps(folder, producer, ring, 0, count // 10)])
    wanted = reference(head, ring, count)
    for window in range(5):
        part = slice(window * ring.window_rows, (window + 1) * ring.window_rows)
        assert sorted(map(tuple, read[part])) == sorted(map(tuple, wanted[part]))
        assert not np.array_equal(read[part], wanted[part])  # they are shuffled
    assert len(sizes) >= 5 * 4
    assert max(sizes) == ring.bytes


def test_it_goes_on_where_a_window_began(head: Head, folder: Path, stop: list[Producer], tmp_path: Path) -> None:
    whole = begin(head, RING, folder, stop)
    first = steps(folder, whole, RING, 0, 25)
    window = RING.window_of(25)
    assert window == 2
    place = whole.begins[window]
    rest = steps(folder, whole, RING, 25, 45)
    (tmp_path / "again").mkdir()
    resumed = begin(head, RING, tmp_path / "again", stop, window, Place(**json.loads(json.dumps(place._asdict()))))
    again = steps(tmp_path / "again", resumed, RING, 25, 45)
    assert [s["rows"] for s in again] == [s["rows"] for s in rest]
    for a, b in zip(again, rest, strict=True):
        for x, y in zip(a["micro_batches"], b["micro_batches"], strict=True):
            assert {key: value.tolist() for key, value in x.items()} == {
                key: value.tolist() for key, value in y.items()
            }
    assert (first[0]["micro_batches"][0]["position_ids"] == 0).any()


def test_ranks_read_parts_of_one_step(head: Head, folder: Path, stop: list[Producer]) -> None:
    producer = begin(head, RING, folder, stop)
    (one,), (left,), (right,) = (steps(folder, producer, RING, 0, 1, r, n) for r, n in ((0, 1), (0, 2), (1, 2)))
    both = np.concatenate([tokens_of(left), tokens_of(right)])
    assert sorted(map(tuple, both)) == sorted(map(tuple, tokens_of(one)))


class Breaks:
    """A source whose second part can't be read the first `times` times."""

    def __init__(self, source: StreamSource, times: int) -> None:
        self.source, self.times = source, times
        self.label, self.identity, self.parts, self.notes = source.label, source.identity, source.parts, source.notes

    def rows(self, part: int, start: int) -> Iterator[Block]:
        for number, block in enumerate(self.source.rows(part, start)):
            if part == 1 and number == 50 and self.times:
                self.times -= 1
                raise ReadError("the line is dead")
            yield block


def test_a_source_that_breaks_is_read_again_and_nothing_is_lost(
    head: Head, folder: Path, stop: list[Producer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(producing, "_FIRST_PAUSE", 0.0)
    broken = replace(head, source=Breaks(head.source, 4))
    producer = Producer(broken, RING, folder, 0, head.begin, patience=600.0)
    stop.append(producer)
    producer.start()
    count = 25 * RING.window_rows
    read = np.concatenate([tokens_of(s) for s in steps(folder, producer, RING, 0, count // 10)])
    wanted = reference(head, RING, count)
    assert sorted(map(tuple, read[:, :-1])) == sorted(map(tuple, wanted[:, :-1]))
    assert broken.source.times == 0


def test_one_that_stays_broken_says_so(head: Head, folder: Path, stop: list[Producer]) -> None:
    producer = begin(replace(head, source=Breaks(head.source, 10**9)), RING, folder, stop)
    for window in itertools.count():
        if not producer.wait_for(window, 60):
            break
        producer.discard_before(window + 1)
    assert isinstance(producer.error, ReadError)
    assert window >= 1  # windows read before the failure were delivered


def test_no_text_left_after_the_head(
    data_config: Callable[..., DataConfig],
    tokenizer_config: Callable[..., object],
    tmp_path: Path,
    folder: Path,
    stop: list[Producer],
) -> None:
    (tmp_path / "a.txt").write_text("Hello")
    cfg = data_config("text", path=str(tmp_path / "a.txt"), ring_val_tokens=6)
    head = prepare_head(cfg, tokenizer_config("bytes"), progress=False)  # type: ignore[arg-type]
    producer = begin(head, RING, folder, stop)
    assert not producer.wait_for(0, 60)
    with pytest.raises(UserError, match="holds no text after"):
        raise producer.error or AssertionError
    with pytest.raises(UserError, match="holds only 6 tokens"):
        prepare_head(replace(cfg, ring_val_tokens=7), tokenizer_config("bytes"), progress=False)  # type: ignore[arg-type]
