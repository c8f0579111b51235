"""Each private part of Lightning that lmtrain uses behaves as strategies/lightning_private.py says.

The sources of all versions in READ_IN were read. For a new version, run this file, read the source of what fails, and
raise the bound.
"""

import ast
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import wandb
from lightning.pytorch.plugins.precision import HalfPrecision
from lightning.pytorch.strategies import DDPStrategy
from packaging.specifiers import SpecifierSet
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lmtrain.strategies import lightning_private
from support import REPO

READ_IN = SpecifierSet(">=2.6,<2.7,!=2.6.2,!=2.6.3")  # 2.6.0, 2.6.1, 2.6.4, 2.6.5, 2.6.6
THE_FILE = REPO / "src" / "lmtrain" / "strategies" / "lightning_private.py"
STEPS = 4


class Plain(pl.LightningModule):
    """Logs two numbers per step, one of them averaged over the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.log("now", float(index), logger=True)
        self.log("mean", float(index), on_step=False, on_epoch=True)
        return self.layer(batch).sum()

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("score", float(index))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class AtStep(pl.Callback):
    """Collects what `look` returns at the end of each step."""

    def __init__(self, look: Any) -> None:
        self.look, self.seen = look, []  # type: ignore[var-annotated]

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        self.seen.append(self.look(trainer))


def trainer_of(tmp_path: Path, *callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    logger = pl.loggers.CSVLogger(tmp_path)
    return pl.Trainer(accelerator="cpu", devices=1, max_steps=STEPS, logger=logger, callbacks=list(callbacks),
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
                      num_sanity_val_steps=0, log_every_n_steps=2, **options)  # fmt: skip


def fit(tmp_path: Path, look: Any, **options: Any) -> list[Any]:
    """Returns what `look` gives at the end of each of four steps."""
    callback = AtStep(look)
    rows: Any = DataLoader(torch.ones(STEPS, 2))  # type: ignore[arg-type]
    trainer_of(tmp_path, callback, **options).fit(Plain(), rows, rows)
    return callback.seen


def test_the_installed_lightning_was_read() -> None:
    installed = version("lightning")
    assert READ_IN.contains(installed), f"lightning {installed}: is lightning_private.py right about it?"


def test_leave_signals_alone(tmp_path: Path) -> None:
    import signal

    before, during = signal.getsignal(signal.SIGTERM), []
    for left in (False, True):
        callback = AtStep(lambda _: signal.getsignal(signal.SIGTERM))
        trainer = trainer_of(tmp_path, callback)
        if left:
            lightning_private.leave_signals_alone(trainer)
        rows: Any = DataLoader(torch.ones(STEPS, 2))  # type: ignore[arg-type]
        trainer.fit(Plain(), rows)
        during.append(callback.seen[0])
    assert during[0] is not before, "Lightning still has a handler of its own"
    assert during[1] is before


def test_broadcast_no_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's own method would broadcast at each step on several ranks."""
    asked: list[str] = []
    monkeypatch.setattr(torch.distributed, "broadcast", lambda *_, **__: asked.append("broadcast"))
    monkeypatch.setattr(torch.distributed, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    trainer = trainer_of(tmp_path)
    monkeypatch.setattr(type(trainer), "world_size", property(lambda _: 2))
    loop: Any = trainer.fit_loop.epoch_loop
    loop._broadcast_sigterm_tensor()
    assert asked == ["broadcast"]
    lightning_private.broadcast_no_sigterm(trainer)
    loop._broadcast_sigterm_tensor()
    assert asked == ["broadcast"]
    assert "_broadcast_sigterm_tensor()" in source("loops/training_epoch_loop.py"), "its loop still asks by this name"


def test_logged_at_step_and_over_the_epoch(tmp_path: Path) -> None:
    steps = fit(tmp_path, lightning_private.logged_at_step)
    assert [float(step["now"]) for step in steps] == [0.0, 1.0, 2.0, 3.0]
    epochs = fit(tmp_path, lightning_private.logged_over_epoch)
    assert float(epochs[-1]["mean"]) == pytest.approx(1.5)
    assert lightning_private.logged_over_epoch(trainer_of(tmp_path)) == {}


def test_hide_logged(tmp_path: Path) -> None:
    def look(trainer: pl.Trainer) -> tuple[list[str], list[str]]:
        lightning_private.hide_logged(trainer, True)
        hidden = list(lightning_private.logged_at_step(trainer))
        lightning_private.hide_logged(trainer, False)
        return hidden, list(lightning_private.logged_at_step(trainer))

    assert fit(tmp_path, look)[-1] == ([], ["now"])


def test_between_batches(tmp_path: Path) -> None:
    """Values logged before a validation that a callback runs are still there after it."""

    def look(trainer: pl.Trainer) -> tuple[dict[str, Any], dict[str, Any], bool]:
        before = dict(lightning_private.logged_at_step(trainer))
        with lightning_private.between_batches(trainer):
            assert trainer.validating
            trainer.fit_loop.epoch_loop.val_loop.run()
        return before, dict(lightning_private.logged_at_step(trainer)), trainer.training

    for before, after, training in fit(tmp_path, look, limit_val_batches=1):
        assert before.items() <= after.items()
        assert training


def test_process_group_backend() -> None:
    strategy = DDPStrategy(parallel_devices=[torch.device("cpu")])
    assert lightning_private.process_group_backend(strategy) == "gloo"


def test_say_moved() -> None:
    module = Plain()
    lightning_private.say_moved(module, torch.device("meta"))
    assert module.device == torch.device("meta")


@pytest.mark.parametrize(("name", "dtype"), [("bf16-true", torch.bfloat16), ("16-true", torch.float16)])
def test_half_dtype(name: Any, dtype: torch.dtype) -> None:
    assert lightning_private.half_dtype(HalfPrecision(name)) is dtype


def test_wandb_options(tmp_path: Path) -> None:
    wandb.finish()  # a run that another test left open would be reused
    logger = pl.loggers.WandbLogger(save_dir=tmp_path, mode="online")
    lightning_private.wandb_options(logger)["mode"] = "disabled"
    assert logger.experiment.disabled, "read when the run is opened"


def test_purge_from(tmp_path: Path) -> None:
    logger = pl.loggers.TensorBoardLogger(tmp_path)
    lightning_private.purge_from(logger, 3)
    logger.experiment.flush()
    (written,) = Path(logger.log_dir).glob("events.*")
    events = [event for event in EventFileLoader(str(written)).Load() if event.HasField("session_log")]
    assert [event.step for event in events] == [3], "TensorBoard drops what an earlier writer wrote from here on"


def source(name: str) -> str:
    return (Path(pl.__file__).parent / name).read_text()


def private_names(folder: Path) -> set[str]:
    """Returns the private methods and attributes of the classes below `folder`."""
    text = "".join(path.read_text() for path in folder.rglob("*.py"))
    return set(re.findall(r"(?:def |self\.)(_[a-z]\w*)\b(?=\(| = |: )", text))


def touched(path: Path, names: set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr in names:
            yield f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def test_nothing_else_touches_them() -> None:
    """Names that lmtrain also gives to its own attributes are not checked."""
    here = THE_FILE.parents[1]
    of_lightning = private_names(Path(pl.__file__).parents[1])
    of_lmtrain = private_names(here)
    found = {path: list(touched(path, of_lightning - of_lmtrain)) for path in here.rglob("*.py")}
    in_the_file = found.pop(THE_FILE)
    assert [line for lines in found.values() for line in lines] == []
    assert len(in_the_file) >= 12
