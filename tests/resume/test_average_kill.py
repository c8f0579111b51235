"""A run with callbacks=ema, killed in a save and in a validation, ends with the same average; so do two ranks."""

from pathlib import Path

import pytest
import torch
from runs import assert_equal_runs, train, train_here
from test_kill_matrix import chain

from lmtrain.checkpoints import store

EMA = ["callbacks=ema", "callbacks.ema.decay=0.9", "data.micro_batch_size=3"]


@pytest.mark.slow
def test_the_average_over_kills_and_ranks(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    done = train_here(corpus, tmp_path / "whole" / "run", *EMA)
    assert done.code == 0, done.err
    chain(corpus, tmp_path / "run", [("mid_save", 4), ("mid_validation", 9)], *EMA)
    assert_equal_runs(tmp_path / "whole" / "run", tmp_path / "run")
    two = train(corpus, tmp_path / "two", *EMA, "trainer.devices=2", "model.dropout=0")
    one = train_here(corpus, tmp_path / "one", *EMA, "model.dropout=0")
    assert (one.code, two.returncode) == (0, 0), two.stderr
    a, b = (store.load(tmp_path / name / "checkpoints" / "last") for name in ("one", "two"))
    averages = [c["callbacks"]["WeightAverage"]["average"] for c in (a, b)]
    assert averages[0].keys() == averages[1].keys() != set()
    # Two ranks add gradients in another order; AdamW turns that into up to 3e-6 near zero, a 300th of a step.
    for name, value in averages[0].items():
        assert torch.allclose(value, averages[1][name], rtol=1e-5, atol=1e-5), name
