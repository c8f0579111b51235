"""Parquet and Arrow files that lie: offsets outside of a batch, indices outside of a dictionary, text in Latin-1."""

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lmtrain.data.sources.tables import read_table
from lmtrain.data.text.prepare import prepare
from lmtrain.errors import UserError


def as_stream(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


def as_file(path: Path, table: pa.Table) -> None:
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def rewritten(path: Path, good: list[int], bad: list[int], dtype: str) -> None:
    raw, before = path.read_bytes(), np.array(good, dtype).tobytes()
    assert raw.count(before) == 1
    path.write_bytes(raw.replace(before, np.array(bad, dtype).tobytes()))


TEXTS = ["a" * 301, "b" * 402, "c" * 503]
ENDS = [0, 301, 703, 1206]
LIES = {
    "after the end": (pa.array(TEXTS), ENDS, [0, 301, 703, 4206], "<i4"),
    "before the start": (pa.array(TEXTS), ENDS, [0, 301, -703, 1206], "<i4"),
    "backwards": (pa.array(TEXTS), ENDS, [0, 703, 301, 1206], "<i4"),
    "of large text": (pa.array(TEXTS, pa.large_string()), ENDS, [0, 301, 703, 2**40], "<i8"),
    "of a list": (pa.array([["a"] * 301, ["b"] * 402, ["c"] * 503]), ENDS, [0, 301, 703, 4206], "<i4"),
    "of a dictionary": (
        pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 1, 0, 2, 2, 1], pa.int32()), pa.array(TEXTS)),
        [0, 1, 2, 1, 0, 2, 2, 1], [0, 1, 2, 1, 0, 2, 77, 1], "<i4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("write", [as_stream, as_file])
@pytest.mark.parametrize("lie", LIES)
def test_nothing_outside_of_the_file_is_read(lie: str, write: Callable[..., None], tmp_path: Path) -> None:
    column, good, bad, dtype = LIES[lie]
    path = tmp_path / "a.arrow"
    write(path, pa.table({"text": column}))
    honest = [row["text"] for _, row in read_table(path, "arrow") if isinstance(row, dict)]
    assert honest == column.to_pylist()
    rewritten(path, good, bad, dtype)
    with pytest.raises(UserError, match=r"a\.arrow can't be read as Arrow: "):
        list(read_table(path, "arrow"))


def in_latin_1() -> pa.Array:
    """Returns texts of which the second is Latin-1, as writers that don't look write them."""
    raw = pa.array([b"good", "Gr\xfc\xdfe".encode("latin-1"), "größer".encode()])
    return pa.Array.from_buffers(pa.string(), 3, raw.buffers())


def inside(texts: pa.Array) -> pa.Array:
    """Returns conversations of one message each."""
    message = pa.StructArray.from_arrays([pa.array(["user"] * 3), texts], ["role", "content"])
    return pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), message)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
@pytest.mark.parametrize("nested", [False, True])
def test_text_that_is_not_utf_8_is_named_by_its_row(nested: bool, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    name = "messages" if nested else "text"
    table = pa.table({"n": [0, 1, 2], name: inside(in_latin_1()) if nested else in_latin_1()})
    pq.write_table(table, path) if suffix == "parquet" else as_stream(path, table)
    (_, first), (where, second), (_, third) = read_table(path, suffix)
    good = [[{"role": "user", "content": text}] if nested else text for text in ("good", "größer")]
    assert [first, third] == [{"n": 0, name: good[0]}, {"n": 2, name: good[1]}]
    assert where == f"{path}, row 1"
    assert second == f"column '{name}' is not UTF-8: write the text as UTF-8, or drop that row"


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_as_training_text(suffix: str, tmp_path: Path, data_config: Any, tokenizer_config: Any) -> None:
    path = tmp_path / f"a.{suffix}"
    table = pa.table({"text": in_latin_1()})
    pq.write_table(table, path) if suffix == "parquet" else as_stream(path, table)
    with pytest.raises(UserError, match=rf"a\.{suffix}, row 1: column 'text' is not UTF-8"):
        prepare(data_config("parquet", path=str(path), format=suffix), tokenizer_config(), progress=False)


def test_a_date_that_python_does_not_have(tmp_path: Path) -> None:
    days = pa.array([datetime.date(2020, 1, 1)]).cast(pa.int32())
    table = pa.table({"text": ["a"], "day": pa.array([days[0].as_py() * 1000], pa.int32()).cast(pa.date32())})
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet can't be read as parquet: "):
        list(read_table(tmp_path / "a.parquet", "parquet"))


def test_a_stream_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path, table = tmp_path / "a.arrow", pa.table({"text": TEXTS * 2})
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)  # several batches: a cut between two is no error of pyarrow
    whole = path.read_bytes()
    assert [row["text"] for _, row in read_table(path, "arrow") if isinstance(row, dict)] == TEXTS * 2
    for length in range(1, len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"a\.arrow "):
            list(read_table(path, "arrow"))
