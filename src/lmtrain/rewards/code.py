"""Runs the code of an answer with its row's tests, in a process of its own with limited time and memory and no network.

It protects against: an endless loop; a program that starts others (they end with it, in a process namespace), uses up
all memory, fills the disk or accesses the network (if the system lets an unprivileged process have a network namespace;
else the reward is refused, unless `network=true`); and accidental writes to the run folder, as the program starts in an
empty folder without the run's environment. It doesn't protect against malicious code, which can read every file that
the user may read and attack the kernel. For models that are not trusted run all of the training in a container or a
virtual machine.
"""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

from lmtrain.errors import UserError
from lmtrain.rewards.base import Reward, needed

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+.-]*)[^\n`]*\n(.*?)```", re.DOTALL | re.MULTILINE)
_WITHIN_A_LINE = re.compile(r"```(?:python|py)?\n(.*?)```", re.DOTALL)  # a fence that doesn't begin its line
_PYTHON = ("", "python", "python3", "py")
_FILE_BYTES, _PROCESSES = 16 * 2**20, 64


def code_of(completion: str) -> str:
    """Returns the last fenced block of Python, or the whole text if there is none."""
    blocks = [code for language, code in _FENCE.findall(completion) if language.lower() in _PYTHON]
    blocks = blocks or _WITHIN_A_LINE.findall(completion)
    return blocks[-1] if blocks else completion


@cache
def without_network() -> tuple[str, ...] | None:
    """Returns the command that starts another one without network, or None if this system does not allow it."""
    unshare = shutil.which("unshare")
    if unshare is None:
        return None
    command = (unshare, "--map-root-user", "--net", "--pid", "--fork", "--kill-child", "--")
    works = subprocess.run([*command, "true"], capture_output=True, timeout=10).returncode == 0
    return command if works else None


class CodeTests(Reward):
    """A reward of 1 if the answer's Python code, followed by the tests of its row, ends without an error; else 0.

    A program that fails, runs too long or needs too much memory is a wrong answer, not a failure of the reward. A row
    without tests gives None, no opinion.
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
            memory_mb: limit of address space.
            network: whether the code may use the network.
            jobs: number of programs that run in parallel; None: one per core.
        """
        if not network and without_network() is None:
            raise UserError(
                "reward=code: this system doesn't let your processes be cut off from the network (unshare "
                "--net), so code in answers could use the network: run in a container without network and set "
                "reward.network=true"
            )
        self.column, self.seconds, self.memory, self.network = column, seconds, memory_mb * 2**20, network
        self.jobs = jobs or os.cpu_count() or 1

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[float | None]:
        tests = needed(columns, self.column, "CodeTests")
        programs = [None if t is None else f"{code_of(c)}\n\n{t}\n" for c, t in zip(completions, tests, strict=True)]
        with ThreadPoolExecutor(self.jobs) as pool:
            return list(pool.map(self._run, programs))

    def _run(self, program: str | None) -> float | None:
        if program is None:
            return None
        with tempfile.TemporaryDirectory(prefix="lmtrain-code-") as folder:
            command = [sys.executable, "-I", "-S", "-c", _LIMITED, str(self.seconds), str(self.memory)]
            prefix = () if self.network else (without_network() or ())
            process = subprocess.Popen(
                [*prefix, *command],
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            # A program that exits early, by sys.exit(0) say, has not run its tests: a secret word marks the end.
            word, said = secrets.token_hex(16), b""
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    said, _ = process.communicate(f"{word}\n{program}".encode(), timeout=self.seconds + 1)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with all processes it has started
                process.wait()
        return float(process.returncode == 0 and said == word.encode())


# Sets the limits in the new process itself, then runs the program read from its standard input.
_LIMITED = rf"""
import os, resource, sys
seconds, memory = float(sys.argv[1]), int(sys.argv[2])
for what, most in ((resource.RLIMIT_CPU, int(seconds) + 1), (resource.RLIMIT_AS, memory),
                   (resource.RLIMIT_FSIZE, {_FILE_BYTES}), (resource.RLIMIT_NPROC, {_PROCESSES}),
                   (resource.RLIMIT_CORE, 0)):
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))
word, _, program = sys.stdin.read().partition("\n")
end = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
sys.argv = ["answer.py"]
exec(compile(program, "answer.py", "exec"), {{"__name__": "__main__"}})
os.write(end, word.encode())
"""
