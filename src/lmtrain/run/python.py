"""The Python API of a run: `lmtrain.compose` and `lmtrain.build` do what the command line does, step by step.

    config = lmtrain.compose(["model=gpt_nano", "data.path=book.txt", "trainer.max_steps=100"])
    run = lmtrain.build(config)
    run.fit()

`run.objective` and `run.datamodule` are a LightningModule and a LightningDataModule: they also work under a
Trainer of your own. Importing this module does not import torch.
"""

import contextlib
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain.config import compose as rules
from lmtrain.config import trust
from lmtrain.config.batch import split_over
from lmtrain.config.override_text import Command
from lmtrain.config.schema import Config
from lmtrain.distributed import ranks
from lmtrain.errors import UserError
from lmtrain.run_folder import finished
from lmtrain.run_folder import folder as run_dir

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lmtrain.data.modules import TokenDataModule
    from lmtrain.objectives.base import Objective
    from lmtrain.run.session import Session


def compose(overrides: Sequence[str] = (), config_dir: str | None = None) -> Config:
    """Composes the config that the command line would make of the same overrides; raises UserError if one is wrong."""
    if isinstance(overrides, str) or not all(isinstance(word, str) for word in overrides):
        raise UserError(f'compose takes a list of overrides, ["model=gpt_nano", "data.path=a.txt"]: {overrides!r}')
    made = rules.composition(list(overrides), config_dir)
    return rules.check(made.tree, Command(tuple(overrides), notes=tuple(made.reasons)))


def build(config: Config) -> "PythonRun":
    """Builds data, model, objective and Trainer of a run on one device; locks its folder against other processes.

    An existing run continues as on the command line: through run.name or run.resume.

    Raises:
        UserError: the command line would refuse the config, or it asks for more than one device.
    """
    from lmtrain.distributed import devices
    from lmtrain.run import updates
    from lmtrain.run.session import Session
    from lmtrain.run.start import keep_precision

    if not isinstance(config, Config):
        raise UserError(f"build takes what compose returns, lmtrain.build(lmtrain.compose([...])): {config!r}")
    config = copy.deepcopy(config)
    if ranks.find() is not None:
        raise UserError("lmtrain.build makes a run of one process: with torchrun or srun start -m lmtrain.train ...")
    _refuse(config)
    keep_precision(config)
    updates.settle(config)
    folder = run_dir.open_run(config)
    try:
        devices.resolve_auto(config)
        if int(config.trainer.devices) > 1:
            found = f"trainer.devices={config.trainer.devices}: a run from Python has one process"
            raise UserError(f"{found}. Set trainer.devices=1, or start python -m lmtrain.train")
        split_over(config, 1)
        return PythonRun(Session(config, folder))
    except BaseException:
        folder.discard_if_unused()
        raise


def _refuse(config: Config) -> None:
    """Raises UserError for what lmtrain.train does before a run is built, or in several processes."""
    chosen = config.budget.chosen
    if chosen is not None:
        found = f"budget.{chosen} chooses the number of steps on the command line only"
        raise UserError(f"{found}: set trainer.max_steps and budget.{chosen}=null, or start python -m lmtrain.train")
    nodes = config.trainer.num_nodes
    if nodes > 1:
        raise UserError(f"trainer.num_nodes={nodes}: a run from Python has one process; leave it out")


class PythonRun:
    """A fully built run: train it with `fit`, inspect it with `validate` and `sample`."""

    def __init__(self, session: "Session") -> None:
        self._session = session
        with contextlib.ExitStack() as held:
            self._run = session.build(held)
            self._held = held.pop_all()
        self.config = session.config
        self.path = session.folder.path
        self.objective: Objective = self._run.objective
        self.datamodule: TokenDataModule = self._run.datamodule
        self.trainer: pl.Trainer = self._run.trainer
        self._saved: Any = None  # the model of the checkpoint that the run continues from, if `sample` was called
        self._fitted = finished.is_finished(session.config)
        if self._fitted:
            self._held.close()  # it trains nothing

    def fit(self) -> dict[str, Any]:
        """Trains to the end and exports, or trains until a stop request; returns the contents of summary.json.

        A run that has already finished is not trained again.
        """
        if not self._fitted:
            self._fitted = True
            with self._held:
                self._session.train(self._run)
            self._session.checkpoint = self._saved = None  # the model now holds the trained weights
        return self._session.folder.read_summary() or {}

    def validate(self) -> dict[str, float]:
        """Returns val/loss and the other metrics of the current weights, or of the checkpoint the run continues from.

        Nothing is written to the run's folder.
        """
        from lmtrain.data import loaders

        metrics, saved = self._run.metrics, self._session.checkpoint
        before = metrics.last_val
        with loaders.no_workers_left():
            self.trainer.validate(
                self.objective, datamodule=self.datamodule, ckpt_path=saved, weights_only=True, verbose=False
            )
        metrics.records.forget_validation()
        found, metrics.last_val = metrics.last_val, before
        return {name: value for name, value in found.items() if name != "step"}

    def sample(self, prompt: str, **settings: Any) -> str:
        """Returns a continuation of `prompt`, by the current weights or the checkpoint that the run continues from.

        `settings` override config.generate, such as max_new_tokens.
        """
        from lmtrain.generation.sampling import sample_text, settings_of

        checkpoint = self._session.checkpoint
        model = self.objective.model.model if checkpoint is None else self._model_of(checkpoint)
        chosen = {**settings_of(self.config.generate), "seed": self.config.seed, **settings}
        return sample_text(model, self._run.corpus.tokenizer, prompt, **chosen)

    def _model_of(self, checkpoint: Path) -> Any:
        """Returns a checkpoint's model, apart from the one that `fit` loads it into, of which references are made."""
        from lightning.pytorch.utilities.seed import isolate_rng

        from lmtrain.run_folder import trained

        if self._saved is None:
            with isolate_rng():
                run = run_dir.RunDir(checkpoint.parent.parent)
                self._saved, _, _ = trained.from_run(run, checkpoint.name, trust.granted(self.config))
            trained.place(self._saved, self.config.trainer.accelerator)
        return self._saved
