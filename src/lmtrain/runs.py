"""The runs under a folder: `python -m lmtrain.runs [outputs]`. Reads what they left; nothing is loaded or changed."""

import argparse
import contextlib
import sys
from pathlib import Path

from lmtrain import cli, errors, terminal
from lmtrain.errors import UserError


def show(folder: Path) -> int:
    """Prints a table of the runs, the one that changed last first; UserError where there is none."""
    from rich import box
    from rich.table import Table

    from lmtrain.reports import listing

    found = listing.runs_under(folder)
    if not found:
        raise UserError(
            f"{folder} holds no run (a folder with config.yaml); name another: python -m lmtrain.runs <folder>"
        )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("run", overflow="fold")
    for name in ("status", "step", "best", "changed"):
        table.add_column(name, justify="right" if name == "step" else "left", no_wrap=name != "best")
    for run in found:
        name = str(run.path.relative_to(folder)) if run.path != folder else run.path.name
        table.add_row(name, run.status, run.steps(), run.best or "", run.age())
    with contextlib.suppress(BrokenPipeError):
        terminal.console().print(table)
    return errors.FINISHED


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lmtrain.runs", description=cli.OTHERS["runs"])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("outputs"), help="where to look (outputs)")
    folder = parser.parse_args(argv).folder.expanduser()
    return cli.plain(lambda: show(folder))


if __name__ == "__main__":
    sys.exit(main())
