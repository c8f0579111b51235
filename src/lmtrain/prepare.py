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
    from lmtrain.data.store.prepared import PreparedData


def prepare(config: "Config") -> int:
    """Prepares the data, or finds it in the cache, and prints a summary of its splits; returns the exit code."""
    if config.data.rows != "text":
        from lmtrain.data.corpus import prepare_corpus

        corpus = prepare_corpus(config)
        _print([*corpus.words, *corpus.notes])
        return errors.FINISHED
    if config.data.source == "bins":
        raise UserError("data=bins is prepared already: train on it, or name text (data=text data.path=...)")
    if config.data.ring_bytes is not None:
        found = f"data.ring_bytes={config.data.ring_bytes} tokenizes while a run trains: there is nothing to prepare"
        raise UserError(f"{found}; set data.ring_bytes=null to have all of it on disk")
    # Neither of these imports torch, which would take longer than tokenizing 100 MB.
    from lmtrain.data.text import prepare as data
    from lmtrain.data.text.mixture import prepare_mixture

    if config.data.source == "mixture":
        for _, part in prepare_mixture(config.data, config.tokenizer):
            _show(part)
    else:
        _show(data.prepare(config.data, config.tokenizer))
    return errors.FINISHED


def _show(prepared: "PreparedData") -> None:
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
