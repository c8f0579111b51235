"""Table (best trial first) and plot of a sweep's trials: `python -m lmtrain.sweep_report outputs/sweeps/my_sweep`."""

import argparse
import sys
from pathlib import Path

from lmtrain import cli


def sweep_report(folder: Path) -> int:
    """Prints the table of the sweep in `folder` and writes <folder>/sweep.png."""
    from lmtrain.sweeps.report import report

    return report(folder)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lmtrain.sweep_report", description=cli.OTHERS["sweep_report"])
    parser.add_argument("folder", type=Path, help="the sweep's folder, such as outputs/sweeps/my_sweep")
    folder = parser.parse_args(argv).folder
    return cli.plain(lambda: sweep_report(folder))


if __name__ == "__main__":
    sys.exit(main())
