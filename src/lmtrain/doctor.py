"""Diagnosis of this machine: `python -m lmtrain.doctor`. Exit code 1 if training could not run on it."""

import argparse
import sys
from pathlib import Path

from lmtrain import cli


def doctor(folder: Path) -> int:
    """Prints one line per check as it completes, with what is missing and how to get it; returns the exit code."""
    from lmtrain.reports import machine

    return machine.diagnose(folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lmtrain.doctor", description=cli.OTHERS["doctor"])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("outputs"), help="where runs would be (outputs)")
    return doctor(parser.parse_args(argv).folder.expanduser().absolute())


if __name__ == "__main__":
    sys.exit(main())
