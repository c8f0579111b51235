"""The default corpus: the source code of the running Python's standard library (about 11 MB), and questions about it.

The answers are the library's own docstrings and signatures, so the same Python gives the same rows in the same order.
Questions about a module that pretraining on the library holds out (data=python_stdlib) are held out too.
"""

import ast
import functools
import hashlib
import inspect
import os
import random
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmtrain.config.schema_data import DataConfig
from lmtrain.data.sources.pieces import Piece, is_held_out
from lmtrain.data.sources.tables import Record
from lmtrain.data.store.contents import Facts
from lmtrain.errors import UserError

# Tests and installed packages are not part of the library; encodings consists of tables of hexadecimal numbers.
_LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "__pycache__"}


def stdlib_files() -> list[Path]:
    """Returns the modules' source files, in an order that is the same on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [s for s in subfolders if s not in _LEFT_OUT and not s.startswith("config-")]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files = [f for f in files if f.stat().st_size > 0]
    if not files:
        raise UserError(f"this Python has no source text in {root}: choose other data, such as data=text data.path=...")
    return sorted(files, key=lambda f: f.relative_to(root).as_posix())


def stdlib_pieces() -> Iterator[Piece]:
    """Yields one document per module, decoded as its encoding declaration says."""
    for path in stdlib_files():
        with tokenize.open(path) as file:
            yield Piece(file.read(), True)


class StdlibSource:
    """The library as text, or questions about it; the questions of "train" and "val" are about different modules."""

    label = "python_stdlib"
    notes: list[str] = []  # noqa: RUF012

    def __init__(self, cfg: DataConfig) -> None:
        self.cfg, self.files = cfg, stdlib_files()
        self.resolved: str | None = Facts(cfg.cache_dir).digest(self.files)
        self.settings: dict[str, Any] = {"kind": "python_stdlib"}
        if cfg.rows != "text":
            self.settings["questions"] = VERSION

    def records(self, name: str) -> Iterator[Record] | None:
        if name == "val" and self.cfg.val_fraction == 0:
            return None
        return (pairs if self.cfg.rows == "pairs" else conversations)(name == "val", self.cfg.val_fraction)

    def pieces(self, name: str) -> Iterator[Piece] | None:
        return stdlib_pieces() if name == "train" else None

    def text_bytes(self, name: str) -> int | None:
        return sum(file.stat().st_size for file in self.files)


VERSION = 1  # to be raised when the same library gives other rows than before
_NOT_ASKED = {"idlelib", "lib2to3", "turtledemo", "pydoc_data", "ensurepip"}  # packages that no questions are about
_LONGEST = 400  # maximum characters of a docstring's first paragraph used as an answer
_NAMES = 6  # maximum number of names that an answer lists

question_files = stdlib_files  # the files to ask about: the whole library
Homes = dict[str, dict[str, None]]  # by name: the modules that export it, as an ordered set


@dataclass(frozen=True)
class Item:
    """A public module, class, function or method; `about` is its docstring's first paragraph, '' if that is no use."""

    module: str
    name: str  # qualified by its module: textwrap.dedent
    kind: str
    about: str
    call: str | None  # a call with its arguments; None for a module
    exported: tuple[str, ...] = ()  # a module's public names


@dataclass(frozen=True)
class Answered:
    """A conversation of questions and answers: a single pair, or several that follow one another."""

    kind: str
    turns: tuple[tuple[str, str], ...]


@functools.cache
def items(files: tuple[Path, ...]) -> tuple[tuple[int, Item], ...]:
    """Returns the items that the library documents, each with the index of its file in `files`."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[tuple[int, Item]] = []
    for number, path in enumerate(files):
        parts = path.relative_to(root).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if not parts or any(part.startswith("_") or part in _NOT_ASKED or not part.isidentifier() for part in parts):
            continue
        with tokenize.open(path) as file:
            text = file.read()
        try:
            tree = ast.parse(text)
        except SyntaxError:  # a source code template, or code for another Python version
            continue
        found += [(number, item) for item in _of_module(".".join(parts), tree)]
    return tuple(found)


def _of_module(module: str, tree: ast.Module) -> Iterator[Item]:
    names = _exported(tree)
    about = _about(tree)
    if about or names:
        yield Item(module, module, "module", about, None, names)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield from _of_definition(module, node)


def _of_definition(module: str, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[Item]:
    name = f"{module}.{node.name}"
    if not isinstance(node, ast.ClassDef):
        yield Item(module, name, "function", _about(node), f"{name}({_arguments(node)})")
        return
    methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    begin = next((n for n in methods if n.name == "__init__"), None)
    yield Item(module, name, "class", _about(node), f"{name}({_arguments(begin, bound=True) if begin else ''})")
    for method in methods:
        if not method.name.startswith("_"):
            call = f"{node.name}.{method.name}({_arguments(method, bound=True)})"
            yield Item(module, f"{name}.{method.name}", "method", _about(method), call)


def _exported(tree: ast.Module) -> tuple[str, ...]:
    """Returns the names in `__all__` if that is a literal list, otherwise the public classes and functions."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]:
            try:
                return tuple(str(name) for name in ast.literal_eval(node.value))
            except ValueError:  # composed of other modules' lists
                break
    defined = (n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef))
    return tuple(name for name in defined if not name.startswith("_"))


def _about(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    """Returns the docstring's first paragraph on one line; '' if it is a signature, a few words, or too long."""
    paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    is_signature = "->" in paragraph or paragraph.partition("(")[0].isidentifier()
    return "" if is_signature or paragraph.count(" ") < 2 or len(paragraph) > _LONGEST else paragraph


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef, *, bound: bool = False) -> str:
    """Returns the arguments with their defaults; for a method without self."""
    arguments = ast.unparse(node.args)
    return arguments.partition(",")[2].strip() if bound else inspect.cleandoc(arguments)


def _homes(all_items: tuple[tuple[int, Item], ...]) -> Homes:
    """Returns the modules that export each name."""
    found: Homes = {}
    for _, item in all_items:
        for name in item.exported:
            found.setdefault(name, {})[item.module] = None
    return found


def _draw(*key: object) -> random.Random:
    """Returns a random number generator seeded by its purpose, `key`."""
    return random.Random(hashlib.sha256(repr(key).encode()).digest())


def _what(item: Item) -> tuple[str, str]:
    asked = {
        "module": (f"What is the module `{item.name}` for?", f"Tell me about the module `{item.name}`."),
        "method": (f"What does the method `{item.name}` do?", f"What is `{item.name}` for?"),
        "class": (f"What is the class `{item.name}`?", f"What is `{item.name}` for?"),
        "function": (f"What does `{item.name}` do?", f"What is `{item.name}` for?"),
    }[item.kind]
    return _draw(item.name, "what").choice(asked), f"`{item.name}` is a {item.kind}. {item.about}"


def _how(item: Item) -> tuple[str, str]:
    asked = (f"How is `{item.name}` called?", f"What arguments does `{item.name}` take?")
    return _draw(item.name, "how").choice(asked), f"It is called as `{item.call}`."


def _where(name: str, homes: Homes) -> tuple[str, str] | None:
    """Returns a question and answer on which module has a name; None if none or more than two have it."""
    modules = [f"`{module}`" for module in homes.get(name, ())]
    if not 1 <= len(modules) <= 2:
        return None
    asked = (f"Which module has `{name}`?", f"Where do I find `{name}`?", f"From which module is `{name}` imported?")
    plural = "s" if len(modules) > 1 else ""
    return _draw(name, "where").choice(asked), f"`{name}` is in the module{plural} {' and '.join(modules)}."


def _contents(item: Item) -> tuple[str, str]:
    names = ", ".join(f"`{name}`" for name in item.exported[:_NAMES])
    more = " and more" if len(item.exported) > _NAMES else ""
    return f"What is in the module `{item.name}`?", f"`{item.name}` has {names}{more}."


def _of_item(item: Item, homes: Homes) -> Iterator[Answered]:
    """Yields single questions about an item and, for about every other item, a conversation of several turns."""
    if item.about:
        yield Answered(f"what {item.kind}", (_what(item),))
    if item.kind == "module":
        if item.exported:
            yield Answered("contents", (_contents(item),))
        for name in item.exported:
            found = _where(name, homes)
            if found is not None:
                yield Answered("where", (found,))
        if item.about and item.exported:
            yield Answered("turns", (_what(item), ("What is in it?", _contents(item)[1])))
        return
    if item.about and _draw(item.name, "turns").random() < 0.5:
        found = _where(item.name.removeprefix(f"{item.module}."), homes) if item.kind != "method" else None
        asked = ("And what does it do?", _what(item)[1]) if found else _what(item)
        yield Answered("turns", (*([found] if found else []), asked, ("How is it called?", _how(item)[1])))
    elif item.kind != "class":
        yield Answered("how", (_how(item),))


def _answered(held_out: bool, fraction: float) -> list[Answered]:
    documented = items(tuple(question_files()))
    homes = _homes(documented)
    return [
        answered
        for number, item in documented
        if is_held_out(number, fraction) == held_out
        for answered in _of_item(item, homes)
    ]


def conversations(held_out: bool, fraction: float) -> Iterator[Record]:
    """Yields rows with `messages`, about the modules that are held out or about the others."""
    for number, answered in enumerate(_answered(held_out, fraction)):
        messages = [
            {"role": role, "content": text}
            for turn in answered.turns
            for role, text in zip(("user", "assistant"), turn, strict=True)
        ]
        yield f"question {number + 1:,} about the standard library", {"messages": messages}


def pairs(held_out: bool, fraction: float) -> Iterator[Record]:
    """Yields rows with `prompt`, `chosen`, `rejected`; `rejected` answers another such question or is cut short."""
    single = [answered for answered in _answered(held_out, fraction) if len(answered.turns) == 1]
    of_kind: dict[str, list[str]] = {}
    for answered in single:
        of_kind.setdefault(answered.kind, []).append(answered.turns[0][1])
    for number, answered in enumerate(single):
        (asked, answer) = answered.turns[0]
        row = {"prompt": asked, "chosen": answer, "rejected": _rejected(asked, answer, of_kind[answered.kind])}
        yield f"pair {number + 1:,} about the standard library", row


def _rejected(asked: str, answer: str, others: list[str]) -> str:
    draw, words = _draw(asked, "rejected"), answer.split(" ")
    other = draw.choice(others)
    if other != answer and draw.random() < 0.5:
        return other
    return " ".join(words[: max(1, int(len(words) * draw.uniform(0.3, 0.8)))])
