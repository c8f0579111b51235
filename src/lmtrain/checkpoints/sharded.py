"""Sharded writing: every rank writes its shards into model.safetensors and optimizer.safetensors at the same time.

The files don't depend on the number of ranks that write them, so any number of devices can read them, and no rank ever
holds a whole model. Format: https://github.com/huggingface/safetensors#format
Ranks need no collective to finish: each writes a note, a small JSON file that lists what it wrote, and rank 0 publishes
the checkpoint once all notes exist.
"""

import hashlib
import json
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from lmtrain.checkpoints import store
from lmtrain.distributed import process_group as world
from lmtrain.errors import RunError, reason
from lmtrain.files import write_atomic

_POLL_SECONDS = 0.02
DTYPES = {dtype: name for name, dtype in safetensors.torch._TYPES.items()}


class FilePiece(NamedTuple):
    """A range of bytes of a file that this rank writes."""

    offset: int  # in the file, in bytes
    values: Tensor  # contiguous, on any device


class Layout(NamedTuple):
    """The position of each tensor in the file; the same on every rank."""

    header: bytes
    offsets: dict[str, int]  # of each tensor's first byte, from the start of the file
    size: int  # of the whole file


def prepare(checkpoint: dict[str, Any], path: Path, take: Callable[[Any], Any] | None) -> Callable[[], bool] | None:
    """Returns the job that writes this rank's part, or None if `path` already holds a good checkpoint.

    The job returns whether it published the checkpoint. Every rank must call this function.

    Args:
        checkpoint: Lightning's checkpoint dict, whose `state_dict` and `optimizer_states` hold sharded tensors.
        take: copies the tensors of a tree to host memory, if training continues while the job runs; else None.
    """
    rank, ranks = world.rank(), world.size()
    # Where each rank's pieces of the tensors go in the two files.
    optimizers, states = _without_tensors(checkpoint["optimizer_states"])
    files = {store.MODEL: checkpoint["state_dict"], store.OPTIMIZER: states}
    layouts = {name: lay_out(tensors) for name, tensors in files.items()}
    temporary = path.with_name(f"{path.name}.tmp")
    if not world.from_first(lambda: _create(path, temporary, layouts)):
        return None
    # Copied now, written by the job.
    found = {name: pieces(tensors, layouts[name], rank) for name, tensors in files.items()}
    rest = {key: value for key, value in checkpoint.items() if key != "state_dict"} | {"optimizer_states": optimizers}
    if take is not None:
        found, rest = take((found, rest))

    def job() -> bool:
        with store.explained(path, temporary if rank == 0 else None):
            _write(temporary, found, rank)
            if rank != 0:
                return False
            notes = _gather(temporary, ranks)
            parts = {name: [part for note in notes for part in note[name]] for name in files}
            written = {name: {"bytes": layouts[name].size, "parts": parts[name]} for name in files}
            written |= store.write_files(temporary, {"trainer.pt": rest})
            store.put_in_place(checkpoint, written, temporary, path)
        return True

    return job


def _without_tensors(optimizer_states: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """Returns the optimizer states without their tensors, and the tensors by `<optimizer>.<parameter>.<name>`."""
    plain: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for number, saved in enumerate(optimizer_states):
        state: dict[int, dict[str, Any]] = {}
        for index, values in saved["state"].items():
            state[index] = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
            tensors |= {f"{number}.{index}.{key}": value for key, value in values.items() if isinstance(value, Tensor)}
        plain.append({**saved, "state": state})
    return plain, tensors


def _create(path: Path, temporary: Path, layouts: dict[str, Layout]) -> bool:
    """Creates the files at full size; returns False if `path` holds a good checkpoint, which is never overwritten."""
    if path.exists() and store.damage(path) is None:
        return False
    with store.explained(path, temporary):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, layout in layouts.items():
            with (temporary / name).open("wb") as file:
                file.truncate(layout.size)  # so that all ranks can write at the same time
    return True


def _note(temporary: Path, rank: int) -> Path:
    return temporary / f"rank_{rank}.json"


def _write(temporary: Path, found: dict[str, list[FilePiece]], rank: int) -> None:
    """Writes this rank's pieces, then its note, which lists them or holds the error."""
    try:
        written: Any = {name: write_pieces(temporary / name, pieces) for name, pieces in found.items()}
    except OSError as error:
        write_atomic(_note(temporary, rank), json.dumps({"error": reason(error)}))
        raise
    write_atomic(_note(temporary, rank), json.dumps(written))


def _gather(temporary: Path, ranks: int) -> list[dict[str, Any]]:
    """Waits for the notes of all ranks, removes and returns them. Raises RunError if one is late or holds an error."""
    notes: list[dict[str, Any]] = []
    deadline = time.monotonic() + world.patience()
    for rank in range(ranks):
        note = _note(temporary, rank)
        while not note.exists():
            if time.monotonic() > deadline:
                late = f"rank {rank} has not written its checkpoint within {world.patience():g} s"
                raise RunError(f"{late}: raise trainer.rank_timeout")
            time.sleep(_POLL_SECONDS)
        notes.append(json.loads(note.read_text()))
        if "error" in notes[-1]:
            raise RunError(f"rank {rank}: {notes[-1]['error']}")
        note.unlink()
    return notes


def lay_out(tensors: dict[str, Tensor]) -> Layout:
    """Computes the file layout of `tensors` (full or sharded) from their names, shapes and dtypes alone."""
    entries: dict[str, Any] = {}
    same: dict[str, str] = {}
    first: dict[int, str] = {}
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].element_size()):  # aligns all
        if id(tensor) in first:
            same[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        begin, end = end, end + tensor.numel() * tensor.element_size()  # numel of the full tensor
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt", store.SAME: json.dumps(same)}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    header = struct.pack("<Q", len(text)) + text
    offsets = {name: len(header) + entry["data_offsets"][0] for name, entry in entries.items()}
    return Layout(header, offsets, len(header) + end)


def pieces(tensors: dict[str, Tensor], layout: Layout, rank: int) -> list[FilePiece]:
    """Returns what this rank writes: its rows of sharded tensors and, on rank 0, the header and all unsharded tensors.

    Every rank must call it with the same names, because tensors that are not sharded by rows are gathered.
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
    """Returns the rows that this rank writes. Shards that aren't rows are gathered; replicated rows are divided up."""
    mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    by_rows = [placement if getattr(placement, "dim", None) == 0 else Replicate() for placement in tensor.placements]
    gathered = by_rows != list(tensor.placements)
    local = (tensor.redistribute(placements=by_rows) if gathered else tensor).to_local()
    if 0 not in mesh.mesh:
        return []  # another replica, and the mesh that contains rank 0 writes
    start, rows = 0, tensor.shape[0] if tensor.ndim else 1
    # Tensor parallelism (Shard) cuts first; FSDP cuts each rank's part further, with a placement of another class.
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
    """Returns (first row, number of rows) of part `index`, cut as torch.chunk does."""
    size = -(-rows // parts)
    begin = min(rows, size * index)
    return begin, min(rows, begin + size) - begin


def write_pieces(file: Path, found: list[FilePiece]) -> list[dict[str, Any]]:
    """Writes this rank's pieces and syncs the file; returns {offset, bytes, sha256} of each piece."""
    ranges = []
    with file.open("r+b") as handle, store.HashedFile(handle) as hashed:
        for offset, values in found:
            data = values.cpu().view(-1).view(torch.uint8).numpy().data
            handle.seek(offset)
            hashed.digest = hashlib.sha256()
            hashed.write(data)
            ranges.append({"offset": offset, "bytes": len(data), "sha256": hashed.digest.hexdigest()})
    return ranges
