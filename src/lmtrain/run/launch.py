"""Training on several ranks of one node: they read the config from <run>/ranks/config.yaml.

Lightning's TorchElasticEnvironment takes it from there.
"""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmtrain import errors
from lmtrain.config.schema import Config
from lmtrain.distributed.ranks import leave_after, was_restarted
from lmtrain.run import elastic
from lmtrain.run_folder.folder import RunDir


def launch(run: RunDir, config: Config, processes: int) -> int:
    """Runs `processes` ranks; returns the run's exit code. The run's config.yaml is rank 0's to write, once checked."""
    run.ranks.mkdir(exist_ok=True)
    before = run.read_summary()  # of an earlier start; training begins with its removal
    code = elastic.launch("lmtrain.run.launch", config, run.ranks, processes, config.trainer.max_restarts)
    if code <= 0:  # after a signal the ranks have saved, if they could
        code = _by_summary(run, before)
    if code != errors.FAILED:  # only a failed launch leaves its rank logs
        shutil.rmtree(run.ranks, ignore_errors=True)
    return code


def _by_summary(run: RunDir, before: dict[str, Any] | None) -> int:
    """The exit code of ranks that failed in nothing."""
    summary = run.read_summary()
    status = summary["status"] if summary is not None else None
    if status is None or (summary == before and status != "preempted"):
        errors.print_error(
            f"the ranks of {run.path} were stopped before they could save; the same command starts again"
        )
        return errors.FAILED
    return errors.PREEMPTED if status == "preempted" else errors.FINISHED


def rank_main(words: Sequence[str]) -> int:
    """One rank: reads the config and trains. A preempted rank exits 0, as its siblings must; summary.json tells."""
    from lmtrain.run.session import Session

    def train(config: Config) -> int:
        if was_restarted():
            config.run.resume = "auto"
        return Session(config, RunDir(Path(words[0]).parents[1])).run()

    code = elastic.as_rank(words, train)
    return errors.FINISHED if code == errors.PREEMPTED else code


if __name__ == "__main__":
    leave_after(lambda: rank_main(sys.argv[1:]))
