"""What a user's own callbacks see and change, in a run and under a Trainer of the user's own."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging

import lmtrain
from inprocess import message, train_tiny
from lmtrain.callbacks import extra
from lmtrain.errors import UserError
from support import TINY, rows

SIX = ["trainer.max_steps=6", "trainer.val_check_interval=2", "trainer.limit_val_batches=2"]
OWN = f"run.allow_target=[{__name__}]"


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def with_own(*callbacks: str) -> list[str]:
    return [f"callbacks.extra=[{','.join(f'{{_target_: {__name__}.{each}}}' for each in callbacks)}]", OWN]


def built(corpus: Path, *argv: str) -> Any:
    return lmtrain.build(lmtrain.compose([*TINY, *SIX, "data=text", f"data.path={corpus}", "run.dir=run", *argv]))


def own_trainer(*callbacks: pl.Callback, **arguments: Any) -> pl.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return pl.Trainer(accelerator="cpu", logger=False, callbacks=list(callbacks), **quiet | arguments)


class ShrinksWeights(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        with torch.no_grad():
            for p in pl_module.parameters():
                p.clamp_(-0.01, 0.01)


def test_a_score_is_that_of_the_weights_that_are_saved(corpus: Path) -> None:
    """A callback changes the weights after each step, as in weight clipping."""
    words = ["optimizer.lr=0.03", *with_own("ShrinksWeights")]
    ended = train_tiny(corpus, *SIX, "run.dir=run", *words)
    assert ended.code == 0, ended.err
    again = built(corpus, *words, "run.resume=auto")
    scores = [row["val/loss"] for row in rows(Path("run/metrics.jsonl")) if "val/loss" in row]
    assert again.validate()["val/loss"] == pytest.approx(scores[-1], rel=1e-6)
    assert max(float(p.detach().abs().max()) for p in again.objective.parameters()) <= 0.01


class Reads(pl.Callback):
    """Notes the loss of each step, in three ways."""

    seen: list[tuple[int, float, float, float]]

    def on_fit_start(self, *_: Any) -> None:
        type(self).seen = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        shown = float(trainer.callback_metrics["train/loss"])
        own = pl_module.step_means()["train/loss"]
        self.seen.append((trainer.global_step, float(outputs["loss"]), shown, own))


def test_each_steps_loss_is_shown_in_time(corpus: Path) -> None:
    ended = train_tiny(corpus, *SIX, "run.dir=run", "trainer.log_every_n_steps=3", *with_own("Reads"))
    assert ended.code == 0, ended.err
    assert [step for step, *_ in Reads.seen] == [1, 2, 3, 4, 5, 6]
    logged = {row["step"]: row["train/loss"] for row in rows(Path("run/metrics.jsonl")) if "train/loss" in row}
    assert sorted(logged) == [1, 3, 6]
    for step, returned, shown, own in Reads.seen:
        assert returned == pytest.approx(own, rel=1e-6)
        assert shown == pytest.approx(own, rel=1e-6)
        assert own == pytest.approx(logged.get(step, own), rel=1e-6)


def test_each_steps_loss_is_shown_in_time_by_a_trainer_of_ones_own(corpus: Path) -> None:
    run = built(corpus)
    own_trainer(Reads(), max_steps=3, limit_val_batches=0).fit(run.objective, datamodule=run.datamodule)
    assert len(Reads.seen) == 3
    for _, returned, shown, own in Reads.seen:
        assert [returned, shown] == pytest.approx([own, own], rel=1e-6)


def test_stopping_and_saving_by_the_training_loss(corpus: Path) -> None:
    """Lightning's callbacks monitor train/loss: the run stops where it is low enough, the best checkpoint is found."""
    run = built(corpus, "optimizer.lr=0.01", "schedule.warmup_steps=0", "trainer.max_steps=40")
    stop = EarlyStopping("train/loss", patience=50, stopping_threshold=5.0)
    keep = ModelCheckpoint("own", monitor="train/loss", every_n_train_steps=1, save_top_k=1)
    run.trainer.callbacks[1:1] = [stop, keep]
    summary = run.fit()
    assert summary["status"] == "stopped_early"
    losses = {row["step"]: row["train/loss"] for row in rows(run.path / "metrics.jsonl") if "train/loss" in row}
    assert losses[summary["step"]] < 5.0
    assert float(keep.best_model_score) == pytest.approx(min(losses.values()), rel=1e-6)  # type: ignore[arg-type]
    assert run.trainer.callback_metrics["train/loss"] == pytest.approx(losses[summary["step"]], rel=1e-6)


def test_the_training_loss_is_known_in_a_validation_before_the_first_step(corpus: Path) -> None:
    """Not the loss, which no step has yet: EarlyStopping waits. A resumed run begins with that of its last step."""
    stop = "{_target_: lightning.pytorch.callbacks.EarlyStopping, monitor: train/loss}"
    words = ["run.dir=run", f"callbacks.extra=[{stop}]", "trainer.save_every_n_steps=2"]
    ended = train_tiny(corpus, *SIX, *words, "trainer.val_before_training=true", "trainer.max_steps=2")
    assert ended.code == 0, ended.err
    run = built(corpus, *words, "run.resume=auto", "trainer.val_before_training=true")
    seen = []

    class Looks(pl.Callback):
        def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
            seen.append(float(trainer.callback_metrics["train/loss"]))

    run.trainer.callbacks.append(Looks())
    run.fit()
    losses = [row["train/loss"] for row in rows(Path("run/metrics.jsonl")) if "train/loss" in row]
    assert seen == [losses[1]]


def test_averaging_that_sets_rates_is_refused_under_a_trainer_of_ones_own(corpus: Path) -> None:
    run = built(corpus)
    trainer = own_trainer(StochasticWeightAveraging(swa_lrs=1e-2), max_epochs=2, limit_train_batches=2)
    with pytest.raises(UserError, match="StochasticWeightAveraging sets the learning rate"):
        trainer.fit(run.objective, datamodule=run.datamodule)


class UnfreezesLate(pl.Callback):
    """What the refusal of BaseFinetuning advises."""

    moved: list[bool]

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.table = pl_module.model.model.get_input_embeddings().weight
        self.table.requires_grad_(trainer.global_step >= 3)
        self.before = self.table.detach().clone()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        type(self).moved = [*(self.moved if trainer.global_step > 1 else []), not torch.equal(self.table, self.before)]


class CountsEpochs(pl.Callback):
    def on_train_epoch_end(self, *_: Any) -> None:
        Path("epochs").write_text("one")


def test_what_acts_at_steps_works_and_what_acts_at_epochs_is_told(corpus: Path) -> None:
    words = ["optimizer.lr=0.01", "schedule.warmup_steps=0", "optimizer.weight_decay=0"]
    ended = train_tiny(corpus, *SIX, *words, "run.dir=run", *with_own("UnfreezesLate", "CountsEpochs"))
    assert ended.code == 0, ended.err
    assert UnfreezesLate.moved == [False, False, False, True, True, True]
    said = " ".join(ended.out.split())
    assert "callbacks.extra, CountsEpochs: on_train_epoch_end runs once, as a run is a single epoch" in said
    assert "UnfreezesLate:" not in said
    assert Path("epochs").read_text() == "one"


@pytest.mark.parametrize(
    ("name", "arguments", "instead"),
    [
        ("LearningRateMonitor", "logging_interval: epoch", "logging_interval=step"),
        ("Timer", "duration: {seconds: 9}, interval: epoch", "interval=step"),
        ("EarlyStopping", "monitor: val/loss, check_on_train_epoch_end: true", "check_on_train_epoch_end=false"),
        ("ModelCheckpoint", "every_n_epochs: 2", "every_n_train_steps"),
        ("ModelCheckpoint", "save_on_train_epoch_end: true", "every_n_train_steps"),
    ],
)
def test_what_would_act_at_epochs_only_is_refused(name: str, arguments: str, instead: str, corpus: Path) -> None:
    ended = train_tiny(corpus, *SIX, f"callbacks.extra=[{{_target_: lightning.pytorch.callbacks.{name}, {arguments}}}]")
    assert ended.code == 2
    assert message(ended.err).endswith(f"a run is a single epoch of Lightning's: set {instead} instead")


def test_callbacks_that_act_at_steps_are_not_refused() -> None:
    for entry in ({"_target_": "lightning.pytorch.callbacks.Timer", "interval": "step"},
                  {"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "every_n_epochs": 1},
                  {"_target_": "mine.Timer", "interval": "epoch"}):  # fmt: skip
        assert extra.fitted(entry) == entry
