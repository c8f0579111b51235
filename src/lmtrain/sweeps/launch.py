"""Trials as processes of this machine, sweep.jobs at a time. On a signal they save and end, then the sweep does."""

import functools
import itertools
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.types import HydraContext, RunMode

from lmtrain import errors
from lmtrain.config.config_files import folders_of
from lmtrain.config.override_text import bare_or_quoted
from lmtrain.sweeps import trial_process
from lmtrain.sweeps import trials as rows
from lmtrain.sweeps.plan import SweepPlan
from lmtrain.sweeps.processes import POLL_SECONDS, SIGNALS, end_session, show, start
from lmtrain.sweeps.trials import Trial, Trials


@dataclass
class Running:
    trial: Trial
    process: BaseProcess
    started: float
    log: Path
    shown: int  # bytes of the log that the screen has
    slot: int  # which of the sweep.jobs places it runs in


class Local:
    """Starts, stops and judges trials; all in the main thread, which a signal interrupts."""

    def __init__(self, plan: SweepPlan, trials: Trials) -> None:
        self.plan, self.trials = plan, trials
        self.running: list[Running] = []
        self.stopping = 0  # how often the sweep was told to stop

    def run(self, todo: Iterator[Trial]) -> list[Trial]:
        """Returns the trials that were started."""
        before = {n: signal.signal(n, lambda *_: self.stop()) for n in SIGNALS}
        started: list[Trial] = []
        try:
            while True:
                while not self.stopping and len(self.running) < self.plan.config.sweep.jobs:
                    trial = next(todo, None)
                    if trial is None:
                        break
                    started.append(trial)
                    self._start(trial)
                if not self.running:
                    return started
                time.sleep(POLL_SECONDS)
                for one in list(self.running):
                    self._look_after(one)
        finally:
            for one in self.running:  # an error in the sweep itself
                end_session(one.process)
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """Asks the running trials to save and end; asked a second time, ends them at once."""
        self.stopping += 1
        for one in self.running:
            if self.stopping == 1:
                one.process.terminate()
            else:
                end_session(one.process)

    def _start(self, trial: Trial) -> None:
        log = self.plan.folder / f"{trial.number}.log"
        words = rows.command(trial, self.plan.folder)
        shown = log.stat().st_size if log.exists() else 0  # an earlier start's
        jobs = self.plan.config.sweep.jobs
        slot = next(n for n in range(jobs) if n not in [one.slot for one in self.running])
        process = trial_process.start(self.plan.verb, words, log, share_of_gpus(slot, jobs))
        self.running.append(Running(trial, process, time.monotonic(), log, shown, slot))
        if self.stopping:  # the signal came while the process was made
            self.running[-1].process.terminate()

    def _look_after(self, one: Running) -> None:
        """Shows what a trial printed since, where it runs alone; writes its row once it has ended."""
        code = one.process.exitcode
        if self.plan.config.sweep.jobs == 1:
            one.shown = show(one.log, one.shown)
        if code is None:
            return
        self.running.remove(one)
        if code != errors.FINISHED:
            end_session(one.process)  # what a crash left over would hold memory that the next trial needs
        one.trial.seconds = round(time.monotonic() - one.started, 1)
        rows.judge(one.trial, self.plan.folder, code, stopped=self.stopping > 0)
        self.trials.write()
        print(rows.in_words(one.trial, self.plan.config.checkpoint.monitor), flush=True)
        if one.trial.status == "preempted" and not self.stopping:
            self.stop()  # the machine is going away: no other trial is started


def share_of_gpus(slot: int, jobs: int) -> str | None:
    """The GPUs of CUDA_VISIBLE_DEVICES that one of several trials gets; None where they can't be dealt out."""
    gpus = [g for g in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if g]
    each = len(gpus) // jobs
    return ",".join(gpus[slot * each : (slot + 1) * each]) if jobs > 1 and each else None


def run(plan: SweepPlan, trials: Trials, todo: Iterator[Trial]) -> list[Trial]:
    """Hands the trials to the launcher, all of a grid at once, of a search sweep.jobs at a time; returns them."""
    size = plan.config.sweep.jobs if plan.config.sweep.method == "optuna" else None
    started: list[Trial] = []
    while batch := list(itertools.islice(todo, size)):
        begun = time.monotonic()
        codes = _launch(plan, [rows.command(t, plan.folder) for t in batch], batch[0].number)
        for trial, code in zip(batch, codes, strict=True):
            trial.seconds = round(time.monotonic() - begun, 1)
            rows.judge(trial, plan.folder, code, stopped=False)
            print(rows.in_words(trial, plan.config.checkpoint.monitor), flush=True)
        trials.write()
        started += batch
        if any(t.status == "preempted" for t in batch):
            break
    return started


def _launch(plan: SweepPlan, words: list[list[str]], number: int) -> list[int | None]:
    """Exit codes of the trials; None for those whose result did not come back."""
    from hydra._internal.callbacks import Callbacks  # Hydra has no public way to run a launcher

    hydra_words = [w for w in plan.hydra_words if not w.startswith(("hydra.sweep.dir=", "hydra.sweep.subdir="))]
    here = [f"hydra.sweep.dir={bare_or_quoted(str(plan.folder))}", "hydra.sweep.subdir=."]
    folders, search_path = folders_of(plan.config_dir, plan.config_name)
    with initialize_config_dir(config_dir=str(folders[0]), version_base="1.3", job_name="lmtrain"):
        loader = GlobalHydra.instance().config_loader()
        tree = loader.load_configuration(plan.config_name, [*search_path, *hydra_words, *here], RunMode.MULTIRUN)
        context = HydraContext(config_loader=loader, callbacks=Callbacks(tree))
        launcher = Plugins.instance().instantiate_launcher(context, functools.partial(job, plan.verb, plan.flags), tree)
        try:
            return [_code(result) for result in launcher.launch(words, initial_job_idx=number)]
        except Exception as error:  # a launcher raises one failed job's error for the whole batch
            errors.print_error(f"the launcher ended with {type(error).__name__}: {error}")
            return [None] * len(words)


def job(verb: str, flags: list[str], _: Any) -> int:
    """Runs the trial as a process of its own on the machine that the launcher found."""
    words = list(HydraConfig.get().overrides.task)
    run_dir = next(w.partition("=")[2].strip("'") for w in words if w.startswith("run.dir="))
    return start(verb, [*words, *flags], Path(f"{run_dir}.log")).wait()


def _code(result: JobReturn) -> int | None:
    try:
        return int(result.return_value)
    except Exception:  # the job's own error, raised again here: its log tells
        return None
