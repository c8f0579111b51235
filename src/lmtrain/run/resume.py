"""Resuming: finds the checkpoint, checks that it belongs to this run, and cuts the logs back to its step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lmtrain.callbacks.metrics import Metrics
from lmtrain.callbacks.time_budget import TimeBudget
from lmtrain.checkpoints import retention, store
from lmtrain.checkpoints.checksums import Compare
from lmtrain.config import fingerprint
from lmtrain.config.constraints import RATE
from lmtrain.config.fingerprint import Fingerprint, changed_since, changes, check_names, not_compared
from lmtrain.config.options import WarmupStableDecayConfig
from lmtrain.config.override_text import shell_word
from lmtrain.config.schema import Config
from lmtrain.errors import RunError, UserError, reason
from lmtrain.objectives.base import Objective
from lmtrain.objectives.routing import hold_to
from lmtrain.run.build import Run
from lmtrain.run.loggers import note_sent, write_again
from lmtrain.run_folder import finished
from lmtrain.run_folder import folder as run_dir
from lmtrain.run_folder.cut_back import cut_back
from lmtrain.run_folder.folder import RunDir


def find(config: Config, folder: RunDir, tell: Callable[[str], None], compare: Compare) -> Path | None:
    """Returns the checkpoint run.resume asks for, verified with `compare`, or None; `tell` is called with notes.

    Raises:
        UserError: a given path is missing or damaged, or the run has newer ones; with run.resume=auto, all are damaged.
        RunError: a checkpoint's files cannot be read from the disk.
    """
    mode = run_dir.resume_mode(config)
    if mode == "none":
        return None
    if mode == "auto":
        newest = store.newest_complete(folder.checkpoints, tell, compare)
        if newest is None and config.run.resume == "auto":
            tell(f"run.resume=auto: no checkpoint in {folder.checkpoints} yet, so this is a fresh start")
        return newest

    # A checkpoint by its path: there, whole, and the newest of its run.
    path = Path(mode).expanduser().resolve()
    key = f"run.{'resume' if config.run.cooldown_from is None else 'cooldown_from'}={mode}"
    if not path.is_dir():
        raise UserError(f"{key}: no such checkpoint folder; run.resume=auto takes the newest of run.dir")
    if (path / "checkpoints").is_dir():
        raise UserError(f"run.resume={mode} is a run: continue it with {shell_word('run.dir', mode)} run.resume=auto")
    problem = store.damage(path, compare)
    if problem is not None:
        raise UserError(f"{key} is not a complete checkpoint ({problem}); run.resume=auto takes the newest one")
    newer = [p for p in store.scan(folder.checkpoints) if store.step_of(p) > store.step_of(path)]
    good = next((p for p in reversed(newer) if store.damage(p, compare) is None), None)
    if good is not None:
        found = f"run.resume={mode}: the run in {folder.path} has gone on to {good.name}"
        raise UserError(f"{found}. Go on from there with run.resume=auto, or give the new branch another run.name")
    return path


def trainer_state(
    checkpoint: Path, objective: Objective, config: Config, tell: Callable[[str], None], scored_on: str | None = None
) -> dict[str, Any]:
    """Returns the content of trainer.pt, if a run with this objective may go on from the checkpoint.

    `tell` and exceptions are those of `check_fingerprint`.
    """
    saved = store.load_trainer_state(checkpoint)
    theirs, ours = saved["fingerprint"], objective.fingerprint
    hold_to(objective, theirs, config.router.over_layers)
    check_fingerprint(checkpoint, theirs, ours, config, tell, scored_on)
    return saved


def check_fingerprint(
    checkpoint: Path,
    theirs: dict[str, Any],
    ours: Fingerprint,
    config: Config,
    tell: Callable[[str], None],
    scored_on: str | None = None,
) -> None:
    """Refuses to continue a run if its data, tokenizer, model or any other setting that affects learning has changed.

    `tell` is called with permitted changes, and with what could not be compared with the checkpoint.

    Raises:
        UserError: a change is not listed in run.allow_change, or a name listed there is unknown.
    """
    allowed = config.run.allow_change
    check_names(allowed, ours, config)
    before = finished.last_start(RunDir(checkpoint.parent.parent), config)
    refused = [c for c in changes(theirs, ours, before, config) if not c.is_allowed(allowed)]
    if refused:
        found = f"{checkpoint} was trained with other settings: {'; '.join(map(str, refused))}"
        change = f"run.allow_change=[{','.join(c.name for c in refused)}]"
        raise UserError(f"{found}. Put them back, give this run another run.name, or make it another run by {change}")
    others = [step for steps in retention.scored_on_others(checkpoint.parent, scored_on).values() for step in steps]
    if others:
        found = f"{config.checkpoint.monitor} is measured on other rows than up to step {max(others):,}"
        tell(f"{found}: scores are not compared with those before; `best` and early stopping start over")
    changed = changed_since(before, config, *fingerprint.MAY_CHANGE)
    if changed:
        tell(f"changed since this run's last start: {', '.join(f'{key} {both}' for key, both in changed.items())}")
    unknown = not_compared(theirs, ours, config)
    if unknown:
        tell(f"{checkpoint.name} is of an earlier version: what it had for {', '.join(unknown)} could not be compared")


def refuse_other_rates(checkpoint: Path, config: Config) -> None:
    """Raises UserError if a run that has trained all of its steps is asked for with other rates, as none remains."""
    changed = fingerprint.trained_otherwise(finished.last_start(RunDir(checkpoint.parent.parent), config), config, RATE)
    if changed:
        both = ", ".join(f"{key} {values}" for key, values in changed.items())
        remedy = "Put them back, train more steps with them, or give this run another run.name"
        raise UserError(f"{checkpoint.parent.parent} is finished, with other settings: {both}. {remedy}")


def fit_schedule(run: Run, saved: dict[str, Any], tell: Callable[[str], None]) -> None:
    """Keeps or rescales the learning rate schedule of a run that was made longer or shorter, and reports which.

    A run with a time budget continues with the number of steps it had when it was saved, or with that of its larger
    budget.

    Args:
        saved: the contents of the checkpoint's trainer.pt.
    """
    schedule_steps = saved["schedule_steps"]
    if run.config.budget.minutes is not None:
        _fit_budget(run, saved, tell)
        return
    if run.config.run.cooldown_from is not None:
        _check_full_rate(run.config, saved)
    if schedule_steps == run.total_steps:
        return
    rule = run.config.run.schedule_on_resume
    if rule == "keep":
        run.objective.schedule_steps = schedule_steps
        kept = f"its learning rate keeps the schedule planned for {schedule_steps:,}"
        tell(f"the run now has {run.total_steps:,} steps; {kept} (run.schedule_on_resume=rescale stretches it)")
    else:
        tell(f"the learning rate's schedule, planned for {schedule_steps:,} steps, now spans {run.total_steps:,}")


def _check_full_rate(config: Config, saved: dict[str, Any]) -> None:
    """Raises UserError if the learning rate at the checkpoint that a cooldown starts from is not the peak."""
    step = saved["global_step"]
    if not isinstance(config.schedule, WarmupStableDecayConfig) or step != config.schedule.decay_from:
        return  # the cooldown itself is continued
    group = saved["optimizer_states"][0]["param_groups"][0]
    if group["lr"] < group["base_lr"]:
        found = f"at step {step:,} the learning rate was {group['lr'] / group['base_lr']:.2f} of its peak"
        advice = "choose a checkpoint between warmup and decay"
        raise UserError(f"run.cooldown_from={config.run.cooldown_from}: {found}; {advice}")


def _fit_budget(run: Run, saved: dict[str, Any], tell: Callable[[str], None]) -> None:
    seconds, step = 60 * run.config.budget.minutes, saved["global_step"]  # type: ignore[operator]
    clock = saved["callbacks"].get(TimeBudget.__name__, {})
    used, steps = clock.get("used", 0.0), saved["schedule_steps"]
    # The run had ended, or was about to before the clock is looked at again.
    larger = step >= steps or clock.get("seconds", seconds) < seconds
    if larger and used < 0.95 * seconds:
        steps = max(steps, step + 1, round(step * seconds / max(used, 1.0)))
    budget = next(c for c in run.trainer.callbacks if isinstance(c, TimeBudget))  # type: ignore[attr-defined]
    budget.set_length(run.trainer, run.objective, min(steps, budget.at_most))
    tell(f"{used / 60:.1f} of {seconds / 60:g} minutes of the budget were used up to step {step:,}")


def knows_validation(checkpoint: Path) -> bool:
    """Returns whether its step was validated before saving; if not and one was due, the resumed run starts with it."""
    state = store.load_trainer_state(checkpoint)["callbacks"][Metrics.__name__]
    return state["last_val"].get("step") == store.step_of(checkpoint)


def let_last_validation_run(run: Run, checkpoint: Path | None) -> None:
    """Adds 1 to max_steps if only the last validation is missing: Lightning skips a fit whose steps are all done.

    The callback in callbacks/validation.py sets it back.
    """
    if checkpoint is not None and store.step_of(checkpoint) == run.total_steps and not knows_validation(checkpoint):
        run.trainer.fit_loop.epoch_loop.max_steps = run.total_steps + 1


def rewind(run: Run, checkpoint: Path | None, tell: Callable[[str], None]) -> None:
    """Removes leftovers and truncates the run's logs to the checkpoint's step; only rank 0 may call it.

    `tell` is called with notes for the user.
    """
    step = store.step_of(checkpoint) if checkpoint is not None else -1  # keeps no rows
    validated = checkpoint is not None and knows_validation(checkpoint)
    try:
        store.sweep(run.dir.path)
        store.sweep(run.dir.checkpoints)
        _set_damaged_aside(run.dir.checkpoints, checkpoint, tell)
        note_sent(run.metrics.records.joined, run.dir, step)
        run.metrics.records.rows = cut_back(run.dir.metrics, step, validated, tell)
        cut_back(run.dir.samples, step, validated, tell)
        run.dir.summary.unlink(missing_ok=True)
        write_again(run.metrics.records.joined, run.dir, step)
    except OSError as error:
        raise RunError(f"can't prepare {error.filename or run.dir.path} to continue: {reason(error)}") from error
    if checkpoint is not None and checkpoint.resolve().parent == run.dir.checkpoints.resolve():
        _tell_of_lost_rows(run, checkpoint, tell)


def _set_damaged_aside(folder: Path, checkpoint: Path | None, tell: Callable[[str], None]) -> None:
    """Renames checkpoints after `checkpoint`, all damaged (see `find`): retention must not count or delete them."""
    if checkpoint is None:
        return
    for path in store.scan(folder):
        passed_over = store.step_of(path) > store.step_of(checkpoint)
        in_its_way = store.step_of(path) == store.step_of(checkpoint) and path.resolve() != checkpoint.resolve()
        if passed_over or (in_its_way and store.damage(path) is not None):
            tell(f"the damaged {path.name} is kept as {store.set_aside(path).name} and is no longer used")


def _tell_of_lost_rows(run: Run, checkpoint: Path, tell: Callable[[str], None]) -> None:
    state = store.load_trainer_state(checkpoint)["callbacks"][Metrics.__name__]
    written, found = state["rows"], run.metrics.records.rows
    if found < written:
        lost = f"has {found:,} of {written:,} records" if run.dir.metrics.exists() else "is missing"
        until = f"{run.dir.metrics.name} {lost} up to step {store.step_of(checkpoint):,}"
        tell(f"{until}: what was logged there is lost, but training continues exactly")
