"""One process of a run, from its resolved config to its exit code: the whole run on one device, or one rank of it.

`start.py` creates a Session for a run on one device and for ranks that torchrun or SLURM started, `launch.py` for the
ranks it starts itself.
"""

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

from lmtrain import errors, terminal
from lmtrain.callbacks import extra
from lmtrain.checkpoints import manifest, store
from lmtrain.checkpoints.checksums import helped_by_ranks
from lmtrain.config import compose as rules
from lmtrain.config import environment
from lmtrain.config.keys import freeze
from lmtrain.config.schema import Config
from lmtrain.data import loaders
from lmtrain.distributed import devices, heap, spinning
from lmtrain.distributed import process_group as world
from lmtrain.distributed.stop_signals import Preempted
from lmtrain.errors import RunError
from lmtrain.exports import hf_folder
from lmtrain.exports.export import check_upload, push
from lmtrain.run import build, failures, loggers, next_commands, plan, resume, summary
from lmtrain.run.build import Run
from lmtrain.run_folder import finished, links, lock
from lmtrain.run_folder import folder as run_dir
from lmtrain.run_folder.folder import RunDir


class Session:
    """A run in this process, from building to export: `Session(config, folder).run()`, or `build` and then `train`."""

    def __init__(self, config: Config, folder: RunDir) -> None:
        self.config, self.folder = config, folder
        self.started = time.time()
        self.files = finished.files_named(config)  # before they are read
        self.notes: list[str] = []  # shown with the plan
        self.checkpoint: Path | None = None  # the one to continue from
        self.done = 0  # its step
        self.is_done = False  # whether an earlier process trained all of its steps

    def run(self) -> int:
        """Builds the run and trains it in its folder; returns the exit code."""
        with contextlib.ExitStack() as stack:
            return self.train(self.build(stack))

    def build(self, stack: contextlib.ExitStack) -> Run:
        """Builds everything and finds the checkpoint to continue from, before anything is written to the folder.

        The folder is locked against other processes until `stack` is closed.
        """
        config, tell = self.config, self.notes.append
        freeze(config)
        world.connect(config.trainer.accelerator, config.trainer.rank_timeout)
        if world.size() > 1:
            world.write_traces_to(self.folder.path)  # unless the launcher has set a folder
        world.together(lambda: self._lock(stack) if world.rank() == 0 else None)
        terminal.be_quiet(config.run.quiet)
        devices.set_threads(config.trainer.num_threads, int(config.trainer.devices))
        spinning.watch()
        # Verifying a checkpoint reads all of it, so the ranks do it once, together.
        self.checkpoint = helped_by_ranks(lambda compare: resume.find(config, self.folder, tell, compare))
        console = terminal.console(quiet=world.rank() > 0)
        run = build.build(config, self.folder, console, self.started)
        # A wrong field of export.generation or a missing upload token must raise here, not after the training.
        check_upload(config.export)
        hf_folder.generation_config(run.objective.model.model, run.corpus.tokenizer, None, config.export.generation)
        if self.checkpoint is not None:
            saved = resume.trainer_state(self.checkpoint, run.objective, config, tell, run.scored_on)
            resume.fit_schedule(run, saved, tell)
            run.objective.continue_from(saved)
            self.done = store.step_of(self.checkpoint)
        self.is_done = world.from_first(
            lambda: self.done >= run.total_steps and (finished.ended(self.folder) or {}).get("step") == self.done
        )
        if self.is_done and self.checkpoint is not None:
            resume.refuse_other_rates(self.checkpoint, config)
        if not self.is_done:
            world.together(lambda: loggers.start_loggers(run.metrics.records.joined, self.done, tell))
        return run

    def _lock(self, stack: contextlib.ExitStack) -> None:
        """Locks the folder against other processes until `stack` is closed."""
        links.refuse_links(self.folder.path)
        stack.enter_context(lock.held(self.folder.path))
        # If the lock was waited for, another run may have started here since this was checked.
        run_dir.refuse_to_overwrite(self.folder, self.config)

    def _write_what_runs(self, tokenizer: Any) -> None:
        run_dir.write_config(self.folder, self.config)
        if self.checkpoint is not None:
            said = manifest.read(self.checkpoint).get("tokenizer")
            found = run_dir.tokenizer_files(self.folder)
            if said and found == said:
                return  # unchanged, though maybe written by another version of the libraries
            if said and found:
                self.notes.append(f"{self.folder.tokenizer} was changed since {self.checkpoint.name}: rewritten")
        run_dir.write_tokenizer(self.folder, tokenizer)

    def train(self, run: Run) -> int:
        """Trains the run that `build` returned from the checkpoint (or the start) to its end; returns the exit code."""
        if self.is_done:
            run.console.print(finished.nothing_to_do(self.folder), soft_wrap=True, highlight=False)
            return errors.FINISHED
        # The folder: its files, its logs cut back to the checkpoint, and what the loggers hold.
        world.from_first(lambda: self._write_what_runs(run.corpus.tokenizer))
        world.from_first(lambda: resume.rewind(run, self.checkpoint, self.notes.append))
        resume.let_last_validation_run(run, self.checkpoint)
        loggers.log_config(run.trainer.loggers, rules.to_plain(self.config))
        # The plan.
        self.notes += environment.in_full(dataclasses.asdict(self.config), self.config.kept)
        callbacks = run.trainer.callbacks  # type: ignore[attr-defined]
        self.notes += [*extra.outside(self.config, self.folder, callbacks), *extra.epoch_notes(callbacks)]
        resumed_from = f"continues after step {self.done:,} ({self.checkpoint})" if self.checkpoint else None
        plan.show(run, resumed_from, self.done, self.notes)
        if world.rank() == 0:
            run_dir.note_start(self.folder, self.done, self.config.headline(), self.files)
        if self.config.trainer.accelerator == "cpu":
            heap.keep()
        # Training, until its last step, a stop request or an error.
        signals = run.objective.stop.signals
        signals.how_to_go_on = (lambda: next_commands.continuing(run)) if world.rank() == 0 else None
        with contextlib.closing(signals), loaders.no_workers_left():
            try:
                run.trainer.fit(run.objective, datamodule=run.datamodule, ckpt_path=self.checkpoint, weights_only=True)
            except Preempted:
                raise
            except BaseException as error:
                summary.note_failure(run, self.started, error)
                explained = failures.explain(error, run)
                if explained is None:
                    raise
                raise explained from error
            return self._end(run)

    def _end(self, run: Run) -> int:
        """Exports, writes summary.json and prints the results; returns the exit code."""
        preemption = run.callbacks.preemption
        complete = run.trainer.global_step >= run.total_steps and not preemption.interrupted_validation
        status = "finished" if complete else "preempted" if preemption.stopped else "stopped_early"
        if not run.trainer.is_global_zero:
            return errors.PREEMPTED if status == "preempted" else errors.FINISHED
        failed = preemption.stop.error
        if status == "preempted" and failed is not None:
            error = RunError(f"{failed}; {failures.last_good(run)}")
            summary.note_failure(run, self.started, error)
            raise error
        if status == "preempted":
            summary.write_summary(run, status, self.started)
            next_commands.print_how_to_continue(run)
            return errors.PREEMPTED
        try:
            failures.refuse_lost_model(run)
            exported = summary.export(run) if run.config.export.enabled else []
        except RunError as error:
            summary.note_failure(run, self.started, error)
            raise
        summary.show(run, summary.write_summary(run, status, self.started), exported)
        if exported and run.config.export.push_to is not None:  # even if this fails, the run has finished
            print(f"uploaded to {push(exported[-1], run.config.export, run.trainer.global_step)}")
        return errors.FINISHED
