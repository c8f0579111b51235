"""Tokenized examples on disk: their ids one after another, which of them are learned, and where each example begins."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from lmtrain.errors import UserError
from lmtrain.run_dir import write_atomic

META = "examples.json"
FORMAT_VERSION = 1


class ExampleWriter:
    """Writes <folder>/<split>.ids (uint32), .trained (one byte a token) and .starts (int64 [n + 1])."""

    def __init__(self, folder: Path, split: str) -> None:
        self.ids, self.trained = (folder / f"{split}.ids").open("wb"), (folder / f"{split}.trained").open("wb")
        self.starts, self.path = [0], folder / f"{split}.starts"

    def append(self, input_ids: list[int], trained: list[bool]) -> None:
        self.ids.write(np.array(input_ids, dtype=np.uint32).tobytes())
        self.trained.write(np.array(trained, dtype=np.uint8).tobytes())
        self.starts.append(self.starts[-1] + len(input_ids))

    def close(self) -> None:
        self.ids.close()
        self.trained.close()
        np.array(self.starts, dtype=np.int64).tofile(self.path)


class Examples:
    """A split's examples, read from disk as they are asked for."""

    def __init__(self, folder: Path, split: str) -> None:
        self.folder, self.split = folder, split
        self.starts = np.fromfile(folder / f"{split}.starts", dtype=np.int64)
        self._open()

    def _open(self) -> None:
        shape = int(self.starts[-1])
        files = [(self.folder / f"{self.split}.{part}", kind) for part, kind in (("ids", "u4"), ("trained", "u1"))]
        self.ids, self.trained = (
            np.memmap(path, dtype=np.dtype(kind), mode="r", shape=(shape,)) if shape else np.empty(0, np.dtype(kind))
            for path, kind in files
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "split": self.split, "starts": self.starts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each example, int64 [n]."""
        return np.diff(self.starts)

    def read(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """An example's ids, int64 [T], and which of them are learned, bool [T]."""
        start, stop = self.starts[index], self.starts[index + 1]
        return self.ids[start:stop].astype(np.int64), self.trained[start:stop].astype(bool)


def save_meta(meta: dict[str, Any], folder: Path) -> None:
    write_atomic(folder / META, json.dumps(meta, indent=2, ensure_ascii=False) + "\n")


def load_meta(folder: Path) -> dict[str, Any]:
    meta = json.loads((folder / META).read_text(encoding="utf-8"))
    if meta["format_version"] != FORMAT_VERSION:
        raise UserError(f"{folder} was written by another version of lmtrain: remove it, and it is made again")
    return dict(meta)


def fingerprint(examples: list[Examples]) -> str:
    """sha256 of ids and masks, wherever they lie."""
    digest = hashlib.sha256()
    for part in examples:
        for array in (part.starts, part.ids, part.trained):
            digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()[:16]
