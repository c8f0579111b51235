"""The step that all objectives share: its rate in a resumed run, and which losses count in the median for spikes."""

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
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


def test_a_spike_is_a_multiple_of_the_median_of_good_losses() -> None:
    """Bad losses are no part of the median: after a spike, or a step that is not finite, the next spike is one too."""
    guard, fine = StepGuard(spike_factor=2.0, window=3), torch.ones(())
    losses = [9.0, 1.0, 2.0, 3.0, 5.0, 5.0, 5.0, 5.0, float("nan"), 3.9, 2.0]
    bad = [bool(guard.judge(step, torch.tensor(loss), fine)) for step, loss in enumerate(losses)]
    # The first three fill the window; the median of 1, 2, 3 is 2, and that of 2, 3, 3.9 is 3.
    assert bad == [False, False, False, False, True, True, True, True, True, False, False]
    assert guard.recent.tolist() == pytest.approx([3.0, 3.9, 2.0])
    assert guard.counts() == (5, 0, 4)
    assert bool(guard.judge(11, torch.tensor(1.0), torch.tensor(float("inf")))), "a gradient that is not finite"
    assert guard.counts() == (6, 1, 11)


def test_a_guard_goes_on_from_its_state() -> None:
    first, again = (StepGuard(spike_factor=2.0, window=3) for _ in range(2))
    for step, loss in enumerate([1.0, 2.0, 3.0, 50.0, 60.0]):
        first.judge(step, torch.tensor(loss), torch.ones(()))
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert again.counts() == first.counts() == (2, 2, 3)
    assert bool(again.judge(5, torch.tensor(4.1), torch.ones(())))
    assert not bool(again.judge(6, torch.tensor(3.9), torch.ones(())))
    other = StepGuard(spike_factor=2.0, window=5)
    other.load_state_dict(first.state_dict())
    assert other.recent.isnan().all(), "a window of another length begins empty"


def test_without_a_factor_only_gradients_that_are_not_finite_are_bad() -> None:
    guard = StepGuard(spike_factor=None, window=2)
    losses = [torch.tensor(1.0), None, torch.tensor(100.0), torch.tensor(float("nan"))]
    assert [bool(guard.judge(step, loss, torch.ones(()))) for step, loss in enumerate(losses)] == [False] * 4
    assert bool(guard.judge(4, None, torch.tensor(float("nan"))))
    assert guard.counts() == (1, 1, 4)
    assert not bool(guard.judge(5, None, torch.ones(())))
    assert guard.counts() == (1, 0, 4)
    assert [int(count) for count in guard.tensors()] == [1, 0, 4]


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
