"""Shared code of the fine-tuning benchmarks: rounds of interleaved legs, and the table."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ends
import torch
from legs import Leg, Lines, Skipped, interleaved, run, say_left_out
from machine import machine, setting, warn_if_busy
from rich.console import Console
from rich.table import Table
from shapes import LOGGER
from workload import MARKED_CHATML, Row, read_rows, write_model

REPO = Path(__file__).resolve().parents[1]
LEARNING_RATE = 1e-4  # constant, the same for every contender
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "bf16-true": "bf16-true", "fp8": "fp8"}
LORA = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}


@dataclass
class Task:
    """The task that all contenders get."""

    data: Path  # JSON Lines file
    model: Path
    options: argparse.Namespace


@dataclass
class Round:
    """One leg of one contender."""

    per_s: float  # non-padding tokens, or pairs, per second after the warm-up
    peak_gib: float  # of GPU memory, or of the process without a GPU
    process_s: float


Contender = Callable[[Task, Path], Leg]


def parser(doc: str | None, contenders: dict[str, Contender], steps: int) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--contenders", default=",".join(contenders), help="default: %(default)s")
    made.add_argument("--data", type=Path, help="rows in a .jsonl or .parquet file or a folder of them; default: made")
    made.add_argument("--model", type=Path, help="a folder with a model's config and tokenizer; default: a small Llama")
    made.add_argument("--made", type=int, default=2000, help="rows that are made, without --data (%(default)s)")
    made.add_argument("--lora", dest="peft", action="store_const", const="lora",
                      help="train LoRA of rank 16 on all linear layers, not all weights")  # fmt: skip
    made.add_argument("--peft", help="another adapter: qlora, qlora_8bit (lmtrain only)")
    made.add_argument("--micro-batch-size", type=int, help="per forward; default: a whole step's")
    made.add_argument("--trl-micro-batch-size", type=int, help="TRL's, which holds all logits; default: as the others'")
    made.add_argument("--seq-len", type=int, default=1024, help="longest row in tokens (%(default)s)")
    made.add_argument("--rounds", type=int, default=5, help="legs of each contender, interleaved (%(default)s)")
    made.add_argument("--steps", type=int, default=steps, help="optimizer steps of a leg (%(default)s)")
    made.add_argument("--warmup", type=int, default=5, help="first steps that do not count (%(default)s)")
    made.add_argument("--every", type=int, default=1, help="steps between two times taken (%(default)s)")
    made.add_argument("--scratch", type=Path, help="keep the model's weights here for the next call")
    made.add_argument("--precision", choices=tuple(PRECISIONS), help="default: fp32 on a CPU, bf16 on a GPU")
    made.add_argument("--threads", type=int, help="CPU threads; default: torch's choice")
    made.add_argument("--trl-python", type=Path, default=REPO / ".venv-trl/bin/python", help="default: make env-trl's")
    made.add_argument("--json", type=Path, help="also write the numbers to this file")
    return made


def parse(made: argparse.ArgumentParser, contenders: dict[str, Contender], argv: list[str] | None) -> Any:
    options = made.parse_args(argv)
    options.contenders = options.contenders.split(",")
    unknown = [name for name in options.contenders if name not in contenders]
    if unknown:
        made.error(f"--contenders {','.join(unknown)}: choose among {', '.join(contenders)}")
    if options.steps <= options.warmup or options.steps % options.every or options.warmup % options.every:
        made.error(
            f"--steps {options.steps} leaves nothing after --warmup {options.warmup}, each {options.every} steps"
        )
    options.precision = options.precision or ("bf16" if torch.cuda.is_available() else "fp32")
    return options


def prepare(
    folder: Path, options: argparse.Namespace, made_rows: Callable[[int], list[Row]], columns: list[str]
) -> Task:
    rows = read_rows(options.data.expanduser(), 2000) if options.data else made_rows(options.made)
    rows = [{name: row[name] for name in columns} for row in rows]
    # Real conversations sometimes contain an empty turn, which lmtrain refuses and TRL trains on.
    rows = [row for row in rows if all(turn["content"] for turn in row.get("messages", []))]
    data, model = folder / "rows.jsonl", (options.scratch or folder) / "model"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if not model.exists():  # writing some gigabytes anew takes longer than a leg
        write_model(model, options.model, rows)
    return Task(data, model, options)


def lmtrain_leg(task: Task, folder: Path, settings: dict[str, Any], counted: Callable[[Row], float]) -> Leg:
    """The lmtrain.train command, ended after its last timed step; its reports are the rows of metrics.jsonl."""
    options = task.options
    common = {
        "data.path": task.data,
        "data.val_fraction": 0,
        "data.seq_len": options.seq_len,
        "data.chat_template": "chatml",
        "data.cache_dir": task.data.parent / "cache",
        "model": "pretrained",
        "model.name_or_path": task.model,
        "optimizer.lr": LEARNING_RATE,
        "schedule": "constant",
        "trainer.log_every_n_steps": options.every,
        "trainer.save_every_n_steps": "null",
        "trainer.precision": PRECISIONS[options.precision],
        "export.enabled": "false",
        "run.dir": folder / "run",
    }
    argv = [*(f"{key}={value}" for key, value in {**common, **settings}.items()), *LOGGER]
    argv += [*ends.words(options.steps), *([f"peft={options.peft}"] if options.peft else [])]

    def rows() -> list[Row]:
        found = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
        return [row for row in found if "train/loss" in row and row["step"] % options.every == 0]

    return Leg(
        [sys.executable, "-m", "lmtrain.train", *argv],
        stamps=lambda _: [(counted(row), row["time"]) for row in rows()],
        facts=lambda _: {"gpu_gib": rows()[-1].get("memory_gib")},
    )


def trl_leg(task: Task, folder: Path, objective: str, settings: dict[str, Any], counted: Callable[[Row], float]) -> Leg:
    python, options = task.options.trl_python, task.options
    if not python.exists():
        raise Skipped(f"TRL is not there ({python}): make env-trl")
    bf16 = options.precision != "fp32"
    arguments = {
        "max_steps": options.steps,
        "max_length": options.seq_len,
        "learning_rate": LEARNING_RATE,
        "bf16": bf16,
        "logging_steps": options.every,
    }
    if options.peft not in (None, "lora"):
        raise Skipped(f"peft={options.peft} is lmtrain's")
    spec = {
        "objective": objective,
        "model": str(task.model),
        "data": str(task.data),
        "template": MARKED_CHATML,
        "lora": LORA if options.peft else None,
        "weights": "bfloat16" if options.precision == "bf16-true" else "float32",
        "arguments": {**arguments, **settings},
    }
    (folder / "spec.json").write_text(json.dumps(spec))

    def stamps(lines: Lines) -> list[tuple[float, float]]:
        found = [json.loads(text) for _, text in lines if text.startswith('{"step"')]
        return [(counted(row), row["time"]) for row in found]

    def facts(lines: Lines) -> Row:
        return next((json.loads(text) for _, text in lines if text.startswith('{"gpu_gib"')), {})

    command = [str(python), str(REPO / "benchmarks/leg_trl.py"), str(folder / "spec.json")]
    return Leg(command, stamps, facts, cwd=folder)


def measure(
    task: Task, contenders: dict[str, Contender], folder: Path
) -> tuple[dict[str, list[Round]], dict[str, str]]:
    """See `legs.interleaved`."""
    options = task.options

    def leg(name: str, leg_folder: Path) -> tuple[Round, str]:
        done = run(contenders[name](task, leg_folder), options.threads)
        (first, since), (last, until) = done.stamps[options.warmup // options.every - 1], done.stamps[-1]
        peak_gib = done.facts.get("gpu_gib") or done.peak_gib
        measured = Round((last - first) / (until - since), peak_gib, done.seconds)
        return measured, f"{name:<16} {measured.per_s:10,.1f} /s"

    return interleaved(options.contenders, options.rounds, folder, leg)


def show(results: dict[str, list[Round]], missing: dict[str, str], options: argparse.Namespace, unit: str) -> None:
    """Prints each contender's median, and per round the first one's ratio to it, in which machine drift cancels out."""
    first = next(iter(results.values()))
    table = Table()
    for column in ("", f"{unit}/s", f"{next(iter(results))} over it", "(least, most)", "peak GiB", "process s"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for name, legs in results.items():
        over = [a.per_s / b.per_s for a, b in zip(first, legs, strict=True)]
        table.add_row(
            name,
            f"{median(leg.per_s for leg in legs):,.1f}",
            f"{median(over):.2f}",
            f"({min(over):.2f}, {max(over):.2f})",
            f"{median(leg.peak_gib for leg in legs):.2f}",
            f"{median(leg.process_s for leg in legs):.1f}",
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    say_left_out(missing)
    what = options.peft or "all weights"
    print(f"{what}, {options.precision}, {setting()}")


def main(
    task_of: Callable[[Path, argparse.Namespace], Task],
    contenders: dict[str, Contender],
    options: argparse.Namespace,
    unit: str,
) -> int:
    warn_if_busy()
    with tempfile.TemporaryDirectory(prefix="lmtrain_benchmark_") as name:
        results, missing = measure(task_of(Path(name), options), contenders, Path(name))
    if not results:
        return 1
    show(results, missing, options, unit)
    if options.json:
        rounds = {name: [asdict(leg) for leg in legs] for name, legs in results.items()}
        asked = {key: value if isinstance(value, int | list) else str(value) for key, value in vars(options).items()}
        numbers = {"machine": machine(), "unit": unit, "options": asked, "rounds": rounds, "left_out": missing}
        options.json.write_text(json.dumps(numbers, indent=2) + "\n")
    return 0
