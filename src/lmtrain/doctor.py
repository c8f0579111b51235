"""What this machine can do: `python -m lmtrain.doctor`. Exit code 1 where the main job could not run."""

import argparse
import sys
from pathlib import Path

from lmtrain import cli


def doctor(folder: Path) -> int:
    """Prints what was found, a line each, as it is found; says what is missing and how to get it."""
    from lmtrain.reports import machine

    return machine.diagnose(folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lmtrain.doctor", description=cli.OTHERS["doctor"])
    parser.add_argument("folder", type=Path, nargs="?", default=Path("outputs"), help="where runs would be (outputs)")
    return doctor(parser.parse_args(argv).folder.expanduser().absolute())


if __name__ == "__main__":
    sys.exit(main())
