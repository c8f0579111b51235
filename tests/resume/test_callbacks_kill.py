"""With eight user callbacks that log every step, a killed run ends with an undisturbed one's records and states."""

from pathlib import Path

import pytest
from logs import WAYS
from runs import STEPS, assert_equal_runs, train, train_here
from test_kill_matrix import SIGKILLED

from lmtrain.files import read_jsonl


@pytest.mark.slow
def test_eight_callbacks_over_kills(corpus: Path, tmp_path: Path) -> None:
    eight = ",".join(f"{{_target_: logs.Logs, way: {way}}}" for way in WAYS)
    given = ["data.micro_batch_size=3", "run.allow_target=[logs,killer]", "logger=csv"]
    done = train_here(corpus, tmp_path / "whole", *given, f"callbacks.extra=[{eight}]")
    assert done.code == 0, done.err
    for place, step in (("mid_step", 3), ("mid_validation", 6), ("before_prune", 9)):
        kill = f"{{_target_: killer.KillAt, place: {place}, step: {step}}}"
        died = train(corpus, tmp_path / "killed", *given, f"callbacks.extra=[{eight},{kill}]")
        assert died.returncode == SIGKILLED, died.stderr
    done = train(corpus, tmp_path / "killed", *given, f"callbacks.extra=[{eight}]")
    assert done.returncode == 0, done.stderr
    assert_equal_runs(tmp_path / "whole", tmp_path / "killed")
    found = [row for row in read_jsonl(tmp_path / "killed" / "metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    names = {"log_dict/mean" if way == "log_dict" else way for way in WAYS}
    assert all(names <= row.keys() for row in found)
