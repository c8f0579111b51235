"""Lightning's CheckpointIO over the store: writes its checkpoint dict to a folder, at once or in the background."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO

from lmtrain.checkpoints.store import load, publish, remove


class HostCopies:
    """Copies of a checkpoint's tensors in host memory that is kept from save to save, page-locked where there is a GPU.

    A GPU copies into page-locked memory several times faster, and all tensors without a wait between them.
    """

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}  # by the place of a tensor in the tree

    def take(self, tree: Any) -> Any:
        """`tree` with copies for tensors; they hold until the next call. Tied weights stay one tensor."""
        copies: dict[Any, torch.Tensor] = {}

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            same = (tensor.shape, tensor.dtype, tensor.device, tensor.data_ptr(), tensor.stride())
            if same not in copies:
                buffer = self._buffer(len(copies), tensor.shape, tensor.dtype)
                copies[same] = buffer.copy_(tensor.detach(), non_blocking=True)
            return copies[same]

        copied = torch.utils._pytree.tree_map_only(torch.Tensor, copy, tree)
        if any(device.type == "cuda" for _, _, device, *_ in copies):
            torch.cuda.synchronize()  # before the next step changes what is copied
        return copied

    def _buffer(self, place: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        kept = self._buffers.get(place)
        if kept is None or (kept.shape, kept.dtype) != (shape, dtype):
            kept = self._buffers[place] = torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
        return kept


class FolderCheckpointIO(CheckpointIO):
    """Lightning's checkpoint dict to and from a folder.

    With `background`, a save copies the tensors to host memory and returns; a thread writes. The next save, and the end
    of training, wait for it and raise its error. `published` is called after each checkpoint is in place.
    """

    def __init__(self, background: bool = False) -> None:
        self.background = background
        self._host_copies = HostCopies()
        self.published: Callable[[], None] = lambda: None
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._saving: Future[None] | None = None

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        self.wait()
        if self.background:
            checkpoint = self._host_copies.take(checkpoint)
        self._run(lambda: self._publish(checkpoint, Path(path)))

    def _publish(self, checkpoint: dict[str, Any], path: Path) -> None:
        publish(checkpoint, path)
        self.published()

    def save_together(self, prepare: Callable[[Callable[[Any], Any] | None], Callable[[], bool] | None]) -> None:
        """Writes this rank's part of a checkpoint.

        Args:
            prepare: returns the job that writes it, which says whether it published the checkpoint; None where there is
                nothing to do. It is given what copies tensors to host memory (HostCopies.take) where training goes on
                while the job runs.
        """
        self.wait()
        job = prepare(self._host_copies.take if self.background else None)
        if job is not None:
            self._run(lambda: self.published() if job() else None)

    def _run(self, write: Callable[[], None]) -> None:
        """Writes at once, or in a thread while training goes on."""
        if self.background:
            self._saving = self._pool.submit(write)
        else:
            write()

    def wait(self) -> None:
        """Waits for a save in flight; raises its error."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def teardown(self) -> None:
        self.wait()

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        return load(Path(path))

    def remove_checkpoint(self, path: str | Path) -> None:
        remove(Path(path))
