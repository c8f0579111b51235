"""Runs tests for rewards/code.py with the names that they see; without lmtrain and site packages, as code_values.py."""

import __future__

import ast
import builtins
import importlib
import sys
from typing import Any


class TestNames(dict[str, Any]):
    """The names that tests see: their own, Python's, modules that the answer imports, and what the answer defines.

    Python's come first, so that an answer can't replace `sorted` or `abs` in the tests. For the same reason, what the
    answer imports from the standard library is imported again, here, and under its own name only.
    """

    def __init__(self, peer: Any, defined: list[str], imported: list[Any]) -> None:
        """
        Args:
            peer: the end of the wire to the answer.
            defined: the names that the answer has defined.
            imported: its imports, as `imports_of` returns them.
        """
        super().__init__(__name__="__main__", __builtins__=builtins)
        self.peer, self.defined, self.imported = peer, set(defined), imported

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        for module, attribute, bound in self.imported:
            if str(module).partition(".")[0] not in sys.stdlib_module_names:
                continue
            if attribute is None and bound == name:
                found = importlib.import_module(module)
                return sys.modules[bound] if bound == module.partition(".")[0] else found
            if attribute == name == bound or (attribute == "*" and name in vars(importlib.import_module(module))):
                return getattr(importlib.import_module(module), name)
        if name in self.defined:
            return self.peer.ask("name", name)
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self.defined

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401  # `get` knows no __missing__


def imports_of(tree: ast.Module) -> list[Any]:
    """Returns module, attribute (or None) and bound name of each import at the top of a program."""
    found: list[Any] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            found += [[one.name, None, one.asname or one.name.partition(".")[0]] for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [[node.module, one.name, one.asname or one.name] for one in node.names]
    return found


def run_tests(tests: str, names: TestNames) -> None:
    """Runs tests. An answer may use classes that they define, but no functions, one of which may know the values."""
    program = ast.parse(tests)
    features = [getattr(__future__, name).compiler_flag for name in __future__.all_feature_names]
    flags = compile(program, "tests.py", "exec").co_flags & sum(set(features))
    for node in program.body:
        exec(compile(ast.Module([node], []), "tests.py", "exec", flags), names)  # noqa: S102
        if isinstance(node, ast.ClassDef) and node.name not in names.defined:
            names.peer.ask("define", node.name, names[node.name])
