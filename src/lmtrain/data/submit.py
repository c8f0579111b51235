"""Preparing data in several processes or jobs, by datatrove's executors (prepare.executor, prepare.tasks).

The step of the pipeline (task_step.py) makes a part (store/parts.py). datatrove starts the tasks, and keeps their logs
and records beside the parts.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmtrain.config import compose, trust
from lmtrain.config.schema import Config
from lmtrain.data.store.parts import Encode, begin_once, folder_of_parts, part_of
from lmtrain.errors import WRONG_INPUT, RunError, UserError, needing
from lmtrain.files import write_atomic

_SECONDS_BETWEEN_LOOKS = 2.0
_AGAIN = "; the same command makes only the parts that are missing"


class Submitter:
    """Has all parts of the prepared folders of `config` made by datatrove's tasks, and removes them at the end."""

    def __init__(self, config: Config, say: Callable[[str], None]) -> None:
        options = config.prepare
        with needing("datatrove", f"prepare.executor={options.executor} prepare.tasks={options.tasks}"):
            import datatrove  # noqa: F401
        self.config, self.say = config, say
        self.folders: list[Path] = []
        if config.prepare.executor == "slurm":
            _check_slurm(config.prepare.slurm)

    def encode(self, target: Path, begin: Callable[[Path], object], encode: Encode) -> Path:
        """See `Tasks`.

        Raises:
            RunError: a task was killed; the others' parts stay.
            UserError: a task has found something wrong with the data.
        """
        options = self.config.prepare
        folder = folder_of_parts(target, options.tasks)
        begin_once(folder, begin)
        write_atomic(folder / "config.yaml", compose.dump(self.config))
        command = [trust.as_word(trust.granted(self.config)), json.dumps([*self.config.command.words])]
        job = [str(folder / "config.yaml"), target.name, *command]
        missing = self._missing(folder)
        there = f", {options.tasks - len(missing)} are done already" if len(missing) < options.tasks else ""
        self.say(f"encoding in {options.tasks} tasks ({options.executor}{there}); logs in {folder}")
        if options.executor == "local":
            self._local(folder, job, missing)
        elif missing:
            self._slurm(folder, job)
        self.folders.append(folder)
        return folder

    def _missing(self, folder: Path) -> list[int]:
        """Returns the tasks whose parts are not there."""
        return [rank for rank in range(self.config.prepare.tasks) if not part_of(folder, rank).is_dir()]

    def clean(self) -> None:
        """Removes the parts, of which the prepared folders have been made."""
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)

    def _local(self, folder: Path, job: list[str], ranks: list[int]) -> None:
        """Runs tasks as processes: each is a LocalPipelineExecutor of one task, as a pool waits for a killed one."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        at_once = min(len(ranks), self.config.prepare.workers or cores)
        threads = str(max(1, cores // max(1, at_once)))
        env = {**os.environ, "RAYON_NUM_THREADS": os.environ.get("RAYON_NUM_THREADS", threads)}
        running: dict[int, subprocess.Popen[bytes]] = {}
        failed: list[UserError | RunError] = []
        try:
            while running or (ranks and not failed):
                while ranks and not failed and len(running) < at_once:
                    rank = ranks.pop(0)
                    words = [sys.executable, "-m", "lmtrain.data.task_step", str(self.config.prepare.tasks), str(rank)]
                    with open(folder / f"task_{rank:05d}.txt", "wb") as log:
                        running[rank] = subprocess.Popen([*words, *job], stdout=log, stderr=log, env=env)
                time.sleep(0.05)
                for rank, process in list(running.items()):
                    if process.poll() is not None:
                        del running[rank]
                        if not part_of(folder, rank).is_dir():
                            kind = UserError if process.returncode == WRONG_INPUT else RunError
                            failed.append(kind(_why(folder / f"task_{rank:05d}.txt", rank, process.returncode)))
        finally:
            for process in running.values():
                process.terminate()
        if failed:
            raise failed[0]

    def _slurm(self, folder: Path, job: list[str]) -> None:
        from lmtrain.data.task_step import slurm_executor

        options = self.config.prepare
        executor = slurm_executor(job, options.tasks, options.workers, folder / "datatrove", options.slurm)
        for rank in self._missing(folder):  # datatrove's own mark of a task whose part is gone, or that never had one
            (folder / "datatrove" / "completions" / f"{rank:05d}").unlink(missing_ok=True)
        executor.run()
        job_id = str(executor.job_id)
        self.say(f"submitted as job {job_id}; waiting for its tasks")
        while self._missing(folder) and _is_queued(job_id):
            time.sleep(_SECONDS_BETWEEN_LOOKS)
        if self._missing(folder):
            time.sleep(_SECONDS_BETWEEN_LOOKS)  # of a shared file system, which may be late
        if missing := self._missing(folder):
            where = folder / "datatrove" / "slurm_logs"
            logs = sorted(where.glob(f"{job_id}_*.out"))
            why = next((_why(log, missing[0], 1) for log in logs if "error: " in log.read_text()), "")
            found = why or f"job {job_id} has ended without the parts of {len(missing)} tasks"
            raise RunError(f"{found} (logs in {where}){_AGAIN}")


def _check_slurm(options: dict[str, Any]) -> None:
    absent = [key for key in ("partition", "time") if not options.get(key)]
    if absent:
        example = "prepare.slurm='{partition: cpu, time: \"4:00:00\"}'"
        raise UserError(f"prepare.executor=slurm needs {' and '.join(absent)} of the jobs: {example}")
    if shutil.which("sbatch") is None:
        raise UserError("prepare.executor=slurm: there is no sbatch here: run it where you submit jobs")


def _is_queued(job: str) -> bool:
    """Returns whether tasks of a job array are running or waiting; True if SLURM doesn't answer."""
    done = subprocess.run(["squeue", "--noheader", f"--jobs={job}"], capture_output=True, text=True, check=False)
    return bool(done.stdout.strip()) if done.returncode == 0 else "Invalid job id" not in done.stderr


def _why(log: Path, rank: int, code: int) -> str:
    """Returns why a task has ended without its part: its own message, or its exit code."""
    said = re.findall(r"error: (.*)", log.read_text(errors="replace"))
    ended = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    return f"task {rank}: {said[-1]}" if said else f"task {rank} {ended} ({log}){_AGAIN}"
