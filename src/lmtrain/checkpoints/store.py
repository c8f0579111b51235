"""Checkpoints: folders `step_00000500` that are complete or absent, found by scanning.

A checkpoint is written under a temporary name in the same folder, synced, and renamed. Its manifest, written last,
lists every file with its size and SHA-256 and holds a hash of itself, so damage is detected: a damaged checkpoint is
skipped and set aside, never removed. There are two files: model.pt (weights) and trainer.pt (optimizer, progress,
callbacks). Both hold only plain containers and tensors and are loaded with weights_only=True. Ranks that write together
(trainer.fsdp.sharded_checkpoint) write the tensors into model.safetensors and optimizer.safetensors instead.
"""

import contextlib
import hashlib
import json
import os
import pickle
import shutil
import signal
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, Self

import torch
from safetensors import SafetensorError, safe_open

from lmtrain.checkpoints import checksums, manifest
from lmtrain.errors import RunError, UserError, first_line, reason
from lmtrain.files import CHECKPOINT, absolute, aside, fsync

MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
_SMALL = 1 << 16  # bytes that are hashed sooner than they are handed to a thread
_SYNC_BYTES = 1 << 27  # bytes after which they are forced to disk while more are written
SAME = "same tensor"  # metadata key of both: maps the names of tied weights to the name that is written


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    match = CHECKPOINT.fullmatch(path.name)
    if match is None:
        raise UserError(f"{path} is not a checkpoint's name (step_00000500 is one)")
    return int(match[1])


def scan(folder: Path) -> list[Path]:
    """Returns all checkpoints of a run, oldest step first, without temporary ones and those set aside."""
    try:
        return sorted((p for p in folder.iterdir() if CHECKPOINT.fullmatch(p.name) and not p.is_symlink()), key=step_of)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise manifest.unreadable(folder, error) from error


def sweep(folder: Path) -> None:
    """Removes the temporary files and folders of writers that died."""
    for leftover in folder.glob("*.tmp*"):
        folder_itself = leftover.is_dir() and not leftover.is_symlink()
        shutil.rmtree(leftover, ignore_errors=True) if folder_itself else leftover.unlink(missing_ok=True)


def damage(path: Path, compare: checksums.Compare = checksums.first_wrong) -> str | None:
    """Returns what is wrong with a checkpoint, or None if its files match its manifest, and the manifest its hash.

    Args:
        compare: verifies the contents of the files; called only after all checks that don't read them have passed.

    Raises:
        RunError: a file can't be read from the disk, which does not count as damage.
    """
    try:
        content = manifest.read(path)
        if CHECKPOINT.fullmatch(path.name) and content["step"] != step_of(path):
            return f"it is the checkpoint of step {content['step']}"
        files = {path / name: expected for name, expected in content["files"].items()}
        problems = (_wrong_size(file, expected) for file, expected in files.items())  # reads no contents
        return next(filter(None, problems), None) or _wrong_content(files, compare)
    except manifest.Damaged as damaged:
        return damaged.what
    except OSError as error:
        raise manifest.unreadable(Path(error.filename or path), error) from error


def _wrong_size(file: Path, expected: dict[str, Any]) -> str | None:
    """Returns what is wrong with a file, compared with its manifest entry without reading it, or None."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return f"{file.name} is missing"
    if not stat.S_ISREG(found.st_mode):
        return f"{file.name} is not a file"
    if found.st_size != expected["bytes"]:
        return f"{file.name} has {found.st_size} bytes instead of {expected['bytes']}"
    return checksums.gap(file, expected["parts"]) if "parts" in expected else None


def _wrong_content(files: dict[Path, dict[str, Any]], compare: checksums.Compare) -> str | None:
    """Returns a message about the first file, or part of a file, that does not match its checksum, or None."""
    parts = [
        checksums.CheckedPart(file, part.get("offset", 0), part["bytes"], part["sha256"])
        for file, expected in files.items()
        for part in expected.get("parts", [expected])
    ]
    wrong = compare(parts)
    if wrong is None:
        return None
    where = f" at byte {wrong.offset}" if "parts" in files[wrong.file] else ""
    return f"{wrong.file.name} does not match its checksum{where}"


def newest_complete(
    folder: Path, tell: Callable[[str], None] = print, compare: checksums.Compare = checksums.first_wrong
) -> Path | None:
    """Returns the newest undamaged checkpoint, or None if there are no checkpoints; reports skipped ones to `tell`.

    Raises:
        UserError: there are checkpoints, but all are damaged.
    """
    damaged: dict[str, str] = {}
    for path in reversed(scan(folder)):
        problem = damage(path, compare)
        if problem is None:
            for name, what in damaged.items():
                tell(f"checkpoint {name} is damaged ({what}); falling back to {path.name}")
            return path
        damaged[path.name] = problem
    if damaged:
        listed = ", ".join(f"{name} ({what})" for name, what in damaged.items())
        found = f"no checkpoint in {folder} can be continued, all are damaged: {listed}. Nothing was removed"
        advice = "Put a copy back, name one elsewhere (run.resume=<folder>), or start over with another run.name"
        raise UserError(f"{found}. {advice}")
    return None


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint to step_00000500.damaged, which no run reads but the user may still repair."""
    kept = aside(path)
    try:
        os.rename(path, kept)
    except OSError as error:
        raise RunError(f"cannot rename the damaged checkpoint {path}: {reason(error)}") from error
    return kept


def add_metrics(path: Path, metrics: dict[str, float], interim: bool, scored_on: str | None = None) -> bool:
    """Adds scores to the manifest of a checkpoint that has none; returns whether it did."""
    content = manifest.read(path)
    if content["metrics"]:
        return False
    interim = interim and content.get("interim", False)  # one that was due when written stays regular
    rows = {"scored_on": scored_on} if scored_on is not None else {}
    manifest.write(path, {**content, "metrics": metrics, "interim": interim, **rows})
    return True


@contextlib.contextmanager
def _sigchld_waits() -> Iterator[None]:
    """Defers a SIGCHLD until the block ends: torch's handler for dead workers raises in whatever line is running.

    Raised inside torch.save, the error would leave a zip writer behind that aborts the process when it is collected.
    """
    handler = signal.getsignal(signal.SIGCHLD)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():  # only it runs handlers
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGCHLD, lambda *arguments: waiting.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, handler)
        if waiting:
            handler(*waiting[-1])


class HashedFile:
    """A file object whose writes are hashed and forced to disk meanwhile, in two threads; what is left, at its end.

    So there is no file to read again for its checksum, and little left to wait for at the end.
    """

    def __init__(self, handle: BinaryIO) -> None:
        self.handle = handle
        self.flush = handle.flush
        self.digest = hashlib.sha256()
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="checkpoint-file")
        self._syncing: Future[Any] = self._pool.submit(int)
        self._unsynced = 0

    def write(self, data: memoryview) -> int:
        if len(data) < _SMALL:
            self.digest.update(data)
            return self.handle.write(data)
        hashing = self._pool.submit(self.digest.update, data)
        try:
            written = self.handle.write(data)
        finally:
            hashing.result()  # `data` is valid only until this returns
        self._unsynced += written
        if self._unsynced > _SYNC_BYTES and self._syncing.done():
            self._syncing.result()  # the kernel reports a failed write of the disk only once
            self._syncing, self._unsynced = self._pool.submit(os.fsync, self.handle.fileno()), 0
        return written

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown()
        if kind is None:
            self._syncing.result()
            self.handle.flush()
            os.fsync(self.handle.fileno())


@contextlib.contextmanager
def _without_crc() -> Iterator[None]:
    """Lets torch.save leave out its CRC-32 of each tensor, which torch.load ignores: the manifest has a SHA-256."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def write_files(folder: Path, contents: dict[str, Any]) -> dict[str, Any]:
    """Writes files of a checkpoint at the same time; returns their entries for the manifest."""
    with _sigchld_waits(), _without_crc(), ThreadPoolExecutor(len(contents)) as pool:
        entries = pool.map(lambda name: write(folder / name, contents[name]), contents)
        return dict(zip(contents, entries, strict=True))


def write(file: Path, content: Any) -> dict[str, Any]:
    """Writes a file of a checkpoint and syncs it; returns its entry for the manifest."""
    with file.open("wb") as handle:
        with HashedFile(handle) as hashed:
            torch.save(content, hashed)  # type: ignore[arg-type]
        return {"bytes": handle.tell(), "sha256": hashed.digest.hexdigest()}


def load_weights(path: Path, mmap: bool = False) -> dict[str, torch.Tensor]:
    """Returns the model's state dict of a checkpoint, on the CPU; with `mmap`, tensors are read only when used."""
    if (path / MODEL).exists():
        return read_tensors(path / MODEL)
    weights = _unpickle(path / "model.pt", mmap)
    wrong = next((name for name in weights if not isinstance(name, str)), None)
    if wrong is not None:
        raise UserError(_not_tensors(path / "model.pt", TypeError(f"it has {wrong!r} for a parameter's name")))
    return weights


def load_trainer_state(path: Path) -> dict[str, Any]:
    """Returns the content of a checkpoint's trainer.pt, which holds no weights; its tensors are mapped, not read."""
    state = _unpickle(path / "trainer.pt", mmap=True)
    if "callbacks" not in state or "fingerprint" not in state:
        raise UserError(f"{path / 'trainer.pt'} was not written by lmtrain as part of a checkpoint; choose another")
    return state


def load(path: Path, mmap: bool = False) -> dict[str, Any]:
    """Returns Lightning's checkpoint dict from a checkpoint's files; with `mmap`, tensors are read only when used."""
    checkpoint = _unpickle(path / "trainer.pt", mmap)
    if (path / OPTIMIZER).exists():
        for name, tensor in read_tensors(path / OPTIMIZER).items():
            optimizer, index, key = name.split(".", 2)
            state = checkpoint["optimizer_states"][int(optimizer)]["state"]
            state.setdefault(int(index), {})[key] = tensor
    return {**checkpoint, "state_dict": load_weights(path, mmap)}


def _unpickle(file: Path, mmap: bool) -> dict[str, Any]:
    """Loads a dict of plain containers and tensors; anything else in a pickle is refused (UserError), never run."""
    try:
        content = torch.load(absolute(file), map_location="cpu", weights_only=True, mmap=mmap)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        if "allocate" in str(error):
            raise
        raise UserError(_not_tensors(file, error)) from error
    if not isinstance(content, dict):
        raise UserError(_not_tensors(file, TypeError(f"it holds a {type(content).__name__}")))
    return content


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Returns the tensors of a safetensors file, memory-mapped: nothing is read before it is used."""
    try:
        with safe_open(file, framework="pt") as handle:
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
            same = json.loads((handle.metadata() or {}).get(SAME, "{}"))
    except SafetensorError as error:
        raise UserError(_not_tensors(file, error)) from error
    return tensors | {name: tensors[other] for name, other in same.items()}


def _not_tensors(file: Path, error: Exception) -> str:
    return f"{file} is not a tensor file written by lmtrain ({first_line(error)}). Nothing in it was run"


def publish(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint so that `path` is either complete or absent.

    Raises:
        RunError: the disk is full or was removed; earlier checkpoints are untouched.
    """
    if path.exists() and damage(path) is None:
        return  # the same step of the same run: a good checkpoint is never overwritten
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    with explained(path, temporary):
        temporary.mkdir(parents=True)
        rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        files = write_files(temporary, {"model.pt": checkpoint["state_dict"], "trainer.pt": rest})
        put_in_place(checkpoint, files, temporary, path)


def put_in_place(checkpoint: dict[str, Any], files: dict[str, Any], temporary: Path, path: Path) -> None:
    """Writes the manifest of a checkpoint whose `files` are all in `temporary`, and renames that folder to `path`."""
    about = {"metrics": checkpoint.get("metrics", {}), "interim": checkpoint.get("interim", False)}
    about |= {name: checkpoint[name] for name in ("scored_on", "tokenizer") if checkpoint.get(name) is not None}
    manifest.write(temporary, {"step": checkpoint["global_step"], **about, "files": files})
    fsync(temporary)
    if path.exists():  # known to be damaged
        set_aside(path)
    os.rename(temporary, path)
    fsync(path.parent)


@contextlib.contextmanager
def explained(path: Path, temporary: Path | None) -> Iterator[None]:
    """Turns failures to write the checkpoint `path` into a RunError that says what to do, and removes `temporary`."""
    try:
        yield
    except (OSError, RuntimeError, RunError) as error:  # torch.save reports a failed write as RuntimeError
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if "DataLoader worker" in str(error):
            raise  # torch reports a dead worker in whatever code is running at the time
        found = f"cannot write the checkpoint {path}: {reason(error)}; the ones before it are untouched"
        advice = "Free space there, or set checkpoint.keep_last lower, then start again with run.resume=auto"
        raise RunError(f"{found}. {advice}") from error


def remove(path: Path) -> None:
    """Removes a checkpoint. It is renamed first, so that an interrupted removal leaves nothing that looks complete."""
    doomed = path.with_name(f"{path.name}.tmp{os.getpid()}")
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
