"""HTML report of a run, or comparison of several runs: `python -m lmtrain.report run_dir=outputs/my_run`."""

from pathlib import Path

from lmtrain import cli, terminal
from lmtrain.errors import UserError
from lmtrain.files import absolute


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(prog="python -m lmtrain.report", description=cli.OTHERS["report"])
    parser.add_argument("runs", nargs="*", help="run folders, as FOLDER or run_dir=FOLDER; or a folder of runs")
    parser.add_argument("--out", type=Path, help="the file (one run: report.html in its folder; several: here)")

    def action() -> int:
        options = parser.parse_args(argv)
        words = [word.removeprefix("run_dir=") for word in options.runs]
        lists = [[word] if Path(word).expanduser().exists() else word.strip("[]").split(",") for word in words]
        folders = [Path(part) for parts in lists for part in parts]
        if not folders:
            raise UserError("which run? python -m lmtrain.report outputs/NAME; several are compared")
        terminal.status.say("reading the runs")
        from lmtrain.reports import report

        return report.report([absolute(folder) for folder in folders], options.out)

    return cli.plain(action)


cli.run_as_program(__name__, main)
