"""A hook of mkdocs: promises.yaml becomes the page promises.md: what pages promise, its tests, and when they run."""

import ast
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).resolve().parents[1]
HEAD = """# Promises and their tests

What the pages promise, the tests of it (in `tests/`), and when they run: `every commit` (`make test`, the quick tests),
`every change` (`make test-all`, the slow ones; .ci/run runs both), `nightly` (`make nightly`).
Made of tests/promises.yaml. An entry under Added in CHANGELOG.md needs a test there.
"""
WHEN = ("every commit", "every change", "nightly")


def flat(text: str) -> str:
    return " ".join(text.split())


def added(changelog: str) -> list[str]:
    """Returns the entries under Added of the newest release, each on one line."""
    section = changelog.partition("\n### Added")[2].partition("\n### ")[0].replace("\n#", "\n- #")
    return [flat(entry) for entry in section.split("\n- ")[1:] if not entry.startswith("#")]


def _marks(nodes: list[ast.expr]) -> set[str]:
    """Returns slow, nightly and thinned as they are named in decorators or in pytestmark."""
    words = {part.attr if isinstance(part, ast.Attribute) else getattr(part, "id", "")
             for node in nodes for part in ast.walk(node) if isinstance(part, ast.Attribute | ast.Name)}  # fmt: skip
    return words & {"slow", "nightly", "thinned"}


def runs(file: Path) -> dict[str, list[str]]:
    """Returns {test function: when it runs} of a file; some cases of one with `thinned` run at every change only."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    values = [
        n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "pytestmark"
    ]
    whole, found = _marks(values), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            marks = whole | _marks(node.decorator_list)
            at = WHEN[2] if "nightly" in marks else WHEN[1] if "slow" in marks else WHEN[0]
            found[node.name] = [at, WHEN[1]] if "thinned" in marks and at == WHEN[0] else [at]
    return found


def row(promise: str, tests: list[str]) -> str:
    """Returns the row of the table; raises ValueError if a test isn't there."""
    when: set[str] = set()
    for test in tests:
        name, _, function = test.partition("::")
        file = REPO / "tests" / name
        there = runs(file) if file.exists() else {}
        if not there or (function and function not in there):
            raise ValueError(f"tests/{test} is not there, which promises.yaml names for {promise!r}")
        when |= {at for key, times in there.items() if function in ("", key) for at in times}
    return f"| {promise} | {', '.join(f'`{test}`' for test in tests)} | {', '.join(at for at in WHEN if at in when)} |"


def page(promises: dict[str, Any]) -> str:
    """Returns the page; raises ValueError for a promise that its page doesn't make, or a test that isn't there."""
    lines = [HEAD]
    for name, of_page in promises.items():
        text = flat((REPO / name).read_text(encoding="utf-8"))
        for promise in of_page:
            if flat(promise) not in text:
                raise ValueError(f"{name} doesn't say {promise!r}: change tests/promises.yaml with it")
        lines += [f"## {name}\n", "| Promise | Tests | Runs |", "| --- | --- | --- |"]
        lines += [row(promise, tests) for promise, tests in of_page.items()]
        lines.append("")
    return "\n".join(lines)


def promises() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def on_files(files: Any, config: Any) -> Any:
    """Adds the page, which is in no folder."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "promises.md", content=page(promises())))
    return files
