"""The LightningDataModule: loaders whose items are whole optimizer steps (training) or micro-batches (validation)."""

import functools
import os

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lmtrain.config.batch import batch_split
from lmtrain.config.growth import Stages
from lmtrain.data.loaders import StepDataset, StepSampler, ValidationDataset, start_worker
from lmtrain.data.order import Rows
from lmtrain.distributed.data_parallel import data_parallel


class TokenDataModule(pl.LightningDataModule):
    """Training and validation rows as Lightning loaders; batch sizes are rows, intervals optimizer steps."""

    def __init__(
        self,
        train_rows: Rows,
        val_rows: Rows | None,
        *,
        seed: int,
        sizes: Stages,
        micro_batch_size: int,
        total_steps: int,
        max_epochs: int | None,
        limit_val_batches: int | None,
        num_workers: int,
        val_sets: dict[str, Rows] | None = None,
        lengths: Stages | None = None,
    ) -> None:
        """
        Args:
            sizes: rows of each step.
            val_sets: validated on beside `val_rows`, each as a loader of its own.
            lengths: tokens of a training row in each step, where they grow.
        """
        super().__init__()
        self.train_rows, self.val_rows = train_rows, val_rows
        self.seed, self.total_steps, self.max_epochs = seed, total_steps, max_epochs
        self.sizes, self.micro_batch_size, self.lengths = sizes, micro_batch_size, lengths
        self.limit_val_batches, self.num_workers = limit_val_batches, num_workers
        own = {"": val_rows} if val_rows is not None else {}
        self.val_sets: dict[str, Rows] = own | (val_sets or {})  # by name; the validation split has none

    def _loader(self, dataset: Dataset, sampler: Sampler[int] | None) -> DataLoader:
        return DataLoader(
            dataset,
            batch_size=None,  # an item is a whole step already
            sampler=sampler,
            num_workers=self.num_workers,
            persistent_workers=False,
            pin_memory=torch.cuda.is_available(),
            # A generator of its own: starting an iterator must not draw from the one that dropout uses.
            generator=torch.Generator().manual_seed(self.seed),
            worker_init_fn=functools.partial(start_worker, os.getpid()),
        )

    def train_dataloader(self) -> DataLoader:
        trainer = self.trainer
        assert trainer is not None
        part = data_parallel(trainer)
        batch_split(self.sizes.last, self.micro_batch_size, part.size)
        dataset = StepDataset(
            self.train_rows,
            seed=self.seed,
            sizes=self.sizes,
            micro_batch_size=self.micro_batch_size,
            max_epochs=self.max_epochs,
            rank=part.rank,
            world_size=part.size,
            lengths=self.lengths,
        )
        return self._loader(dataset, StepSampler(trainer.global_step, self.total_steps))

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """A loader for each of `val_sets`, in their order."""
        if self.trainer is None:
            return []
        loaders = [self._loader(self._validation(rows), None) for rows in self.val_sets.values()]
        return loaders[0] if len(loaders) == 1 else loaders

    def test_dataloader(self) -> DataLoader | list[DataLoader]:
        """For Lightning's `trainer.test`: what is validated on, as data.val_path names it; `evaluate` has more."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader | list[DataLoader]:
        return self.val_dataloader()

    def _validation(self, rows: Rows) -> ValidationDataset:
        assert self.trainer is not None, "asked by val_dataloader alone"
        part = data_parallel(self.trainer)
        return ValidationDataset(
            rows,
            micro_batch_size=self.micro_batch_size,
            limit=self.limit_val_batches,
            rank=part.rank,
            world_size=part.size,
        )
