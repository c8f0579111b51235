"""A run that stops because of bad steps re-runs the first bad batch in the precision of the run."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from inprocess import run
from lmtrain.objectives.causal_lm import CausalLM
from support import TINY, ends_within


def test_the_bad_batch_is_run_in_the_runs_precision(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed: list[bool] = []
    loss = CausalLM.micro_batch_loss

    def watched(self: CausalLM, batch: dict[str, torch.Tensor]) -> Any:
        mixed.append(torch.is_autocast_enabled("cpu"))
        return loss(self, batch)

    monkeypatch.setattr(CausalLM, "micro_batch_loss", watched)
    settings = [
        *TINY, "data=text", f"data.path={corpus}", f"run.dir={tmp_path / 'run'}", "trainer.precision=bf16-mixed",
        "optimizer.lr=1e30", "trainer.max_steps=20", "trainer.max_bad_steps=2", "trainer.gradient_clip_val=null",
    ]  # fmt: skip
    ended = run("train", *settings)
    assert ended.code == 1, ended.err
    report = json.loads(next((tmp_path / "run").glob("bad_step_*.json")).read_text())
    assert len(report["micro_batch_losses"]) == 3
    assert len(mixed) > 6, "the steps' micro-batches, and those of the bad step once more"
    assert all(mixed)


@pytest.mark.parametrize("gone", [True, False])
def test_bad_steps_on_rows_of_a_stream(gone: bool, tmp_path: Path) -> None:
    """The first bad step may be in a window that was removed since: the run must not wait for its rows."""
    (tmp_path / "a.txt").write_text("Hello world, this is some text.\n" * 500)
    stream = ["data.streaming=true", "data.ring_bytes=1_000_000", "data.ring_shard_tokens=97", "data.ring_window=2",
              "data.ring_val_tokens=500", "data.sample_by=line", "data.global_batch_size=2",
              "data.micro_batch_size=2"]  # fmt: skip
    bad = ["optimizer.lr=1e30", "trainer.max_steps=20", "trainer.gradient_clip_val=null", "trainer.accelerator=cpu",
           f"trainer.max_bad_steps={4 if gone else 1}"]  # fmt: skip
    words = [*TINY, "data=text", f"data.path={tmp_path}/a.txt", f"run.dir={tmp_path}/run", *stream, *bad]
    with ends_within(120):
        ended = run("train", *words)
    assert ended.code == 1, ended.err
    said = " ".join(ended.err.split())
    assert f"{4 if gone else 1} updates in a row were skipped" in said
    assert ("of the stream was removed after training on it" if gone else "The worst micro-batch of that step") in said
