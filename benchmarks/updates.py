"""Compares what budget.updates=auto plans for question-answer pairs with a grid of twelve recipes.

python benchmarks/updates.py --model MODEL --pairs PAIRS.jsonl --out FOLDER [--text TEXT.txt] [--peft lora]

Each run is the command that a person types, `train pairs.jsonl model=MODEL`, and the same with other batches (half and
twice), epochs (the planned number and twice that) and rates (a third, the same, three times). A tenth of the pairs is
held out of all runs alike. Shown are the loss on it, the share of trained answers that are exactly right when asked
again, and by how much the loss on other text rises, which the model knew before (--text).
"""

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from machine import setting, warn_if_busy
from rich.console import Console
from rich.table import Table

ASKED = 100  # trained pairs that are asked again
# Batch, epochs and rate of a recipe, relative to the planned ones.
RECIPES = list(itertools.product((0.5, 2.0), (1, 2), (1 / 3, 1.0, 3.0)))


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or a name of the hub")
    parser.add_argument("--pairs", type=Path, required=True, help="JSON lines of questions and answers")
    parser.add_argument("--text", type=Path, help="text that the model could foretell before")
    parser.add_argument("--peft", default="none", help="none or lora (%(default)s)")
    parser.add_argument("--recipes", type=int, default=len(RECIPES), help="recipes of the grid (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="a folder for runs and numbers")
    return parser.parse_args(argv)


def lmtrain(verb: str, *words: str) -> None:
    done = subprocess.run([sys.executable, "-m", f"lmtrain.{verb}", *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"lmtrain.{verb} {' '.join(words)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")


def split(pairs: Path, out: Path) -> tuple[Path, Path]:
    """Writes every tenth pair to one file and the others to another."""
    lines = pairs.read_text(encoding="utf-8").splitlines(keepends=True)
    trained, held_out = out / "trained.jsonl", out / "held_out.jsonl"
    trained.write_text("".join(line for i, line in enumerate(lines) if i % 10), encoding="utf-8")
    held_out.write_text("".join(line for i, line in enumerate(lines) if not i % 10), encoding="utf-8")
    return trained, held_out


def train(options: argparse.Namespace, name: str, *words: str) -> Path:
    run = options.out / name
    lmtrain("train", str(options.out / "trained.jsonl"), f"model={options.model}", f"peft={options.peft}",
            f"data.val_path={options.out / 'held_out.jsonl'}", "optimizer=adamw", "export.merge=true", "logger=none",
            "callbacks.samples.every_n_validations=0", f"run.dir={run}", *words)  # fmt: skip
    return run


def scores(options: argparse.Namespace, model: Path | str, name: str, *words: str) -> dict[str, Any]:
    folder = options.out / "evaluations"
    lmtrain("evaluate", f"run_dir={model}", f"evaluate.dir={folder}", f"evaluate.name={name}", *words)
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())["scores"]
    return found


def text_loss(options: argparse.Namespace, model: Path | str, name: str) -> float | None:
    if options.text is None:
        return None
    return float(
        scores(options, model, name, "data=text", f"data.val_path={options.text}", "evaluate.limit=20")["loss"]
    )


def measure(options: argparse.Namespace, name: str, *words: str) -> dict[str, Any]:
    """Trains with the settings `words`; returns the numbers of the run's final weights."""
    run = train(options, name, *words)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    config = yaml.safe_load((run / "config.yaml").read_text())
    asked = ["data=chat_jsonl", f"data.val_path={options.out / 'trained.jsonl'}", f"evaluate.answers={ASKED}",
             "evaluate.metrics=[exact_match]", "evaluate.max_new_tokens=64", "evaluate.checkpoint=last"]  # fmt: skip
    return {
        "updates": records[-1]["step"],
        "epochs": config["trainer"]["max_epochs"],
        "rate": config["optimizer"]["lr"],
        "held_out": [r["val/loss"] for r in records if "val/loss" in r][-1],
        "exact": scores(options, run, f"{name}-asked", *asked)["exact_match"],
        "text": text_loss(options, run, f"{name}-text"),
        "config": config,
    }


def recipe(planned: dict[str, Any], batch: float, epochs: int, rate: float) -> list[str]:
    """Returns the settings of a recipe, relative to the planned ones; half of one row is a row of half its length."""
    data, rows, length = planned["config"]["data"], 1.0, planned["config"]["data"]["seq_len"]
    rows = data["global_batch_size"] * batch
    if rows < 1:
        rows, length = 1, length // 2
    return [f"data.global_batch_size={int(rows)}", "data.micro_batch_size=1", f"data.seq_len={length}",
            f"data.max_length={length}", f"trainer.max_epochs={planned['epochs'] * epochs}",
            f"optimizer.lr={planned['rate'] * rate:g}"]  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    warn_if_busy()
    options.out.mkdir(parents=True, exist_ok=True)
    trained, _ = split(options.pairs, options.out)
    before = text_loss(options, options.model, "before-text")
    table = Table(title=f"{options.pairs.name}: {len(trained.read_text().splitlines()):,} pairs, {options.model}")
    for column in ("batch, epochs, rate", "updates", "rate", "held-out loss", "trained answers right", "other text"):
        table.add_column(column, justify="left" if "," in column else "right")
    planned = measure(options, "planned")
    found = [("planned", planned)]
    for batch, epochs, rate in RECIPES[: options.recipes]:
        name = f"b{batch:g}_e{epochs}_r{rate:.2f}"
        found.append((name, measure(options, name, *recipe(planned, batch, epochs, rate))))
    for name, one in found:
        harm = f"{one['text'] - before:+.3f}" if before is not None else "-"
        row = f"{one['updates']:,}", f"{one['rate']:.1e}", f"{one['held_out']:.4f}", f"{one['exact']:.0%}", harm
        table.add_row(name, *row)
    Console(width=120).print(table)
    best = min(one["held_out"] for _, one in found)
    print(f"planned: {planned['held_out'] / best:.3f} times the least held-out loss. {setting()}")
    (options.out / "numbers.json").write_text(json.dumps(dict(found), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
