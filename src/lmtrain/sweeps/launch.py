"""Trials as processes on this machine, sweep.jobs at a time, or as jobs of a Hydra launcher.

On a signal, trials on this machine save and end, and then the sweep ends.
"""

import functools
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from lmtrain import errors
from lmtrain.config.config_files import folders_of, hydra_over
from lmtrain.config.override_text import bare_or_quoted
from lmtrain.sweeps.plan import SweepPlan
from lmtrain.sweeps.processes import POLL_SECONDS, Child, Children, start
from lmtrain.sweeps.trials import Trial, Trials, command, judge, outcome


def run_here(plan: SweepPlan, trials: Trials, todo: Iterator[Trial]) -> list[Trial]:
    """Runs the trials, `sweep.jobs` at a time, in the main thread; returns those that were started."""
    jobs, started = plan.config.sweep.jobs, list[Trial]()
    places: dict[int, tuple[Trial, Child]] = {}
    with Children() as children:
        while True:
            # Free places get the next trials.
            while not children.stopping and len(places) < jobs and (trial := next(todo, None)) is not None:
                started.append(trial)
                place = next(n for n in range(jobs) if n not in places)
                words, log = command(trial, plan.folder), plan.folder / f"{trial.number}.log"
                places[place] = trial, children.start(plan.verb, words, log, **share_of_gpus(place, jobs))
            if not places:
                return started
            time.sleep(POLL_SECONDS)
            # Trials that have ended are judged and give up their places.
            for place, (trial, child) in list(places.items()):
                code = child.code()
                if jobs == 1:
                    child.show()
                if code is not None:
                    del places[place]
                    children.ended(child, code)
                    trial.seconds = child.seconds()
                    judge(trial, plan.folder, code, stopped=children.stopping > 0)
                    trials.write()
                    print(outcome(trial, plan.config.checkpoint.monitor), flush=True)
                    if trial.status == "preempted" and not children.stopping:
                        children.stop()  # the machine is being taken away: no other trial is started


def share_of_gpus(slot: int, jobs: int) -> dict[str, str]:
    """Returns CUDA_VISIBLE_DEVICES with one parallel trial's share of the GPUs; {} if these can't be divided."""
    gpus = [g for g in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if g]
    each = len(gpus) // jobs
    share = ",".join(gpus[slot * each : (slot + 1) * each])
    return {"CUDA_VISIBLE_DEVICES": share} if jobs > 1 and each else {}


def run(plan: SweepPlan, trials: Trials, todo: Iterator[Trial]) -> list[Trial]:
    """Hands the trials to the launcher, those of a grid all at once, of a search sweep.jobs at a time; returns them."""
    size = plan.config.sweep.jobs if plan.config.sweep.method == "optuna" else None
    started: list[Trial] = []
    while batch := list(itertools.islice(todo, size)):
        begun = time.monotonic()
        codes = _launch(plan, [command(t, plan.folder) for t in batch], batch[0].number)
        for trial, code in zip(batch, codes, strict=True):
            trial.seconds = round(time.monotonic() - begun, 1)
            judge(trial, plan.folder, code, stopped=False)
            print(outcome(trial, plan.config.checkpoint.monitor), flush=True)
        trials.write()
        started += batch
        if any(t.status == "preempted" for t in batch):
            break
    return started


def _launch(plan: SweepPlan, words: list[list[str]], number: int) -> list[int | None]:
    """Runs trials with Hydra's launcher and returns their exit codes, None for those that returned no result."""
    # A launcher is a public plugin, and what Hydra gives it is not: only Hydra's own command line makes one.
    from hydra._internal.callbacks import Callbacks

    hydra_overrides = [w for w in plan.hydra_overrides if not w.startswith(("hydra.sweep.dir=", "hydra.sweep.subdir="))]
    here = [f"hydra.sweep.dir={bare_or_quoted(str(plan.folder))}", "hydra.sweep.subdir=."]
    folders, search_path = folders_of(plan.config_dir, plan.config_name)
    with hydra_over(folders) as hydra:
        loader = hydra.config_loader
        tree = loader.load_configuration(plan.config_name, [*search_path, *hydra_overrides, *here], RunMode.MULTIRUN)
        context = HydraContext(config_loader=loader, callbacks=Callbacks(tree))
        launcher = Plugins.instance().instantiate_launcher(context, functools.partial(job, plan.verb, plan.flags), tree)
        try:
            return [_code(result) for result in launcher.launch(words, initial_job_idx=number)]
        except Exception as error:  # a launcher raises one failed job's error for the whole batch
            errors.print_error(f"the launcher ended with {type(error).__name__}: {error}")
            return [None] * len(words)


def job(verb: str, flags: list[str], config: DictConfig) -> int:
    """Runs a trial as a separate process on the machine that the launcher chose; returns its exit code."""
    words = [*HydraConfig.get().overrides.task, *flags]
    return start(verb, words, Path(f"{config.run.dir}.log")).wait()


def _code(result: JobReturn) -> int | None:
    try:
        return int(result.return_value)
    except Exception:  # the job's own error, raised again here; its log has the details
        return None
