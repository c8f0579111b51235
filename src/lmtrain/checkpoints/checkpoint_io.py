"""Lightning's CheckpointIO over the store: writes its checkpoint dict to a folder, at once or in the background."""

import threading
from collections.abc import Callable
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
        self._buffers: dict[Any, list[torch.Tensor]] = {}  # by shape and dtype

    def take(self, tree: Any) -> Any:
        """`tree` with copies for tensors; they hold until the next call. Tied weights stay one tensor."""
        taken: dict[Any, int] = {}
        copies: dict[Any, torch.Tensor] = {}

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            kind = (tensor.shape, tensor.dtype)
            same = (*kind, tensor.device, tensor.data_ptr(), tensor.stride())
            if same not in copies:
                number = taken[kind] = taken.get(kind, -1) + 1
                copies[same] = self._buffer(kind, number).copy_(tensor.detach(), non_blocking=True)
            return copies[same]

        copied = torch.utils._pytree.tree_map_only(torch.Tensor, copy, tree)
        if any(device.type == "cuda" for _, _, device, *_ in copies):
            torch.cuda.synchronize()  # before the next step changes what is copied
        return copied

    def _buffer(self, kind: tuple[torch.Size, torch.dtype], number: int) -> torch.Tensor:
        buffers = self._buffers.setdefault(kind, [])
        if number == len(buffers):
            shape, dtype = kind
            buffers.append(torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available()))
        return buffers[number]


class FolderCheckpointIO(CheckpointIO):
    """Lightning's checkpoint dict to and from a folder.

    With `background`, a save copies the tensors to host memory and returns; a thread writes. The next save, and the end
    of training, wait for it and raise its error. `published` is called after each checkpoint is in place.
    """

    def __init__(self, background: bool = False) -> None:
        self.background = background
        self._host_copies = HostCopies()
        self.published: Callable[[], None] = lambda: None
        self._writer: threading.Thread | None = None
        self._error: BaseException | None = None

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
        if not self.background:
            write()
            return
        self._writer = threading.Thread(target=self._write_in_thread, args=(write,), name="checkpoint")
        self._writer.start()

    def _write_in_thread(self, write: Callable[[], None]) -> None:
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
        remove(Path(path))
