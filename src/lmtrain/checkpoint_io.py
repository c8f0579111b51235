"""Lightning's door to checkpoints: its dict to and from a folder, at once or beside the training."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import CheckpointIO

from lmtrain.checkpoint import load, publish, remove


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
        remove(Path(path))
