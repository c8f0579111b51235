"""HTML report of a run, or comparison of several runs: `python -m lmtrain.report run_dir=outputs/my_run`."""

import argparse
import sys
from pathlib import Path

from lmtrain import cli


def report(folders: list[Path], out: Path | None) -> int:
    """Writes <run>/report.html or, for several runs, report.html in the current folder; returns the exit code."""
    from lmtrain.reports import report

    return report.report(folders, out)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lmtrain.report", description=cli.OTHERS["report"])
    parser.add_argument("runs", nargs="+", help="run folders, as FOLDER or run_dir=FOLDER; or a folder of runs")
    parser.add_argument("--out", type=Path, help="the file (one run: report.html in its folder; several: here)")
    options = parser.parse_args(argv)
    folders = [Path(part) for word in options.runs for part in word.removeprefix("run_dir=").strip("[]").split(",")]
    return cli.plain(lambda: report([folder.expanduser().absolute() for folder in folders], options.out))


if __name__ == "__main__":
    sys.exit(main())
