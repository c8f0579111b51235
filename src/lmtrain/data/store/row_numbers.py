"""Numbers of rows that take long to compute: made in parts that are kept, so that what was interrupted goes on."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from lmtrain.data.store.progress import RowProgress
from lmtrain.errors import UserError
from lmtrain.files import fsync

PART = 512  # rows whose numbers are kept together


def parts_of(folder: Path) -> Path:
    """Where the parts lie while what `folder` will hold is computed."""
    return folder.with_name(f"{folder.name}.parts")


def in_parts(rows: np.ndarray) -> Iterator[np.ndarray]:
    return (rows[start : start + PART] for start in range(0, len(rows), PART))


def compute(
    parts: Path, rows: np.ndarray, numbers: Callable[[np.ndarray], np.ndarray], progress: RowProgress
) -> np.ndarray:
    """`numbers` of all rows, [n, ...], those of whole parts from `parts` where an earlier call was interrupted.

    Args:
        rows: int64 [n]; the same in every call with this folder.
        numbers: of some of them, in their order.

    Raises:
        UserError: a part can't be read.
    """
    parts.mkdir(parents=True, exist_ok=True)
    found = []
    for number, some in enumerate(in_parts(rows)):
        path = parts / f"{number:08d}.npy"
        if not path.exists():
            _save(path, numbers(some))
        found.append(load(path))
        progress.advance(len(some), 0)
    progress.finish()
    return np.concatenate(found)


def load(path: Path) -> np.ndarray:
    """UserError where it can't be read."""
    try:
        return np.asarray(np.load(path))
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} can't be read ({error}): delete {path.parent}, and it is computed again") from None


def _save(path: Path, numbers: np.ndarray) -> None:
    """Whole or not at all."""
    temporary = path.with_suffix(".tmp.npy")
    np.save(temporary, numbers)
    fsync(temporary)
    temporary.replace(path)
    fsync(path.parent)
