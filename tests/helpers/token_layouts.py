"""Small folders of token files, written from the definitions of other programs' formats."""

import csv
import gzip
import json
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Documents = Sequence[Sequence[int]]


def datatrove(folder: Path, documents: Documents, size: int = 2, name: str = "00000_unshuffled") -> None:
    ids, ends = _joined(documents)
    ids.astype(f"<u{size}").tofile(folder / f"{name}.ds")
    ends.astype("<u8").tofile(folder / f"{name}.ds.index")
    (folder / f"{name}.ds.metadata").write_text(f"bytes|{size}\n{len(ids)}\n{len(ids)} T")


def megatron(folder: Path, documents: Documents, code: int = 8, sentences: int = 1, name: str = "text") -> None:
    """sentences: the number of sequences of each document."""
    ids, _ = _joined(documents)
    dtype = np.dtype({4: "<i4", 8: "<u2", 5: "<i8"}[code])
    parts = [part for one in documents for part in np.array_split(np.array(one), sentences)]
    lengths = np.array([len(part) for part in parts])
    ids.astype(dtype).tofile(folder / f"{name}_text_document.bin")
    at = (np.cumsum(lengths) - lengths) * dtype.itemsize
    borders = np.arange(len(documents) + 1) * sentences
    (folder / f"{name}_text_document.idx").write_bytes(
        b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(borders)) + lengths.astype("<i4").tobytes()
        + at.astype("<i8").tobytes() + borders.astype("<i8").tobytes()
    )  # fmt: skip


def litdata(folder: Path, documents: Documents, dtype: str = "<i4", form: str = "no_header_tensor:16") -> None:
    chunks = []
    for number, some in enumerate((documents[: len(documents) // 2], documents[len(documents) // 2 :])):
        ids, ends = _joined(some)
        item = np.dtype(dtype).itemsize
        places = 4 * (len(some) + 2) + np.append(0, ends) * item
        raw = np.array([len(some), *places], "<u4").tobytes() + ids.astype(dtype).tobytes()
        (folder / f"chunk-0-{number}.bin").write_bytes(raw)
        chunks.append(
            {"chunk_bytes": len(raw), "chunk_size": len(some), "dim": len(ids), "filename": f"chunk-0-{number}.bin"}
        )
    config = {"compression": None, "encryption": None, "data_format": [form], "item_loader": "TokensLoader"}
    (folder / "index.json").write_text(json.dumps({"chunks": chunks, "config": config, "updated_at": "1"}))


def dolma(folder: Path, documents: Documents, dtype: str = "<u2") -> None:
    ids, ends = _joined(documents)
    ids.astype(dtype).tofile(folder / "part-0-00000.npy")
    with gzip.open(folder / "part-0-00000.csv.gz", "wt", newline="") as file:
        for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            csv.writer(file).writerow([start, end, f"id-{number}", "a.jsonl.gz", number])


def llmc(folder: Path, documents: Documents, magic: int = 20240520, version: int = 1, dtype: str = "<u2") -> None:
    """The documents begin with their last token, as llm.c's do."""
    ids, _ = _joined([[one[-1], *one[:-1]] for one in documents])
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids)
    (folder / "fineweb_train_000001.bin").write_bytes(header.tobytes() + ids.astype(dtype).tobytes())


def nanogpt(folder: Path, documents: Documents, dtype: str = "<u2") -> None:
    _joined(documents)[0].astype(dtype).tofile(folder / "train.bin")


def numpy_array(folder: Path, documents: Documents) -> None:
    np.save(folder / "edu_train_000001.npy", _joined(documents)[0].astype("<u2"))


def mds(folder: Path, documents: Documents, encoding: str = "ndarray:int32") -> None:
    rows = []
    for one in documents:
        shape = bytes([1 << 2]) + bytes([len(one)]) if encoding == "ndarray:int32" else b""
        value = shape + np.array(one, "<i4" if shape else "<i8").tobytes()
        rows.append(struct.pack("<I", len(value)) + value)
    entry: dict[str, Any] = {"column_encodings": [encoding], "column_names": ["tokens"], "column_sizes": [None]}
    entry |= {"compression": None, "format": "mds", "hashes": [], "size_limit": 1 << 26, "version": 2}
    own = json.dumps(entry, sort_keys=True).encode()
    places = 4 * (len(rows) + 2) + len(own) + np.append(0, np.cumsum([len(row) for row in rows]))
    raw = np.array([len(rows), *places], "<u4").tobytes() + own + b"".join(rows)
    (folder / "shard.00000.mds").write_bytes(raw)
    entry |= {"raw_data": {"basename": "shard.00000.mds", "bytes": len(raw), "hashes": {}}, "samples": len(rows)}
    (folder / "index.json").write_text(json.dumps({"shards": [entry | {"zip_data": None}], "version": 2}))


def table(documents: Documents, **columns: Any) -> Any:
    import pyarrow as pa

    lists = {"input_ids": pa.array([list(one) for one in documents], pa.list_(pa.int32()))}
    return pa.table({**lists, **{name: pa.array(rows) for name, rows in columns.items()}})


def parquet(folder: Path, documents: Documents, **columns: Any) -> None:
    import pyarrow.parquet as pq

    pq.write_table(table(documents, **columns), folder / "train-00000-of-00001.parquet")


def saved_to_disk(folder: Path, documents: Documents, **columns: Any) -> None:
    import pyarrow as pa

    rows = table(documents, **columns)
    with pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file, pa.ipc.new_stream(file, rows.schema) as to:
        for batch in rows.to_batches(max_chunksize=4):
            to.write_batch(batch)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")


# Every layout, each with the ids and ends of the documents as they are given, except for those of llm.c.
LAYOUTS: dict[str, Callable[[Path, Documents], None]] = {
    "nanogpt": nanogpt,
    "nanogpt of 32 bits": lambda folder, documents: nanogpt(folder, documents, "<u4"),
    "llm.c": llmc,
    "llm.c for Llama 3": lambda folder, documents: llmc(folder, documents, 20240801, 7, "<u4"),
    "datatrove": datatrove,
    "datatrove of 32 bits": lambda folder, documents: datatrove(folder, documents, 4),
    "megatron": megatron,
    "megatron of sentences": lambda folder, documents: megatron(folder, documents, 4, sentences=2),
    "litdata": litdata,
    "litdata of arrays": lambda folder, documents: litdata(folder, documents, "<u2", "no_header_numpy:5"),
    "dolma": dolma,
    "numpy": numpy_array,
    "mds": mds,
    "mds of bytes": lambda folder, documents: mds(folder, documents, "bytes"),
    "parquet": parquet,
    "saved to disk": saved_to_disk,
}


def _joined(documents: Documents) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([np.asarray(one, dtype=np.int64) for one in documents]), np.cumsum(
        [len(d) for d in documents]
    )
