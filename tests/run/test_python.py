"""A run started from Python gives the command line's numbers, as do its modules under a stock Trainer."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

import lmtrain
from inprocess import train_tiny
from lmtrain.callbacks.metrics import without_times
from lmtrain.errors import UserError
from lmtrain.objectives.causal_lm import CausalLM
from lmtrain.run_folder import lock
from support import TINY, rows
from test_imports import python

STEPS = ["trainer.max_steps=4", "trainer.limit_val_batches=1", "trainer.val_check_interval=2", "export.enabled=false"]


def settings(corpus: Path, *more: str) -> list[str]:
    return [*TINY, "data=text", f"data.path={corpus}", *STEPS, *more]


@pytest.fixture
def typed(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Returns the records of the command line's run."""
    monkeypatch.chdir(tmp_path)
    assert train_tiny(corpus, *STEPS, "run.dir=typed").code == 0
    return [without_times(row) for row in rows(tmp_path / "typed" / "metrics.jsonl")]


def test_fit_validate_and_sample(typed: list[dict[str, Any]], corpus: Path, tmp_path: Path) -> None:
    run = lmtrain.build(lmtrain.compose(settings(corpus, "run.dir=called")))
    untrained = run.validate()
    assert untrained["val/loss"] == pytest.approx(5.5, abs=0.5)  # ln 256
    assert not (tmp_path / "called" / "metrics.jsonl").exists()
    summary = run.fit()
    assert summary["status"] == "finished"
    trained = [row for row in typed if "train/loss" in row][-1]
    assert summary["train"] == {"train/loss": trained["train/loss"], "step": 4}
    assert [without_times(row) for row in rows(tmp_path / "called" / "metrics.jsonl")] == typed
    last = next(row for row in reversed(typed) if "val/loss" in row)
    assert run.validate() == {name: value for name, value in last.items() if name.startswith("val/")}
    assert run.trainer.global_step == 4
    text = run.sample("def ", max_new_tokens=5)
    assert text == run.sample("def ", max_new_tokens=5)
    before = (tmp_path / "called" / "metrics.jsonl").read_bytes()
    assert run.fit() == summary
    assert (tmp_path / "called" / "metrics.jsonl").read_bytes() == before


def test_a_run_that_is_there_is_continued(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    faster, alike = "optimizer.lr=0.03", {"temperature": 1.0, "max_new_tokens": 20}
    first = lmtrain.build(lmtrain.compose(settings(corpus, "run.name=one", "trainer.max_steps=2", faster)))
    untrained = first.sample("line ", **alike)
    first.fit()
    again = lmtrain.build(lmtrain.compose(settings(corpus, "run.name=one", faster)))
    assert again.sample("line ", **alike) == first.sample("line ", **alike) != untrained  # of the checkpoint
    assert again.validate() == pytest.approx(first.validate())
    again.fit()
    said = again.sample("line ", **alike)
    finished = lmtrain.build(lmtrain.compose(settings(corpus, "run.name=one", faster)))
    assert finished.sample("line ", **alike) == said
    assert not lock.taken(finished.path)
    assert [row["step"] for row in rows(again.path / "metrics.jsonl") if "lr" in row] == [1, 2, 3, 4]


def test_two_composed_configs_have_a_command_each(corpus: Path, tmp_path: Path) -> None:
    """The command in a run's summary is that of its own config, whatever was composed after it."""
    first = lmtrain.compose(settings(corpus, f"run.dir={tmp_path}/first", "trainer.max_steps=1"))
    lmtrain.compose(settings(corpus, "run.name=another"))
    command = lmtrain.build(first).fit()["command"]
    assert f"run.dir={tmp_path}/first" in command
    assert "another" not in command


def test_under_a_stock_trainer(typed: list[dict[str, Any]], corpus: Path, tmp_path: Path) -> None:
    run = lmtrain.build(lmtrain.compose(settings(corpus, "run.dir=built")))
    losses = []

    class Reads(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
            losses.append(pl_module.step_means()["train/loss"])

    trainer = pl.Trainer(
        max_steps=4, accelerator="cpu", logger=CSVLogger(str(tmp_path / "stock")), log_every_n_steps=1,
        val_check_interval=2, callbacks=[Reads()], enable_progress_bar=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(run.objective, datamodule=run.datamodule)
    assert losses == pytest.approx([row["train/loss"] for row in typed if "train/loss" in row], rel=1e-6)
    last = [row["val/loss"] for row in typed if "val/loss" in row][-1]
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(last, rel=1e-6)
    assert float(trainer.callback_metrics["train/loss"]) == pytest.approx(losses[-1], rel=1e-6)


def losses_of(words: list[str], ckpt_path: Path | None = None, **arguments: Any) -> list[float]:
    """Trains a built run under a stock Trainer; returns the losses of the steps."""
    run = lmtrain.build(lmtrain.compose(words))
    losses = []

    class Reads(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
            losses.append(pl_module.step_means()["train/loss"])

    settings: dict[str, Any] = {"limit_val_batches": 0, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", logger=False, callbacks=[Reads()], **settings, **arguments)
    trainer.fit(run.objective, datamodule=run.datamodule, ckpt_path=ckpt_path, weights_only=False)
    return losses


def test_a_stock_trainers_length_is_the_runs(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the config, by steps, by epochs or after a resume, it gives the losses of a config of that length."""
    monkeypatch.chdir(tmp_path)
    more = ["schedule=cosine", "schedule.warmup_steps=1", "optimizer.lr=0.01"]
    words = [*settings(corpus, *more), "trainer.max_steps=3"]
    assert train_tiny(corpus, *STEPS, *more, "trainer.max_steps=6", "run.dir=typed").code == 0
    expected = [row["train/loss"] for row in rows(tmp_path / "typed" / "metrics.jsonl") if "train/loss" in row]
    for i, length in enumerate(({"max_steps": 6}, {"max_epochs": 2})):
        found = losses_of([*words, f"run.dir=built_{i}"], enable_checkpointing=False, **length)
        assert found == pytest.approx(expected, rel=1e-6), length
    constant = [*words, "schedule=constant"]
    whole = losses_of([*constant, "run.dir=whole"], enable_checkpointing=False, max_steps=6)
    begun = losses_of([*constant, "run.dir=first"], default_root_dir=tmp_path / "begun", max_steps=3)
    (checkpoint,) = (tmp_path / "begun").rglob("*.ckpt")
    rest = losses_of([*constant, "run.dir=rest"], ckpt_path=checkpoint, enable_checkpointing=False, max_steps=6)
    assert begun + rest == pytest.approx(whole, rel=1e-6)
    with pytest.raises(UserError, match=r"pass ckpt_path='.*ckpt' to trainer\.fit or validate"):
        CausalLM.load_from_checkpoint(checkpoint)
    run = lmtrain.build(lmtrain.compose([*constant, "run.dir=loaded"]))
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    trainer.validate(run.objective, datamodule=run.datamodule, ckpt_path=checkpoint, verbose=False)
    saved = torch.load(checkpoint, weights_only=False)["state_dict"]
    assert all(torch.equal(saved[name], value) for name, value in run.objective.state_dict().items())


def test_a_stock_trainers_metrics_test_and_predict(typed: list[dict[str, Any]], corpus: Path, tmp_path: Path) -> None:
    """It is used as Lightning users would: without a logger, for fewer steps than log_every_n_steps."""
    run = lmtrain.build(lmtrain.compose(settings(corpus, "run.dir=built")))
    trainer = pl.Trainer(max_steps=4, accelerator="cpu", logger=False, enable_progress_bar=False,
                         enable_checkpointing=False, val_check_interval=2)  # fmt: skip
    trainer.fit(run.objective, datamodule=run.datamodule)
    last = [row for row in typed if "train/loss" in row][-1]
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for name in ("train/loss", "lr", "grad_norm"):
        assert found[name] == pytest.approx(last[name], rel=1e-6)
    expected = [row["val/loss"] for row in typed if "val/loss" in row][-1]
    (tested,) = trainer.test(run.objective, datamodule=run.datamodule, verbose=False)
    assert tested["test/loss"] == pytest.approx(expected, rel=1e-6)
    predicted: Any = trainer.predict(run.objective, datamodule=run.datamodule)
    scored = torch.cat([(part["labels"] != -100).flatten() for part in predicted])
    log_probs = torch.cat([part["log_probs"].flatten() for part in predicted])
    assert -log_probs[scored].mean().item() == pytest.approx(expected, rel=1e-6)
    assert not log_probs[~scored].any()
    assert not (tmp_path / "built" / "metrics.jsonl").exists()


def test_tested_and_predicted_by_the_runs_own_trainer(corpus: Path, tmp_path: Path) -> None:
    run = lmtrain.build(lmtrain.compose(settings(corpus, f"run.dir={tmp_path / 'called'}", "trainer.max_steps=2")))
    run.fit()
    written = (tmp_path / "called" / "metrics.jsonl").read_bytes()
    (tested,) = run.trainer.test(run.objective, datamodule=run.datamodule, verbose=False)
    assert tested["test/loss"] == pytest.approx(run.validate()["val/loss"])
    assert run.trainer.predict(run.objective, datamodule=run.datamodule)
    assert (tmp_path / "called" / "metrics.jsonl").read_bytes() == written


class Own(pl.LightningModule):
    def training_step(self, *_: Any) -> None: ...

    def configure_optimizers(self) -> None: ...


def test_what_is_mixed_up_is_said(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong types, modules and data, each of which ended in an AssertionError, a KeyError or an AttributeError."""
    monkeypatch.chdir(tmp_path)
    run = lmtrain.build(lmtrain.compose(settings(corpus, "run.dir=built")))
    keys: dict[str, Any] = {"path": str(corpus), "tokenizer": "bytes", "seq_len": 32}
    data = lmtrain.TextDataModule("text", **keys, batch_size="4")  # type: ignore[arg-type]  # as from a command line
    data.setup("fit")
    assert len(next(iter(data.train_dataloader()))["input_ids"]) == 4
    trainer = pl.Trainer(max_steps=1, accelerator="cpu", logger=False, enable_checkpointing=False)
    for match, does in (
        ("step_means: no step has been trained yet", run.objective.step_means),
        ("the Trainer of a run trains objectives, and Own is none", lambda: run.trainer.fit(Own())),
        ("CausalLM trains whole steps, and this loader gives micro-", lambda: trainer.fit(run.objective, data)),
        ("num_workers=-1: a whole number from 0", lambda: lmtrain.TextDataModule("text", **keys, num_workers=-1)),
        ("compose takes a list of overrides", lambda: lmtrain.compose("model=gpt_nano")),
        ("build takes what compose returns", lambda: lmtrain.build({})),  # type: ignore[arg-type]
    ):
        with pytest.raises(UserError, match=match):
            does()


def test_refusals(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"optimizer\.lr"):
        lmtrain.compose(["optimizer.lrr=1"])
    with pytest.raises(UserError, match="a run from Python has one process"):
        lmtrain.build(lmtrain.compose(settings(corpus, "trainer.devices=2", "data.global_batch_size=8")))
    for word in ("budget.minutes=1", "budget.tokens=1e6", "trainer.num_nodes=2"):
        with pytest.raises(UserError, match=word.partition("=")[0]):
            lmtrain.build(lmtrain.compose(settings(corpus, word)))
    with pytest.raises(UserError, match=r"set trainer.max_steps and budget.tokens=null"):  # one is not enough
        lmtrain.build(lmtrain.compose(settings(corpus, "budget.tokens=1e6", "trainer.max_steps=2")))
    assert list(tmp_path.iterdir()) == []


def test_importing_costs_no_torch(tmp_path: Path) -> None:
    code = "import lmtrain, sys; lmtrain.compose(['optimizer.lr=1e-3']); print('torch' in sys.modules)"
    assert python(code, cwd=tmp_path) == "False"
