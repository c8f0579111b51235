"""Prints the lines of everything that ships, by room (a folder of src/lmtrain, conf, docs), beside the last release's.

python tests/size.py            # make size
python tests/size.py --record 0.3.0   # at a release: writes the numbers into tests/size_released.json

Blank lines, and comments and docstrings of Python, are left out. Nothing is enforced: look at a package that grows.
"""

import argparse
import ast
import io
import json
import tokenize
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
RELEASED = Path(__file__).with_name("size_released.json")
CODE = {".py": "code", ".txt": "tables", ".yaml": "tables", ".jinja": "tables", ".html": "pages", ".css": "pages",
        ".js": "pages", ".md": "pages"}  # fmt: skip
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
          tokenize.ENDMARKER}  # fmt: skip


def code_lines(text: str) -> int:
    """Returns the number of lines of Python that hold code: no blank lines, comments or docstrings."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            texts |= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    tokens = (t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in LAYOUT)
    return len({line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - texts)


def room_of(path: Path) -> str:
    """Returns the folder of src/lmtrain that holds a file (data/text), `conf`, `docs`, or `verbs` for its own files."""
    top, *parts = path.relative_to(REPO).parts
    if top != "src":
        return top
    return "/".join(parts[1:-1][:2]) or "verbs"


def sizes() -> dict[str, dict[str, int]]:
    """Returns {room: {code, tables or pages: lines}} of what ships."""
    found: dict[str, Counter[str]] = {}
    for top in ("src", "conf", "docs"):
        for path in sorted((REPO / top).rglob("*")):
            kind = CODE.get(path.suffix)
            if kind is None or not path.is_file():
                continue
            text = path.read_text(encoding="utf-8")
            lines = code_lines(text) if kind == "code" else sum(bool(line.strip()) for line in text.splitlines())
            found.setdefault(room_of(path), Counter())[kind] += lines
    return {room: dict(kinds) for room, kinds in found.items()}


def table(now: dict[str, dict[str, int]], then: dict[str, dict[str, int]]) -> list[str]:
    """Returns a line per room, the largest first, with the change since `then`, and a line of the sums."""
    kinds = ("code", "tables", "pages")

    def cells(room: str, new: dict[str, int], old: dict[str, int]) -> str:
        change = sum(new.values()) - sum(old.values())
        counts = "".join(f"{new.get(kind, 0):10,}" for kind in kinds)
        return f"{room:14}{counts}{sum(new.values()):10,}{f'{change:+,}' if change else '':>9}"

    rooms = sorted({**then, **now}, key=lambda room: -sum(now.get(room, {}).values()))
    lines = [cells(room, now.get(room, {}), then.get(room, {})) for room in rooms]
    sums = [{kind: sum(room.get(kind, 0) for room in of.values()) for kind in kinds} for of in (now, then)]
    return [*lines, cells("all", *sums)]


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--record", metavar="RELEASE", help="write the numbers as those of this release")
    release, now = arguments.parse_args().record, sizes()
    if release:
        RELEASED.write_text(json.dumps({"release": release, "lines": now}, indent=1) + "\n")
    then = json.loads(RELEASED.read_text())
    print(f"{'lines':14}{'code':>10}{'tables':>10}{'pages':>10}{'all':>10}{'since ' + then['release']:>{9 + 6}}")
    print(*table(now, then["lines"]), sep="\n")


if __name__ == "__main__":
    main()
