"""The best checkpoint is chosen correctly while its save is still being written."""

from pathlib import Path

import pytest
from runs import train

from lmtrain.checkpoints import store


@pytest.mark.slow
def test_the_best_so_far_counts_while_it_is_written(corpus: Path, tmp_path: Path) -> None:
    """At a learning rate of 0 all validations score the same, so the first stays the best, however slow the disk is."""
    settings = ["data.micro_batch_size=6", "optimizer.lr=0", "trainer.max_steps=4", "trainer.val_check_interval=1",
                "trainer.save_every_n_steps=100", "checkpoint.keep_last=4", "checkpoint.async_save=true"]  # fmt: skip
    slow = ["callbacks.extra=[{_target_: slow.SlowDisk, seconds: 1}]", "run.allow_target=[slow]"]
    done = train(corpus, tmp_path / "run", *settings, *slow)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [store.step_of(p) for p in store.scan(tmp_path / "run" / "checkpoints")] == [1, 4]
