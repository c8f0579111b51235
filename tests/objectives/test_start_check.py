"""Checks of the first steps: trained weights move, frozen ones don't, and harmless cases don't end a run."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chats import write_rows
from inprocess import Ended, message, run, train_tiny
from lmtrain.errors import RunError
from lmtrain.objectives.start_check import WEIGHTS_SINCE, FirstSteps, weights_move
from support import TINY

HERE = f"run.allow_target=[{__name__}]"
FEW = ["trainer.max_steps=21", "trainer.val_check_interval=21", "schedule=constant", "schedule.warmup_steps=0",
       "export.enabled=false", "report.enabled=false", "callbacks.samples.every_n_validations=0", "logger=none",
       "optimizer.lr=1e-3"]  # fmt: skip


class Idle(torch.optim.SGD):
    """An optimizer that changes nothing."""

    def step(self, closure: Any = None) -> None:
        assert closure is not None
        closure()


class Deaf(torch.optim.SGD):
    """An optimizer that doesn't call the closure it is given."""

    def step(self, closure: Any = None) -> None:
        super().step()


class EveryTenth(torch.optim.SGD):
    """An optimizer that updates only every tenth step."""

    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        super().step(closure) if self.count % 10 == 0 else closure()


def trained(corpus: Path, run_dir: Path, optimizer: str, *argv: str) -> Ended:
    own = ["optimizer=custom", f"optimizer._target_={__name__}.{optimizer}", HERE]
    return train_tiny(corpus, *FEW, *own, "optimizer.lr=1e-3", f"run.dir={run_dir}", *argv)


@pytest.mark.parametrize("objective", ["causal_lm", "mdlm"])
def test_weights_that_stand_still_end_the_run(objective: str, corpus: Path, tmp_path: Path) -> None:
    ended = trained(corpus, tmp_path / "run", "Idle", f"objective={objective}")
    assert ended.code == 1
    found = message(ended.err)
    assert f"after {WEIGHTS_SINCE} optimizer steps every trained weight is bit for bit what it was before" in found
    assert "(optimizer._target_, of your own) changes nothing" in found


def test_an_sft_of_an_optimizer_that_does_nothing_ends(tmp_path: Path) -> None:
    answers = write_rows(tmp_path / "answers.jsonl", "chat_jsonl")
    ended = run("train", *TINY, *FEW, "objective=sft", "data=chat_jsonl", f"data.path={answers}", HERE,
                "data.chat_template=vicuna", "data.seq_len=512", "model.max_position_embeddings=512",
                "optimizer=custom", f"optimizer._target_={__name__}.Idle", "optimizer.lr=1e-3",
                "data.val_fraction=0.1", f"run.dir={tmp_path}/run")  # fmt: skip
    assert ended.code == 1
    assert "every trained weight is bit for bit" in message(ended.err)


def test_an_optimizer_that_calls_no_closure_ends_the_run(corpus: Path, tmp_path: Path) -> None:
    """Gradients would be neither clipped nor checked, and grad_norm would be 0 in every row."""
    ended = trained(corpus, tmp_path / "run", "Deaf")
    assert ended.code == 1
    assert "Deaf.step(closure) doesn't call its closure" in message(ended.err)


def test_optimizers_that_wait_and_rates_of_nothing_end_no_run(corpus: Path, tmp_path: Path) -> None:
    waits = trained(corpus, tmp_path / "waits", "EveryTenth")
    assert waits.code == 0, waits.err
    for i, rate in enumerate(("0", "1e-12")):
        still = trained(corpus, tmp_path / f"still{i}", "Idle", f"optimizer.lr={rate}")
        assert still.code == 0, still.err


def look(trained: list[torch.nn.Parameter], frozen: list[torch.nn.Parameter]) -> FirstSteps:
    """Builds the check for a model with these parameters, in fp32 on one process."""
    for p in frozen:
        p.requires_grad_(False)
    model = torch.nn.ParameterList([*trained, *frozen])
    trainer = SimpleNamespace(precision="32-true", world_size=1)
    return weights_move(SimpleNamespace(model=model, trainer=trainer, device=torch.device("cpu")))  # type: ignore[arg-type]


def over(first: FirstSteps, rates: list[float] | None = None) -> bool:
    return first.over(WEIGHTS_SINCE, rates or [1e-3], torch.tensor(2.0), True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_bit_of_one_element_is_seen(dtype: torch.dtype) -> None:
    """One changed trained weight is enough to pass; one changed frozen weight is an error."""
    moving, still, frozen = (torch.nn.Parameter(torch.randn(300, 7, dtype=dtype)) for _ in range(3))
    first = look([moving, still], [frozen])
    with pytest.raises(RunError, match="every trained weight is bit for bit"):
        over(first)
    with torch.no_grad():
        moving[299, 6] = torch.nextafter(moving[299, 6], torch.tensor(9, dtype=dtype))
    assert over(first)
    with torch.no_grad():
        frozen[0, 0] = torch.nextafter(frozen[0, 0], torch.tensor(9, dtype=dtype))
    with pytest.raises(RunError, match=r"weights that are frozen have changed \(2\)"):
        over(first)


def test_changes_that_cancel_are_seen() -> None:
    """Steps of opposite signs that cancel in a sum are still detected."""
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    first = look([p], [])
    with torch.no_grad():
        p += torch.tensor([2.0**-20, -(2.0**-20), 0.0])
    assert over(first)


def test_what_can_not_be_judged_is_left_alone() -> None:
    frozen = torch.nn.Parameter(torch.ones(3))
    assert over(look([], [frozen]))  # nothing is trained
    standing = torch.nn.Parameter(torch.ones(3))
    assert over(look([standing], []), [1e-3, 0.0])  # the gradient may be all in the group whose rate is 0
    first = look([standing], [])
    assert not first.over(WEIGHTS_SINCE, [1e-3], torch.tensor(torch.nan), True)  # the step was skipped
    assert not first.over(WEIGHTS_SINCE + 1, [1e-3], torch.tensor(2.0), False)  # not logged
