"""Measures lmtrain.train against a bare PyTorch loop, transformers' Trainer, litgpt and nanoGPT, interleaved.

python benchmarks/pretrain.py            what is measured, and how, is in benchmarks/README.md
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
from contenders import CONTENDERS, Job
from legs import interleaved, interval_ms, run, say_left_out
from machine import machine, setting, versions, warn_if_busy
from rich.console import Console
from rich.table import Table
from shapes import SHAPES, overrides, write_bins

from lmtrain.config import compose as config


@dataclass
class Round:
    """One leg of one contender."""

    step_ms: float  # median over intervals of `every` steps
    process_s: float  # from start to exit, including imports, model building and compilation
    peak_gib: float  # peak resident memory of the process
    parameters: int | None = None  # if the contender reports it
    last_loss: float | None = None


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="default: nano on a CPU, small on a GPU")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="legs of each contender, interleaved (%(default)s)")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of a leg (%(default)s)")
    parser.add_argument("--warmup", type=int, default=30, help="first steps that do not count (%(default)s)")
    parser.add_argument("--every", type=int, default=10, help="steps between two times taken (%(default)s)")
    parser.add_argument("--rows", type=int, help="rows per step, instead of the shape's")
    parser.add_argument("--micro-batch-size", type=int, help="rows per forward; default: all of a step's")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="default: fp32 on a CPU, bf16 on a GPU")
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's choice")
    parser.add_argument("--litgpt-python", type=Path, help="a python that has litgpt; default: one is installed")
    parser.add_argument("--nanogpt", type=lambda p: Path(p).resolve(), help="a folder with nanoGPT's train.py")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args(argv)
    options.contenders = options.contenders.split(",")
    unknown = [name for name in options.contenders if name not in CONTENDERS]
    if unknown:
        parser.error(f"--contenders {','.join(unknown)}: choose among {', '.join(CONTENDERS)}")
    if options.steps < options.warmup + options.every:
        parser.error(f"--steps {options.steps} leaves no {options.every} steps after --warmup {options.warmup}")
    cuda = torch.cuda.is_available()
    options.shape = options.shape or ("small" if cuda else "nano")
    options.precision = options.precision or ("bf16" if cuda else "fp32")
    return options


def make_job(options: argparse.Namespace, folder: Path) -> Job:
    """Writes the bins and composes the config from which the settings of all contenders are derived."""
    shape = SHAPES[options.shape]
    shape = replace(shape, rows=options.rows or shape.rows)
    chosen = overrides(
        shape,
        folder / "bins",
        micro_batch_size=options.micro_batch_size or shape.rows,
        steps=options.steps,
        every=options.every,
        precision=options.precision,
    )
    cfg = config.check(config.compose(chosen))
    multiple = cfg.model.vocab_multiple_of
    embedding_rows = -(-shape.vocab_size // multiple) * multiple
    write_bins(folder / "bins", shape.vocab_size, embedding_rows)
    return job_of(options, chosen, folder / "bins", embedding_rows)


def job_of(options: argparse.Namespace, chosen: list[str], bins: Path, embedding_rows: int = 0) -> Job:
    """embedding_rows: of the model, which only litgpt has to be told."""
    cfg, cuda = config.check(config.compose(chosen)), torch.cuda.is_available()
    return Job(cfg, chosen, bins, embedding_rows, options.steps, options.every, options.precision, cuda)


def measure(options: argparse.Namespace, job: Job, folder: Path) -> tuple[dict[str, list[Round]], dict[str, str]]:
    """See `legs.interleaved`."""

    def leg(name: str, leg_folder: Path) -> tuple[Round, str]:
        done = run(CONTENDERS[name](job, leg_folder, options), options.threads)
        step_ms = median(interval_ms(done.stamps, options.warmup))
        words = f"{name:<12} {step_ms:9.2f} ms/step {done.peak_gib:6.2f} GiB"
        return Round(step_ms, done.seconds, done.peak_gib, **done.facts), words

    return interleaved(options.contenders, options.rounds, folder, leg)


def ratios(legs: list[Round], base: list[Round]) -> list[float]:
    """Returns per round the step time relative to the baseline's, so that drift of the machine cancels out."""
    return [leg.step_ms / other.step_ms for leg, other in zip(legs, base, strict=True)]


def show(results: dict[str, list[Round]], missing: dict[str, str], options: argparse.Namespace, job: Job) -> None:
    data = job.config.data
    tokens = data.global_batch_size * data.seq_len
    table = Table(title=f"{options.shape}: {data.global_batch_size} rows of {data.seq_len} tokens, {options.precision}")
    base = results.get("bare")
    for column in ("", "ms/step", "tokens/s", "time / bare", "(least, most)", "process s", "peak GiB", "parameters"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, legs in results.items():
        step_ms = median(leg.step_ms for leg in legs)
        over = ratios(legs, base) if base else None
        table.add_row(
            name,
            f"{step_ms:.2f}",
            f"{1000 * tokens / step_ms:,.0f}",
            f"{median(over):.3f}" if over else "",
            f"({min(over):.3f}, {max(over):.3f})" if over else "",
            f"{median(leg.process_s for leg in legs):.1f}",
            f"{median(leg.peak_gib for leg in legs):.2f}",
            f"{legs[0].parameters:,}" if legs[0].parameters else "",
        )
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table)
    if base and "lmtrain" in results:
        cost = median(ratios(results["lmtrain"], base)) - 1
        print(f"Trainer, callbacks and loader over the bare loop: {100 * cost:+.1f} %")
    say_left_out(missing)
    print(setting())


def as_json(results: dict[str, list[Round]], missing: dict[str, str], options: argparse.Namespace, job: Job) -> str:
    base = results.get("bare")
    asked = {k: v for k, v in vars(options).items() if isinstance(v, int | str | list) or v is None}
    return json.dumps(
        {
            "machine": machine(),
            "versions": versions(),
            "options": asked,
            "overrides": [o for o in job.overrides if not o.startswith("data.path=")],
            "rounds": {name: [asdict(leg) for leg in legs] for name, legs in results.items()},
            "step_ms": {name: median(leg.step_ms for leg in legs) for name, legs in results.items()},
            "ratio_to_bare": {n: median(ratios(legs, base)) for n, legs in results.items()} if base else None,
            "left_out": missing,
        },
        indent=2,
    )


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    warn_if_busy()
    with tempfile.TemporaryDirectory(prefix="lmtrain_benchmark_") as name:
        folder = Path(name)
        job = make_job(options, folder)
        results, missing = measure(options, job, folder)
        if not results:
            return 1
        show(results, missing, options, job)
        if options.json:
            options.json.write_text(as_json(results, missing, options, job) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
