"""Sweeps (`-m key=a,b`): each trial is a separate process with its own folder; a failed trial does not end the sweep.

The sweep's folder holds trials.jsonl (a row per trial), <number>/ (its run) and <number>.log (its output). Running the
same sweep again skips finished trials, continues preempted ones and retries failed ones.
"""

import os
import shlex
from collections.abc import Iterator

from lmtrain import errors
from lmtrain.config.override_text import bare_or_quoted
from lmtrain.distributed import ranks
from lmtrain.errors import UserError
from lmtrain.secrets import command, hide
from lmtrain.sweeps import launch, search
from lmtrain.sweeps import plan as plans
from lmtrain.sweeps import trials as rows
from lmtrain.sweeps.plan import SweepPlan
from lmtrain.sweeps.processes import locked, refuse_strange_files
from lmtrain.sweeps.report import measured
from lmtrain.sweeps.trials import Trial, Trials


def run(verb: str, overrides: list[str], config_dir: str | None, config_name: str = "config") -> int:
    """Runs every trial that is not finished yet.

    Returns:
        0 if all finished; 75 if one was preempted (the same command continues the sweep); 1 if any failed, unless
        sweep.allow_failures.

    Raises:
        UserError: an override is wrong, or the folder is not a sweep's; no trial has been started.
    """
    _refuse_ranks()
    plan = plans.make(verb, overrides, config_dir, config_name)
    folder = plan.folder
    refuse_strange_files(folder, "sweep", "trials.jsonl", "sweep.name or hydra.sweep.dir")
    with locked(folder, "sweep", "sweep.root"):
        (folder / "trials.jsonl").touch()
        return _run(plan, Trials(folder))


def show(verb: str, overrides: list[str], config_dir: str | None, config_name: str = "config") -> int:
    """Prints what the sweep would try and the config of its first trial, without starting anything."""
    from lmtrain.config import compose as config

    plan = plans.make(verb, overrides, config_dir, config_name)
    grid = plan.config.sweep.method == "grid"
    number = len(list(search.combinations(plan.swept))) if grid else plan.config.sweep.n_trials
    print(f"# a sweep of {number} trials in {plan.folder}, none started; the config of the first:")
    for swept in plan.swept:
        print(f"# {hide(swept.input_line or '')}")
    print(config.dump(plan.config), end="")
    return errors.FINISHED


def _refuse_ranks() -> None:
    """Raises UserError if this is one of several processes, each of which would run the whole sweep."""
    by = ranks.started_by()
    several = by == "SLURM" or int(os.environ.get("WORLD_SIZE", "1")) > 1
    if by is not None and several:
        without = "without torchrun" if by == "torchrun" else "without srun, or with srun --ntasks=1"
        found = f"{by} has started several processes, each of which would run the whole sweep: start it {without}"
        raise UserError(f"{found}. hydra/launcher=submitit_slurm makes each trial a SLURM job")


def _run(plan: SweepPlan, trials: Trials) -> int:
    kept = sum(rows.finished(t, plan.folder, plan.verb) for t in trials.rows)
    if kept:
        print(f"{plan.folder}: {kept} finished trial{'s are' if kept > 1 else ' is'} kept as found")
    todo = upcoming(plan, trials)
    elsewhere = any(w.startswith("hydra/launcher=") for w in plan.hydra_overrides)
    started = launch.run(plan, trials, todo) if elsewhere else launch.run_here(plan, trials, todo)
    return conclude(plan, trials, started)


def upcoming(plan: SweepPlan, trials: Trials) -> Iterator[Trial]:
    """Yields the trials still to be run, marking each as running just before."""
    fixed = list(map(hide, [*plan.fixed, *plan.flags]))
    if plan.config.sweep.method == "grid":
        for combination in search.combinations(plan.swept):
            trial = trials.find(combination, fixed) or trials.add(combination, fixed)
            if not rows.finished(trial, plan.folder, plan.verb):
                yield _begin(trials, trial)
        return
    space = search.distributions(plan.swept)
    swept = sorted(o.key_or_group for o in plan.swept)
    # Rows that set other keys don't belong to this sweep: somebody else may have written trials.jsonl.
    mine = [t for t in trials.rows if t.fixed == fixed and sorted(o.partition("=")[0] for o in t.overrides) == swept]
    yield from [_begin(trials, t) for t in mine if not rows.finished(t, plan.folder, plan.verb)]
    while len(mine) < (plan.config.sweep.n_trials or 0):
        chosen = search.propose(space, plan.config.sweep, plan.config.checkpoint.mode, mine)
        mine.append(trials.add(chosen, fixed))
        yield _begin(trials, mine[-1])


def _begin(trials: Trials, trial: Trial) -> Trial:
    trial.status = "running"
    trials.write()
    print(f"trial {trial.number}: {' '.join(trial.overrides)}", flush=True)
    return trial


def conclude(plan: SweepPlan, trials: Trials, started: list[Trial]) -> int:
    """Prints how the sweep ended and returns its exit code."""
    kinds = [kind for kind in measured(plan.folder, trials.rows) if kind.trials and kind.trials[0].score is not None]
    for compared, monitor, (best, *_) in kinds:
        of = f"; {compared}" if len(kinds) > 1 else ""
        print(f"best: trial {best.number}, {monitor} {best.score:.6g} ({' '.join(best.overrides)}){of}")
    print(f"table and picture: python -m lmtrain.sweep_report {shlex.quote(str(plan.folder))}", flush=True)
    failed = [t for t in started if t.status == "failed"]
    for trial in failed:
        text = f"trial {trial.number} ({' '.join(trial.overrides)}) failed: {rows.last_line(trial)}"
        errors.print_error(f"{text} (all of it: {plan.folder / str(trial.number)}.log)")
    if any(t.status == "preempted" for t in started):
        typed = [w for w in plan.typed if not w.startswith("hydra.sweep.dir=")]
        here = [] if plan.config.sweep.name else [f"hydra.sweep.dir={bare_or_quoted(str(plan.folder))}"]
        print("the sweep was stopped; what ran has saved. Continue with:")
        print(f"  {command(plan.verb, ['-m', *typed, *here, *plan.flags])}", flush=True)
        return errors.PREEMPTED
    return errors.FAILED if failed and not plan.config.sweep.allow_failures else errors.FINISHED
