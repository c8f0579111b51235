"""A run as one HTML page: `python -m lmtrain.report run_dir=outputs/my_run`; of several folders, the runs compared."""

import argparse
import sys
from pathlib import Path

from lmtrain import cli, errors, terminal
from lmtrain.errors import UserError


def report(folders: list[Path], out: Path | None) -> int:
    """Writes <run>/report.html, or report.html where several are compared."""
    from lmtrain.reports import listing
    from lmtrain.reports import report as pages
    from lmtrain.run_folder.folder import RunDir

    runs: list[RunDir] = []
    for folder in folders:
        found = [RunDir(run.path) for run in listing.runs_under(folder)]
        if not found:
            raise UserError(f"{folder} holds no run (a folder with config.yaml)")
        runs += found
    default = runs[0].report if len(runs) == 1 else Path("report.html").absolute()
    print(terminal.visible(f"written: {pages.write(runs, out or default)}"))
    return errors.FINISHED


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lmtrain.report", description=cli.OTHERS["report"])
    parser.add_argument("runs", nargs="+", help="run folders, as FOLDER or run_dir=FOLDER; or a folder of runs")
    parser.add_argument("--out", type=Path, help="the file (one run: report.html in its folder; several: here)")
    options = parser.parse_args(argv)
    folders = [Path(part) for word in options.runs for part in word.removeprefix("run_dir=").strip("[]").split(",")]
    return cli.plain(lambda: report([folder.expanduser().absolute() for folder in folders], options.out))


if __name__ == "__main__":
    sys.exit(main())
