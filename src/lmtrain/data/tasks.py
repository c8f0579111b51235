"""What a task of data preparation does: it prepares with the submitter's config, up to the part that it has to make."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from lmtrain.config import compose, trust
from lmtrain.config.override_text import Command
from lmtrain.config.schema import Config
from lmtrain.data.store.parts import OneTask, TaskDone, Tasks
from lmtrain.errors import RunError

if TYPE_CHECKING:
    from lmtrain.data.corpus import Corpus
    from lmtrain.data.store.prepared import PreparedData


def prepare_all(config: Config, tasks: Tasks | None = None) -> "Corpus | list[PreparedData]":
    """Prepares the data of a config; returns the corpus of rows, or the prepared folders of text, one per source."""
    if config.data.rows != "text":
        from lmtrain.data.corpus import prepare_corpus

        return prepare_corpus(config, tasks)
    # Neither of these imports torch, which would take longer than tokenizing 100 MB.
    from lmtrain.data.text.mixture import prepare_mixture
    from lmtrain.data.text.prepare import prepare

    if config.data.source == "mixture":
        return [part for _, part in prepare_mixture(config.data, config.tokenizer, tasks)]
    return [prepare(config.data, config.tokenizer, tasks=tasks)]


def run_task(job: list[str], rank: int, tasks: int) -> None:
    """Makes part `rank` in one of datatrove's tasks: prepares as the submitter does, up to that part.

    Args:
        job: the config file, the name of the prepared folder, the trust grants and the words of the command.
    """
    path, target, grants, words = job
    command = Command(tuple(json.loads(words)))
    config = compose.load(Path(path), trust.of_words([grants]), own=True, command=command)
    try:
        prepare_all(config, OneTask(target, rank, tasks))
    except TaskDone:
        return
    raise RunError(f"{target} is prepared already, or the data was changed")
