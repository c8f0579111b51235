"""What this machine can do: `python -m lmtrain.doctor`. Exit code 1 where the main job could not run."""

import argparse
import sys
from pathlib import Path

from lmtrain import cli, errors, terminal


def diagnose(folder: Path) -> int:
    """Prints what was found, a line each, as it is found; says what is missing and how to get it."""
    from rich.table import Table
    from rich.text import Text

    from lmtrain.reports import machine

    console, missing = terminal.console(), 0
    for finding in machine.findings(folder):
        missing += finding.needed and not finding.good
        sign, style = ("ok", "green") if finding.good else ("missing", "red") if finding.needed else ("-", "dim")
        line = Table.grid(padding=(0, 1))
        line.add_column(width=7, style=style)
        line.add_column(width=23, style="bold")
        line.add_column(overflow="fold")
        line.add_row(sign, Text(finding.name), Text(finding.words))  # as they are: [ray] is no markup
        console.print(line)
    if missing:
        errors.print_error(f"training can't run here: parts it needs and lacks, named above: {missing}")
        return errors.FAILED
    return errors.FINISHED


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lmtrain.doctor", description=cli.OTHERS["doctor"])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("outputs"), help="where runs would be (outputs)")
    return diagnose(parser.parse_args(argv).folder.expanduser().absolute())


if __name__ == "__main__":
    sys.exit(main())
