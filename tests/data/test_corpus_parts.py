"""What is known about a corpus besides its rows, each by hand: sizes, shares, names of what is scored, and pauses."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmtrain.config.fingerprint import short_hash
from lmtrain.data import corpus, framing, val_sets
from lmtrain.data.sources.choose import expected_bytes
from lmtrain.data.store import prepared
from lmtrain.data.stream import ring
from lmtrain.data.stream.source import Place
from lmtrain.errors import ReadError


def test_bytes_of_a_target_are_those_of_the_text_by_the_tokens_that_are_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start = [1]
    monkeypatch.setattr(framing, "start_of", lambda tokenizer: start)
    tokenizer: Any = SimpleNamespace(bos_token_id=7)

    def split(tokens: int, documents: int | None, size: int | None, begins: list[int]) -> Any:
        return SimpleNamespace(tokens=tokens, documents=documents, bytes=size, begins_with=lambda s: s == begins)

    def found(*splits: Any, isolate: bool = True, packing: str | None = None) -> float | None:
        data: Any = SimpleNamespace(isolate_documents=isolate, packing=packing)
        return corpus.bytes_per_target(list(splits), data, tokenizer)

    one, other = split(60, 10, 100, [1]), split(90, 20, 130, [2])
    assert found(one) == 100 / 50, "the first token of a document is not predicted"
    assert found(one, isolate=False) == 100 / 60
    assert found(one, isolate=False, packing="off") == 100 / 50
    assert found(one, other) == 230 / 140
    assert found(split(60, None, 100, [1])) == 100 / 60
    assert found(one, split(60, 10, None, [1])) is None
    assert found() is None
    start = []
    assert found(one) == 100 / 60
    assert found(split(60, 10, 100, [7])) == 100 / 50


def test_a_fraction_that_holds_one_row_out_is_advised() -> None:
    def advice(rows: int | None, source: str = "files") -> str:
        held: Any = SimpleNamespace(splits={"train": {} if rows is None else {"rows": rows}})
        data: Any = SimpleNamespace(source=source)
        return corpus.Corpus.how_to_validate(held, data).partition(" ")[0].removeprefix("data.val_fraction=")

    assert [advice(rows) for rows in (None, 2, 3, 5, 99, 100, 101, 5000)] == [
        "0.01", "0.5", "0.34", "0.2", "0.02", "0.01", "0.01", "0.01",
    ]  # fmt: skip
    assert advice(1) == "data.val_path"
    assert advice(5, "bins") == "name"


def test_scores_are_named_by_the_rows_that_they_are_measured_on() -> None:
    own, wiki = range(10), range(5)
    held: Any = SimpleNamespace(val=own, fingerprint="own")
    sets: Any = {"wiki": val_sets.ValSet(wiki, None, "other", [])}  # type: ignore[arg-type]
    for monitor in ("val/loss", "val/gone/loss", "train/wiki"):
        assert val_sets.measured_on(held, sets, monitor) == (own, "own")
    assert val_sets.measured_on(held, sets, "val/wiki/loss") == (wiki, "other")

    def name(monitor: str, limit: int | None) -> str | None:
        config: Any = SimpleNamespace(
            data=SimpleNamespace(micro_batch_size=3), trainer=SimpleNamespace(limit_val_batches=limit)
        )
        return val_sets.scored_on(config, held, sets, monitor)

    assert name("val/loss", 2) == short_hash(["own", 6])
    assert name("val/loss", None) == name("val/loss", 4) == short_hash(["own", 10])
    assert name("val/wiki/loss", 2) == short_hash(["other", 5])
    held.val = None
    assert name("val/loss", 2) is None


def test_packed_rows_count_by_their_examples() -> None:
    class Pairs(list[int]):
        group = 2

    packed: Any = SimpleNamespace(examples=Pairs(range(12)))
    assert val_sets.count(packed) == 6
    assert val_sets.count(range(9)) == 9  # type: ignore[arg-type]


def test_a_split_is_expected_to_have_its_share_of_the_text() -> None:
    def found(name: str, sizes: dict[str, int | None], fraction: float = 0.1, most: int | None = None) -> int | None:
        source: Any = SimpleNamespace(text_bytes=sizes.get, pieces=lambda name: [] if name in sizes else None)
        return expected_bytes(source, SimpleNamespace(num_samples=most, val_fraction=fraction), name)  # type: ignore[arg-type]

    assert [found(name, {"train": 1000}) for name in ("train", "val")] == [900, 100]
    assert [found(name, {"train": 1000, "val": 50}) for name in ("train", "val")] == [1000, 50]
    assert found("train", {"train": None}) is None
    assert found("train", {"train": 1000}, most=5) is None


def test_a_full_disk_is_told_with_what_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=5_000_000))
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "x.bin").write_bytes(b"x" * 150_000)
    (tmp_path / "a" / "b" / "y.bin").write_bytes(b"x" * 50_000)
    for total, done, needed in (
        (4000, 1000, "about 0.8 MB"), (500, 1000, "about 0.2 MB"), (None, 1000, "more than the 0.2 MB written so far"),
        (4000, 0, "more than the 0.2 MB written so far"),
    ):  # fmt: skip
        show: Any = SimpleNamespace(total=total, text_bytes=done)
        words = f"the disk is full: preparing needs {needed} in {tmp_path}, where 5.0 MB are left. Free"
        assert prepared._explain_full(tmp_path / "a", show).startswith(words)


def test_the_name_of_a_folder_is_a_name_of_files() -> None:
    cfg: Any = SimpleNamespace(cache_dir="cache")
    found = prepared.folder_of(cfg, "a b/ü" + "x" * 300, {"n": 1})
    assert found == Path("cache", f"a-b-{'x' * 196}-{short_hash({'n': 1})[:12]}")
    assert len(found.name) == 213


def test_a_source_that_fails_is_asked_again_after_longer_and_longer_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    def pauses(patience: float, better: int | None = None) -> list[float]:
        """better: the attempt that writes a shard before it fails."""
        producer = ring.Producer(None, SimpleNamespace(window_shards=4), Path(), 0, Place(), patience)  # type: ignore[arg-type]
        now, waited, tried = [7.0], list[float](), [0]

        def wait(done: Any, seconds: float) -> bool:
            assert not done()
            waited.append(seconds)
            now[0] += seconds
            return False

        def produce() -> None:
            tried[0] += 1
            producer._next += tried[0] == better
            raise ReadError("the line is dead")

        monkeypatch.setattr(ring, "time", SimpleNamespace(monotonic=lambda: now[0]))
        monkeypatch.setattr(producer, "_changed", Condition(wait))
        monkeypatch.setattr(producer, "_produce", produce)
        producer._run()
        assert str(producer.error) == "the line is dead"
        return waited

    assert pauses(0.0) == []
    assert pauses(121.5) == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert pauses(1.5, better=3) == [0.5, 1.0, 0.5, 1.0]


class Condition:
    """A threading.Condition whose waiting is a function."""

    def __init__(self, wait: Any) -> None:
        self.wait_for = wait

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...
    def notify_all(self) -> None: ...
