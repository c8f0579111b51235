"""Runs a pipeline: finished stages are skipped, interrupted ones continue, and changed ones run again."""

import os
import time
from pathlib import Path

from lmtrain import errors
from lmtrain.config.effect import TRIAL
from lmtrain.config.override_text import bare_or_quoted
from lmtrain.errors import RunError
from lmtrain.secrets import command
from lmtrain.stages import checks, report, state
from lmtrain.stages.plan import PipelinePlan, PlannedEvaluation, PlannedStage
from lmtrain.stages.state import State
from lmtrain.sweeps.processes import POLL_SECONDS, Children, locked, refuse_strange_files
from lmtrain.sweeps.trials import placed


class Work(Children):
    """The child processes of a pipeline, which runs verbs one after the other."""

    def run(self, verb: str, words: list[str], log: Path) -> int:
        """Runs `python -m lmtrain.VERB words` and returns its exit code, or 75 if it ended because of a signal."""
        if self.stopping:
            return errors.PREEMPTED
        child = self.start(verb, words, log, **{TRIAL: "stage"})
        while (code := child.code()) is None:
            time.sleep(POLL_SECONDS)
            child.show()
        child.show()
        self.ended(child, code)
        return errors.PREEMPTED if self.stopping and code != errors.FINISHED else code


def last_line(log: Path) -> str:
    """Returns the last error that a process printed, else its last line, without the prefix that `errors` adds."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    shown = [line for line in lines if line.strip()]
    errors_ = [line for line in shown if line.startswith("error: ")]
    return (errors_[-1:] or shown[-1:] or [f"see {os.fspath(log)}"])[0].removeprefix("error: ")


def run(plan: PipelinePlan, typed: list[str]) -> int:
    """Checks the data of all stages, shows the plan, and runs what is not finished.

    Args:
        typed: the command line, for the message on how to continue.

    Returns:
        0 if every stage and evaluation has finished; 75 if stopped (the same command continues); else the exit code for
        the failure of a stage or evaluation.

    Raises:
        UserError: a stage's data is wrong, or the folder is not a pipeline's; no stage has been started.
    """
    refuse_strange_files(plan.folder, "pipeline", "stages.json", "run.name or run.dir")
    checks.check(plan, begun=set(State(plan.folder).rows))
    with locked(plan.folder, "pipeline", "run.root"):
        return _Pipeline(plan).run(typed)


class _Pipeline:
    def __init__(self, plan: PipelinePlan) -> None:
        self.plan, self.state = plan, State(plan.folder)
        self.exports: dict[str, str] = {}  # export digests of the finished stages, by name
        self.work = Work()
        self.state.write()

    def run(self, typed: list[str]) -> int:
        statuses = self.statuses()
        report.show_plan(self.plan, statuses)
        with self.work:
            for one in self.plan.stages:
                code = self._stage(one) or self._evaluations()
                if code != errors.FINISHED:
                    return self._stopped(code, typed)
        report.write(self.plan, self.state)
        return errors.FINISHED

    def statuses(self) -> dict[str, str]:
        """Returns what will happen to each stage, as far as is known before the first one runs."""
        found: dict[str, str] = {}
        known: dict[str, str] = {}
        for one in self.plan.stages:
            row = self.state.rows.get(one.name)
            waits = [name for name in one.stage.needs if name not in known]
            if waits:
                found[one.name] = f"runs after {' and '.join(waits)}" + (" if that changes" if row else "")
            elif row is None:
                found[one.name] = "runs"
            elif row.identity != self.plan.identity(one, known):
                found[one.name] = "has changed: runs again"
            elif (digest := state.export_digest(one)) is not None:
                found[one.name], known[one.name] = state.FINISHED, digest
            else:
                found[one.name] = "continues"
        return found

    def _stage(self, one: PlannedStage) -> int:
        """Trains a stage unless it has finished; returns the exit code."""
        identity = self.plan.identity(one, self.exports)
        row = self.state.rows.get(one.name)
        if row is not None and row.identity == identity and (digest := state.export_digest(one)) is not None:
            self._finished(one, row, digest)
            return errors.FINISHED
        if one.run.exists() and (row is None or row.identity != identity):
            kept = state.set_aside(one.run)
            print(f"stage {one.name} has changed, or what it begins with: it runs again (the earlier run is in {kept})")
        row = self.state.begin(one.name, identity)
        words = placed(one.words, one.run)
        print(f"stage {one.name}: {command('train', words)}", flush=True)
        log = self.plan.folder / f"{one.name}.log"
        code = self._ended(f"stage {one.name}", row, "train", [*words, *self.plan.flags], log)
        if code != errors.FINISHED:
            return code
        digest = state.export_digest(one)
        if digest is None:
            again = command("export", [f"run_dir={bare_or_quoted(str(one.run))}", "export.checkpoint=last"])
            raise RunError(f"stage {one.name} has ended without {one.export}: {again} writes it (output: {log})")
        self._finished(one, row, digest)
        return errors.FINISHED

    def _finished(self, one: PlannedStage, row: state.Row, digest: str) -> None:
        self.exports[one.name] = row.export = digest
        self.state.write()

    def _evaluations(self) -> int:
        """Runs the evaluations whose stages have finished and that have not been run; returns the exit code."""
        for one in self.plan.evaluations:
            code = self._evaluation(one) if one.needs <= set(self.exports) else errors.FINISHED
            if code != errors.FINISHED:
                return code
        return errors.FINISHED

    def _evaluation(self, one: PlannedEvaluation) -> int:
        identity = self.plan.identity_of_scores(one, self.exports)
        row = self.state.rows.get(one.name)
        if row is not None and row.identity == identity and row.export is not None and one.file.exists():
            return errors.FINISHED
        row = self.state.begin(one.name, identity)
        print(f"evaluation {one.evaluation.name} of {one.of}", flush=True)
        words, log = [*one.words, *self.plan.flags_of(one)], self.plan.folder / "evaluations.log"
        code = self._ended(f"evaluation {one.name}", row, "evaluate", words, log)
        if code == errors.FINISHED:
            row.export = "written"
            self.state.write()
        return code

    def _ended(self, what: str, row: state.Row, verb: str, words: list[str], log: Path) -> int:
        """Runs a verb, records its duration and prints its error, if any; returns the exit code of the pipeline."""
        started = time.monotonic()
        report.write_page(self.plan, self.state)
        code = self.work.run(verb, words, log)
        row.seconds = round(row.seconds + time.monotonic() - started, 1)
        self.state.write()
        if code in (errors.FINISHED, errors.PREEMPTED):
            return code
        how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
        errors.print_error(f"{what} failed ({how}): {last_line(log)} (all of it: {log})")
        return errors.WRONG_INPUT if code == errors.WRONG_INPUT else errors.FAILED

    def _stopped(self, code: int, typed: list[str]) -> int:
        if code == errors.PREEMPTED:
            print("the pipeline was stopped; what ran has saved. Continue with:")
            print(f"  {command('pipeline', typed)}", flush=True)
        return code
