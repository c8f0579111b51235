"""The run folder: its files, and functions that locate, create, reopen and write it. Imports no torch.

A run writes only inside its own folder, even if the folder came from someone else: links leading out are refused.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lmtrain.config import compose as config_rules
from lmtrain.config.override_text import typed_keys
from lmtrain.config.schema import Config
from lmtrain.errors import UserError, writing
from lmtrain.files import (
    CHECKPOINT,
    absolute,
    first_unused,
    read_regular,
    replacing,
    strict_json,
    temporary_beside,
    write_atomic,
)
from lmtrain.run_folder import lock as run_lock
from lmtrain.run_folder.links import refuse_links
from lmtrain.secrets import shown_in


class RunDir:
    """Paths inside the folder `path` of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.samples = path / "samples.jsonl"
        self.plan = path / "plan.txt"
        self.summary = path / "summary.json"
        # A line for each start or resumption of training: {"time", "step", "headline", "files"}.
        self.starts = path / "starts.jsonl"
        self.report = path / "report.html"
        self.checkpoints = path / "checkpoints"
        self.tokenizer = path / "tokenizer"
        self.ring = path / "ring"  # prefetched tokens of a run that trains on a stream; removed when the run ends
        self.ranks = path / "ranks"  # config and logs that a multi-rank launch writes before the run itself begins
        self.export = path / "export"
        self.export_merged = path / "export_merged"  # adapter and base merged into one model; `export` has the adapter
        self.existed: Path | None = None  # set by `open_run` if no run is there: the part of the path that was there

    def discard_if_unused(self) -> None:
        """Removes a new run folder in which no training started, so that a rejected config leaves nothing behind."""
        if self.existed is None or self.metrics.exists() or self.summary.exists():
            return
        if checkpoint_names(self.checkpoints) or run_lock.taken(self.path):
            return
        for entry in self.path.iterdir() if self.path.is_dir() else ():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        with contextlib.suppress(OSError):  # not empty: another run has started beside it
            for folder in (self.path, *self.path.parents):
                if folder == self.existed:
                    break
                folder.rmdir()

    def summary_or_error(self) -> dict[str, Any]:
        """Returns summary.json; {} if there is none, status "unreadable" and the `error` if it can't be read."""
        try:
            return self.read_summary() or {}
        except UserError as error:
            return {"status": "unreadable", "error": str(error)}

    def read_summary(self) -> dict[str, Any] | None:
        """Returns the contents of summary.json, which says how the run ended, or None if there is none.

        Raises:
            UserError: the file can't be read or lacks a valid status or best_metric.
        """
        try:
            summary = json.loads(read_regular(self.summary))
            if not isinstance(summary, dict) or not isinstance(summary.get("status"), str):
                raise ValueError("it has no status")
            best = summary.get("best_metric") or {}
            if not isinstance(best, dict) or not all(isinstance(value, int | float | None) for value in best.values()):
                raise ValueError("its best_metric is not a number")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            advice = "Move it away to continue the run from its newest checkpoint"
            raise UserError(f"{self.summary} can't be read: {error}. {advice}") from None
        return summary

    def write_summary(self, summary: dict[str, Any]) -> None:
        write_atomic(self.summary, strict_json(shown_in(summary), indent=2) + "\n")


def note_start(run: RunDir, step: int, headline: list[str], files: str) -> None:
    """Appends the time, the step at which training starts, Config.headline and `files_named` to starts.jsonl."""
    row = {"time": round(time.time(), 3), "step": step, "headline": headline, "files": files}
    with contextlib.suppress(OSError), run.starts.open("a", encoding="utf-8") as file:  # optional: failures are ignored
        file.write(json.dumps(row) + "\n")


def checkpoint_names(folder: Path) -> list[str]:
    """Returns the names of the checkpoints in a folder, without those that a kill left half written or removed."""
    return [p.name for p in folder.glob("step_*") if CHECKPOINT.fullmatch(p.name)]


def locate(config: Config) -> Path:
    """Returns the path of the run's folder: run.dir, <root>/<name>, or <root>/<date>_<time> (made unique)."""
    if config.run.dir is not None:
        return absolute(config.run.dir)
    root = absolute(config.run.root)
    if config.run.name is not None:
        return root / config.run.name
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return first_unused(lambda n: root / (f"{stamp}_{n}" if n else stamp))


@contextlib.contextmanager
def folder_beside_runs(config: Config, name: str) -> Iterator[Path]:
    """Yields a temporary folder in run.root. Raises UserError if it can't be created."""
    root = absolute(config.run.root)
    with writing(str(root), "; set run.root to a folder you can write"):
        root.mkdir(parents=True, exist_ok=True)
        folder = temporary_beside(root / name)
        folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def resume_mode(config: Config) -> str:
    """Returns none, auto, or a checkpoint's path; a run with run.name resumes (auto) unless run.resume is set.

    A cooldown run starts from run.cooldown_from and resumes (auto) once its own folder has a checkpoint.
    """
    cooldown_from = config.run.cooldown_from
    if cooldown_from is not None:
        return "auto" if checkpoint_names(RunDir(locate(config)).checkpoints) else cooldown_from
    if config.run.resume is not None:
        return config.run.resume
    return "auto" if config.run.name is not None else "none"


def begins_elsewhere(words: Sequence[str]) -> bool:
    """Returns whether the overrides let a run begin at the checkpoint of another: run.resume=<path>."""
    return typed_keys(words).get("run.resume", "null") not in ("null", "none", "auto")


def continue_after_restart(config: Config, run: RunDir) -> None:
    """Makes ranks that were restarted after a failure continue from the run's newest checkpoint.

    Without one they begin where the run began, which may be another run's checkpoint.
    """
    if checkpoint_names(run.checkpoints) or resume_mode(config) == "none":
        config.run.resume = "auto"


def other_files(run: RunDir) -> list[Path]:
    """Returns the entries of a folder without a run, except the leftovers of a start that was killed early."""
    entries = [p for p in run.path.iterdir() if ".tmp" not in p.name and p.name != run_lock.NAME]
    return [p for p in entries if p != run.ranks and (p != run.checkpoints or any(p.iterdir()))]


def open_run(config: Config) -> RunDir:
    """Creates or reopens the run's folder and sets config.run.dir to it.

    Raises:
        UserError: the folder can't be written, holds other files or links out of it, or holds a run and resume=none.
    """
    path = locate(config)
    run, existed = RunDir(path), next(p for p in (path, *path.parents) if p.exists())
    if path.exists() and not path.is_dir():
        raise UserError(f"run.dir={path} is a file: name a folder")
    refuse_to_overwrite(run, config)
    if path.is_dir():
        refuse_links(path)
    if path.is_dir() and not run.config.exists() and other_files(run):
        raise UserError(f"{path} holds files that are not a run of lmtrain's: choose another run.dir or run.name")
    named = config.run.dir is not None or config.run.name is not None
    try:
        path.mkdir(parents=True, exist_ok=named)
        run.checkpoints.mkdir(exist_ok=True)
        probe = path / f"probe.tmp{os.getpid()}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        if isinstance(error, FileExistsError) and not named:
            return open_run(config)  # a run that started in the same second has this name
        raise UserError(f"cannot write the run folder {path}: {error.strerror}; set run.dir to one you can") from None
    config.run.dir = str(path)
    run.existed = None if run.config.exists() else existed
    return run


def refuse_to_overwrite(run: RunDir, config: Config) -> None:
    """Raises UserError if the folder holds a run that `config` does not resume."""
    if run.config.exists() and resume_mode(config) == "none":
        advice = "continue it with run.resume=auto, or choose another run.dir or run.name"
        raise UserError(f"{run.path} holds a run already, and nothing in it is overwritten: {advice}")


def write_config(run: RunDir, config: Config) -> None:
    """Writes the run's config.yaml; if it differs, an earlier one is kept as config.1.yaml, config.2.yaml, ..."""
    text = config_rules.dump(config)
    if run.config.exists():
        if read_regular(run.config) == text:
            return
        shutil.copyfile(run.config, first_unused(lambda n: run.path / f"config.{n + 1}.yaml"))
    write_atomic(run.config, text)


def tokenizer_files(run: RunDir) -> dict[str, str] | None:
    """Returns the hashes of the run's tokenizer files, or None if they can't be read."""
    from lmtrain.data import tokenizers

    try:
        return tokenizers.file_hashes(run.tokenizer)
    except OSError:
        return None


def write_tokenizer(run: RunDir, tokenizer: Any) -> None:
    """Writes the run's own copy of its tokenizer, which loading the model later needs; complete or not at all."""
    from lmtrain.data import tokenizers

    with replacing(run.tokenizer, str(run.tokenizer), "free space there or set run.dir elsewhere") as temporary:
        tokenizers.save(tokenizer, temporary)
