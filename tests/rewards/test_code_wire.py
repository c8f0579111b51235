"""The words between an answer and its tests, the names that tests see, and the limits, each part by itself."""

import ast
import collections
import contextlib
import datetime
import decimal
import fractions
import json
import math
import os
import random
import resource
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from code_wire import served
from lmtrain.files import is_running
from lmtrain.rewards import code, code_process
from lmtrain.rewards.code_names import TestNames as Names
from lmtrain.rewards.code_names import imports_of
from lmtrain.rewards.code_values import _ALL, Peer, Proxy, _check_allowed

ANSWER = '''
class Box:
    """A box."""
    size = 3
    def __init__(self, inside=()): self.inside = list(inside)
    def add(self, *items, times=1):
        self.inside += items * times
        return self
    def __len__(self): return len(self.inside)
    def __getitem__(self, i): return self.inside[i]
    def __add__(self, other): return Box([*self.inside, *getattr(other, "inside", [other])])
    def __call__(self, x): return ("called", x)
    def __contains__(self, x): return x in self.inside
class Mine(ValueError): pass
def same(x): return x
def fails(cls, *args): raise cls(*args)
def grow(a, d=None, s=None, b=None):
    a.append(1)
    if d is not None: d["k"] = 2
    if s is not None: s.add(3)
    if b is not None: b.extend(b"4")
    return None
def shout(x):
    print("said", x)
    return x
def back(f, *args): return f(*args)
'''


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    """Yields the end of the tests; the answer's serves in a thread."""
    with served(ANSWER) as (end, _):
        yield end


VALUES: list[Any] = [
    None, True, False, 0, -7, 2**80, 1.5, math.inf, "é\n\ud800", b"\x00\xff", bytearray(b"ab"), 3 - 2j, range(1, 9, 3),
    slice(1, None, 2), fractions.Fraction(-3, 7), decimal.Decimal("1.10"), datetime.date(2024, 2, 29),
    datetime.timedelta(1, 2, 3), datetime.datetime(2024, 1, 2, 3, 4, 5, 6), datetime.time(1, 2, 3),
    [1, [2.0, "3"]], (1, (2,)), {1, 2}, frozenset({(1, 2)}), {"a": {(1, 2): [3]}, 4: None},
    collections.deque([1, 2]), collections.OrderedDict(b=1, a=2), collections.Counter("aab"),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{type(value).__name__} {value!a}")
def test_plain_values_are_copied_there_and_back(value: Any, peer: Peer) -> None:
    found = peer.ask("name", "same")(value)
    assert type(found) is type(value)
    assert found == value
    assert found is not value or not isinstance(value, list | dict | set)
    assert type(peer.ask("name", "same")([value])[0]) is type(value), "inside another, too"


def test_a_defaultdict_keeps_its_factory_and_an_object_its_identity(peer: Peer) -> None:
    found = peer.ask("name", "same")(collections.defaultdict(list, a=[1]))
    assert (type(found), found["new"], found["a"]) == (collections.defaultdict, [], [1])
    mine = object()
    assert peer.ask("name", "same")(mine) is mine
    box = peer.ask("name", "Box")([5])
    assert type(box) is Proxy
    assert peer.ask("name", "same")(box) is box
    assert peer.ask("name", "same")([box])[0] is box


def test_what_the_answer_changes_in_an_argument_is_changed_here(peer: Peer) -> None:
    a, d, s, b = [0], {"x": 1}, {2}, bytearray(b"3")
    peer.ask("name", "grow")(a, d, s=s, b=b)
    assert (a, d, s, b) == ([0, 1], {"x": 1, "k": 2}, {2, 3}, bytearray(b"34"))
    peer.ask("name", "same")(a)
    assert a == [0, 1]


def test_objects_of_the_answer_are_used_from_afar(peer: Peer) -> None:
    box = peer.ask("name", "Box")([1, 2])
    assert (len(box), box[1], box(7), 2 in box, 9 in box) == (2, 2, ("called", 7), True, False)
    assert box.add(3, 4, times=2) is box
    assert box.inside == [1, 2, 3, 4, 3, 4]
    box.inside.append(9)
    assert box.inside[-1] == 9, "what the tests append arrives in the answer's list"
    box.size = 8
    assert box.size == 8
    del box.size
    assert box.size == 3, "that of the class again"
    assert [*(box + box)][:2] == [1, 2]
    assert box != [1]
    with pytest.raises(AttributeError, match="none_such"):
        box.none_such  # noqa: B018
    with pytest.raises(TypeError):
        box < 3  # noqa: B015


def test_exceptions_have_the_class_that_the_tests_can_catch(peer: Peer) -> None:
    fails, mine = peer.ask("name", "fails"), peer.ask("name", "Mine")
    with pytest.raises(KeyError) as caught:
        fails(KeyError, "a", 1)
    assert caught.value.args == ("a", 1)
    with pytest.raises(ValueError, match="odd") as own:
        fails(mine, "odd")
    assert type(own.value).__name__ == "Mine"
    assert issubclass(mine, ValueError)


def test_what_the_answer_prints_is_printed_here_and_functions_of_the_tests_are_called(
    peer: Peer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert peer.ask("name", "shout")(3) == 3
    assert capsys.readouterr().out == "said 3\n"
    assert peer.ask("name", "back")(lambda x, y: x * y, 3, 4) == 12
    assert peer.ask("name", "back")(sorted, [2, 1]) == [1, 2]


def test_an_answer_calls_what_it_is_given_and_reaches_nothing_behind_it() -> None:
    own = type("Own", (), {"__module__": "__main__", "value": 1})()
    other = SimpleNamespace(value=1)
    for task, target, name in [
        ("call", other, "x"), ("special", other, "__len__"), ("get", own, "value"), ("set", own, "value"),
        ("get", len, "__name__"), ("get", other, "__doc__"),
    ]:  # fmt: skip
        _check_allowed(task, target, [name])
    for task, target, name in [
        ("get", other, "value"), ("set", other, "value"), ("get", own, "_value"), ("delete", own, "value"),
        ("get", own, "__globals__"), ("set", own, "__name__"), ("name", own, "value"), ("get", len, "__self__"),
    ]:  # fmt: skip
        with pytest.raises(AttributeError, match=f"may not {task} {name}"):
            _check_allowed(task, target, [name])


def test_only_known_methods_and_values_are_read() -> None:
    here = Peer(None, {})
    with pytest.raises(PermissionError, match="__reduce__"):
        here.do("special", object(), "__reduce__")
    assert "__reduce__" not in _ALL
    assert here.do("special", 3, "__lt__", 4) is True
    assert here.do("special", object(), "__add__", 1) is NotImplemented
    assert here.do("content", type("L", (list,), {})([1, 2])) == [1, 2]
    with pytest.raises(ValueError, match="no value: odd"):
        here.unpack(["odd", 1])
    tests = Peer(None)
    assert tests.own("builtins", "dict") is dict
    assert tests.own("decimal", "InvalidOperation") is decimal.InvalidOperation
    for module, name in [("decimal", "Decimal"), ("os", "system"), ("builtins", "len"), ("torch", "Tensor")]:
        with pytest.raises(TypeError, match=f"the answer gave {module}.{name}"):
            tests.own(module, name)
    assert Peer(None, {}).own("os.path", "join") is os.path.join


def test_what_is_the_standard_librarys_is_named() -> None:
    tests, answer = Peer(None), Peer(None, {})
    assert tests.standard(sorted) == ["standard", "builtins", "sorted"]
    assert tests.standard(json.dumps) == ["standard", "json", "dumps"]
    assert answer.standard(sorted) is None, "of the answer classes only"
    assert answer.standard(KeyError) == ["standard", "builtins", "KeyError"]
    assert answer.standard(decimal.Decimal) is None
    assert tests.standard(lambda: None) is None
    assert tests.standard(math.pi) is None


def test_the_names_of_tests_are_their_own_then_pythons_then_imports_then_the_answers() -> None:
    asked: list[Any] = []
    peer = SimpleNamespace(ask=lambda *words: asked.append(words) or "the answer's")
    program = (
        "import os.path, math as m, numpy\nfrom random import shuffle, random as r\nfrom json import *\nimport math"
    )
    program += "\nfrom . import near\ndef f():\n    import csv"
    imported = imports_of(ast.parse(program))
    assert imported == [
        ["os.path", None, "os"], ["math", None, "m"], ["numpy", None, "numpy"], ["random", "shuffle", "shuffle"],
        ["random", "random", "r"], ["json", "*", "*"], ["math", None, "math"],
    ]  # fmt: skip
    names = Names(peer, ["f", "sorted", "math", "r", "numpy"], imported)
    names["mine"] = 5
    assert (names["mine"], names["os"], names["math"]) == (5, os, math)
    assert (names["shuffle"], names["dumps"]) == (random.shuffle, json.dumps)
    assert not asked
    assert [names[name] for name in ("f", "r", "numpy")] == ["the answer's"] * 3
    assert asked == [("name", "f"), ("name", "r"), ("name", "numpy")]
    for name in ("sorted", "m2", "csv"):
        with pytest.raises(KeyError):
            names[name]
    assert ("mine" in names, "f" in names, "g" in names) == (True, True, False)
    assert (names.get("mine"), names.get("f"), names.get("g"), names.get("g", 7)) == (5, "the answer's", None, 7)


def in_child(work: Callable[[], Any]) -> Any:
    """Returns what `work` returns in a fork of this process, as JSON."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            os.write(write, json.dumps(work()).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as said:
        text = said.read()
    os.waitpid(child, 0)
    return json.loads(text)


def test_a_program_has_the_limits_of_the_settings() -> None:
    def limited() -> Any:
        code_process._limit(2.7, 2**33)
        kinds = ("CPU", "AS", "FSIZE", "NPROC", "CORE")
        return [resource.getrlimit(getattr(resource, f"RLIMIT_{kind}")) for kind in kinds]

    assert in_child(limited) == [[n, n] for n in (3, 2**33, 16 * 2**20, 64, 0)]

    def already() -> Any:
        resource.setrlimit(resource.RLIMIT_CPU, (5, 5))
        code_process._limit(60, 2**33)
        return resource.getrlimit(resource.RLIMIT_CPU)

    assert in_child(already) == [5, 5], "a limit that is lower stays"


def test_a_descriptor_is_moved_out_of_the_way() -> None:
    read, write = os.pipe()
    moved = code_process._moved(write)
    assert moved >= 500
    os.write(moved, b"x")
    assert os.read(read, 1) == b"x"
    with pytest.raises(OSError):
        os.fstat(write)
    os.close(moved)
    assert code_process._moved(write) == write, "one that is closed stays what it is"
    os.close(read)


@pytest.mark.parametrize("counts", [False, True])
def test_a_watched_program_gives_its_exit_code(counts: bool) -> None:
    def watched() -> int:
        program = os.fork()
        if program == 0:
            os._exit(7)
        with mock.patch.object(code_process, "PROCESSES", 10**6):
            return code_process._watched(program, counts)

    assert in_child(watched) == 7


@pytest.mark.parametrize(("number", "code"), [(4, 5), (5, 1)])
def test_too_many_processes_end_the_watch(number: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process of the namespace, the watch and the program are there besides those that are counted."""
    monkeypatch.setattr(code_process, "PROCESSES", 2)

    def watched() -> int:
        program = os.fork()
        if program == 0:
            if code == 1:
                os.read(os.pipe()[0], 1)
            os._exit(5)
        os.listdir = lambda _: ["self", *map(str, range(number))]  # type: ignore[assignment]
        found = code_process._watched(program, True)
        os.kill(program, 9) if code == 1 else None
        return found

    assert in_child(watched) == code


def test_folders_are_measured_removed_and_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "a/b").mkdir(parents=True)
    empty = code._bytes_in(tmp_path)
    (tmp_path / "a/b/c").write_bytes(b"x" * 1000)
    (tmp_path / "a/d").write_bytes(b"x" * 300)
    (tmp_path / "a/elsewhere").symlink_to(Path(__file__).parent)
    assert code._bytes_in(tmp_path) - empty == 1300 + len(str(Path(__file__).parent))
    assert code._bytes_in(tmp_path / "gone") == 0
    with code._folder() as folder:
        assert folder.parent == tmp_path
        assert folder.name.startswith(f"lmtrain-code-{os.getpid()}-")
        (folder / "x").mkdir()
        (folder / "x").chmod(0)
    assert not folder.exists()
    gone = os.fork()
    if gone == 0:
        os._exit(0)
    os.waitpid(gone, 0)
    assert (is_running(os.getpid()), is_running(1), is_running(gone)) == (True, True, False)
    kept = [tmp_path / f"lmtrain-code-{name}" for name in (f"{os.getpid()}-a", "x-a")]
    left = tmp_path / f"lmtrain-code-{gone}-a"
    for one in (*kept, left):
        one.mkdir()
    code._sweep()
    assert all(one.exists() for one in kept)
    assert not left.exists()


def test_the_reward_has_the_settings_of_its_arguments(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(code, "isolation", lambda network: {"files": True, "processes": True})
    made = code.CodeTests("checks", 2.5, 7, True, 3)
    assert (made.column, made.seconds, made.memory, made.network, made.jobs) == ("checks", 2.5, 7 * 2**20, True, 3)
    assert made.isolated
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(os, "cpu_count", lambda: 11)
    assert code.CodeTests().jobs == 11
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert (code.CodeTests().jobs, code.CodeTests().seconds, code.CodeTests().memory) == (1, 5.0, 512 * 2**20)
    monkeypatch.setattr(code, "isolation", lambda network: {"files": False, "processes": True})
    assert code.CodeTests().isolated
    said = "".join(capsys.readouterr())
    assert "limit files:" in " ".join(said.split())
    monkeypatch.setenv("RANK", "1")
    code.CodeTests()
    assert "".join(capsys.readouterr()) == "", "one rank says it"


def test_an_answer_is_given_its_time_and_its_share_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "isolation", lambda network: {"files": True, "processes": True})
    reward = code.CodeTests(seconds=2.0)
    now, waited = [100.0], list[float]()

    class Process:
        def communicate(self, timeout: float) -> tuple[bytes, None]:
            waited.append(timeout)
            now[0] += timeout
            raise code.subprocess.TimeoutExpired("x", timeout)

    monkeypatch.setattr(code.time, "monotonic", lambda: now[0])
    process: Any = Process()
    assert reward._said(process, []) is None
    assert waited == [3.0], "a second more than the processor's"
    waited.clear()
    assert reward._said(process, [tmp_path]) is None
    assert waited[0] == 0.1
    assert sum(waited) == pytest.approx(3.0)
    waited.clear()
    monkeypatch.setattr(code, "MEGABYTES", 1)
    monkeypatch.setattr(code, "_bytes_in", lambda folder: 2**20 + (len(waited) == 3))
    assert reward._said(process, [tmp_path]) is None
    assert len(waited) == 3, "a folder that is too large ends it"
