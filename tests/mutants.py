"""Puts faults into the code one at a time (mutants) and lists those that no quick test notices.

make mutants                                            # 100 mutants of the packages in ROOMS
make mutants N=20 FILES="src/lmtrain/losses src/lmtrain/data/order.py" ARGS="--seed 3"

A mutant changes one comparison, operator, boolean or number, swaps two arguments, or removes a statement. The tests
that execute the line, by the contexts in .coverage (make coverage writes it), run on it, in a fork of one process that
has imported torch, on a copy of the tree. For a line that none executes, which may run in processes that tests start,
all tests of its package run. Mutants that no test can notice, since the program does the same, are in
tests/mutants_equivalent.txt, with the reason, and not tried.

mutmut 3 and cosmic-ray were looked at: neither removes statements, swaps arguments or samples; mutmut wraps every
function, and cosmic-ray starts an interpreter, with the imports of torch, for each mutant.
"""

import argparse
import ast
import contextlib
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from coverage import CoverageData

REPO = Path(__file__).resolve().parents[1]
ROOMS = ("losses", "objectives", "optim", "data", "checkpoints", "rollouts", "adapters", "rewards", "evaluation",
         "planning")  # fmt: skip
EQUIVALENT = Path(__file__).with_name("mutants_equivalent.txt")
SECONDS = 900  # of one mutant; one that takes longer counts as noticed, as its tests hang
QUICK = ["-m", "not slow and not gpu", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:cov", "--no-header"]
LOADS = (
    "lmtrain.run.session, lmtrain.objectives.dpo, lmtrain.train, lmtrain.evaluate, datasets, peft, pytest, hypothesis"
)

OTHER: dict[type, list[type]] = {
    ast.Lt: [ast.LtE, ast.Gt], ast.LtE: [ast.Lt, ast.Gt], ast.Gt: [ast.GtE, ast.Lt], ast.GtE: [ast.Gt, ast.Lt],
    ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq], ast.Is: [ast.IsNot], ast.IsNot: [ast.Is], ast.In: [ast.NotIn],
    ast.NotIn: [ast.In], ast.Add: [ast.Sub], ast.Sub: [ast.Add], ast.Mult: [ast.Div], ast.Div: [ast.Mult],
    ast.FloorDiv: [ast.Mult], ast.Mod: [ast.FloorDiv], ast.Pow: [ast.Mult], ast.And: [ast.Or], ast.Or: [ast.And],
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    path: Path  # relative to the repository
    line: int
    kind: str  # comparison, arithmetic, boolean, constant, arguments or statement
    old: str
    new: str
    start: int  # byte offsets of `old` in the file
    stop: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line} | {' '.join(self.old.split())} | {' '.join(self.new.split())}"


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yields (kind, changed copy) for each fault that a node of the syntax tree can have."""
    copied = lambda **fields: type(node)(**{**dict(ast.iter_fields(node)), **fields})  # noqa: E731
    if isinstance(node, ast.Compare):
        for new in OTHER[type(node.ops[0])]:
            yield "comparison", copied(ops=[new(), *node.ops[1:]])
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in OTHER:
        kind = "boolean" if isinstance(node, ast.BoolOp) else "arithmetic"
        yield kind, copied(op=OTHER[type(node.op)][0]())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        yield ("boolean" if isinstance(node.op, ast.Not) else "arithmetic"), node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "boolean", ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield "constant", ast.Constant(node.value + 1)
    elif isinstance(node, ast.Call) and len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args):
        if (
            getattr(node.func, "id", "") in ("max", "min") or getattr(node.func, "attr", "") == "promote_types"
        ):  # the same either way
            return
        yield "arguments", copied(args=[node.args[1], node.args[0], *node.args[2:]])
    elif isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break) or (
        isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)  # not a docstring
    ):
        yield "statement", ast.Pass()


def walked(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that run: not annotations, and not the parts of f-strings, whose places Python 3.11 lacks."""
    yield node
    for name, value in ast.iter_fields(node):
        exact = isinstance(node, ast.keyword) and node.arg == "strict"  # of zip: lengths differ in a bug only
        if name not in ("annotation", "returns") and not isinstance(node, ast.JoinedStr) and not exact:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walked(child)


def mutants_of(path: Path) -> list[Mutant]:
    """Returns all mutants of a file, which is given relative to the repository, the current folder."""
    source = path.read_bytes()
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in walked(ast.parse(source)):
        for kind, new in changes(node):
            first, last = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            old, text = source[first:last].decode(), ast.unparse(new)
            if text != ast.unparse(node):
                text = text if kind == "statement" else f"({text})"
                found.append(Mutant(path, node.lineno, kind, old, text, first, last))
    return found


def sample(files: list[Path], number: int, seed: int) -> list[Mutant]:
    """Returns random mutants of files, of each kind alike; no two of one line, and none that is known as equivalent."""
    known = {line.split("  #")[0].strip() for line in EQUIVALENT.read_text().splitlines()}
    by_kind: dict[str, list[Mutant]] = {}
    for mutant in (m for file in files for m in mutants_of(file)):
        path, _, change = str(mutant).partition(" | ")
        if f"{path.rpartition(':')[0]} | {change}" not in known:
            by_kind.setdefault(mutant.kind, []).append(mutant)
    draw = random.Random(seed)
    found: dict[tuple[Path, int], Mutant] = {}
    while len(found) < number and any(by_kind.values()):
        left = by_kind[draw.choice([kind for kind, some in sorted(by_kind.items()) if some])]
        mutant = left.pop(draw.randrange(len(left)))
        found.setdefault((mutant.path, mutant.line), mutant)
    return list(found.values())


def executing(mutant: Mutant, data: CoverageData) -> list[str]:
    """Returns the tests that execute a mutant's line, those of its own package first."""
    contexts = data.contexts_by_lineno(str(REPO / mutant.path))
    functions = [n for n in ast.walk(ast.parse(mutant.path.read_text())) if isinstance(n, ast.FunctionDef)]
    inside = any(n.body[0].lineno <= mutant.line <= n.end_lineno for n in functions)
    lines = [mutant.line] if inside else list(contexts)  # a module's own lines run when it is imported
    found = {name.rpartition("|") for line in lines for name in contexts.get(line, ()) if name}
    # What a fixture of a file makes, all tests of the file may read.
    whole = {name.partition("::")[0] for name, _, phase in found if phase != "run"}
    single = {name for name, _, phase in found if phase == "run" and name.partition("::")[0] not in whole}
    own = f"tests/{mutant.path.parts[2].removesuffix('.py')}/"
    return sorted({*whole, *single}, key=lambda name: (not name.startswith(own), name))


def in_fork(tree: Path, tests: list[str], log: Path) -> str:
    """Runs tests in a copy of the repository, in a fork of this process; returns passed, failed or "time"."""
    child = os.fork()
    if child == 0:
        os.setsid()
        for number in (1, 2):
            os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(tree)
        sys.path.insert(0, str(tree / "src"))
        os.environ["PYTHONPATH"] = str(tree / "src")
        code = int(pytest.main([*QUICK, f"--basetemp={tree.parent / 'tmp'}", *tests]))
        sys.stdout.flush()
        os._exit(code)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code == pytest.ExitCode.USAGE_ERROR:
                raise SystemExit(f"{log.read_text()}\nthe tests are not those of .coverage: make coverage")
            return "passed" if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else "failed"
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "time"


def import_libraries() -> None:
    """Imports what lmtrain imports, but not lmtrain itself, so that forks begin with it."""
    code = f"import {LOADS}, sys; print(*sys.modules)"
    names = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True).stdout
    for name in names.split():
        if name.split(".")[0] not in ("lmtrain", "__main__"):
            with contextlib.suppress(Exception):
                importlib.import_module(name)


def tried(mutant: Mutant, data: CoverageData, folder: Path) -> str:
    """Returns how a mutant ends: "lives", or by what it is noticed."""
    tree = folder / "tree"
    file = tree / mutant.path
    source = file.read_bytes()
    file.write_bytes(source[: mutant.start] + mutant.new.encode() + source[mutant.stop :])
    try:
        tests, package = executing(mutant, data), f"tests/{mutant.path.parts[2]}"
        some = tests or [package] * Path(package).is_dir()
        ended = in_fork(tree, some, folder / "log") if some else "passed"
        if ended != "passed":
            lines = (folder / "log").read_text(errors="replace").splitlines()
            first = next((line for line in lines if line.startswith(("FAILED", "ERROR"))), ended)
            return f"dies by {first.removeprefix('FAILED ').partition(' - ')[0]}"
        return f"lives ({len(tests)} tests execute the line)"
    finally:
        file.write_bytes(source)


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("-n", type=int, default=100)
    arguments.add_argument("--seed", type=int, default=int(time.time()))
    arguments.add_argument("--coverage", type=Path, default=REPO / ".coverage")
    arguments.add_argument("files", nargs="*", type=Path, default=[Path("src/lmtrain", room) for room in ROOMS])
    asked = arguments.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    data = CoverageData(str(asked.coverage.absolute()))
    data.read()
    os.chdir(REPO)
    import_libraries()
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
        for path in filter(os.path.exists, listed.rstrip("\0").split("\0")):
            (tree / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, tree / path)
        os.chdir(tree)  # what is changed in the repository meanwhile doesn't matter
        files = sorted({file for path in asked.files for file in ([path] if path.is_file() else path.rglob("*.py"))})
        lives, chosen = [], sample(files, asked.n, asked.seed)
        for number, mutant in enumerate(chosen, start=1):
            ended = tried(mutant, data, Path(name))
            print(f"{number}/{len(chosen)} {mutant} | {ended}", flush=True)
            lives += [mutant] if ended.startswith("lives") else []
        os.chdir(REPO)
    print(f"seed {asked.seed}: {len(chosen) - len(lives)} of {len(chosen)} are noticed; these live:", *lives, sep="\n")


if __name__ == "__main__":
    main()
