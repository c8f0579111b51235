"""Checkpoints: folders `step_00000500` that are complete or absent, found by scanning.

Written under a temporary name beside their place, synced, renamed; a manifest written last lists every file with its
size and SHA-256, so a damaged one is seen. Two files: model.pt (weights) and trainer.pt (optimizer, progress,
callbacks). Both hold plain containers and tensors only and are loaded with weights_only=True. Ranks that write together
(trainer.fsdp.sharded_checkpoint) write the tensors into model.safetensors and optimizer.safetensors instead.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

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


def write(file: Path, content: Any) -> dict[str, Any]:
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
            "model.pt": write(temporary / "model.pt", checkpoint["state_dict"]),
            "trainer.pt": write(temporary / "trainer.pt", rest),
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


def remove(path: Path) -> None:
    """Renamed first: a removal that is cut short leaves nothing that looks complete."""
    doomed = path.with_name(f"{path.name}.tmp{os.getpid()}")
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)
