"""Measures the cost of waiting OpenMP threads: a step on an idle machine, and beside processes that keep cores busy.

python benchmarks/spin.py           what is measured, and how, is in benchmarks/README.md
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

# OpenMP settings of each contender. 300,000 spins are libgomp's default; "watch" is what lmtrain.train does.
CONTENDERS = {
    "spin_300000": {"GOMP_SPINCOUNT": "300000"},
    "watch": {},
    "spin_30000": {"GOMP_SPINCOUNT": "30000"},
    "spin_10000": {"GOMP_SPINCOUNT": "10000"},
    "spin_1000": {"GOMP_SPINCOUNT": "1000"},
    "spin_0": {"GOMP_SPINCOUNT": "0"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
}
FIRST = "spin_300000"
WARMUP = 3  # steps
SETTLING_S = 5.0  # steps before each turn of "watch", which sees the others' turns as other programs' work
BUSY = """
import os, sys
while os.getppid() == int(sys.argv[1]):
    for _ in range(100_000):
        pass
"""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="default: %(default)s")
    parser.add_argument("--turns", type=int, default=5, help="turns of each contender (%(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="of a turn (%(default)s)")
    parser.add_argument("--busy", type=int, default=1, help="busy processes beside (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)  # the contender that this process is
    options = parser.parse_args(argv)
    options.contenders = options.contenders.split(",")
    unknown = [name for name in options.contenders if name not in CONTENDERS]
    if unknown or options.contenders[0] != FIRST:
        parser.error(f"--contenders begins with {FIRST}, then any of {', '.join(CONTENDERS)}")
    return options


def step_when_asked(name: str) -> None:
    """Runs a contender: for each number n read, runs n steps of a small transformer, writes the milliseconds of one."""
    from lmtrain.distributed import spinning

    if name == "watch":
        spinning.watch()
    import torch

    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(128, 4, 512, 0.0, batch_first=True)
    model, rows = torch.nn.TransformerEncoder(layer, 4), torch.randn(12, 64, 128)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    print("ready", flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        print(1000 * (time.perf_counter() - began) / int(line), flush=True)


@contextmanager
def started(name: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, __file__, "--worker", name]
    kept = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")}
    env = {**kept, **CONTENDERS[name]}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, text=True)
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise SystemExit(f"{name} could not start: see above")
        ms(process, WARMUP)
        yield process
    finally:
        process.kill()
        process.wait()


def ms(process: "subprocess.Popen[str]", steps: int) -> float:
    """Returns the milliseconds per step of a contender, over a number of steps."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{steps}\n")
    process.stdin.flush()
    return float(process.stdout.readline())


@contextmanager
def busy(number: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY, str(os.getpid())]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def measure(options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Returns step times in ms by state and contender; contenders alternate, so drift affects all equally."""
    times: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        processes = {name: stack.enter_context(started(name)) for name in options.contenders}
        for state, number, steps in (("alone", 0, options.steps), ("beside", options.busy, options.steps)):
            times[state] = {name: [] for name in processes}
            with busy(number):
                for _ in range(options.turns):
                    for name, process in processes.items():
                        ends = time.monotonic() + (SETTLING_S if name == "watch" else 0.0)
                        while time.monotonic() < ends:
                            ms(process, WARMUP)
                        times[state][name].append(ms(process, steps))
    return times


def show(times: dict[str, dict[str, list[float]]], options: argparse.Namespace, load: tuple[float, float]) -> None:
    table = Table(title=f"ms/step, median (tenth) of {options.turns} turns")
    for column in ("", "alone", f"over {FIRST}", f"beside {options.busy} busy", f"{FIRST} over it"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name in options.contenders:
        alone, beside = times["alone"][name], times["beside"][name]
        ratios = [a / b for a, b in zip(alone, times["alone"][FIRST], strict=True)]
        table.add_row(
            name,
            f"{median(alone):.1f} ({tenth(alone):.1f})",
            f"{median(ratios):.3f} ({tenth(alone) / tenth(times['alone'][FIRST]):.3f})",
            f"{median(beside):.1f} ({tenth(beside):.1f})",
            f"{median(times['beside'][FIRST]) / median(beside):.2f}",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    print(f"load average of others and this, before and after: {load[0]:.1f}, {load[1]:.1f}")


def tenth(values: list[float]) -> float:
    """Returns the 10th percentile: on a machine with other work, the least disturbed turns."""
    return sorted(values)[len(values) // 10]


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    if options.worker:
        step_when_asked(options.worker)
        return 0
    from machine import setting, warn_if_busy

    warn_if_busy()
    before = os.getloadavg()[0]
    times = measure(options)
    show(times, options, (before, os.getloadavg()[0]))
    print(setting())
    if options.json:
        options.json.write_text(json.dumps(times, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
