"""A CheckpointIO plugin for Lightning that uses the checkpoint store, saving synchronously or in the background."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO

from lmtrain.checkpoints.store import load, publish, remove


class HostCopies:
    """Reusable host-memory buffers for copies of a checkpoint's tensors, page-locked where CUDA is available.

    A GPU copies into page-locked memory several times faster, and copies all tensors without waiting between them.
    """

    def __init__(self) -> None:
        self._buffers: dict[Any, torch.Tensor] = {}  # keyed by shape, dtype and a number

    def take(self, tree: Any) -> Any:
        """Returns `tree` with tensors replaced by host copies, valid until the next call. Tied weights stay tied."""
        taken: Counter[Any] = Counter()
        copies: dict[Any, torch.Tensor] = {}

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            shape, dtype = tensor.shape, tensor.dtype
            same = (shape, dtype, tensor.device, tensor.data_ptr(), tensor.stride())
            if same not in copies:
                place = (shape, dtype, taken[shape, dtype])
                taken[shape, dtype] += 1
                if place not in self._buffers:
                    self._buffers[place] = torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())
                copies[same] = self._buffers[place].copy_(tensor.detach(), non_blocking=True)
            return copies[same]

        copied = torch.utils._pytree.tree_map_only(torch.Tensor, copy, tree)
        if any(device.type == "cuda" for _, _, device, *_ in copies):
            torch.cuda.synchronize()  # before the next step changes the tensors being copied
        return copied


class FolderCheckpointIO(CheckpointIO):
    """A CheckpointIO that stores Lightning's checkpoint dict as a folder.

    With `background`, a save copies the tensors to host memory and returns while a thread writes the files. The next
    save and the end of training wait for that thread and raise its error. `published` is called once a checkpoint is
    in place.
    """

    def __init__(self, background: bool = False) -> None:
        self.background = background
        self._host_copies = HostCopies()
        self.published: Callable[[], None] = lambda: None
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
            prepare: returns the job that writes this rank's part, or None if there is nothing to write. The job returns
                whether it published the checkpoint. `prepare` is called with HostCopies.take, to copy tensors to host
                memory, if training continues while the job runs, else with None.
        """
        self.wait()
        job = prepare(self._host_copies.take if self.background else None)
        if job is not None:
            self._run(lambda: self.published() if job() else None)

    def _run(self, write: Callable[[], None]) -> None:
        """Calls `write` now or, with `background`, in a thread while training continues."""
        if not self.background:
            write()
            return
        pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving = pool.submit(write)
        pool.shutdown(wait=False)  # the thread ends with the save

    def wait(self) -> None:
        """Waits for the save in progress, if any, and raises its error."""
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
