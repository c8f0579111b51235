"""Runs the code of an answer with the tests of its row, in two processes with limited time, memory, disk and rights.

The tests run in a process of their own, which asks that of the answer for what it has defined and compares the values
itself (code_values.py), so that an answer can't read the tests, change what they compare, or say that they have passed.
Both processes are isolated (code_process.py) if the system lets an unprivileged process have namespaces; if not, the
reward is refused unless `network=true`, and then it limits less. docs/rewards.md says what holds when.

It doesn't protect against malicious code, which can read every file that the user may read and attack the kernel. For
models that are not trusted run all of the training in a container or a virtual machine.
"""

import contextlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from lmtrain import terminal
from lmtrain.errors import UserError
from lmtrain.files import is_running
from lmtrain.rewards.base import Reward, needed
from lmtrain.rewards.code_process import MEGABYTES

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+.-]*)[^\n`]*\n(.*?)```", re.DOTALL | re.MULTILINE)
_WITHIN_A_LINE = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)  # a fence that doesn't begin its line
_PYTHON = ("", "python", "python3", "py")
# A program named on the command line would be compiled each time. Answers can't import from the folder.
_FIRST = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import code_process
del sys.path[0]
for name in ("code_process", "code_values", "code_names"):
    del sys.modules[name]
os._exit(code_process.main(json.loads(sys.argv[2])))
"""
_FOLDER = "lmtrain-code-"  # where there is no isolation: followed by the number of the process that removes it


def code_of(completion: str) -> str:
    """Returns the last fenced block of Python, or the whole text if there is none."""
    blocks = [code for language, code in _FENCE.findall(completion) if language.lower() in _PYTHON]
    blocks = blocks or _WITHIN_A_LINE.findall(completion)
    return blocks[-1] if blocks else completion


@cache
def isolation(network: bool) -> dict[str, bool] | None:
    """Returns which protections isolated processes have here, "files" and "processes"; None: there is no isolation."""
    if sys.platform != "linux":
        return None
    probe = _start({"role": "probe", "isolated": True, "network": network}, [])
    with probe:
        said, _ = probe.communicate(timeout=60)
    return json.loads(said) if probe.returncode == 0 else None


class CodeTests(Reward):
    """A reward of 1 if the tests of a row, Python code that uses what the answer's code defines, end without an error.

    It is 0 otherwise: a program that fails, runs too long or needs too much memory is a wrong answer, not a failure of
    the reward. A row without tests gives None, no opinion.
    """

    def __init__(
        self,
        column: str = "tests",
        seconds: float = 5.0,
        memory_mb: int = 512,
        network: bool = False,
        jobs: int | None = None,
    ) -> None:
        """
        Args:
            column: the column of Python code, such as assertions, that is run after the answer's.
            seconds: limit of processor time, and of wall-clock time.
            memory_mb: limit of address space of each process.
            network: whether the code may use the network.
            jobs: number of answers that are tested in parallel; None: one per core.
        """
        held = isolation(network)
        if held is None and not network:
            found = "reward=code: this system allows no namespaces, so code in answers could use the network"
            raise UserError(f"{found}: run in a container without a network, and set reward.network=true")
        self.column, self.seconds, self.memory, self.network = column, seconds, memory_mb * 2**20, network
        self.isolated, self.jobs = held is not None, jobs or os.cpu_count() or 1
        missing = [name for name in ("files", "processes") if not (held or {}).get(name)]
        if missing and os.environ.get("RANK", "0") == "0":
            held_back = f"this system doesn't let it limit {' and '.join(missing)}"
            terminal.note(f"reward=code: {held_back}: docs/rewards.md says what")
        if not self.isolated:
            _sweep()

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | None]:
        tests = needed(columns, self.column, "CodeTests")
        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(self._score, map(code_of, completions), tests))

    def _score(self, answer: str, tests: str | None) -> float | None:
        if tests is None:
            return None
        settings = {name: getattr(self, name) for name in ("seconds", "memory", "isolated", "network")}
        # Tests that exit early, by sys.exit(0) say, have not passed: a secret word marks the end.
        word = secrets.token_hex(16)
        with contextlib.ExitStack() as stack:
            texts = [stack.enter_context(_file(text)) for text in (answer, f"{word}\n{tests}")]
            folders = [] if self.isolated else [stack.enter_context(_folder()) for _ in texts]
            settings |= {"role": "both", "folders": [str(folder) for folder in folders] or ["/", "/"]}
            process = _start(settings, texts)
            stack.callback(_end, process)
            return float(self._said(process, folders) == word.encode())

    def _said(self, process: subprocess.Popen[bytes], folders: list[Path]) -> bytes | None:
        """Returns what the tests have written at their end; None: they took too long, or too much of the disk."""
        end = time.monotonic() + self.seconds + 1
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=min(left, 0.1) if folders else left)[0]
            if any(_bytes_in(folder) > MEGABYTES * 2**20 for folder in folders):
                break
        return None


@contextlib.contextmanager
def _file(text: str) -> Iterator[int]:
    """Yields the descriptor of a file that holds a text and has no name."""
    with tempfile.TemporaryFile() as file:
        file.write(text.encode("utf-8", "surrogatepass"))
        file.seek(0)
        yield file.fileno()


def _start(settings: dict[str, Any], texts: list[int]) -> subprocess.Popen[bytes]:
    """Starts the first process of code_process.py; its standard output can be read."""
    given = json.dumps({**settings, "texts": texts, "parent": os.getpid()})
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _FIRST, str(Path(__file__).parent), given],
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=texts,
        start_new_session=True,
    )


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a process with those that it has started, in its namespace, or else in its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with process:  # closes its pipe and waits
        pass


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix=f"{_FOLDER}{os.getpid()}-"))
    try:
        yield folder
    finally:
        _remove(folder)


def _remove(folder: Path) -> None:
    """Removes a folder whatever is in it; shutil.rmtree fails if it is thousands deep."""
    subprocess.run(["rm", "-rf", folder], check=False, stderr=subprocess.DEVNULL)
    if folder.is_dir() and not folder.is_symlink():
        subprocess.run(["chmod", "-R", "u+rwx", folder], check=False, stderr=subprocess.DEVNULL)
        subprocess.run(["rm", "-rf", folder], check=False, stderr=subprocess.DEVNULL)


def _sweep() -> None:
    """Removes the folders of processes that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_FOLDER}*"):
        number = folder.name.removeprefix(_FOLDER).partition("-")[0]
        with contextlib.suppress(OSError):
            if number.isdigit() and folder.lstat().st_uid == os.getuid() and not is_running(int(number)):
                _remove(folder)


def _bytes_in(folder: Path) -> int:
    """Returns the size of the files in a folder, of those that are found."""
    size, folders = 0, [str(folder)]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    folders += [entry.path] if entry.is_dir(follow_symlinks=False) else []
                    size += entry.stat(follow_symlinks=False).st_size
    return size
