"""The run folder: its contents, and functions that locate, create, reopen and write it. Imports no torch.

A run writes only inside its own folder, even if the folder came from someone else: links leading out are refused.
"""

import contextlib
import glob
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from lmtrain.config import compose as config_rules
from lmtrain.config.constraints import MODEL, PREPARED, RATE, TRAJECTORY, VALIDATION
from lmtrain.config.fingerprint import read_config, short_hash, trained_otherwise
from lmtrain.config.keys import flat, keys_in, value_of
from lmtrain.config.override_text import typed_keys
from lmtrain.config.schema import BUDGETS, Config
from lmtrain.data.store.contents import version_of
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
from lmtrain.run_folder.cut_back import last_rows
from lmtrain.secrets import shown_in
from lmtrain.terminal import counted


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

    def told_summary(self) -> dict[str, Any]:
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
            raise UserError(
                f"{self.summary} can't be read: {error}. Nothing was changed. Move it away, and the same command "
                f"continues the run from its newest checkpoint"
            ) from None
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


def asked(config: Config) -> dict[str, Any]:
    """Returns the config values that determine the length of a run."""
    t, chosen = config.trainer, config.budget.chosen
    budget = {} if chosen is None else {chosen: getattr(config.budget, chosen)}
    return {"max_steps": t.max_steps, "max_epochs": t.max_epochs, **budget}


def is_finished(config: Config) -> bool:
    """Returns whether the run of this config has ended with the same length and settings; prints a message if so.

    Settings that only say how a result is computed or shown are not compared. Of a run with others, the session finds
    out whether it may go on.
    """
    folder = RunDir(locate(config))
    if resume_mode(config) != "auto" or not folder.config.exists():
        return False
    summary = ended(folder)
    if summary is None or summary.get("asked") != asked(config):
        return False
    if trained_otherwise(last_start(folder, config), config, PREPARED, MODEL, TRAJECTORY, RATE, VALIDATION):
        return False
    begun = [{}, *last_rows(folder.starts)][-1]
    if begun.get("files") != files_named(config):  # maybe of the same content: the session compares it
        return False
    print(nothing_to_do(folder))
    return True


def files_named(config: Config) -> str:
    """Returns a hash of path, size, times and inode of the files here that the config names, as `version_of`.

    A file that is replaced by an older one, as mv, rsync -t and tar do, has another inode or change time.
    """
    whole = Path("/")  # is refused when the data is opened
    named = (path for path in _named_files(config) if path.resolve() != whole)
    files = (p for path in named for p in (path, *sorted(path.rglob("*"))) if p.is_file())
    return short_hash([[str(path.absolute()), version_of(path)] for path in files])


def _named_files(config: Config) -> Iterator[Path]:
    """Yields the files and folders here that the config names, of which a resumed run compares the content."""
    values = (value_of(config, key.name) for key in keys_in(config) if key.by_content)
    for _, name in (pair for value in values for pair in flat(value)):
        if isinstance(name, str):
            yield from (Path(path) for path in glob.iglob(os.path.expanduser(name), recursive=True))


def last_start(run: RunDir, config: Config) -> dict[str, Any]:
    """Returns the values that the run's config.yaml has for the keys of `config`; {} if it can't be read."""
    try:
        return read_config(config_rules.read(run.config), config)
    except UserError:
        return {}


def ended(folder: RunDir) -> dict[str, Any] | None:
    """Returns the summary of a run with status finished or stopped_early, otherwise None."""
    summary = folder.read_summary()
    return summary if summary is not None and summary["status"] in ("finished", "stopped_early") else None


def nothing_to_do(folder: RunDir) -> str:
    """Returns the message for a finished run, which names the setting that would train it further."""
    summary = folder.read_summary() or {}
    asked, step = summary.get("asked") or {}, summary.get("step", 0)
    epochs, early = asked.get("max_epochs"), summary.get("status") == "stopped_early"
    key = f"trainer.max_steps={2 * max(step, (asked.get('max_steps') or 0) if early else 0)}"
    if epochs is not None and asked.get("max_steps") != step:
        key = f"trainer.max_epochs={2 * epochs}"
    for budget in BUDGETS:
        if asked.get(budget) is not None:
            key = f"budget.{budget}={2 * asked[budget]:g}"
    stopping = config_rules.read(folder.config).get("callbacks", {}).get("early_stopping", {}) if early else {}
    if stopping.get("enabled"):
        more, reached = f"patience={2 * stopping['patience']}", stopping.get("stop_at") is not None
        key = f"callbacks.early_stopping.{'enabled=false' if reached else more}"
    how = "stopped early" if early else "is finished"
    finished = f"{folder.path} {how}: nothing to do after {counted(step, 'step')}"
    if summary.get("ended_by") is not None:
        of_mixture = summary["ended_by"] == "data.mixture"
        by = "its mixture's epochs end" if of_mixture else f"trainer.max_epochs={epochs} ends"
        return (
            f"{finished}, where {by} it: more minutes add no step, and further passes over "
            f"its data rarely help. For a new run, another run.name"
        )
    return f"{finished}. To train it further, the same command with {key}; for a new run, another run.name"


def foreign_files(run: RunDir) -> list[Path]:
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
    if path.is_dir() and not run.config.exists() and foreign_files(run):
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
        raise UserError(
            f"{run.path} holds a run already, and nothing in it is overwritten: continue it with run.resume=auto, "
            f"or choose another run.dir or run.name"
        )


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


def refuse_link_at(path: Path, folder: Path) -> None:
    """Raises UserError if a path to be written resolves to a location outside of `folder`."""
    target, inside = os.path.realpath(path), os.path.realpath(folder)
    if target != inside and not target.startswith(f"{inside}/"):
        raise UserError(
            f"{path} is a link to {target}, outside of the run's folder, which would be written there: remove the "
            f"link, or put the whole run where there is room (run.root)"
        )


def refuse_links(folder: Path) -> None:
    """Raises UserError if a link inside a run's folder leads out of it, as writing would change files elsewhere.

    Exempt are W&B's links to the log of its service: W&B makes one per start, and later starts do not write to it.
    """
    for place, below, files in os.walk(folder):
        for path in (Path(place) / name for name in (*below, *files)):
            if path.is_symlink() and not path.match("wandb/*run-*/logs/debug-core.log"):
                refuse_link_at(path, folder)


def gives_rewards(export: Path) -> bool:
    """Returns whether an exported folder holds a model with a scalar head, or an adapter for one."""
    adapter = export / "adapter_config.json"
    if adapter.exists():
        return json.loads(adapter.read_text(encoding="utf-8")).get("task_type") == "SEQ_CLS"
    return any(str(name).endswith("ForSequenceClassification") for name in _config(export).get("architectures") or [])


def predicts_masked_tokens(export: Path) -> bool:
    """Returns whether an exported folder holds a model of masked tokens, which predicts no next token."""
    config = _config(export)
    return config.get("is_causal") is False and config.get("mask_token_id") is not None


def brings_code(export: Path) -> bool:
    """Returns whether an exported folder contains its own modeling code, which transformers runs only if trusted."""
    return "auto_map" in _config(export)


def _config(export: Path) -> dict[str, Any]:
    path = export / "config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def loading_class(export: Path) -> tuple[str, str]:
    """Returns the names of the package and the class that load an exported folder."""
    kind, adapter = "SequenceClassification" if gives_rewards(export) else "CausalLM", export / "adapter_config.json"
    if adapter.exists():
        names_class = json.loads(adapter.read_text(encoding="utf-8")).get("auto_mapping")  # that of a wrapper
        return "peft", "AutoPeftModel" if names_class else f"AutoPeftModelFor{kind}"
    whole = any(name.endswith("ForConditionalGeneration") for name in _config(export).get("architectures") or [])
    return "transformers", "AutoModelForImageTextToText" if whole else f"AutoModelFor{kind}"
