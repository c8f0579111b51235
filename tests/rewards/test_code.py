"""reward=code: right answers of many kinds pass, fakes don't, and programs that go too far are ended."""

import ast
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from code_wire import served
from lmtrain.rewards import code, code_names
from lmtrain.rewards.code import CodeTests

RIGHT = {
    name: tuple(text.split("\n## tests\n"))
    for name, _, text in (
        part.partition("\n") for part in (Path(__file__).parent / "right_answers.txt").read_text().split("#### ")[1:]
    )
}
ALONE = ("pickle", "fork", "spawn", "a pool of processes", "inspect")  # they need a program of their own
# Each gives something else than the right number for f(3), which is 4.
FAKES = {
    "equal to all": "class A:\n    def __eq__(self, other): return True\ndef f(x): return A()",
    "an int equal to all": "class A(int):\n    def __eq__(self, other): return True\ndef f(x): return A(0)",
    "all operators": "class A:\n    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __bool__ = lambda *a: True\n"
    "    __sub__ = __rsub__ = __abs__ = __float__ = __round__ = lambda *a: 0\ndef f(x): return A()",
    "a difference that is small": "class A:\n    __sub__ = lambda s, o: s\n    __abs__ = __float__ = lambda s: 0.0\n"
    "    __lt__ = lambda *a: True\n    __neg__ = __pow__ = lambda *a: 0\ndef f(x): return A()",
    "other builtins": "abs = sorted = round = float = isinstance = lambda *a, **k: True\ndef f(x): return 0",
    "another math": "class math:\n    isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 0",
    "ANY": "from unittest.mock import ANY\ndef f(x): return ANY",
    "ANY as f": "from unittest.mock import ANY as f",
    "a mock": "from unittest.mock import MagicMock\nf = MagicMock()",
    "exits": "def f(x): raise SystemExit(0)",
    "stops": "def f(x): raise StopIteration",
}
TESTS = [
    "assert f(3) == 4", "assert abs(f(3) - 4) < 1e-6", "import math\nassert math.isclose(f(3), 4)",
    "assert f(3) in (4,)", "assert sorted([f(3)]) == [4]",
    "assert (f(3) - 4) ** 2 < 1e-6", "assert round(f(3), 2) == 4",
    "assert not f(3) - 4", "assert f(3) <= 4 <= f(3)",
]  # fmt: skip


def passes(answer: str, tests: str) -> bool:
    """Tries an answer with the two ends of the wire in two threads of this process, which takes milliseconds."""
    with served(answer) as (end, namespace):
        names = code_names.TestNames(end, list(namespace), code_names.imports_of(ast.parse(answer)))
        try:
            code_names.run_tests(tests, names)
        except (Exception, SystemExit):
            return False
    return True


@pytest.mark.parametrize("name", sorted(set(RIGHT) - set(ALONE)))
def test_right_answers_pass(name: str) -> None:
    answer, tests = RIGHT[name]
    assert passes(answer, tests)
    assert not passes(answer, f"{tests}\nassert False")


@pytest.mark.parametrize("name", FAKES)
def test_fakes_do_not(name: str) -> None:
    assert [tests for tests in TESTS if passes("def f(x): return x + 1", tests)] == TESTS
    assert not [tests for tests in TESTS if passes(FAKES[name], tests)]


def test_an_answer_cannot_use_what_the_tests_compare_with() -> None:
    tests = "def expected(x): return x + 1\nassert f(3) == expected(3)"
    assert passes("def f(x): return x + 1", tests)
    assert not passes("def f(x): return expected(x)", tests)


def test_answers_that_need_a_program_of_their_own() -> None:
    found = CodeTests(seconds=20, jobs=2)(
        [""] * len(ALONE), [RIGHT[n][0] for n in ALONE], tests=[RIGHT[n][1] for n in ALONE]
    )
    assert dict(zip(ALONE, found, strict=True)) == dict.fromkeys(ALONE, 1.0)


PROGRAMS = {
    "def f(x): return 2 * x": 1,
    "Here it is:\n```python\ndef f(x):\n    return x + x\n```\nGood?": 1,
    "def f(x): return x": 0,
    "import sys\nsys.exit(0)": 0,
    "import os\nos._exit(0)": 0,
    "x = ' ' * 10**10": 0,
    "while True: pass": 0,
    "import socket\nsocket.create_connection(('127.0.0.1', 9), 1)\ndef f(x): return 4": 0,
    "import os\nos.setsid()\nif os.fork() == 0:\n    import time\n    time.sleep(60)\ndef f(x): return 4": 1,
    "open('a', 'w').write('x' * 2**26)\ndef f(x): return 4": 0,
    "for i in range(20): open(f'a{i}', 'w').write('x' * 2**23)\ndef f(x): return 4": 0,
    "import os, time\nfor i in range(200):\n    if os.fork() == 0: time.sleep(9)\ndef f(x): return 4": 0,
    "import os\nfor i in range(3000):\n    os.mkdir('d')\n    os.chdir('d')\ndef f(x): return 4": 1,
    "import os\nos.closerange(3, 100)\ndef f(x): return 4": 1,
    "import __main__, sys, os\ng = sys._getframe(1).f_globals\nos.write(g['end'], g['word'])\nos._exit(0)": 0,
    "import ctypes\nctypes.CDLL(None).prctl(1, 0, 0, 0, 0)\nwhile True: pass": 0,
    "import ctypes\nif ctypes.CDLL(None).umount2(b'/dev/shm', 2): raise OSError\ndef f(x): return 4": 0,
    f"open({str(Path(__file__).parent / 'written')!r}, 'w')\ndef f(x): return 4": 0,
    "s = '\ud800'\ndef f(x): return 4": 0,
}


def test_code_is_run_with_limits() -> None:
    """Wrong, endless, greedy and early-exiting programs are wrong answers; processes they start end with them."""
    started = time.monotonic()
    found = CodeTests(seconds=1.5, jobs=4)(
        [0] * len(PROGRAMS), list(PROGRAMS), tests=["assert f(2) == 4"] * len(PROGRAMS)
    )
    assert dict(zip(PROGRAMS, found, strict=True)) == PROGRAMS
    assert time.monotonic() - started < 40
    wait_until(lambda: processes(os.getpid()) == 0)
    assert not list(Path(tempfile.gettempdir()).glob(f"lmtrain-code-{os.getpid()}-*"))


def test_tests_see_their_own_names_and_have_to_end() -> None:
    answer = "def f(x): return 4\n__name__ = 'mine'\nAssertionError = ValueError"
    tests = ["assert __name__ == '__main__'\nassert AssertionError('')\nassert f(1) == 4", "import sys\nsys.exit(0)"]
    assert CodeTests(seconds=5)([0] * 2, [answer] * 2, tests=tests) == [1, 0]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the system permit no namespaces."""
    monkeypatch.setattr(code, "isolation", lambda network: None)


@pytest.mark.usefixtures("alone")
def test_without_namespaces_the_folder_is_watched_and_removed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(code.UserError, match=r"reward\.network=true"):
        CodeTests()
    reward = CodeTests(seconds=5, jobs=3, network=True)
    assert "doesn't let it limit files and processes" in " ".join(capsys.readouterr().out.split())
    fills = "import time\nfor i in range(20): open(f'a{i}', 'w').write('x' * 2**23)\ntime.sleep(60)"
    shuts = "import os\nos.makedirs('a/b')\nos.chmod('a', 0)\nos.chmod('.', 0)\ndef f(x): return 4"
    deep = "import os\nfor i in range(1500):\n    os.mkdir('d')\n    os.chdir('d')\ndef f(x): return 4"
    began = time.monotonic()
    assert reward([0] * 3, [fills, shuts, deep], tests=["assert f(2) == 4"] * 3) == [0, 1, 1]
    assert time.monotonic() - began < 40
    assert not list(Path(tempfile.gettempdir()).glob(f"lmtrain-code-{os.getpid()}-*"))


def processes(parent: int) -> int:
    """Returns how many processes with programs a process has."""
    listed = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return listed.count(f'"parent": {parent}}}')


KILLED = """
import sys
from lmtrain.rewards import code
if sys.argv[1] == "alone":
    code.isolation = lambda network: None
code.CodeTests(seconds=60, network=True)([""], ["import os, time\\nos.fork()\\ntime.sleep(60)"], tests=["f(1)"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["isolated", "alone"])
def test_nothing_stays_after_the_run_is_killed(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", KILLED, mode], stdout=subprocess.PIPE, env=env)
    wait_until(lambda: processes(process.pid) >= 4)
    process.kill()
    process.communicate()
    wait_until(lambda: processes(process.pid) == 0)
    if mode == "alone":
        assert list(tmp_path.iterdir())
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        code._sweep()
    assert not list(tmp_path.iterdir())


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(200):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("it never came true")
