"""Prepares data without training: `python -m lmtrain.prepare data=wikitext tokenizer=gpt2`.

Text becomes a tokenizer and token bins. Conversations, pairs and other rows become the examples that a run with the
same settings finds in the cache.
"""

import shlex
from typing import TYPE_CHECKING

from lmtrain import cli, errors, terminal
from lmtrain.errors import UserError

if TYPE_CHECKING:
    from lmtrain.config.schema import Config
    from lmtrain.data.corpus import Corpus
    from lmtrain.data.store.prepared import PreparedData


def prepare(config: "Config") -> int:
    """Prepares the data, or finds it in the cache, and prints a summary of its splits; returns the exit code."""
    if config.data.rows == "text" and config.data.source == "bins":
        raise UserError("data=bins is prepared already: train on it, or name text (data=text data.path=...)")
    if config.data.rows == "text" and config.data.ring_bytes is not None:
        found = f"data.ring_bytes={config.data.ring_bytes} tokenizes while a run trains: there is nothing to prepare"
        raise UserError(f"{found}; set data.ring_bytes=null to have all of it on disk")
    from lmtrain.data.submit import Submitter
    from lmtrain.data.tasks import prepare_all

    if config.prepare.executor == "local" and config.prepare.tasks == 1:
        _show(prepare_all(config))
        return errors.FINISHED
    submitter = Submitter(config, lambda line: _print([line]))
    try:
        _show(prepare_all(config, submitter))
    except UserError:  # about what was encoded; after others, such as a full disk, the same command goes on with it
        submitter.clean()
        raise
    submitter.clean()
    return errors.FINISHED


def _show(prepared: "Corpus | list[PreparedData]") -> None:
    if not isinstance(prepared, list):
        _print([*prepared.words, *prepared.notes])
        return
    for part in prepared:
        _show_text(part)


def _show_text(prepared: "PreparedData") -> None:
    from rich.table import Table

    table = Table("split", "tokens", "documents", "bytes", "shards", title=str(prepared.folder), title_justify="left")
    for name, split in prepared.meta["splits"].items():
        counts = (split["tokens"], split["documents"], split["bytes"], len(split["shards"]))
        table.add_row(name, *("" if n is None else f"{n:,}" for n in counts))
    console = terminal.console()
    console.print(table)
    _print([*prepared.notes, f"train on it anywhere: data=bins {shlex.quote(f'data.path={prepared.folder}')}"])


def _print(lines: list[str]) -> None:
    for line in lines:
        terminal.console().print(line, soft_wrap=True, markup=False, highlight=False)


main = cli.main_of("prepare", prepare)
cli.run_as_program(__name__, main)
