"""Rows of token ids that other programs wrote: Parquet and Arrow files of `datasets`, and shards of MDS.

Their tokens stand between other bytes, or compressed, so they are written once into one file of tokens. A row's
`labels` (-100: not learned), `loss_mask`, `completion_mask` and `assistant_masks` become its loss mask; tokens whose
`attention_mask` is 0 are padding, and left out.

Sources: huggingface/datasets arrow_dataset.py (save_to_disk); mosaicml/streaming base/format/mds.
"""

import itertools
import json
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.config.proposers import column_names
from lmtrain.data.sources.tables import arrow_batches, read_as
from lmtrain.data.sources.token_files import CUT, TokenLayout, by_split, parsed, sized
from lmtrain.errors import UserError

IDS = ("input_ids", "tokens")  # the column of token ids, the first of these that there is
_MASKS = ("labels", "loss_mask", "completion_mask", "assistant_masks", "attention_mask")
_NOT_LEARNED = -100  # in `labels`
_ROWS = 1024  # rows of a columnar file read at a time


@dataclass(frozen=True)
class TokenRows:
    """Some rows of a file: their tokens one after the other, the tokens in each row, and which are learned."""

    ids: np.ndarray  # int64 [n]
    lengths: np.ndarray  # int64 [rows], summing to n
    learned: np.ndarray | None  # bool [n]; None: all


Columns = dict[str, tuple[np.ndarray, np.ndarray]]  # of some rows, by name: the values, and how many each row has


def columnar(files: list[Path]) -> TokenLayout:
    """Returns the layout of Parquet or Arrow files that have a column of ids; `save_to_disk` says which these are."""
    states = [file for file in files if file.name == "state.json"]
    listed = {file.parent / str(one["filename"]) for file in states for one in parsed(file)["_data_files"]}
    folders = {file.parent for file in states}
    read = listed | {f for f in files if f.suffix in (".parquet", ".arrow") and f.parent not in folders}
    _refuse_missing(sorted(read))
    for file in read:
        if not is_columnar(file):
            raise UserError(f"{file} has no column {IDS[0]}, as other files there: name the folder of those that have")
    return TokenLayout("datasets", by_split(sorted(read)), rows=_columnar_rows, also=states)


def is_columnar(file: Path) -> bool:
    """Returns whether a Parquet or Arrow file has a column of ids; raises UserError if it can't be read."""
    if file.suffix not in (".parquet", ".arrow"):
        return False
    with read_as(file.suffix[1:], file):
        return IDS[0] in column_names(file)


def _refuse_missing(files: list[Path]) -> None:
    """Raises UserError if a file is missing: by state.json, or of those named such as train-00000-of-00002."""
    missing = next((file for file in files if not file.is_file()), None)
    if missing is not None:
        raise UserError(f"{missing} is missing, which state.json names")
    named = [(file.parent, m[1], int(m[2])) for file in files if (m := re.match(r"(.*)-\d+-of-(\d+)\.\w+$", file.name))]
    for key, same in itertools.groupby(sorted(named)):
        folder, name, wanted = key
        if (found := len(list(same))) != wanted:
            raise UserError(
                f"{folder} holds {found} of the {wanted} files {name}-...-of-{wanted:05d}: copy all of them"
            )


def _columnar_rows(file: Path) -> Iterator[TokenRows]:
    import pyarrow.parquet as pq

    with read_as(file.suffix[1:], file):
        names = column_names(file)
    columns = [name for name in (IDS[0], *_MASKS) if name in names]
    if file.suffix == ".arrow":
        batches = arrow_batches(file, columns)
    else:
        batches = pq.ParquetFile(file).iter_batches(batch_size=_ROWS, columns=columns)
    with read_as(file.suffix[1:], file):
        for batch in batches:
            batch.validate(full=True)
            yield block({name: _values(batch.column(name), f"{file}, {name}") for name in columns}, file)


def _values(column: Any, where: str) -> tuple[np.ndarray, np.ndarray]:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = column.type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    if not is_list or not (pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)):
        raise UserError(f"{where} holds {kind}, not lists of integers")
    values = column.flatten()
    if column.null_count or values.null_count:
        raise UserError(f"{where} has a null: token ids are needed in every row")
    return values.to_numpy(zero_copy_only=False).astype(np.int64), pc.list_value_length(column).to_numpy().astype(int)


def block(columns: Columns, where: Path) -> TokenRows:
    """Returns rows with their loss mask; raises UserError if a mask has other lengths, or labels other tokens."""
    name = next(name for name in IDS if name in columns)
    ids, lengths = columns[name]
    masks = {}
    for other in (other for other in _MASKS if other in columns):
        values, counts = columns[other]
        if not np.array_equal(counts, lengths):
            raise UserError(f"{where}: a row has another number of {other} than of {name}: write them anew")
        masks[other] = values != (_NOT_LEARNED if other == "labels" else 0)
        if other == "labels" and (values != ids)[masks[other]].any():
            found = "labels are other tokens than input_ids, where they are not -100"
            raise UserError(f"{where}: {found}: write them unshifted, or leave the column out if all is learned")
    kept = masks.pop("attention_mask", np.ones(len(ids), dtype=bool))
    rows = np.repeat(np.arange(len(lengths)), lengths)
    learned = np.logical_and.reduce(list(masks.values()))[kept] if masks else None
    return TokenRows(ids[kept], np.bincount(rows[kept], minlength=len(lengths)), learned)


# MDS: index.json, and shards of n, n + 1 offsets (uint32), the index's entry again, then the rows


def mds(files: list[Path]) -> TokenLayout:
    """Returns the layout of the shards that each index.json names."""
    shards = {}
    indexes = [file for file in files if file.name == "index.json"]
    if not indexes:
        raise UserError(f"{files[0].parent} holds shards of MDS without their index.json: {CUT}")
    for index in indexes:
        for entry in parsed(index)["shards"]:
            if entry["compression"] or entry["zip_data"]:
                advice = "write them with MDSWriter(compression=None), or decompress them and set it to null there"
                raise UserError(f"{index}: the shards are compressed ({entry['compression']}): {advice}")
            shards[index.parent / entry["raw_data"]["basename"]] = entry
    for file in (f for f in files if f.suffix == ".mds" and f not in shards):
        raise UserError(f"{file} is not named by an index.json: {CUT}")
    return TokenLayout("MDS", by_split(list(shards)), rows=lambda f: _mds_rows(f, shards[f]), also=indexes)


def is_mds(files: list[Path]) -> bool:
    return any(f.suffix == ".mds" or (f.name == "index.json" and b'"mds"' in f.read_bytes()) for f in files)


def _mds_rows(file: Path, entry: dict[str, Any]) -> Iterator[TokenRows]:
    if not file.is_file():
        raise UserError(f"{file} is missing, which index.json names")
    sized(file, entry["raw_data"]["bytes"], "the rows that index.json names")
    columns = list(zip(entry["column_names"], entry["column_encodings"], entry["column_sizes"], strict=True))
    decoders = {name: _decoder(code) for name, code, _ in columns if name in (*IDS, *_MASKS)}
    if not any(name in decoders for name in IDS):
        raise UserError(f"{file} has the columns {', '.join(entry['column_names'])}, not {' or '.join(IDS)}")
    raw, count = file.read_bytes(), int(entry["samples"])
    at = np.frombuffer(raw, "<u4", min(count + 2, len(raw) // 4)).astype(np.int64)
    own = _own_entry(raw, 4 * (count + 2), int(at[1]) if len(at) > 1 else 0)
    if len(at) != count + 2 or at[0] != count or at[-1] != len(raw) or (np.diff(at[1:]) < 0).any() or own is None:
        raise UserError(f"{file} doesn't begin with the places of the {count:,} rows that index.json names: {CUT}")
    if any(own.get(key) != entry[key] for key in ("column_names", "column_encodings", "column_sizes")):
        raise UserError(f"{file} has other columns than index.json names: {CUT}")
    rows = [_decoded(raw[begin:end], columns, decoders) for begin, end in itertools.pairwise(at[1:].tolist())]
    found = {name: [row[name] for row in rows] for name in decoders}
    if rows:
        yield block({n: (np.concatenate(v), np.array([len(one) for one in v])) for n, v in found.items()}, file)


def _own_entry(raw: bytes, begin: int, end: int) -> dict[str, Any] | None:
    """Returns the entry that a shard repeats before its rows; None if it can't be read."""
    try:
        found = json.loads(raw[begin:end])
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _decoded(
    row: bytes, columns: list[tuple[str, str, int | None]], decoders: dict[str, Callable[[bytes], np.ndarray]]
) -> dict[str, np.ndarray]:
    varying = sum(size is None for _, _, size in columns)
    sizes = iter(struct.unpack_from(f"<{varying}I", row))
    at, found = 4 * varying, {}
    for name, _, fixed in columns:
        size = next(sizes) if fixed is None else fixed
        if name in decoders:
            found[name] = decoders[name](row[at : at + size]).astype(np.int64)
        at += size
    if at != len(row):
        raise ValueError(f"a row of {len(row)} bytes, whose columns take {at}")
    return found


def _decoder(encoding: str) -> Callable[[bytes], np.ndarray]:
    """Returns what reads a column of `encoding`: ndarray[:dtype[:shape]], or bytes, in which llm-foundry has int64."""
    kind, _, rest = encoding.partition(":")
    dtype, _, shape = rest.partition(":")
    if kind == "bytes":
        return lambda data: np.frombuffer(data, "<i8")
    if kind != "ndarray" or dtype not in ("", *_MDS_CODES.values()) or "," in shape:
        raise UserError(f"a column of MDS with encoding {encoding!r} holds no token ids: ndarray:int32, say, does")

    def read(data: bytes) -> np.ndarray:
        of, data = (dtype, data) if dtype else (_MDS_CODES[data[0]], data[1:])
        if shape:
            return np.frombuffer(data, np.dtype(of).newbyteorder("<"), int(shape))
        axes, width = data[0] >> 2, 1 << data[0] % 4
        length = int.from_bytes(data[1 : 1 + width], "little")
        values = np.frombuffer(data[1 + width :], np.dtype(of).newbyteorder("<"))
        if axes != 1 or len(values) != length:
            raise ValueError(f"an array of {axes} axes and {len(values)} values, not {length}")
        return values

    return read


_MDS_CODES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}
