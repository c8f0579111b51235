"""Checkpoints: folders `step_00000500` that are complete or absent, found and pruned by scanning.

Written under a temporary name beside their place, synced, renamed; a manifest written last lists every file with its
size and SHA-256, so a damaged one is seen. Two files: model.pt (weights) and trainer.pt (optimizer, progress,
callbacks). Both hold plain containers and tensors only and are loaded with weights_only=True. Ranks that write together
(trainer.fsdp.sharded_checkpoint) write the tensors into model.safetensors and optimizer.safetensors instead.
"""

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO

from lmtrain import shared_file
from lmtrain.errors import RunError, UserError, reason
from lmtrain.run_dir import fsync_dir, write_atomic

MANIFEST = "manifest.json"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
_NAME = re.compile(r"step_(\d{8,})")


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise UserError(f"{path} is not a checkpoint's name (step_00000500 is one)")
    return int(match[1])


def scan(folder: Path) -> list[Path]:
    """All checkpoints of a run by step, oldest first; temporary ones are not among them."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name) and not p.is_symlink()), key=step_of)


def sweep(folder: Path) -> None:
    """Removes what writers that died left behind."""
    for leftover in folder.glob("*.tmp*"):
        folder_itself = leftover.is_dir() and not leftover.is_symlink()
        shutil.rmtree(leftover, ignore_errors=True) if folder_itself else leftover.unlink(missing_ok=True)


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None if every file is as its manifest says."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, json.JSONDecodeError) as error:
        return f"{MANIFEST} can't be read ({error})"
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{name} has {file.stat().st_size} bytes instead of {expected['bytes']}"
        if "parts" in expected:
            problem = shared_file.damage(file, expected["parts"])
            if problem is not None:
                return problem
        elif _sha256(file) != expected["sha256"]:
            return f"{name} does not match its checksum"
    return None


def newest_complete(folder: Path, tell: Any = print) -> Path | None:
    """The newest undamaged checkpoint; damaged ones are named through `tell` and passed over."""
    for path in reversed(scan(folder)):
        problem = damage(path)
        if problem is None:
            return path
        tell(f"checkpoint {path.name} is damaged ({problem}); falling back to the one before")
    return None


def read_manifest(path: Path) -> dict[str, Any]:
    return json.loads((path / MANIFEST).read_text())


def add_metrics(path: Path, metrics: dict[str, float], interim: bool) -> bool:
    """Writes scores into the manifest of a checkpoint that has none; returns whether it did."""
    manifest = read_manifest(path)
    if manifest["metrics"]:
        return False
    interim = interim and manifest.get("interim", False)  # one that was due when it was made stays so
    write_atomic(path / MANIFEST, json.dumps({**manifest, "metrics": metrics, "interim": interim}, indent=2))
    return True


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(file: Path, content: Any) -> dict[str, Any]:
    with file.open("wb") as handle:
        torch.save(content, handle)
        handle.flush()
        os.fsync(handle.fileno())
    return {"bytes": file.stat().st_size, "sha256": _sha256(file)}


def load_weights(path: Path, mmap: bool = False) -> dict[str, torch.Tensor]:
    """The model's state dict of a checkpoint, on the CPU; with `mmap` nothing is read before it is used."""
    if (path / MODEL).exists():
        return shared_file.read(path / MODEL)
    return torch.load(path / "model.pt", map_location="cpu", weights_only=True, mmap=mmap)


def load(path: Path, mmap: bool = False) -> dict[str, Any]:
    """Lightning's checkpoint dict."""
    checkpoint = torch.load(path / "trainer.pt", map_location="cpu", weights_only=True, mmap=mmap)
    if (path / OPTIMIZER).exists():
        for name, tensor in shared_file.read(path / OPTIMIZER).items():
            optimizer, index, key = name.split(".", 2)
            state = checkpoint["optimizer_states"][int(optimizer)]["state"]
            state.setdefault(int(index), {})[key] = tensor
    return {**checkpoint, "state_dict": load_weights(path, mmap)}


def publish(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint so that `path` is complete or absent.

    Raises:
        RunError: the disk is full or gone; what was there before is untouched.
    """
    if path.exists() and damage(path) is None:
        return  # the same step of the same run: a good checkpoint is never overwritten
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    with explained(path, temporary):
        temporary.mkdir(parents=True)
        rest = {key: value for key, value in checkpoint.items() if key != "state_dict"}
        files = {
            "model.pt": _write(temporary / "model.pt", checkpoint["state_dict"]),
            "trainer.pt": _write(temporary / "trainer.pt", rest),
        }
        put_in_place(checkpoint, files, temporary, path)


def put_in_place(checkpoint: dict[str, Any], files: dict[str, Any], temporary: Path, path: Path) -> None:
    """Writes the manifest of a checkpoint whose `files` are all in `temporary`, and gives it its name."""
    about = {"metrics": checkpoint.get("metrics", {}), "interim": checkpoint.get("interim", False)}
    manifest = {"step": checkpoint["global_step"], **about, "files": files}
    write_atomic(temporary / MANIFEST, json.dumps(manifest, indent=2))
    fsync_dir(temporary)
    if path.exists():  # damaged
        shutil.rmtree(path)
    os.rename(temporary, path)
    fsync_dir(path.parent)


@contextlib.contextmanager
def explained(path: Path, temporary: Path | None) -> Iterator[None]:
    """Says what to do where writing the checkpoint `path` fails, and removes `temporary`."""
    try:
        yield
    except (OSError, RuntimeError, RunError) as error:  # torch.save reports a failed write as RuntimeError
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        if "DataLoader worker" in str(error):
            raise  # torch tells of a dead worker in whatever code is running then
        raise RunError(
            f"cannot write the checkpoint {path}: {reason(error)}; the ones before it are untouched. Free space "
            f"there, or set checkpoint.keep_last lower, then run the same command with run.resume=auto"
        ) from error


class FolderCheckpointIO(CheckpointIO):
    """Lightning's checkpoint dict to and from a folder.

    With `background`, a save copies the tensors to host memory and returns; a thread writes. The next save, and the end
    of training, wait for it and raise its error. `published` is called after each checkpoint is in place.
    """

    def __init__(self, background: bool = False) -> None:
        self.background = background
        self.published: Callable[[], None] = lambda: None
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        self.wait()
        if self.background:
            checkpoint = torch.utils._pytree.tree_map_only(
                torch.Tensor, lambda t: t.detach().to("cpu", copy=True), checkpoint
            )
        self._run(lambda: self._publish(checkpoint, Path(path)))

    def _publish(self, checkpoint: dict[str, Any], path: Path) -> None:
        publish(checkpoint, path)
        self.published()

    def save_together(self, prepare: Callable[[bool], Callable[[], bool] | None]) -> None:
        """Writes this rank's part of a checkpoint.

        Args:
            prepare: given whether training goes on while it is written, it takes the values and returns the job, which
                says whether it published the checkpoint; None where there is nothing to do.
        """
        self.wait()
        job = prepare(self.background)
        if job is not None:
            self._run(lambda: self.published() if job() else None)

    def _run(self, write: Callable[[], None]) -> None:
        """Now, or beside the training."""
        if not self.background:
            write()
            return
        self._writer = threading.Thread(target=self._write_beside, args=(write,), name="checkpoint")
        self._writer.start()

    def _write_beside(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # raised where the training thread waits
            self._error = error

    def wait(self) -> None:
        """Waits for a save in flight; raises its error."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def teardown(self) -> None:
        self.wait()

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return load(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Renamed first: a removal that is cut short leaves nothing that looks complete."""
        path = Path(path)
        doomed = path.with_name(f"{path.name}.tmp{os.getpid()}")
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)


Scores = list[tuple[int, float | None]]  # (step, validation score if that step was validated)


def scores(folder: Path, monitor: str) -> Scores:
    """Each checkpoint's step and its value of `monitor`, from the manifests; a damaged manifest scores nothing.

    Interim ones, which a run left alone would not have made, are not among them.
    """
    found: Scores = []
    for path in scan(folder):
        try:
            manifest = read_manifest(path)
            if not manifest.get("interim", False):
                found.append((step_of(path), manifest["metrics"].get(monitor)))
        except (OSError, json.JSONDecodeError, KeyError):
            found.append((step_of(path), None))
    return found


def _ranked(scores: Scores, mode: str) -> list[int]:
    """Steps with a finite score, best first; of equal ones the earlier."""
    sign = 1 if mode == "min" else -1
    scored = [(sign * score, step) for step, score in scores if score is not None and math.isfinite(score)]
    return [step for _, step in sorted(scored)]


def best_of(scores: Scores, mode: str) -> int | None:
    """The best step, or None if none has a score."""
    return next(iter(_ranked(scores, mode)), None)


def to_keep(scores: Scores, last: int, best: int, every: int | None, mode: str) -> set[int]:
    """The steps whose checkpoints stay: the newest `last`, the best `best`, each that divides by `every`."""
    steps = sorted(step for step, _ in scores)
    keep = set(steps[-last:]) | set(_ranked(scores, mode)[:best])
    return keep | {step for step in steps if every and step % every == 0}


def link(folder: Path, name: str, target: Path) -> None:
    """Points the relative link checkpoints/<name> at a checkpoint, replacing an older one atomically."""
    temporary = folder / f"{name}.tmp{os.getpid()}"
    try:
        temporary.unlink(missing_ok=True)
        os.symlink(target.name, temporary)
        os.replace(temporary, folder / name)
    except OSError:
        temporary.unlink(missing_ok=True)  # a file system without links: summary.json names them as well
