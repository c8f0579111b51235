"""The step of datatrove's pipelines that makes a part; `python -m lmtrain.data.task_step TASKS RANK JOB...` runs it."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtrain.data.tasks import run_task
from lmtrain.errors import RunError, UserError, print_error


@dataclass
class EncodeShare:
    """Makes a part of a prepared folder: the documents and rows of a share of the files, encoded.

    job: as `run_task` reads it.
    """

    job: list[str]

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> Any:
        """Is called by datatrove for each task."""
        try:
            run_task(self.job, rank, world_size)
        except (UserError, RunError) as error:
            print_error(str(error))
            sys.exit(error.exit_code)
        return data


def slurm_executor(job: list[str], tasks: int, workers: int | None, folder: Path, options: dict[str, Any]) -> Any:
    """Returns a SlurmPipelineExecutor whose jobs run in this Python's environment; `options` are its arguments."""
    from datatrove.executor import SlurmPipelineExecutor

    path = f"export PATH={Path(sys.executable).parent}:$PATH"
    given = {"job_name": "lmtrain_prepare", "qos": "", "env_command": path, **options}
    return SlurmPipelineExecutor(
        pipeline=[EncodeShare(job)], tasks=tasks, workers=workers or -1, logging_dir=str(folder), **given
    )


def main(words: list[str]) -> None:
    from datatrove.executor import LocalPipelineExecutor

    tasks, rank, *job = words
    folder = Path(job[0]).with_name("datatrove")
    LocalPipelineExecutor(
        pipeline=[EncodeShare(job)], tasks=int(tasks), workers=1, local_tasks=1, local_rank_offset=int(rank),
        logging_dir=str(folder), skip_completed=False,
    ).run()  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
