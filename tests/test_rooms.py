"""The rules of docs/architecture.md: imports go down only and have no cycles, files are small, functions short.

The graph includes every import statement of src/lmtrain, also those inside functions and under TYPE_CHECKING.
"""

import ast
import functools
import re
import statistics
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from support import REPO

SOURCE = REPO / "src" / "lmtrain"

# From the lowest layer up. A room is a folder or a file of the package; it may import itself and the rooms before it.
ROOMS = [
    "secrets", "terminal", "errors", "files", "losses", "config", "distributed",
    "data.hub", "data.order", "data.mixing", "data.bpe_training", "data.fast_ids", "data.framing", "data.tokenizers",
    "data.store", "data.sources", "data.text", "data.stream", "data.chat", "data.examples", "data",
    "models", "adapters", "optim",
    "checkpoints", "strategies", "rewards", "rollouts", "objectives", "run_folder", "generation", "exports", "reports",
    "callbacks", "run",
    "planning", "evaluation", "sweeps", "stages", "first_words", "cli",
]  # fmt: skip
VERBS = [
    "train",
    "prepare",
    "inspect",
    "export",
    "generate",
    "chat",
    "evaluate",
    "estimate",
    "tune",
    "report",
    "verify",
    "sweep_report",
    "runs",
    "pipeline",
    "doctor",
    "explain",
    "new",
    "__main__",
]  # above all rooms

# Size limits point to design problems: a file split only to stay below a limit is not split at a natural boundary.
MAX_LINES, MAX_FUNCTION, MAX_MEDIAN, MAX_FILES = 450, 60, 10, 26  # files are counted per room, with __init__.py


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """Returns all nodes of a file's syntax tree, the module first; kept, since five tests read every file."""
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def modules() -> dict[str, Path]:
    """Returns {dotted name below lmtrain: file} of all modules that are not empty."""
    files = {p.relative_to(SOURCE).with_suffix(""): p for p in SOURCE.rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in files.items() if path.stat().st_size}


def imports(path: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yields the modules of lmtrain that a file imports, anywhere in it."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "lmtrain":
            base = (node.module or "").removeprefix("lmtrain").lstrip(".")
            for alias in node.names:
                name = f"{base}.{alias.name}".lstrip(".")
                yield name if name in known else base
        elif isinstance(node, ast.Import):
            yield from (a.name.removeprefix("lmtrain.") for a in node.names if a.name.startswith("lmtrain."))


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: {other for other in imports(path, known) if other not in ("", name)} for name, path in known.items()}


def room_of(module: str) -> str:
    """Returns the room (the longest matching name in ROOMS) or the verb that a module belongs to."""
    fits = [room for room in [*ROOMS, *VERBS] if module == room or module.startswith(f"{room}.")]
    assert fits, f"{module} is in no room: add it to ROOMS, where its imports allow it"
    return max(fits, key=len)


def test_imports_go_down_only(graph: dict[str, set[str]]) -> None:
    level = {room: number for number, room in enumerate(ROOMS)} | dict.fromkeys(VERBS, len(ROOMS))
    upward = [
        f"{module} imports {other}, which stands above it"
        for module, others in graph.items() if module != "__init__"
        for other in others if level[room_of(other)] > level[room_of(module)]
    ]  # fmt: skip
    assert upward == []


def test_only_doors_take_from_the_package_itself() -> None:
    """Only cli and the verbs import from `lmtrain/__init__.py`, which re-exports from the rooms and is above them."""
    known = modules()
    takers = {name for name, path in known.items() if "" in imports(path, known)}
    assert takers <= {"cli", *VERBS}


def test_no_file_imports_itself_by_way_of_others(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(error.args[1])}")


def test_no_benchmark_imports_itself_by_way_of_others() -> None:
    files = {path.stem: path for path in (REPO / "benchmarks").glob("*.py")}
    found: dict[str, set[str]] = {}
    for name, path in files.items():
        froms = {n.module for n in nodes(path) if isinstance(n, ast.ImportFrom)}
        plain = {alias.name for n in nodes(path) if isinstance(n, ast.Import) for alias in n.names}
        found[name] = {other for other in froms | plain if other in files}
    assert found["queue_page"] >= {"queue_parts", "computed"}
    TopologicalSorter(found).prepare()  # raises CycleError


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Yields the name and number of lines of each function, docstring included."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{path.relative_to(SOURCE)}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1


def test_files_and_functions_stay_small() -> None:
    lengths = {
        str(p.relative_to(SOURCE)): len(p.read_text(encoding="utf-8").splitlines()) for p in SOURCE.rglob("*.py")
    }
    assert {name: n for name, n in lengths.items() if n > MAX_LINES} == {}
    sizes = dict(pair for path in SOURCE.rglob("*.py") for pair in functions(path))
    assert {name: n for name, n in sizes.items() if n > MAX_FUNCTION} == {}
    assert statistics.median(sizes.values()) < MAX_MEDIAN


def test_the_package_root_holds_verbs_and_little_else() -> None:
    root = {p.stem for p in SOURCE.glob("*.py")} - {"__init__"}
    assert root - set(VERBS) == {"cli", "errors", "files", "secrets", "terminal"}


def test_questions_are_answered_by_files_that_are_there() -> None:
    text = (REPO / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("## Where is ...?")[2].partition("\n## ")[0]
    named = re.findall(r"`([a-z_/]+\.py)`", table)
    assert len(named) >= 10
    assert [name for name in named if not (SOURCE / name).is_file()] == []


def test_no_room_has_more_files_than_one_can_look_through() -> None:
    folders = {p.parent for p in SOURCE.rglob("*.py")} - {SOURCE}
    assert {str(f.relative_to(SOURCE)): n for f in folders if (n := len(list(f.glob("*.py")))) > MAX_FILES} == {}


def test_one_name_for_one_class() -> None:
    where: dict[str, list[str]] = {}
    for path in SOURCE.rglob("*.py"):
        module = nodes(path)[0]
        assert isinstance(module, ast.Module)
        for node in module.body:
            if isinstance(node, ast.ClassDef):
                where.setdefault(node.name, []).append(str(path.relative_to(SOURCE)))
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


def test_one_name_for_one_file_of_tests() -> None:
    """Test modules are imported by their bare names: two of one name end the collection of all."""
    where: dict[str, list[str]] = {}
    for path in (REPO / "tests").rglob("test_*.py"):
        where.setdefault(path.name, []).append(str(path.relative_to(REPO)))
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


def test_no_room_asks_which_objective_a_run_has() -> None:
    """Objectives say what others need to know of them (docs/architecture.md, "Who is asked")."""
    options = "GRPOOptions|DPOConfig|RewardOptions|KTOOptions|MDLMOptions|DistillOptions|SFTConfig|CausalLMConfig"
    asks = re.compile(rf"isinstance\([^()]*\b(?:{options})\b|objective\.name (?:==|!=|in|not in) ")
    found = {name: asks.findall(path.read_text(encoding="utf-8")) for name, path in modules().items()
             if not name.startswith(("objectives.", "config."))}  # fmt: skip
    assert {name: asked for name, asked in found.items() if asked} == {}
