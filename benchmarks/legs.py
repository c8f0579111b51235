"""Legs: processes of one contender each, timed from outside.

Every contender reports every few steps, just after it has read the loss from the device. Only the times of these
reports are compared, not any contender's own measurement.
"""

import os
import runpy
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent  # callbacks of runs are imported from here
Lines = list[tuple[float, str]]  # output of a process: each line with its arrival time
Stamps = list[tuple[int, float]]  # (optimizer steps done, wall-clock seconds)
Measured = TypeVar("Measured")
FORK = False  # start Python legs as forks of this process, which saves their imports; only while it uses no GPU


class Skipped(Exception):
    """Raised with the reason if a contender can't be measured here."""


class Failed(Exception):
    """Raised if a leg ended with an error; the message contains the end of its output."""


@dataclass
class Leg:
    """A process to run, and how to parse its output."""

    command: list[str]
    stamps: Callable[[Lines], Stamps]
    facts: Callable[[Lines], dict[str, Any]] = lambda _: {}  # parameters, last_loss, if it prints them
    cwd: Path | None = None
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Run:
    """A finished leg."""

    stamps: Stamps
    facts: dict[str, Any]
    seconds: float  # from start to exit, including imports, model building and compilation
    peak_gib: float  # peak resident memory of the process


class _Forked:
    """What `run` needs of a subprocess.Popen, for a Python command that runs in a fork of this process."""

    def __init__(self, command: list[str], cwd: Path | None, env: dict[str, str]) -> None:
        read, write = os.pipe()
        self.pid, self.returncode = os.fork(), 0
        if self.pid == 0:
            os.dup2(write, 1)
            os.dup2(write, 2)
            from lmtrain.distributed import ranks

            # What this process does at its end, such as to remove its folder or to join its threads, is not for a fork.
            ranks.leave = sys.exit
            os._exit(_run_python(command[1:], cwd, env))
        os.close(write)
        self.stdout = os.fdopen(read, errors="replace")


def _run_python(argv: list[str], cwd: Path | None, env: dict[str, str]) -> int:
    """Does what `python ARGV` would do and returns the exit code."""
    code: Any = 0
    try:
        sys.stdout, sys.stderr = (os.fdopen(os.dup(n), "w", buffering=1) for n in (1, 2))
        os.environ.update(env)
        os.chdir(cwd or ".")
        sys.argv = argv[1:] if argv[0] == "-m" else argv
        if argv[0] == "-m":
            runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        print(code)
    sys.stdout.flush()
    return code if isinstance(code, int) else int(code is not None)


def _start(leg: Leg, env: dict[str, str]) -> Any:
    if FORK and leg.command[0] == sys.executable:
        return _Forked(leg.command, leg.cwd, env)
    return subprocess.Popen(
        leg.command,
        cwd=leg.cwd,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def run(leg: Leg, threads: int | None) -> Run:
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    env = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": path,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    env.setdefault("CUDA_VISIBLE_DEVICES", "0")  # transformers' Trainer would use all GPUs
    if threads is not None:
        env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    started, lines = time.time(), []
    process = _start(leg, env | leg.env)
    for line in process.stdout:
        lines.append((time.time(), line.rstrip()))
    _, status, usage = os.wait4(process.pid, 0)
    code = process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.time() - started
    if code != 0:
        last = [text for _, text in lines[-15:]] or ["it printed nothing"]
        raise Failed(f"exit code {code}, {last[-1]}\n" + "\n".join(last))
    kib = usage.ru_maxrss / 1024 if sys.platform == "darwin" else usage.ru_maxrss
    return Run(leg.stamps(lines), leg.facts(lines), seconds, kib / 1024**2)


def say_left_out(missing: dict[str, str]) -> None:
    """Prints why contenders are missing, one line each."""
    for name, reason in missing.items():
        print(f"{name} left out: {reason.splitlines()[0]}")


def interval_ms(stamps: Stamps, warmup: int) -> list[float]:
    """Returns the milliseconds per step between successive reports after the warm-up."""
    counted = [stamp for stamp in stamps if stamp[0] >= warmup]
    intervals = [1000 * (t2 - t1) / (s2 - s1) for (s1, t1), (s2, t2) in pairwise(counted)]
    if not intervals:
        raise Failed(f"it reported {len(stamps)} times, which leaves no interval after {warmup} steps")
    return intervals


def interleaved(
    names: list[str], rounds: int, folder: Path, measure: Callable[[str, Path], tuple[Measured, str]]
) -> tuple[dict[str, list[Measured]], dict[str, str]]:
    """Returns (rounds by contender, reasons for missing ones); a contender that fails once is dropped.

    measure: runs a leg of a contender in an empty folder; returns the result and a description of it.
    """
    results: dict[str, list[Measured]] = {name: [] for name in names}
    missing: dict[str, str] = {}
    for number in range(1, rounds + 1):
        for name in [n for n in names if n not in missing]:
            leg_folder = folder / f"{number}_{name}"
            leg_folder.mkdir()
            try:
                measured, words = measure(name, leg_folder)
            except (Skipped, Failed) as reason:
                missing[name] = str(reason)
                print(f"{name} left out: {reason}", flush=True)
                continue
            results[name].append(measured)
            print(f"round {number}/{rounds}  {words}", flush=True)
    return {name: legs for name, legs in results.items() if legs and name not in missing}, missing
