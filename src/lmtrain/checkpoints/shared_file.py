"""One safetensors file written by several ranks, each at the byte offsets of its own shards.

The file is the one a single process would write, so whoever reads it needs not know how many ranks there were, and no
rank ever holds a whole model. Format: https://github.com/huggingface/safetensors#format
"""

import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_SAME = "same tensor"  # metadata: names that stand for a tensor written under another (tied weights)


class FilePiece(NamedTuple):
    """Bytes that this rank writes."""

    offset: int  # in the file
    values: Tensor  # contiguous, of any device


class Layout(NamedTuple):
    """Where each tensor lies in the file; the same on every rank."""

    header: bytes
    offsets: dict[str, int]  # of each tensor's first byte, from the file's beginning
    size: int  # of the whole file


def lay_out(tensors: dict[str, Tensor]) -> Layout:
    """The file of `tensors` (whole or sharded), from their names, shapes and dtypes alone."""
    entries: dict[str, Any] = {}
    same: dict[str, str] = {}
    first: dict[int, str] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):  # so that all are aligned
        if id(tensor) in first:
            same[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        begin, end = end, end + tensor.numel() * tensor.element_size()  # a DTensor's numel is of the whole
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt", _SAME: json.dumps(same)}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    offsets = {name: len(header) + entry["data_offsets"][0] for name, entry in entries.items()}
    return Layout(header, offsets, len(header) + end)


def pieces(tensors: dict[str, Tensor], layout: Layout, rank: int) -> list[FilePiece]:
    """What this rank writes: the header and whole tensors on rank 0, of sharded ones each rank its rows.

    Every rank must call it with the same names: tensors in parts that are no rows are gathered.
    """
    header = torch.frombuffer(bytearray(layout.header), dtype=torch.uint8)
    found = [FilePiece(0, header)] if rank == 0 else []
    for name, offset in layout.offsets.items():
        tensor = tensors[name].detach()
        if isinstance(tensor, DTensor):
            found += _rows(tensor, offset)
        elif rank == 0:
            found.append(FilePiece(offset, tensor.contiguous()))
    return [piece for piece in found if piece.values.numel()]


def _rows(tensor: DTensor, offset: int) -> list[FilePiece]:
    """This rank's rows; parts that are columns are gathered first, and rows that several ranks have are shared out."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    by_rows = [placement if getattr(placement, "dim", None) == 0 else Replicate() for placement in tensor.placements]
    gathered = by_rows != list(tensor.placements)
    local = (tensor.redistribute(placements=by_rows) if gathered else tensor).to_local()
    if 0 not in mesh.mesh:
        return []  # these ranks have a copy of what the mesh with rank 0 has
    start, rows = 0, tensor.shape[0] if tensor.ndim else 1
    # FSDP cuts what tensor parallelism has left, and says so by another class than Shard.
    cuts = sorted(range(mesh.ndim), key=lambda dim: type(by_rows[dim]) is not Shard)
    held = [dim for dim in cuts if not isinstance(by_rows[dim], Replicate)]
    for dim in held:
        begin, rows = _cut(rows, mesh.size(dim), coordinate[dim])
        start += begin
    skip = 0
    for dim in (dim for dim in cuts if dim not in held):
        begin, rows = _cut(rows, mesh.size(dim), coordinate[dim])
        skip += begin
    mine = (local if tensor.ndim else local.reshape(1))[skip : skip + rows].contiguous()
    row_bytes = tensor.element_size() * tensor.shape[1:].numel()
    return [FilePiece(offset + (start + skip) * row_bytes, mine.clone() if gathered else mine)]


def _cut(rows: int, parts: int, index: int) -> tuple[int, int]:
    """(first row, number of rows) of a part, as torch.chunk cuts."""
    size = -(-rows // parts)
    begin = min(rows, size * index)
    return begin, min(rows, begin + size) - begin


def create(file: Path, layout: Layout) -> None:
    """An empty file of the full size, so that every rank can write at once."""
    with file.open("wb") as handle:
        handle.truncate(layout.size)


def write(file: Path, found: list[FilePiece]) -> list[dict[str, Any]]:
    """Writes this rank's pieces and syncs them; returns {offset, bytes, sha256} of each."""
    ranges = []
    with file.open("r+b") as handle:
        for offset, values in found:
            data = values.cpu().view(-1).view(torch.uint8).numpy().data
            handle.seek(offset)
            handle.write(data)
            ranges.append({"offset": offset, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()})
        handle.flush()
        os.fsync(handle.fileno())
    return ranges


def read(file: Path) -> dict[str, Tensor]:
    """The whole tensors, mapped: nothing is read before it is used."""
    with safe_open(file, framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        same = json.loads((handle.metadata() or {}).get(_SAME, "{}"))
    return tensors | {name: tensors[other] for name, other in same.items()}


def gap(file: Path, ranges: list[dict[str, Any]]) -> str | None:
    """Where a file was not written, of one that was written in these ranges; None if nowhere."""
    end = 0
    for part in sorted(ranges, key=lambda part: part["offset"]):
        if part["offset"] != end:
            return f"{file.name} has a gap at byte {end}"
        end += part["bytes"]
    return None if end == file.stat().st_size else f"{file.name} has {file.stat().st_size} bytes instead of {end}"


def sha256(file: Path, offset: int, count: int) -> str:
    """The SHA-256 of some bytes of a file."""
    digest = hashlib.sha256()
    with file.open("rb") as handle:
        handle.seek(offset)
        while count > 0 and (block := handle.read(min(count, 1 << 24))):
            digest.update(block)
            count -= len(block)
    return digest.hexdigest()
