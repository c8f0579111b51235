"""Processes that others have started, read from /proc: ranks, loader workers, tokenizing processes."""

import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    pid: int
    started: str  # in clock ticks since boot: distinguishes processes with a reused id
    parent: int
    name: str
    command: str

    def alive(self) -> bool:
        found = read(self.pid)
        return found is not None and found.started == self.started


def read(pid: int) -> Process | None:
    """Returns the process, or None if it is gone, or has ended and has not been waited for."""
    try:
        named, _, rows = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
        state, parent, *rest = rows.split()
        command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state in "ZX" else Process(pid, rest[17], int(parent), named.partition("(")[2], command)


def everything() -> list[Process]:
    """Returns all processes of this machine."""
    found = [read(int(p.name)) for p in Path("/proc").iterdir() if p.name.isdigit()]
    return [process for process in found if process is not None]


def below(pid: int) -> list[Process]:
    """Returns all descendants of a process."""
    children: dict[int, list[Process]] = {}
    for process in everything():
        children.setdefault(process.parent, []).append(process)
    found, todo = [], [pid]
    while todo:
        new = children.get(todo.pop(), [])
        found += new
        todo += [process.pid for process in new]
    return found


def started_by(parent: int, module: str) -> list[Process]:
    """Returns the direct children of a process that run `python -m module`."""
    return [p for p in below(parent) if p.parent == parent and f"-m {module} " in p.command]


def ranks(parent: int) -> list[int]:
    """Returns the process ids of a launcher's ranks, rank 0 first."""
    found = started_by(parent, "lmtrain.run.launch")
    numbers = {int(variable(p.pid, "RANK") or -1): p.pid for p in found}
    forked = [p for p in below(parent) if p.parent == parent and p.name.startswith("rank ")]  # by forked_ranks
    numbers |= {int(p.name.removeprefix("rank ")): p.pid for p in forked}
    return [pid for _, pid in sorted(numbers.items())]


def variable(pid: int, name: str) -> str:
    """Returns an environment variable of a process as it was started, or an empty text."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_text().split("\0")
    except (FileNotFoundError, PermissionError, ProcessLookupError):
        return ""
    return next((v.partition("=")[2] for v in variables if v.startswith(f"{name}=")), "")


def wait_until_gone(processes: list[Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while left := [p for p in processes if p.alive()]:
        assert time.monotonic() < deadline, f"still running after {seconds} s: {left}"
        time.sleep(0.1)
