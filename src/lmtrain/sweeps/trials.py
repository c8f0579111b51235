"""The trials of a sweep: each has a row in <sweep>/trials.jsonl, a process, and its output in <sweep>/<number>.log."""

import json
import math
import shutil
import signal
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmtrain import errors
from lmtrain.config.override_text import bare_or_quoted
from lmtrain.errors import UserError
from lmtrain.files import read_jsonl, write_atomic
from lmtrain.run_folder.folder import RunDir, begins_elsewhere, checkpoint_names
from lmtrain.secrets import hide

_TYPES: dict[str, Any] = {"number": int, "overrides": list, "fixed": list, "status": str, "exit_code": int | None,
                          "score": int | float | None, "seconds": int | float, "error": str | None}  # fmt: skip
_LINES_KEPT = 100  # lines of a failed trial's output that its row keeps


@dataclass
class Trial:
    """A row of trials.jsonl."""

    number: int  # its folder is <sweep>/<number>
    overrides: list[str]  # what the sweep chose for it
    fixed: list[str]  # the rest of its command line
    status: str = "running"  # running, finished, preempted or failed; running after the sweep: it was killed
    exit_code: int | None = None  # of its process; negative: the signal that ended it
    score: float | None = None  # the best value of checkpoint.monitor; None where there is none, or it is not finite
    seconds: float = 0.0  # of the last start
    error: str | None = None  # the end of a failed trial's output, from its traceback on

    def __post_init__(self) -> None:
        """Raises TypeError for a value of the wrong type."""
        for name, types in _TYPES.items():
            if not isinstance(getattr(self, name), types):
                raise TypeError(f"{name} is {getattr(self, name)!r:.80}")
        for word in (*self.overrides, *self.fixed):
            if not isinstance(word, str):
                raise TypeError(f"{word!r:.80} is not an override")


class Trials:
    """The rows of trials.jsonl in a sweep's folder; `write` saves them."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "trials.jsonl"
        try:
            self.rows = [Trial(**row) for row in read_jsonl(self.path)]
        except TypeError as error:
            raise UserError(f"{self.path} holds a row that is not a trial ({error}); fix or remove it") from None

    def write(self) -> None:
        write_atomic(self.path, "".join(json.dumps(asdict(row)) + "\n" for row in self.rows))

    def find(self, overrides: list[str], fixed: list[str]) -> Trial | None:
        """Returns the trial with this command line, regardless of the order of its words, or None."""
        wanted = sorted(map(hide, [*overrides, *fixed]))
        return next((row for row in self.rows if sorted([*row.overrides, *row.fixed]) == wanted), None)

    def add(self, overrides: list[str], fixed: list[str]) -> Trial:
        """Adds a trial with the next free number and returns it."""
        number = 1 + max((row.number for row in self.rows), default=-1)
        self.rows.append(Trial(number, list(map(hide, overrides)), list(map(hide, fixed))))
        return self.rows[-1]


def ranked(trials: list[Trial], mode: str) -> list[Trial]:
    """Returns the trials sorted by score, best first; those without a score come last."""
    sign = -1 if mode == "max" else 1
    return sorted(trials, key=lambda t: math.inf if t.score is None else sign * t.score)


def last_line(trial: Trial) -> str:
    """Returns the last line of the trial's error, which names the exception."""
    return (trial.error or "").strip().rpartition("\n")[2].removeprefix("error: ")


def outcome(trial: Trial, metric: str) -> str:
    score = "" if trial.score is None else f", {metric} {trial.score:.6g}"
    return f"trial {trial.number} {trial.status}{score}, {trial.seconds} s"


def command(trial: Trial, folder: Path) -> list[str]:
    """Returns the trial's overrides, with its folder as in `placed`."""
    return placed([*trial.fixed, *trial.overrides], folder / str(trial.number))


def placed(overrides: list[str], run: Path) -> list[str]:
    """Returns the overrides with the folder of the run, and with run.resume=auto if it already holds a run.

    A run that begins at another's checkpoint (run.resume=<path>) begins there again until it has one of its own.
    """
    words = [*overrides, f"run.dir={bare_or_quoted(str(run))}"]
    if (run / "config.yaml").exists():
        if begins_elsewhere(overrides) and not checkpoint_names(run / "checkpoints"):
            return words
        return [*(w for w in words if not w.startswith("run.resume=")), "run.resume=auto"]
    shutil.rmtree(run, ignore_errors=True)  # left by a start killed before its config.yaml was written
    return words


def finished(trial: Trial, folder: Path, verb: str) -> bool:
    """Returns whether the trial need not run again, according to its row and, for training, its run's summary.json."""
    if trial.status != "finished":
        return False
    summary = RunDir(folder / str(trial.number)).summary_or_error()
    return verb != "train" or summary.get("status") in ("finished", "stopped_early")


def judge(trial: Trial, folder: Path, code: int | None, stopped: bool) -> None:
    """Fills in the row of a trial that has ended; the caller writes trials.jsonl.

    Args:
        code: its exit code, or None if the machine that ran it did not report one, so that summary.json decides.
        stopped: whether the sweep was asked to end: a trial that ended with it did not fail.
    """
    log, summary = folder / f"{trial.number}.log", RunDir(folder / str(trial.number)).summary_or_error()
    if code is None and summary.get("status") in ("finished", "stopped_early", "preempted"):
        code = errors.PREEMPTED if summary["status"] == "preempted" else errors.FINISHED
    trial.exit_code = code
    trial.score = None
    trial.error = None
    if code == errors.PREEMPTED or (stopped and code != errors.FINISHED):
        trial.status = "preempted"
    elif code != errors.FINISHED:
        trial.status, trial.error = "failed", _why(log, code)
    elif summary.get("status") == "unreadable":
        trial.status, trial.error = "failed", summary["error"]
    else:
        trial.status = "finished"
        metric, value = next(iter((summary.get("best_metric") or {}).items()), (None, None))
        if value is not None and not math.isfinite(value):
            trial.status, trial.error = "failed", f"its best {metric} is {value}"
        trial.score = value if trial.status == "finished" else None


def _why(log: Path, code: int | None) -> str:
    """Returns the last traceback that a trial printed, or the end of its output, plus how it ended if that helps."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    begins = [i for i, line in enumerate(lines) if line.startswith(("Traceback ", "error: "))]
    tail = lines[begins[-1] :] if begins and code is not None and code > 0 else lines
    tail = tail[-_LINES_KEPT:]
    if code is None:
        tail.append("the launcher gave no result for this trial")
    elif code < 0:
        memory = ": the machine ran out of memory, most likely" if code == -signal.SIGKILL else ""
        tail.append(f"ended by {signal.Signals(-code).name}{memory}")
    return "\n".join(tail)
