"""Whether a run has ended with the length and settings that a config asks for, and what would train it further."""

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmtrain.config import compose as config_rules
from lmtrain.config.constraints import MODEL, PREPARED, RATE, TRAJECTORY, VALIDATION
from lmtrain.config.fingerprint import read_config, short_hash, trained_otherwise
from lmtrain.config.keys import flat, keys_in, value_of
from lmtrain.config.schema import BUDGETS, Config
from lmtrain.data.store.contents import version_of
from lmtrain.errors import UserError
from lmtrain.run_folder.cut_back import last_rows
from lmtrain.run_folder.folder import RunDir, locate, resume_mode
from lmtrain.terminal import counted


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


def asked(config: Config) -> dict[str, Any]:
    """Returns the config values that determine the length of a run."""
    t, chosen = config.trainer, config.budget.chosen
    budget = {} if chosen is None else {chosen: getattr(config.budget, chosen)}
    return {"max_steps": t.max_steps, "max_epochs": t.max_epochs, **budget}


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
        rarely = "more minutes add no step, and further passes over its data rarely help"
        return f"{finished}, where {by} it: {rarely}. For a new run, another run.name"
    return f"{finished}. To train it further, the same command with {key}; for a new run, another run.name"


def last_start(run: RunDir, config: Config) -> dict[str, Any]:
    """Returns the values that the run's config.yaml has for the keys of `config`; {} if it can't be read."""
    try:
        return read_config(config_rules.read(run.config), config)
    except UserError:
        return {}


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
