"""The step that all objectives share: its rate in a resumed run, and which steps are bad."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import lmtrain
from inprocess import train_tiny
from lmtrain.optim.skipping import StepGuard
from support import TINY, rows


def test_a_resumed_run_takes_its_rate_from_its_config(corpus: Path, tmp_path: Path) -> None:
    """A checkpoint's optimizer state holds the rate of the run that wrote it, which must not come back."""
    words = [f"run.dir={tmp_path / 'run'}", "schedule=constant", "schedule.warmup_steps=0", "run.resume=auto"]
    for steps, lr in ((2, 1e-3), (4, 5e-5)):
        ended = train_tiny(corpus, *words, f"trainer.max_steps={steps}", f"optimizer.lr={lr}")
        assert ended.code == 0, ended.err
    found = [row["lr"] for row in rows(tmp_path / "run" / "metrics.jsonl") if "lr" in row]
    assert found == [1e-3, 1e-3, 5e-5, 5e-5]


def test_a_guard_counts_steps_in_a_row_and_goes_on_from_its_state() -> None:
    first, again = StepGuard(), StepGuard()
    norms = [1.0, float("inf"), 1.0, float("nan"), float("nan")]
    assert [bool(first.judge(step, torch.tensor(norm))) for step, norm in enumerate(norms)] == [
        False,
        True,
        False,
        True,
        True,
    ]
    again.load_state_dict({**json.loads(json.dumps(first.state_dict())), "recent": [1.0, 2.0]})  # of an earlier version
    assert again.counts() == first.counts() == (3, 2, 3)
    assert not bool(again.judge(5, torch.ones(())))
    assert again.counts() == (3, 0, 3)


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Counted(pl.Callback):
    """Counts the operations of the third step, and of the same step in a bare loop."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            pl_module.first_steps = []  # the checks of a run's beginning, which end at a logged step
            self.step = Operations()
            self.step.__enter__()
        elif trainer.global_step == 3:
            self.step.__exit__(None, None, None)
            (batch,) = trainer.train_dataloader.dataset[3]["micro_batches"]  # type: ignore[union-attr]
            model, optimizer = pl_module.model, pl_module.optimizers().optimizer
            with Operations() as self.bare:
                (model(**batch).loss_sum / batch["labels"].numel()).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            trainer.should_stop = True


def test_a_step_takes_few_operations_more_than_a_bare_loops(corpus: Path, tmp_path: Path) -> None:
    """After a forward pass each costs ten times what it costs in a loop of its own, as it is in no cache any more."""
    data = ["data=text", f"data.path={corpus}", "data.isolate_documents=false", "data.global_batch_size=2"]
    length = ["trainer.max_steps=200", "trainer.log_every_n_steps=100", "trainer.limit_val_batches=1"]  # a row is rare
    words = [*TINY, *data, *length]
    run = lmtrain.build(lmtrain.compose([*words, f"run.dir={tmp_path / 'run'}"]))
    counted = Counted()
    run.trainer.callbacks.append(counted)  # type: ignore[attr-defined]
    run.fit()
    assert counted.step.count - counted.bare.count <= 32, "it was 65 when a step first was looked through"
