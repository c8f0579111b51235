"""Token files of other programs: which layout a folder has, and for each of its files where the tokens and ends are.

Every layout is a sequence of files, each with a dtype, a byte where its tokens begin, and the ends of its documents.
Tokens are read where they lie. Only those that stand in rows between other bytes (Parquet, Arrow, MDS) come row by row
(data/sources/token_rows.py).

Sources, for the byte layouts: karpathy/nanoGPT data/openwebtext/prepare.py; karpathy/llm.c dev/data/data_common.py;
KellerJordan/modded-nanogpt; huggingface/datatrove pipeline/tokens/tokenizer.py; NVIDIA/Megatron-LM
megatron/core/datasets/indexed_dataset.py; Lightning-AI/litDATA streaming/item_loader.py (TokensLoader); allenai/dolma
tokenizer/memmap_writer.py.
"""

import csv
import gzip
import json
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.data.store.shards import Extent
from lmtrain.errors import UserError
from lmtrain.files import open_regular, read_regular

MOST_IDS = 2**20  # no tokenizer has more
_LOOKED_AT = 1 << 21  # bytes from which a dtype is decided
_ENOUGH = 16  # tokens that decide it
_MOSTLY = 0.9  # share of zeros (or as small) at every second place with which these are no tokens of 16 bits
CUT = "it was cut short or damaged: copy or write it again"


@dataclass(frozen=True)
class TokenFile:
    """Tokens of one file, and what is recorded of them.

    ends: ascending ends of documents, exclusive, in tokens of the file, int64; None if they are not recorded.
    mask: a file with one byte for each token, 1 where it is learned.
    tokenizer: the recorded name of the tokenizer.
    """

    part: Extent
    ends: np.ndarray | None = None
    mask: Path | None = None
    tokenizer: str | None = None


@dataclass(frozen=True)
class TokenLayout:
    """The files of a folder by split, and how each is read.

    read: returns where a file's tokens are; raises one of DAMAGED for a file that is damaged.
    rows: in place of it, for tokens that stand in rows: yields them (see token_rows.py).
    begins: whether each document begins with its border token instead of ending with it; None: as the files show.
    also: further files that what is read depends on.
    """

    name: str
    files: dict[str, list[Path]]
    read: Callable[[Path], TokenFile] | None = None
    rows: Callable[[Path], Iterator[Any]] | None = None
    begins: bool | None = None
    also: list[Path] = field(default_factory=list)


_SPLITS = {"val": "val", "valid": "val", "validation": "val", "test": "test"}


def by_split(files: list[Path]) -> dict[str, list[Path]]:
    """Sorts files by the words of their names and folders: validation, test, or else train.

    Tests are left out, unless there is nothing to train on beside them.
    """
    top = len(Path(os.path.commonpath([file.parent for file in files])).parts)
    found: dict[str, list[Path]] = {"train": [], "val": [], "test": []}
    for file in files:
        words = re.split(r"[^a-z]+", "/".join(file.parts[top:]).lower())
        found[next((_SPLITS[word] for word in words if word in _SPLITS), "train")].append(file)
    if not found["train"]:
        return {"train": files}
    return {name: some for name, some in found.items() if some and name != "test"}


def sized(file: Path, wanted: int, holds: str) -> None:
    found = file.stat().st_size
    if found != wanted:
        raise UserError(f"{file} has {found:,} bytes, but {holds} take {wanted:,}: {CUT}")


def checked_ends(ends: np.ndarray, tokens: int, where: Path) -> np.ndarray:
    """Returns document ends without those of empty documents; raises UserError unless they ascend up to `tokens`."""
    ends = ends.astype(np.int64)
    if tokens and (len(ends) == 0 or ends[0] < 0 or ends[-1] != tokens or (np.diff(ends) < 0).any()):
        last = f"{ends[-1]:,}" if len(ends) else "nothing"
        raise UserError(f"{where}: its document ends don't ascend to {tokens:,} tokens, the last is {last}: {CUT}")
    return np.unique(ends[ends > 0])


def parsed(file: Path) -> Any:
    """Returns the JSON of a file; raises UserError if it can't be read."""
    try:
        return json.loads(read_regular(file))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} can't be read: {error}: {CUT}") from None


# datatrove: X.ds, X.ds.index (uint64 ends), X.ds.metadata ("name|2", tokens, ...), X.ds.loss (a byte for each token)


def _datatrove(files: list[Path]) -> TokenLayout:
    return TokenLayout("datatrove", by_split([f for f in files if f.suffix == ".ds"]), _read_datatrove,
                  also=[f for f in files if ".ds." in f.name])  # fmt: skip


def _read_datatrove(file: Path) -> TokenFile:
    index, metadata, loss = (file.with_name(f"{file.name}.{suffix}") for suffix in ("index", "metadata", "loss"))
    if not index.is_file():
        raise UserError(f"{index} is missing: it holds the document ends of {file.name} (datatrove's save_index)")
    raw = index.read_bytes()
    if len(raw) % 8:
        raise UserError(f"{index} has {len(raw):,} bytes, not a multiple of 8: {CUT}")
    ends = np.frombuffer(raw, "<u8").astype(np.int64)
    tokens, name = int(ends[-1]) if len(ends) else 0, None
    size = str(file.stat().st_size // tokens if tokens > 0 else 2)
    if metadata.is_file():
        first, count = [*metadata.read_text().splitlines(), "", ""][:2]
        name, _, size = first.rpartition("|")
        if count != str(tokens):
            raise UserError(f"{metadata} says {count or 'nothing'} of tokens, and {index.name} {tokens:,}: {CUT}")
    if size not in ("2", "4"):
        raise UserError(f"{file} has tokens of {size} bytes by its index or metadata, not of 2 or 4: {CUT}")
    sized(file, tokens * int(size), f"{tokens:,} tokens of {size} bytes")
    if loss.is_file():
        sized(loss, tokens, f"a byte for each of {tokens:,} tokens")
    known = name if name and not name.startswith("Unknown Tokenizer") else None
    return TokenFile(Extent(file, f"<u{size}", 0, tokens), checked_ends(ends, tokens, index),
                     loss if loss.is_file() else None, known)  # fmt: skip


# Megatron: X.bin and X.idx, which holds the lengths of sequences and which of them begin a document

_MEGATRON = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are float


def _megatron(files: list[Path]) -> TokenLayout:
    tokens = [f.with_suffix(".bin") for f in files if f.suffix == ".idx"]
    without = next((f for f in files if f.suffix == ".bin" and f not in tokens), None)
    if without is not None:
        raise UserError(f"{without} has no .idx beside it, as the other files of Megatron: {CUT}")
    return TokenLayout("Megatron", by_split(tokens), _read_megatron, also=[f for f in files if f.suffix == ".idx"])


def _read_megatron(file: Path) -> TokenFile:
    index = file.with_suffix(".idx")
    if not file.is_file():
        raise UserError(f"{file} is missing beside {index.name}")
    raw = index.read_bytes()
    if raw[:9] != b"MMIDIDX\0\0" or raw[9:17] != struct.pack("<Q", 1) or len(raw) < 34:
        raise UserError(f"{index} is not an index of Megatron, version 1 (it begins with {raw[:17]!r}): {CUT}")
    code, sequences, borders = struct.unpack_from("<BQQ", raw, 17)
    if code not in _MEGATRON:
        raise UserError(f"{index} names dtype {code}, and tokens are one of {sorted(_MEGATRON)}: {CUT}")
    size = 34 + 12 * sequences + 8 * borders
    if len(raw) == size + sequences and any(raw[size:]):
        raise UserError(f"{index} has modes, as that of images and text: only text can be read")
    if len(raw) != size + sequences:
        sized(index, size, f"{sequences:,} sequences and {borders:,} borders of documents")
    lengths = np.frombuffer(raw, "<i4", sequences, 34).astype(np.int64)
    at = np.frombuffer(raw, "<i8", sequences, 34 + 4 * sequences)
    first = np.frombuffer(raw, "<i8", borders, 34 + 12 * sequences)
    stops, item = np.append(0, np.cumsum(lengths)), np.dtype(_MEGATRON[code]).itemsize
    if (lengths < 0).any() or (at != stops[:-1] * item).any():
        raise UserError(f"{index}: the sequences don't lie one after the other: {CUT}")
    if borders < 1 or first[0] != 0 or first[-1] != sequences or (np.diff(first) < 0).any():
        raise UserError(f"{index}: the documents don't go from sequence 0 to {sequences:,}: {CUT}")
    tokens = int(stops[-1])
    sized(file, tokens * item, f"{tokens:,} tokens of {item} bytes")
    return TokenFile(Extent(file, _MEGATRON[code], 0, tokens), checked_ends(stops[first[1:]], tokens, index))


# litdata: index.json, and chunks of n, n + 1 offsets (uint32), then the tokens of n items

_LITDATA = {
    "no_header_tensor": {11: "u1", 13: "<i2", 14: "<i2", 15: "<i4", 16: "<i4", 17: "<i8", 18: "<i8", 20: "<u2"},
    "no_header_numpy": {1: "<i2", 2: "<i4", 3: "<i8", 4: "u1", 5: "<u2", 6: "<u4", 7: "<u8"},
}


def _litdata(files: list[Path]) -> TokenLayout:
    chunks, dtypes = {}, {}
    indexes = _indexes(files)
    for index in indexes:
        content = parsed(index)
        config = content["config"]
        packed = next((key for key in ("compression", "encryption") if config.get(key)), None)
        if packed:
            advice = f"write the chunks again with optimize(..., {packed}=None)"
            raise UserError(f"{index}: the chunks have {packed} {config[packed]!r}, and are read in place: {advice}")
        kind, _, code = str((config.get("data_format") or [""])[0]).partition(":")
        dtype = _LITDATA.get(kind, {}).get(int(code) if code.isdecimal() else -1)
        if dtype is None or len(config["data_format"]) != 1:
            held = f"{index} names the items {config.get('data_format')!r}, not one tensor or array of token ids"
            raise UserError(f"{held}: write them with optimize(..., item_loader=TokensLoader())")
        for chunk in content["chunks"]:
            file = index.parent / str(chunk["filename"])
            chunks[file], dtypes[file] = chunk, dtype
    for file in (f for f in files if f.suffix == ".bin" and f not in chunks):
        raise UserError(f"{file} is not named by the index.json beside it: {CUT}")
    return TokenLayout(
        "litdata", by_split(list(chunks)), lambda f: _read_litdata(f, chunks[f], dtypes[f]), also=[*indexes]
    )


def _indexes(files: list[Path]) -> list[Path]:
    """Returns each index.json with chunks beside it."""
    chunks = {f.parent for f in files if f.suffix == ".bin"} - {f.parent for f in files if f.suffix == ".mds"}
    return [f for f in files if f.name == "index.json" and f.parent in chunks]


def _read_litdata(file: Path, chunk: dict[str, Any], dtype: str) -> TokenFile:
    if not file.is_file():
        raise UserError(f"{file} is missing, which index.json names")
    items, item = int(chunk["chunk_size"]), np.dtype(dtype).itemsize
    head = np.fromfile(file, "<u4", min(items + 2, file.stat().st_size // 4)).astype(np.int64)
    if len(head) != items + 2 or head[0] != items or head[1] != 4 * (items + 2):
        raise UserError(f"{file} doesn't begin with the places of the {items:,} items that index.json names: {CUT}")
    tokens, rest = divmod(int(head[-1] - head[1]), item)
    if chunk.get("dim") not in (None, tokens) or rest or ((head[1:] - head[1]) % item).any():
        raise UserError(f"{file} has {tokens:,} tokens of {item} bytes, index.json says {chunk.get('dim')}: {CUT}")
    sized(file, int(head[-1]), f"{items:,} items")
    return TokenFile(
        Extent(file, dtype, int(head[1]), tokens), checked_ends((head[2:] - head[1]) // item, tokens, file)
    )


# dolma: X.npy, raw in spite of its name, and X.csv.gz of start, end, id, file, line


def _dolma(files: list[Path]) -> TokenLayout:
    tokens = [f for f in files if f.suffix == ".npy"]
    return TokenLayout("dolma", by_split(tokens), _read_dolma, also=[f for f in files if f.name.endswith(".csv.gz")])


def _read_dolma(file: Path) -> TokenFile:
    index = file.with_suffix(".csv.gz")
    if not index.is_file():
        raise UserError(f"{index} is missing: it holds the document ends of {file.name}")
    with gzip.open(index, "rt", newline="") as rows:
        spans = np.array([row[:2] for row in csv.reader(rows)], dtype=np.int64).reshape(-1, 2)
    ends = spans[:, 1]
    if len(ends) == 0 or spans[0, 0] != 0 or (spans[1:, 0] != ends[:-1]).any() or ends[-1] <= 0:
        raise UserError(f"{index}: the documents don't lie one after the other from token 0: {CUT}")
    tokens, found = int(ends[-1]), file.stat().st_size
    size = found // tokens
    if size not in (2, 4, 8) or found % tokens:
        raise UserError(
            f"{file} has {found:,} bytes, but {tokens:,} tokens take {2 * tokens:,} or {4 * tokens:,}: {CUT}"
        )
    _refuse_wider(file, f"<u{size}")
    return TokenFile(Extent(file, f"<u{size}", 0, tokens), checked_ends(ends, tokens, index))


# Files without ends: llm.c and modded-nanogpt with a header, arrays of NumPy, and nanoGPT without anything

# The header is 256 int32: a magic number, a version (of GPT-2's 1, of Llama 3's 7), the number of tokens, zeros.
_LLMC = {20240520: ("<u2", 1), 20240801: ("<u4", 7)}


def plain(files: list[Path], dtype: str | None, most_ids: int) -> TokenLayout:
    """Returns the layout of files without recorded document ends.

    Args:
        dtype: of tokens whose files don't name it; None: decided by the files.
        most_ids: the size of the vocabulary.
    """
    kinds = {_kind(file) for file in files}
    if len(kinds) > 1:
        raise UserError(f"{files[0].parent} holds files of {' and '.join(sorted(kinds))}: name the folder of one kind")
    (name,) = kinds
    if name == "llm.c":
        return TokenLayout(name, by_split(files), _read_llmc, begins=True)
    if name == "NumPy":
        return TokenLayout(name, by_split(files), _read_npy)
    chosen = np.dtype(dtype).newbyteorder("<").str if dtype else _decided(files, most_ids)
    return TokenLayout("nanoGPT", by_split(files), lambda file: _read_raw(file, chosen))


def _kind(file: Path) -> str:
    if re.fullmatch(r"chunk-\d+-\d+.*\.bin", file.name):
        raise UserError(f"{file.parent / 'index.json'} is missing, which names litdata's {file.name}: {CUT}")
    start = _start_of(file, 1024)
    if len(start) == 1024 and int.from_bytes(start[:4], "little") in _LLMC:
        return "llm.c"
    if start[:6] == b"\x93NUMPY":
        return "NumPy"
    if len(start) == 1024 and any(start[:12]) and not any(start[12:]):
        raise UserError(f"{file} begins with a header that is not llm.c's ({start[:12].hex(' ')}, then zeros): {CUT}")
    return "nanoGPT"


def _start_of(file: Path, size: int) -> bytes:
    with open_regular(file) as opened:
        return opened.read(size)


def _read_llmc(file: Path) -> TokenFile:
    magic, version, tokens = np.fromfile(file, "<i4", 3).tolist()
    dtype, known = _LLMC[magic]
    if version != known:
        raise UserError(f"{file} has version {version} of llm.c's header, not {known}: {CUT}")
    part = Extent(file, dtype, 1024, tokens)
    sized(file, 1024 + tokens * np.dtype(part.dtype).itemsize, f"a header and {tokens:,} tokens")
    return TokenFile(part)


def _read_npy(file: Path) -> TokenFile:
    with file.open("rb") as opened:
        version = np.lib.format.read_magic(opened)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(opened)
        offset = opened.tell()
    if len(shape) != 1 or dtype.kind not in "iu" or dtype.str[0] == ">":
        raise UserError(f"{file} holds {dtype} of shape {shape}: token ids are one row of little-endian integers")
    sized(file, offset + shape[0] * dtype.itemsize, f"a header and {shape[0]:,} tokens")
    return TokenFile(Extent(file, dtype.str, offset, shape[0]))


def _read_raw(file: Path, dtype: str) -> TokenFile:
    tokens, rest = divmod(file.stat().st_size, np.dtype(dtype).itemsize)
    if rest:
        found = f"{file.stat().st_size:,} bytes"
        raise UserError(f"{file} has {found}, not a whole number of {np.dtype(dtype).name} tokens: {CUT}")
    return TokenFile(Extent(file, dtype, 0, tokens))


def _decided(files: list[Path], most_ids: int) -> str:
    """Returns the dtype of files that don't name it; raises UserError if they differ or several fit."""
    found = {file: _fitting(file, most_ids) or _fitting(file, MOST_IDS) for file in files}
    sure = {dtypes[0] for dtypes in found.values() if len(dtypes) == 1}
    if len(sure) > 1:
        held = ", ".join(f"{f.name} {np.dtype(d[0]).name}" for f, d in found.items() if len(d) == 1)
        raise UserError(f"{files[0].parent} holds tokens of different widths ({held}): name the folder of one kind")
    if not sure:
        file, dtypes = next(iter(found.items()))
        fit = " and ".join(np.dtype(d).name for d in dtypes) or "no dtype"
        raise UserError(f"{file} names no dtype and {fit} fits: set data.dtype to that which it was written as")
    (dtype,) = sure
    if dtype[0] == ">":
        file = next(f for f, dtypes in found.items() if dtypes == [dtype])
        raise UserError(f"{file} holds {np.dtype(dtype).name}, big endian: write it as little endian")
    return dtype


def _fitting(file: Path, most_ids: int) -> list[str]:
    """Returns the dtypes that the tokens of a file may have, of which each id is below `most_ids`.

    Tokens of a narrower type, read as a wider one, are huge numbers, unless they are so few or so small that it can't
    be told; tokens of a wider type, read as a narrower one, are zero (or as small) at every second place.
    """
    start = _start_of(file, _LOOKED_AT)
    fits = []
    for dtype in map(np.dtype, ("<u8", ">u8", "<u4", ">u4", "<u2")):
        ids = np.frombuffer(start[: len(start) // dtype.itemsize * dtype.itemsize], dtype)
        if len(ids) and int(ids.max()) < most_ids:
            fits.append((dtype.str, len(ids)))
    words = np.frombuffer(start[: len(start) // 4 * 4], "<u2")
    if fits and fits[0][1] >= _ENOUGH and words.max() > (most_ids - 1) >> 16:
        # Where an id of a wider type is damaged, only uint16 fits, with zeros at nearly every second place.
        zeros = [float((words[at::2] <= min(3, (most_ids - 1) >> 16)).mean()) for at in (0, 1)]
        return [] if fits[0][0] == "<u2" and max(zeros) > _MOSTLY and min(zeros) < 0.5 else [fits[0][0]]
    return [dtype for dtype, _ in fits if dtype[0] != ">"]


def _refuse_wider(file: Path, dtype: str) -> None:
    """Raises UserError if tokens are zero at every second place: half of a file of a wider dtype was kept."""
    fits = _fitting(file, MOST_IDS)
    if len(fits) == 1 and np.dtype(fits[0]).itemsize != np.dtype(dtype).itemsize:
        raise UserError(
            f"{file} holds {np.dtype(fits[0]).name}, and its documents end by {np.dtype(dtype).name}: {CUT}"
        )


def with_suffix(*suffixes: str) -> Callable[[list[Path]], bool]:
    """Returns whether among some files there is one with each of these ends of a name."""
    return lambda files: all(any(f.name.endswith(suffix) for f in files) for suffix in suffixes)


LAYOUTS: list[tuple[Callable[[list[Path]], bool], Callable[[list[Path]], TokenLayout]]] = [
    (with_suffix(".ds"), _datatrove),
    (with_suffix(".idx"), _megatron),
    (lambda files: bool(_indexes(files)), _litdata),
    (with_suffix(".npy", ".csv.gz"), _dolma),
]

# What damaged files raise where they are read, beside UserError.
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, struct.error, csv.Error, zlib.error,
           OverflowError, MemoryError)  # fmt: skip
