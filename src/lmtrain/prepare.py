"""Source text to tokenizer and bins, without training: `python -m lmtrain.prepare data=wikitext tokenizer=gpt2`."""

import sys

from lmtrain import cli, errors
from lmtrain.errors import UserError
from lmtrain.schema import Config


def prepare(config: Config) -> int:
    """Prepares the data (or finds it prepared) and prints what there is."""
    from rich.console import Console
    from rich.table import Table

    from lmtrain.data import prepare as data

    if config.data.source == "bins":
        raise UserError(
            "data=bins is prepared already: train with it, or name a source of text (data=text data.path=...)"
        )
    prepared = data.prepare(config.data, config.tokenizer)
    table = Table("split", "tokens", "documents", "bytes", "shards", title=str(prepared.folder), title_justify="left")
    for name, split in prepared.meta["splits"].items():
        counts = (split["tokens"], split["documents"], split["bytes"], len(split["shards"]))
        table.add_row(name, *(f"{n:,}" for n in counts))
    console = Console()
    console.print(table)
    console.print(f"train on it anywhere: data=bins data.path={prepared.folder}", soft_wrap=True)
    return errors.FINISHED


def main(argv: list[str] | None = None) -> int:
    return cli.run("prepare", prepare, argv)


if __name__ == "__main__":
    sys.exit(main())
