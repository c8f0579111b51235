"""Checks of the first steps: trained weights move, frozen ones don't, and harmless cases don't end a run."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from chats import write_rows
from inprocess import Ended, message, run, train_tiny
from lmtrain.errors import RunError
from lmtrain.objectives.start_check import WEIGHTS_SINCE, WeightsMove
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


class Rounds(torch.optim.SGD):
    """Lion's step without its average, computed in bfloat16: most small updates are lost."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.copy_(p.bfloat16() - group["lr"] * p.grad.bfloat16().sign())


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
    assert re.search(
        rf"after {WEIGHTS_SINCE} optimizer steps each of [\d,]+ trained weights looked at is bit for", found
    )
    assert "(optimizer._target_, of your own) changes nothing" in found


def test_an_sft_of_an_optimizer_that_does_nothing_ends(tmp_path: Path) -> None:
    answers = write_rows(tmp_path / "answers.jsonl", "chat_jsonl")
    ended = run("train", *TINY, *FEW, "objective=sft", "data=chat_jsonl", f"data.path={answers}", HERE,
                "data.chat_template=vicuna", "data.seq_len=512", "model.max_position_embeddings=512",
                "optimizer=custom", f"optimizer._target_={__name__}.Idle", "optimizer.lr=1e-3",
                "data.val_fraction=0.1", f"run.dir={tmp_path}/run")  # fmt: skip
    assert ended.code == 1
    assert "trained weights looked at is bit for bit" in message(ended.err)


def test_an_optimizer_that_calls_no_closure_ends_the_run(corpus: Path, tmp_path: Path) -> None:
    """Gradients would be neither clipped nor checked, and grad_norm would be 0 in every row."""
    ended = trained(corpus, tmp_path / "run", "Deaf")
    assert ended.code == 1
    assert "Deaf.step(closure) doesn't call its closure" in message(ended.err)


def test_optimizers_that_wait_and_rates_of_nothing_end_no_run(corpus: Path, tmp_path: Path) -> None:
    waits = trained(corpus, tmp_path / "waits", "EveryTenth")
    assert waits.code == 0, waits.err
    assert "weights have moved" not in waits.out
    for rate, told in (("0", False), ("1e-12", True)):
        still = trained(corpus, tmp_path / f"still{rate}", "Idle", f"optimizer.lr={rate}")
        assert still.code == 0, still.err
        assert ("only 0.0% of the trained weights have moved" in still.out) == told


@pytest.mark.parametrize("precision", ["bf16-true", "32-true"])
def test_a_run_that_loses_most_updates_is_told(precision: str, corpus: Path, tmp_path: Path) -> None:
    ended = trained(corpus, tmp_path / "run", "Rounds", "optimizer.lr=3e-6", f"trainer.precision={precision}")
    assert ended.code == 0, ended.err
    told = " ".join(ended.out.split())
    share = re.search(r"only ([\d.]+)% of the trained weights have moved since the first step", told)
    assert share is not None, told
    assert 1 < float(share[1]) < 10
    assert "Raise optimizer.lr (3e-06 now)" in told


def look(trained: list[nn.Parameter], frozen: list[nn.Parameter], rate: float = 1e-3) -> WeightsMove:
    """Builds the check for a model with these parameters, in fp32 on one process, with an SGD."""
    for p in frozen:
        p.requires_grad_(False)
    model = nn.ParameterList([*trained, *frozen])
    trainer = SimpleNamespace(world_size=1, is_global_zero=True)
    optimizer = torch.optim.SGD(trained, lr=rate)
    return WeightsMove(SimpleNamespace(model=model, trainer=trainer, _optimizer=optimizer, device=torch.device("cpu")))


def over(first: WeightsMove, rates: list[float] | None = None, gradient: Callable[[Tensor], Tensor] = torch.ones_like,
         moves: Callable[[], Any] = lambda: None) -> bool:  # fmt: skip
    """Goes through the first step and the one that is looked at, before which `moves` is called."""
    for step in (1, WEIGHTS_SINCE):
        for p in first.parameters:
            p.grad = gradient(p.detach())
        first.before_update()
        if step > 1:
            with torch.no_grad():
                moves()
        done = first.over(step, rates or [1e-3], torch.tensor(2.0), step > 1)
    return done


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_bit_of_every_element_is_seen(dtype: torch.dtype, capsys: pytest.CaptureFixture[str]) -> None:
    """A trained weight that moves by one bit has moved; a frozen one that does is an error."""
    moving, frozen = (nn.Parameter(torch.randn(300, 7, dtype=dtype)) for _ in range(2))
    up = torch.tensor(9, dtype=dtype)
    with pytest.raises(RunError, match="each of 2,100 trained weights looked at is bit for bit"):
        over(look([moving], [frozen]))
    assert over(look([moving], [frozen]), moves=lambda: moving.copy_(torch.nextafter(moving, up)))
    assert "have moved" not in capsys.readouterr().out

    def both() -> None:
        moving.add_(1)
        frozen[0, 0] = torch.nextafter(frozen[0, 0], up)

    with pytest.raises(RunError, match=r"weights that are frozen have changed \(1\)"):
        over(look([moving], [frozen]), moves=both)


@pytest.mark.parametrize(("rows", "told"), [(40, "40.0%"), (60, None)])
def test_the_share_is_of_all_trained_weights(rows: int, told: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    p = nn.Parameter(torch.ones(100, 1000))  # more than are looked at
    assert over(look([p], []), moves=lambda: p[:rows].add_(1))
    found = re.search(r"only ([\d.]+)% of the trained weights", " ".join(capsys.readouterr().out.split()))
    assert (found is None) == (told is None)
    assert found is None or abs(float(found[1]) - rows) < 1


def test_what_can_not_be_judged_is_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    p, q = nn.Parameter(torch.ones(50, 300)), nn.Parameter(torch.ones(50, 300))

    def few(weight: Tensor) -> Tensor:  # of rows not seen, experts not chosen, and LoRA's A while B is nearly 0
        gradient = torch.full_like(weight, 1e-4 if weight.data_ptr() == q.data_ptr() else 0.0)
        gradient[0] = 1.0 if weight.data_ptr() == p.data_ptr() else 1e-4
        return gradient

    assert over(look([p, q], []), gradient=few, moves=lambda: p[0].add_(1))
    assert over(look([p], []), [1e-3, 0.0])  # the gradient may be all in the group whose rate is 0
    first = look([p], [])
    assert not first.over(WEIGHTS_SINCE, [1e-3], torch.tensor(torch.nan), True)  # the step was skipped
    assert not first.over(WEIGHTS_SINCE + 1, [1e-3], torch.tensor(2.0), False)  # not logged
    assert over(look([p], []), gradient=torch.zeros_like)  # only what isn't looked at has a gradient
    warming = look([p], [])
    assert not any(warming.over(step, [step * 1e-9], torch.tensor(2.0), True) for step in range(1, 60))
    assert "have moved" not in capsys.readouterr().out
