"""The main job: compose, check, build, fit, export. `python -m lmtrain.train [overrides]`."""

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmtrain import cli, errors, ranks, run_dir, run_lock
from lmtrain.config import split_over
from lmtrain.errors import RunError, UserError
from lmtrain.run_dir import RunDir
from lmtrain.schema import Config

if TYPE_CHECKING:
    from lmtrain.build import Run


def train(config: Config) -> int:
    """Trains as `config` says, in this process or in one per device; returns the exit code."""
    if config.debug.get("mode") == "replay":
        return replay_step(config)
    layout = ranks.find()
    if layout is not None:
        return ranks.train(config, layout)
    if config.trainer.num_nodes > 1:
        raise UserError(
            f"trainer.num_nodes={config.trainer.num_nodes}: start one command per node, with torchrun --nnodes="
            f"{config.trainer.num_nodes} -m lmtrain.train ... or srun (docs/multi_node.md has both)"
        )
    folder = RunDir(run_dir.locate(config))
    if is_finished(config, folder):
        say_finished(folder)
        return errors.FINISHED
    existed = run_dir.existing_part(folder.path)
    folder = run_dir.open_run(config)
    fresh = not folder.config.exists()
    try:
        from lmtrain import devices, launch

        devices.resolve_auto(config)
        processes = int(config.trainer.devices)
        split_over(config, processes)
        if processes == 1:
            return run_in_process(config, folder)
        return launch.launch(folder, config, processes)
    finally:
        if fresh:
            folder.discard_if_unused(existed)


def replay_step(config: Config) -> int:
    from lmtrain import devices, replay

    devices.resolve_auto(config)
    return replay.replay(config)


def run_in_process(config: Config, folder: RunDir) -> int:
    """One rank, or the whole run on one device. Torch is imported here, not before."""
    from rich.console import Console

    from lmtrain import world

    started = time.time()
    world.connect(config.trainer.accelerator)
    console = Console(quiet=os.environ.get("RANK", "0") != "0")
    with contextlib.ExitStack() as stack:
        world.together(lambda: take(folder, config, stack) if world.rank() == 0 else None)
        run, checkpoint, notes = prepare_run(config, folder, console, started)
        world.from_first(lambda: write_what_runs(folder, config, run.corpus.tokenizer))
        return fit_and_export(run, checkpoint, notes, started)


def take(folder: RunDir, config: Config, stack: contextlib.ExitStack) -> None:
    """Keeps other processes out of the folder until `stack` ends."""
    stack.enter_context(run_lock.held(folder.path))
    run_dir.refuse_to_overwrite(folder, config)  # one that was waited for began after this command had looked


def write_what_runs(folder: RunDir, config: Config, tokenizer: Any) -> None:
    run_dir.write_config(folder, config)
    run_dir.write_tokenizer(folder, tokenizer)


def is_finished(config: Config, folder: RunDir) -> bool:
    """Whether the run in this folder has ended, and no other length is asked for now."""
    if run_dir.resume_mode(config) != "auto" or not folder.config.exists():
        return False
    summary = folder.read_summary()
    if summary is None or summary["status"] not in ("finished", "stopped_early"):
        return False
    return summary["asked"] == asked(config)


def say_finished(folder: RunDir) -> None:
    print(f"{folder.path} is finished: nothing to do. More steps: trainer.max_steps; a new run: run.name")


def asked(config: Config) -> dict[str, Any]:
    """What decides when a run has ended."""
    return {"max_steps": config.trainer.max_steps, "max_epochs": config.trainer.max_epochs}


def prepare_run(config: Config, folder: RunDir, console: Any, started: float) -> "tuple[Run, Path | None, list[str]]":
    """Builds everything and finds the checkpoint to continue from, before anything is written to the run's folder."""
    from lmtrain import build, devices, loggers, resume, world

    devices.set_threads(config.trainer.num_threads, int(config.trainer.devices))
    notes: list[str] = []
    checkpoint = world.from_first(lambda: resume.find(config, folder, notes.append))  # read whole to be checked: once
    run = build.build(config, folder, console, started)
    if checkpoint is not None:
        saved = resume.read_trainer_state(checkpoint)
        resume.check_fingerprint(checkpoint, saved["fingerprint"], run.objective.fingerprint, config.run.allow_change)
        resume.fit_schedule(run, saved["schedule_steps"], notes.append)
    world.together(lambda: loggers.start_loggers(run.trainer.loggers))
    return run, checkpoint, notes


def fit_and_export(run: "Run", checkpoint: Path | None, notes: list[str], started: float) -> int:
    """Trains from `checkpoint` (or the start), then ends the run."""
    from lmtrain import plan, report, resume, troubleshoot

    resumed_from = resume.rewind(run, checkpoint)
    resume.let_last_validation_run(run, checkpoint)
    plan.show(run, resumed_from, notes)
    with contextlib.closing(run.preemption.signals):
        try:
            run.trainer.fit(run.objective, datamodule=run.datamodule, ckpt_path=checkpoint, weights_only=True)
        except BaseException as error:
            report.note_failure(run, started, error)
            explained = troubleshoot.explain(error, run)
            if explained is None:
                raise
            raise explained from error
        return end(run, started)


def end(run: "Run", started: float) -> int:
    """Exports, writes summary.json and says how the run went."""
    from lmtrain import report

    status = ending(run)
    if not run.trainer.is_global_zero:
        return errors.PREEMPTED if status == "preempted" else errors.FINISHED
    if status == "preempted":
        report.write_summary(run, status, started)
        report.say_how_to_go_on(run)
        return errors.PREEMPTED
    try:
        exported = report.export(run) if run.config.export.enabled else None
    except RunError as error:
        report.note_failure(run, started, error)
        raise
    report.write_summary(run, status, started)
    report.show(run, status, exported)
    return errors.FINISHED


def ending(run: "Run") -> str:
    """finished, preempted or stopped_early."""
    if run.trainer.global_step >= run.total_steps and not run.preemption.interrupted_validation:
        return "finished"
    return "preempted" if run.preemption.stopped else "stopped_early"


def main(argv: list[str] | None = None) -> int:
    return cli.run("train", train, argv)


if __name__ == "__main__":
    if ranks.started_by() is not None:
        from lmtrain.world import leave_after

        leave_after(main)
    sys.exit(main())
