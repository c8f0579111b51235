"""Creates the skeleton of a custom class with its test: `python -m lmtrain.new objective my_thing`."""

import keyword
import re
from pathlib import Path
from string import Template

from lmtrain import cli, errors
from lmtrain.errors import UserError, did_you_mean

SKELETONS = Path(__file__).with_name("skeletons")  # <kind>.txt, <kind>_test.txt, trained.txt
KINDS = ("reward", "dataset", "environment", "objective", "model", "optimizer")


def write(kind: str, name: str) -> int:
    """Writes <name>.py and test_<name>.py into the current folder and returns the exit code.

    Raises:
        UserError: the kind is unknown, the name is no valid module name, or a file exists already.
    """
    if kind not in KINDS:
        raise UserError(f"there is no skeleton of {kind!r}{did_you_mean(kind, KINDS)} ({', '.join(KINDS)})")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise UserError(f"{name!r} can't name a module: use small letters, digits and _, no word of Python's: my_thing")
    cls = "".join(part.capitalize() for part in name.split("_"))
    files = [Path(f"{name}.py"), Path(f"test_{name}.py")]
    for file in (file for file in files if file.exists()):
        raise UserError(f"{file} is there already: choose another name, or move it away")
    trained = filled("trained.txt", name=name)  # what several tests train with
    for file, skeleton in zip(files, (f"{kind}.txt", f"{kind}_test.txt"), strict=True):
        file.write_text(filled(skeleton, name=name, cls=cls, trained=trained), encoding="utf-8")
    print(f"{files[0]}  (its first lines say how to train with it; python -m pytest {files[1]} tests it)")
    return errors.FINISHED


def filled(skeleton: str, **values: str) -> str:
    """Returns the text of a skeleton with these values in it."""
    return Template((SKELETONS / skeleton).read_text(encoding="utf-8")).substitute(values)


def main(argv: list[str] | None = None) -> int:
    parser = cli.Parser(prog="python -m lmtrain.new", description=cli.OTHERS["new"])
    parser.add_argument("kind", nargs="?", help=", ".join(KINDS))
    parser.add_argument("name", nargs="?", help="of the module, such as my_thing; its class is MyThing")

    def action() -> int:
        args = parser.parse_args(argv)
        if args.name is None and (args.kind is None or args.kind in KINDS):
            kind = args.kind or KINDS[0]
            raise UserError(f"which kind and name? python -m lmtrain.new {kind} my_thing (kinds: {', '.join(KINDS)})")
        return write(args.kind, args.name)

    return cli.plain(action)


cli.run_as_program(__name__, main)
