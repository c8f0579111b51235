"""Sharded writing: every rank writes its shard of model.safetensors and optimizer.safetensors at the same time.

The files are the ones a single process would write (see shared_file), so any number of devices reads them.
Ranks need no collective to finish: each leaves a note of what it wrote, and rank 0 publishes when all notes are there.
"""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lmtrain.checkpoints import shared_file, store
from lmtrain.distributed import process_group as world
from lmtrain.errors import RunError, reason
from lmtrain.files import write_atomic

_POLL_SECONDS, _PATIENCE_SECONDS = 0.02, 1800.0  # the second is what collectives wait, too


def prepare(checkpoint: dict[str, Any], path: Path, take: Callable[[Any], Any] | None) -> Callable[[], bool] | None:
    """The job that writes this rank's part and says whether it published the checkpoint; None where `path` is whole.

    Every rank must call it.

    Args:
        checkpoint: Lightning's, whose `state_dict` and `optimizer_states` hold sharded tensors.
        take: copies the tensors of a tree to host memory, where training goes on while the job runs; None: not needed.
    """
    rank, ranks = world.rank(), world.size()
    optimizers, states = _without_tensors(checkpoint["optimizer_states"])
    files = {store.MODEL: checkpoint["state_dict"], store.OPTIMIZER: states}
    layouts = {name: shared_file.lay_out(tensors) for name, tensors in files.items()}
    temporary = path.with_name(f"{path.name}.tmp")
    if not world.from_first(lambda: _create(path, temporary, layouts)):
        return None
    found = {name: shared_file.pieces(tensors, layouts[name], rank) for name, tensors in files.items()}
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
            written["trainer.pt"] = store.write(temporary / "trainer.pt", rest)
            store.put_in_place(checkpoint, written, temporary, path)
        return True

    return job


def _without_tensors(optimizer_states: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    """The optimizers' states without their tensors, and these, by `<optimizer>.<parameter>.<name>`."""
    plain: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for number, saved in enumerate(optimizer_states):
        state: dict[int, dict[str, Any]] = {}
        for index, values in saved["state"].items():
            state[index] = {key: value for key, value in values.items() if not isinstance(value, Tensor)}
            found = {key: value for key, value in values.items() if isinstance(value, Tensor)}
            tensors |= {f"{number}.{index}.{key}": value for key, value in found.items()}
        plain.append({**saved, "state": state})
    return plain, tensors


def _create(path: Path, temporary: Path, layouts: dict[str, shared_file.Layout]) -> bool:
    """Makes room for the checkpoint; False where a good one is there already, which is never overwritten."""
    if path.exists() and store.damage(path) is None:
        return False
    with store.explained(path, temporary):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        for name, layout in layouts.items():
            shared_file.create(temporary / name, layout)
    return True


def _note(temporary: Path, rank: int) -> Path:
    return temporary / f"rank_{rank}.json"


def _write(temporary: Path, found: dict[str, list[shared_file.FilePiece]], rank: int) -> None:
    """Writes this rank's pieces, then its note, which says so or what went wrong."""
    try:
        written: Any = {name: shared_file.write(temporary / name, pieces) for name, pieces in found.items()}
    except OSError as error:
        write_atomic(_note(temporary, rank), json.dumps({"error": reason(error)}))
        raise
    write_atomic(_note(temporary, rank), json.dumps(written))


def _gather(temporary: Path, ranks: int) -> list[dict[str, Any]]:
    """All ranks' notes, as soon as they are there; removes them."""
    notes: list[dict[str, Any]] = []
    deadline = time.monotonic() + _PATIENCE_SECONDS
    for rank in range(ranks):
        note = _note(temporary, rank)
        while not note.exists():
            if time.monotonic() > deadline:
                raise RunError(f"rank {rank} has not written its part within {_PATIENCE_SECONDS:.0f} s")
            time.sleep(_POLL_SECONDS)
        notes.append(json.loads(note.read_text()))
        if "error" in notes[-1]:
            raise RunError(f"rank {rank}: {notes[-1]['error']}")
        note.unlink()
    return notes
