"""LightningDataModules for text and token bins and for dataset rows, in a run or with any LightningModule.

    data = lmtrain.TextDataModule("text", path="book.txt", tokenizer="bytes", seq_len=256, batch_size=8)
    lightning.Trainer(max_steps=100).fit(your_module, datamodule=data)

In a run, a training batch is a whole optimizer step (`for_run`); otherwise it is one micro-batch.
"""

import functools
import itertools
import os
import sys
from collections.abc import Callable
from typing import Any, ClassVar, Self, cast

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lmtrain import terminal
from lmtrain.config import compose as rules
from lmtrain.config.batch import Stages, batch_split
from lmtrain.config.defaults import conf_dir, options_of
from lmtrain.config.options import OBJECTIVES
from lmtrain.config.override_text import written
from lmtrain.config.schema import Config
from lmtrain.config.targets import find_class
from lmtrain.data.corpus import Corpus, prepare_corpus
from lmtrain.data.loaders import StepDataset, StepSampler, ValidationDataset, check_descriptors, start_worker
from lmtrain.data.order import MicroBatch, Rows
from lmtrain.distributed.devices import data_parallel, trainer_steps
from lmtrain.errors import UserError

# From Python 3.14 on, the default is a server process that starts them: it, not the run, would be their parent, with
# which they end (loaders.start_worker), and each would import torch anew.
WORKERS = "fork" if sys.platform == "linux" else None


class TokenDataModule(pl.LightningDataModule):
    """Training and validation rows as Lightning data loaders; batch sizes are in rows, intervals in optimizer steps."""

    def __init__(
        self,
        train_rows: Rows,
        val_rows: Rows | None,
        *,
        seed: int,
        sizes: Stages,
        micro_batch_size: int,
        total_steps: int,
        num_workers: int,
        max_epochs: int | None = None,
        limit_val_batches: int | None = None,
        val_sets: dict[str, Rows] | None = None,
        lengths: Stages | None = None,
        joined_tokens: int | None = None,
    ) -> None:
        """
        Args:
            sizes: number of rows in each step.
            micro_batch_size: rows of a forward pass; of short padded rows more, up to `joined_tokens` tokens, if given.
            val_sets: further validation sets, each with a loader of its own.
            lengths: length of a training row in tokens at each step, if it grows.
        """
        super().__init__()
        self.train_rows, self.val_rows = train_rows, val_rows
        self.seed, self.total_steps, self.max_epochs = seed, total_steps, max_epochs
        self.sizes, self.micro_batch_size, self.lengths = sizes, micro_batch_size, lengths
        self.limit_val_batches, self.num_workers, self.joined_tokens = limit_val_batches, num_workers, joined_tokens
        own = {"": val_rows} if val_rows is not None else {}
        self.val_sets: dict[str, Rows] = own | (val_sets or {})  # by name; the validation split's name is empty

    def _loader(self, dataset: Dataset, sampler: Sampler[int] | None) -> "Resumable":
        return Resumable(
            dataset,
            batch_size=None,  # an item is already a whole step or micro-batch
            sampler=sampler,
            num_workers=self.num_workers,
            multiprocessing_context=WORKERS if self.num_workers else None,
            pin_memory=torch.cuda.is_available(),
            # A separate generator: starting an iterator must not draw random numbers from the one that dropout uses.
            generator=torch.Generator().manual_seed(self.seed),
            worker_init_fn=functools.partial(start_worker, os.getpid()),
        )

    def train_dataloader(self) -> DataLoader:
        """Returns the loader of the steps from the Trainer's current one on; without a Trainer, of all of them.

        A Trainer that trains longer than the config continues with further steps, as a longer config would.
        """
        trainer: Any = self.trainer
        if trainer is None:
            return self._loader(self._step_dataset(self.max_epochs), StepSampler(self.total_steps))
        if trainer.overfit_batches > 0:
            key = f"overfit_batches={trainer.overfit_batches:g}"
            raise UserError(f"Trainer({key}): the steps of a run are overfitted by its config: trainer.{key}")
        most = trainer_steps(trainer, self.total_steps)
        mixture = getattr(self.train_rows, "mixture", None)
        end = mixture.end if mixture is not None and most > self.total_steps else None
        if end is not None and self.sizes.before(most) > end:
            found = f"data.mixture: all sources are used up before the Trainer's {most:,} steps"
            raise UserError(f"{found}: set its max_steps to {self.sizes.step_of(end):,}, or raise a max_epochs")
        items = max(self.total_steps, trainer.max_steps)
        stop = items if trainer.max_steps > 0 or trainer.max_epochs == 1 else sys.maxsize
        dataset = self._step_dataset(self.max_epochs if stop == self.total_steps else None)
        return self._loader(dataset, StepSampler(items, lambda: trainer.global_step, stop))

    def _share(self) -> dict[str, Any]:
        """Returns which of the rows this rank reads, and in which micro-batches, as arguments of both datasets."""
        part = data_parallel(self.trainer)
        return {"micro_batch_size": self.micro_batch_size, "joined_tokens": self.joined_tokens, "rank": part.rank,
                "world_size": part.size}  # fmt: skip

    def _step_dataset(self, max_epochs: int | None) -> StepDataset:
        share = self._share()
        batch_split(self.sizes.last, self.micro_batch_size, share["world_size"])
        return StepDataset(
            self.train_rows, seed=self.seed, sizes=self.sizes, max_epochs=max_epochs, lengths=self.lengths, **share
        )

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        """Returns one loader for each of `val_sets`, in their order."""
        limit, share = self.limit_val_batches, self._share()
        datasets = [ValidationDataset(rows, limit=limit, **share) for rows in self.val_sets.values()]
        loaders: list[DataLoader] = [self._loader(dataset, None) for dataset in datasets]
        return loaders[0] if len(loaders) == 1 else loaders

    def test_dataloader(self) -> DataLoader | list[DataLoader]:
        """Returns the validation loaders for `trainer.test`; data.val_path names the data. `evaluate` offers more."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader | list[DataLoader]:
        return self.val_dataloader()


class CorpusDataModule(TokenDataModule):
    """The base class of `TextDataModule` and `ChatDataModule`: rows chosen by keywords, for any LightningModule.

    `setup` prepares the rows. Batches are micro-batches, dicts of tensors: for text and conversations input_ids and
    labels, int64 [batch_size, T], where labels[b, t] is the token that follows input_ids[b, t], or -100 where it is not
    learned; for other kinds of rows, see `read` of their class. An epoch has as many whole batches as there are rows
    for; the rows left over begin the next. No row comes again before all have been seen, and then in a new order.
    """

    is_text: ClassVar[bool]
    config: Config | None = None  # None in a run, whose rows are already prepared
    corpus: Corpus  # set by `setup`: the tokenizer, the folder, counts of the rows

    def __init__(
        self,
        data: str,
        *,
        tokenizer: str = "gpt2",
        seq_len: int = 1024,
        batch_size: int = 8,
        seed: int = 1337,
        num_workers: int = 0,
        **keys: Any,
    ) -> None:
        """
        Args:
            data: an option of the config group `data` (conf/data): text, bins, wikitext, chat_jsonl, alpaca, ...
            tokenizer: an option of the group `tokenizer` (bytes, bpe, gpt2, ...), a folder, or a name on the hub.
            seq_len: tokens per row; for conversations that aren't packed, the maximum.
            batch_size: rows of a micro-batch on each device.
            seed: seed of the row order.
            keys: any other keys of the group `data`: path, val_fraction, packing, chat_template, cache_dir, ...

        Raises:
            UserError: a key or option doesn't exist, or the data holds another kind of rows.
        """
        config = _config_of(data, tokenizer, {"seq_len": seq_len, "micro_batch_size": batch_size,
                                              "global_batch_size": batch_size, **keys}, seed)  # fmt: skip
        if (config.data.rows == "text") is not self.is_text:
            other = ChatDataModule if self.is_text else TextDataModule
            raise UserError(f"data={data} holds {config.data.rows}: {other.__name__} reads it")
        if config.data.ring_bytes is not None:
            raise UserError("data.ring_bytes: streaming works only in runs started by lmtrain; leave it out")
        check_descriptors(num_workers)
        batch_size, seed = config.data.micro_batch_size, config.seed  # numbers, even if text was passed
        self.config = config
        super().__init__(
            None,  # type: ignore[arg-type]  # `setup` makes them
            None,
            seed=seed,
            sizes=Stages.constant(batch_size),
            micro_batch_size=batch_size,
            total_steps=0,
            num_workers=num_workers,
        )

    @classmethod
    def for_run(cls, train_rows: Rows, val_rows: Rows | None, **settings: Any) -> Self:
        """Builds the data module of a run, whose rows are already prepared; `settings` are those of TokenDataModule."""
        module = cls.__new__(cls)
        TokenDataModule.__init__(module, train_rows, val_rows, **settings)
        return module

    def setup(self, stage: str | None = None) -> None:
        """Prepares the rows or opens them from the cache; several processes may call it at once."""
        if self.config is None or self.train_rows is not None:
            return
        parts = data_parallel(self.trainer).size if self.trainer is not None else 1
        self.config.data.global_batch_size = self.micro_batch_size * parts
        self.sizes = Stages.constant(self.config.data.global_batch_size)
        self.corpus = prepare_corpus(self.config)
        self.train_rows, self.val_rows = self.corpus.train, self.corpus.val
        self.val_sets = {} if self.val_rows is None else {"": self.val_rows}
        self.total_steps = max(1, len(self.train_rows) // self.sizes.last)

    def train_dataloader(self) -> DataLoader:
        """Returns the loader of an epoch, which begins after the batches that the Trainer has trained on.

        Without a Trainer, every iterator of the loader is the next epoch, from the first one on.
        """
        if self.config is None:
            return super().train_dataloader()
        self._check_set_up()
        steps, trainer = self.total_steps, cast(Any, self.trainer)
        if trainer is None:
            begin: Callable[[], int] = functools.partial(next, itertools.count(0, steps))
        else:
            # Batches that were trained on, in all epochs: Lightning restores this count before it asks for an iterator.
            done = trainer.fit_loop.epoch_loop.batch_progress.total
            begin = lambda: 0 if trainer.overfit_batches else done.processed  # noqa: E731
        loader = self._loader(_MicroBatches(self._step_dataset(None)), StepSampler(steps, begin))
        loader.order = {"seed": self.seed, "rows": len(self.train_rows), "batch_size": self.sizes.last}
        return loader

    def val_dataloader(self) -> DataLoader | list[DataLoader]:
        self._check_set_up()
        return super().val_dataloader()

    def _check_set_up(self) -> None:
        if self.train_rows is None:
            raise UserError(f"{type(self).__name__} has no rows before setup(): call it first, or pass it to a Trainer")

    def _loader(self, dataset: Dataset, sampler: Sampler[int] | None) -> "Resumable":
        if sampler is None and self.config is not None:
            sampler = StepSampler(len(dataset))  # type: ignore[arg-type]  # of validation, whose datasets have a length
        return super()._loader(dataset, sampler)


class TextDataModule(CorpusDataModule):
    """Windows of text, or token bins, as Lightning loaders."""

    is_text = True


class ChatDataModule(CorpusDataModule):
    """Rows of Hugging Face datasets and files (conversations, pairs, unpaired answers) as Lightning loaders."""

    is_text = False


class _MicroBatches(Dataset):
    """The single micro-batch of each step of a StepDataset."""

    def __init__(self, steps: Dataset) -> None:
        self.steps = steps

    def __getitem__(self, step: int) -> MicroBatch:
        (micro_batch,) = self.steps[step]["micro_batches"]
        return dict(micro_batch)


class Resumable(DataLoader):
    """A loader that Lightning takes for resumable: its position follows from the Trainer's counts.

    Its state is what the order of the rows depends on, so that a resume with another order is reported.
    """

    order: dict[str, int] = {}  # noqa: RUF012  # replaced, never changed

    def state_dict(self) -> dict[str, int]:
        return self.order

    def load_state_dict(self, state: dict[str, int]) -> None:
        then = {name: state.get(name, now) for name, now in self.order.items()}
        changed = [f"{name}={old} (now {self.order[name]})" for name, old in then.items() if old != self.order[name]]
        if changed:
            terminal.note(f"the checkpoint was trained with {', '.join(changed)}: the rows go on in another order")


def module_class(config: Config) -> type[CorpusDataModule]:
    """Returns the class that data._target_ names; an older config.yaml without one gets the class for its kind of rows.

    Raises:
        UserError: the class is not allowed, can't be imported, or is no CorpusDataModule.
    """
    if config.data._target_ is None:
        return TextDataModule if config.data.rows == "text" else ChatDataModule
    return find_class(config.data._target_, "data", CorpusDataModule, config.run.allow_target)


def _config_of(data: str, tokenizer: str, keys: dict[str, Any], seed: int) -> Config:
    words = [f"data={data}", f"seed={seed}", f"model.max_position_embeddings={keys['seq_len']}"]
    words += [f"data.{key}={written(value)}" for key, value in keys.items()]
    if tokenizer in options_of("tokenizer", [conf_dir()]):
        words.append(f"tokenizer={tokenizer}")
    else:
        words += ["tokenizer=hub", f"tokenizer.name_or_path={written(tokenizer)}"]
    rows = rules.compose(words).data.rows
    # A config must have an objective: choose one that trains on such rows.
    objective = next((name for name, (_, made) in OBJECTIVES.items() if made.rows == rows), "causal_lm")
    return rules.check(rules.compose([*words, f"objective={objective}"]))
