"""Lists the runs under a folder: `python -m lmtrain.runs [outputs]`. Only reads their files; loads no models."""

import argparse
import sys
from pathlib import Path

from lmtrain import cli


def runs(folder: Path) -> int:
    """Prints a table of the runs, the most recently changed first; raises UserError if there are none."""
    from lmtrain.reports import listing

    return listing.show(folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lmtrain.runs", description=cli.OTHERS["runs"])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("outputs"), help="where to look (outputs)")
    folder = parser.parse_args(argv).folder.expanduser()
    return cli.plain(lambda: runs(folder))


if __name__ == "__main__":
    sys.exit(main())
