"""A leg is one contender's process, timed from outside.

Every contender reports each few steps, just after it has read the loss from the device; the times of these reports are
all that is compared, so nobody's own stopwatch is trusted.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

Lines = list[tuple[float, str]]  # what a process printed, each line with the time it came
Stamps = list[tuple[int, float]]  # (optimizer steps done, seconds on the wall clock)
Measured = TypeVar("Measured")
LIMIT_S: float | None = None  # a leg that takes longer is ended, its children with it


class Skipped(Exception):
    """Why a contender can't be measured here."""


class Failed(Exception):
    """A leg ended with an error; the message holds the end of what it printed."""


@dataclass
class Leg:
    """A process to run, and how to read what it printed."""

    command: list[str]
    stamps: Callable[[Lines], Stamps]
    facts: Callable[[Lines], dict[str, Any]] = lambda _: {}  # parameters, last_loss: where it says so
    cwd: Path | None = None
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Run:
    """A finished leg."""

    stamps: Stamps
    facts: dict[str, Any]
    seconds: float  # from start to exit: imports, building, compiling and saving included
    peak_gib: float  # most resident memory of the process


def run(leg: Leg, threads: int | None) -> Run:
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env.setdefault("CUDA_VISIBLE_DEVICES", "0")  # transformers' Trainer would use them all
    if threads is not None:
        env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    started, lines = time.time(), []
    process = subprocess.Popen(
        leg.command,
        cwd=leg.cwd,
        env=env | leg.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=LIMIT_S is not None,
    )
    assert process.stdout is not None
    timer = threading.Timer(LIMIT_S or 0, os.killpg, (process.pid, signal.SIGKILL))
    if LIMIT_S is not None:
        timer.start()
    for line in process.stdout:
        lines.append((time.time(), line.rstrip()))
    timer.cancel()
    _, status, usage = os.wait4(process.pid, 0)
    code = process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.time() - started
    if LIMIT_S is not None and code == -signal.SIGKILL:
        lines.append((time.time(), f"ended after {seconds:.0f} s, the limit of a leg"))
    if code != 0:
        last = [text for _, text in lines[-15:]] or ["it printed nothing"]
        raise Failed(f"exit code {code}, {last[-1]}\n" + "\n".join(last))
    kib = usage.ru_maxrss / 1024 if sys.platform == "darwin" else usage.ru_maxrss
    return Run(leg.stamps(lines), leg.facts(lines), seconds, kib / 1024**2)


def say_left_out(missing: dict[str, str]) -> None:
    """The reasons why contenders are missing, a line each."""
    for name, reason in missing.items():
        print(f"{name} left out: {reason.splitlines()[0]}")


def interval_ms(stamps: Stamps, warmup: int) -> list[float]:
    """Milliseconds per step between successive reports after the warm-up."""
    counted = [stamp for stamp in stamps if stamp[0] >= warmup]
    intervals = [1000 * (t2 - t1) / (s2 - s1) for (s1, t1), (s2, t2) in pairwise(counted)]
    if not intervals:
        raise Failed(f"it reported {len(stamps)} times, which leaves no interval after {warmup} steps")
    return intervals


def interleaved(
    names: list[str], rounds: int, folder: Path, measure: Callable[[str, Path], tuple[Measured, str]]
) -> tuple[dict[str, list[Measured]], dict[str, str]]:
    """(rounds by contender, why the others are missing). A contender that fails once is out.

    measure: runs a leg of a contender in an empty folder; returns what was measured, and it in words.
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
