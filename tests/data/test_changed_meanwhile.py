"""Data that is written while it is prepared: refused, and nothing of it is kept under the key of other content."""

import json
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmtrain.data.corpus import ROW_FORMATS
from lmtrain.data.examples.prepare import prepare_examples
from lmtrain.data.store import contents
from lmtrain.data.store.bins import is_complete, open_bins
from lmtrain.data.stream.head import prepare_head
from lmtrain.data.text.prepare import prepare
from lmtrain.errors import UserError

HALF, WHOLE = [[f"{word} text number {n}" for n in range(40)] for word in ("early", "later")]


def as_text(path: Path, texts: list[str]) -> None:
    path.write_text("\n".join(texts) + "\n")


def as_jsonl(path: Path, texts: list[str]) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def as_csv(path: Path, texts: list[str]) -> None:
    path.write_text("text\n" + "".join(f"{text}\n" for text in texts))


def as_parquet(path: Path, texts: list[str]) -> None:
    pq.write_table(pa.table({"text": texts}), path)


def as_arrow(path: Path, texts: list[str]) -> None:
    table = pa.table({"text": texts})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


WRITERS = {"txt": as_text, "jsonl": as_jsonl, "csv": as_csv, "parquet": as_parquet, "arrow": as_arrow}


def once_digested(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Lets `change` happen between the first digest of the data and its being read."""
    digests, done = contents.Facts.digests, []

    def then_change(facts: contents.Facts, paths: list[Path], *rest: Any) -> dict[Path, str]:
        found = digests(facts, paths, *rest)
        if not done:
            done.append(change())
        return found

    monkeypatch.setattr(contents.Facts, "digests", then_change)


def nothing_is_kept(cache: Path) -> bool:
    return not [p for p in cache.iterdir() if is_complete(p) or p.suffix == ".json"] if cache.exists() else True


def text_of(prepared: Any) -> str:
    return "".join(
        prepared.tokenizer.decode(shard.read(0, shard.tokens).tolist())
        for name in prepared.splits
        for shard in open_bins(prepared.folder, name).shards
    )


@pytest.mark.parametrize("suffix", WRITERS)
def test_every_format(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_config: Any, tokenizer_config: Any
) -> None:
    path = tmp_path / f"data.{suffix}"
    option = "text" if suffix == "txt" else "parquet" if suffix in ("parquet", "arrow") else "jsonl"
    cfg = data_config(option, path=str(path), format="auto")
    WRITERS[suffix](path, HALF)
    once_digested(monkeypatch, lambda: WRITERS[suffix](path, WHOLE))
    with pytest.raises(UserError, match=rf"data.{suffix} was changed while it was read"):
        prepare(cfg, tokenizer_config(), progress=False)
    assert nothing_is_kept(tmp_path / "cache")
    found = text_of(prepare(cfg, tokenizer_config(), progress=False))
    assert "later text number 7" in found
    assert "early" not in found
    WRITERS[suffix](path, HALF)  # the content whose digest was taken: what was read meanwhile is not under its key
    found = text_of(prepare(cfg, tokenizer_config(), progress=False))
    assert "early text number 7" in found
    assert "later" not in found


def in_place_with_its_old_times(path: Path) -> None:
    before = path.stat()
    path.write_bytes(path.read_bytes().replace(b"early", b"later"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def through_a_memory_map(path: Path) -> None:
    """Changes a file whose times don't change, as those of a file written through a map do only when it is synced."""
    before = path.stat()
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[:] = bytes(mapped).replace(b"early", b"later")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    other = path.with_suffix(".new")
    as_text(other, WHOLE)
    os.replace(other, path)


def appended(path: Path) -> None:
    with path.open("a") as file:
        file.write("\n".join(WHOLE))


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


WAYS = [in_place_with_its_old_times, through_a_memory_map, replaced, appended, cut_short, Path.unlink]


@pytest.mark.parametrize("way", WAYS)
def test_every_way(
    way: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    data_config: Any,
    tokenizer_config: Any,
) -> None:
    path = tmp_path / "data.txt"
    as_text(path, HALF)
    once_digested(monkeypatch, lambda: way(path))
    with pytest.raises(UserError, match=r"data.txt (was changed while it was read|can't be read)"):
        prepare(data_config(path=str(path)), tokenizer_config(), progress=False)
    assert nothing_is_kept(tmp_path / "cache")


def test_permissions_are_no_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_config: Any, tokenizer_config: Any
) -> None:
    path = tmp_path / "data.txt"
    as_text(path, HALF)
    once_digested(monkeypatch, lambda: path.chmod(0o600))
    assert "early" in text_of(prepare(data_config(path=str(path)), tokenizer_config(), progress=False))


def test_repeats_that_were_found_in_other_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_config: Any, tokenizer_config: Any
) -> None:
    """data.dedup keeps the numbers of the repeats under the text's key."""
    path = tmp_path / "data.jsonl"
    as_jsonl(path, HALF)
    once_digested(monkeypatch, lambda: as_jsonl(path, [WHOLE[0]] * 40))
    cfg = data_config("jsonl", path=str(path), dedup="exact")
    with pytest.raises(UserError, match="was changed while it was read"):
        prepare(cfg, tokenizer_config(), progress=False)
    assert nothing_is_kept(tmp_path / "cache")
    as_jsonl(path, HALF)
    assert "early text number 7" in text_of(prepare(cfg, tokenizer_config(), progress=False))


def test_a_local_dataset_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_config: Any, tokenizer_config: Any
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    folder = tmp_path / "repository"
    folder.mkdir()
    as_jsonl(folder / "train.jsonl", HALF)
    once_digested(monkeypatch, lambda: as_jsonl(folder / "train.jsonl", WHOLE))
    cfg = data_config(
        "wikitext", name=str(folder), config_name=None, val_split=None, val_fraction=0.1, document_start=None
    )
    with pytest.raises(UserError, match=r"train.jsonl was changed while it was read"):
        prepare(cfg, tokenizer_config(), progress=False)
    assert nothing_is_kept(tmp_path / "cache")


def test_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_config: Any, tokenizer_config: Any) -> None:
    def write(word: str) -> None:
        rows = (
            {"messages": [{"role": "user", "content": f"{word} {n}"}, {"role": "assistant", "content": "yes"}]}
            for n in range(9)
        )
        (tmp_path / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("early")
    once_digested(monkeypatch, lambda: write("later"))
    cfg = data_config("chat_jsonl", path=str(tmp_path / "chat.jsonl"), chat_template="alpaca", max_length=None)
    with pytest.raises(UserError, match=r"chat.jsonl was changed while it was read"):
        prepare_examples(cfg, tokenizer_config(), ROW_FORMATS["conversations"], progress=False)
    assert nothing_is_kept(tmp_path / "cache")


def test_the_head_of_a_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_config: Any, tokenizer_config: Any
) -> None:
    from lmtrain.data.stream import head

    path = tmp_path / "data.txt"
    as_text(path, HALF)
    opened = head.open_stream
    monkeypatch.setattr(head, "open_stream", lambda cfg: (opened(cfg), as_text(path, WHOLE))[0])
    cfg = data_config(path=str(path), ring_bytes=10**6, ring_val_tokens=64)
    with pytest.raises(UserError, match=r"data.txt was changed while it was read"):
        prepare_head(cfg, tokenizer_config(), progress=False)
    assert nothing_is_kept(tmp_path / "cache")


def test_a_tokenizer_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_config: Any, tokenizer_config: Any
) -> None:
    as_text(tmp_path / "data.txt", HALF)
    made = prepare(data_config(path=str(tmp_path / "data.txt")), tokenizer_config(), progress=False)
    file = made.folder / "tokenizer" / "tokenizer.json"
    name = tmp_path / "tokenizer"
    made.tokenizer.save_pretrained(name)
    file = name / "tokenizer.json"
    once_digested(monkeypatch, lambda: None)
    from lmtrain.data import tokenizers

    identity = tokenizers.identity
    done: list[object] = []

    def then_change(cfg: Any) -> Any:
        found = identity(cfg)
        if not done:
            done.append(file.write_text(file.read_text() + "\n"))
        return found

    monkeypatch.setattr(tokenizers, "identity", then_change)
    with pytest.raises(UserError, match="was changed while it was read"):
        prepare(
            data_config(path=str(tmp_path / "data.txt"), min_length=2),
            tokenizer_config("hub", name_or_path=str(name)),
            progress=False,
        )


def test_ready_bins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data_config: Any, tokenizer_config: Any) -> None:
    folder = tmp_path / "bins"
    folder.mkdir()
    (folder / "train.bin").write_bytes(b"\0\1" * 1000)

    def change() -> None:
        (folder / "train.bin").write_bytes(b"\1\0\0\1" * 500)

    once_digested(monkeypatch, change)
    with pytest.raises(UserError, match=r"train.bin was changed while it was read"):
        prepare(data_config("bins", path=str(folder)), tokenizer_config(), progress=False)
