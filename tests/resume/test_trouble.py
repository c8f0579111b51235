"""Trouble with the machine ends a run with one message, exit code 1, and the last checkpoint untouched."""

import json
from pathlib import Path

import pytest
from runs import train, train_here

from lmtrain.checkpoints import store

CASES = {
    "KillWorkers": ("data loading process ended unexpectedly", "data.num_workers=0"),
    "Greedy": ("out of memory", "data.micro_batch_size=1"),
    "LoseTheData": ("it was changed while in use", ""),
}


@pytest.mark.parametrize("what", [pytest.param("KillWorkers", marks=pytest.mark.slow), *list(CASES)[1:]])
def test_one_message_and_the_checkpoint_stays(
    what: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMTRAIN_CACHE", str(tmp_path / "cache"))  # LoseTheData damages it
    workers = "data.num_workers=2" if what == "KillWorkers" else "data.num_workers=0"
    run_dir = tmp_path / "run"
    trouble = [f"callbacks.extra=[{{_target_: trouble.{what}}}]", "run.allow_target=[trouble]"]
    settings = ["data.micro_batch_size=3", workers, "trainer.max_steps=500", *trouble]
    if what == "KillWorkers":  # in a process that has no other children
        done = train(corpus, run_dir, *settings)
        code, err = done.returncode, done.stderr
    else:
        ended = train_here(corpus, run_dir, *settings)
        code, err = ended.code, ended.err
        assert "Traceback" not in err  # torch prints an ignored one when it cleans up its dead workers
    assert code == 1, err
    message, fix = CASES[what]
    assert message in err
    assert fix in err
    kept = store.scan(run_dir / "checkpoints")
    # A lost worker is noticed a little later, when step 3 may have been saved.
    assert store.step_of(kept[0]) in ([2, 3] if what == "KillWorkers" else [2])
    assert all(store.damage(path) is None for path in kept)
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "failed"
