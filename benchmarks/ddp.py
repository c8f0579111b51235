"""Measures how well two ranks use two cores: ddp and fsdp, one thread per rank, against one process with one thread.

python benchmarks/ddp.py            what is measured, and how, is in benchmarks/README.md
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import mean, median

from legs import Leg, Lines, Stamps, interleaved, interval_ms, run, say_left_out
from machine import machine, setting, versions, warn_if_busy
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, overrides, write_bins

RANKS = 2


@dataclass
class Round:
    """One leg of one contender."""

    step_ms: float  # median over intervals of `every` steps
    process_s: float


def two_ranks(strategy: str) -> list[str]:
    return [f"trainer.devices={RANKS}", f"trainer.strategy={strategy}"]


# Settings of each contender besides the shape; `apart` is two independent processes with half the rows each.
CONTENDERS: dict[str, list[str]] = {
    "one": ["trainer.devices=1"],
    "apart": ["trainer.devices=1"],
    "ddp": two_ranks("ddp"),
    "fsdp": two_ranks("fsdp"),
}


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="nano", help="default: %(default)s")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="default: %(default)s")
    parser.add_argument("--rows", type=int, default=16, help="rows per step, whatever the ranks (%(default)s)")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="rows per forward (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="legs of each contender, interleaved (%(default)s)")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of a leg (%(default)s)")
    parser.add_argument("--warmup", type=int, default=10, help="first steps that do not count (%(default)s)")
    parser.add_argument("--every", type=int, default=5, help="steps between two times taken (%(default)s)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(argv)
    options.contenders = options.contenders.split(",")
    unknown = [name for name in options.contenders if name not in CONTENDERS]
    if unknown:
        parser.error(f"--contenders {','.join(unknown)}: choose among {', '.join(CONTENDERS)}")
    if "one" not in options.contenders:
        parser.error("--contenders leaves out one, which all are compared with")
    if options.rows % (RANKS * options.micro_batch_size) != 0:
        parser.error(f"--rows {options.rows}: not a multiple of {RANKS} times --micro-batch-size, which shares alike")
    if options.steps < options.warmup + options.every:
        parser.error(f"--steps {options.steps} leaves no {options.every} steps after --warmup {options.warmup}")
    return options


def settings(name: str, options: argparse.Namespace, bins: Path) -> list[str]:
    """Returns the overrides of a contender."""
    rows = options.rows // RANKS if name == "apart" else options.rows
    shape = replace(SHAPES[options.shape], rows=rows)
    given = overrides(
        shape,
        bins,
        micro_batch_size=options.micro_batch_size,
        steps=options.steps,
        every=options.every,
        precision=options.precision,
    )
    mine = [*CONTENDERS[name], "trainer.accelerator=cpu", "trainer.num_threads=1"]
    return [o for o in given if not o.startswith("trainer.devices=")] + mine


def leg(words: list[str], folder: Path) -> Leg:
    def stamps(_: Lines) -> Stamps:
        found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        return [(row["step"], row["time"]) for row in found if "step_ms" in row]

    return Leg([sys.executable, "-m", "lmtrain.train", *words, f"run.dir={folder}"], stamps)


def measurer(options: argparse.Namespace, bins: Path) -> Callable[[str, Path], tuple[Round, str]]:
    """See `legs.interleaved`."""

    def measure(name: str, folder: Path) -> tuple[Round, str]:
        at_a_time = RANKS if name == "apart" else 1
        words = settings(name, options, bins)
        with ThreadPoolExecutor(at_a_time) as pool:
            done = list(pool.map(lambda n: run(leg(words, folder / f"run_{n}"), threads=1), range(at_a_time)))
        step_ms = mean(median(interval_ms(d.stamps, options.warmup)) for d in done)
        return Round(step_ms, max(d.seconds for d in done)), f"{name:<6} {step_ms:9.2f} ms/step"

    return measure


def efficiencies(legs: list[Round], one: list[Round]) -> list[float]:
    """Returns for each round: the time of one process / (ranks x the time with that many ranks)."""
    return [alone.step_ms / (RANKS * leg.step_ms) for leg, alone in zip(legs, one, strict=True)]


def show(results: dict[str, list[Round]], missing: dict[str, str], options: argparse.Namespace) -> None:
    seq_len = SHAPES[options.shape].seq_len
    table = Table(title=f"{options.shape}: {options.rows} rows of {seq_len} tokens, {options.precision}, {RANKS} ranks")
    for column in ("", "ms/step", "tokens/s", "of the ideal", "(least, most)", "process s"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, legs in results.items():
        step_ms = median(leg.step_ms for leg in legs)
        found = efficiencies(legs, results["one"])
        table.add_row(
            name,
            f"{step_ms:.2f}",
            f"{1000 * options.rows * seq_len / step_ms:,.0f}",
            "" if name == "one" else f"{median(found):.3f}",
            "" if name == "one" else f"({min(found):.3f}, {max(found):.3f})",
            f"{median(leg.process_s for leg in legs):.1f}",
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    say_left_out(missing)
    print(setting())


def as_json(results: dict[str, list[Round]], missing: dict[str, str], options: argparse.Namespace) -> str:
    return json.dumps(
        {
            "machine": machine(),
            "versions": versions(),
            "options": {k: v for k, v in vars(options).items() if isinstance(v, int | str | list)},
            "rounds": {name: [asdict(leg) for leg in legs] for name, legs in results.items()},
            "step_ms": {name: median(leg.step_ms for leg in legs) for name, legs in results.items()},
            "efficiency": {n: median(efficiencies(legs, results["one"])) for n, legs in results.items() if n != "one"},
            "left_out": missing,
        },
        indent=2,
    )


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    warn_if_busy()
    with tempfile.TemporaryDirectory(prefix="lmtrain_benchmark_") as name:
        folder = Path(name)
        vocab_size = SHAPES[options.shape].vocab_size
        write_bins(folder / "bins", vocab_size, vocab_size)
        measure = measurer(options, folder / "bins")
        results, missing = interleaved(options.contenders, options.rounds, folder, measure)
        if "one" not in results:
            return 1
        show(results, missing, options)
        if options.json:
            options.json.write_text(as_json(results, missing, options) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
