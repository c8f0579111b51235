"""Compares what budget.updates=auto plans for question-answer pairs with a grid of twelve recipes.

python benchmarks/updates.py --model MODEL --pairs PAIRS.jsonl --out FOLDER [--text TEXT.txt] [--peft lora]

Each run is the command that a person types, `train pairs.jsonl model=MODEL`, and the same with other batches (half and
twice), epochs (the planned number and twice that) and rates (a third, the same, three times). A tenth of the pairs is
held out of all runs alike, or the pairs of --held-out, which are more for a file of few pairs. Shown are the loss on
them, and, for the planned recipe and the best, the share of trained answers that are exactly right when asked again,
and by how much the loss on other text rises, which the model knew before (--text).
"""

import argparse
import importlib
import itertools
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import yaml
from machine import setting, warn_if_busy
from rich.console import Console
from rich.table import Table

ASKED = 100  # trained pairs that are asked again
# Batch, epochs and rate of a recipe, relative to the planned ones.
RECIPES = list(itertools.product((0.5, 2.0), (1, 2), (3.0, 1.0, 1 / 3)))
RATES = [(1.0, 1, 1 / 3), (1.0, 1, 3.0)]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder or a name of the hub")
    parser.add_argument("--pairs", type=Path, required=True, help="JSON lines of questions and answers")
    parser.add_argument("--text", type=Path, help="text that the model could foretell before")
    parser.add_argument("--held-out", type=Path, help="pairs to hold out, instead of a tenth of --pairs")
    parser.add_argument("--peft", default="none", help="none or lora (%(default)s)")
    parser.add_argument("--rates", action="store_true", help="vary the rate only: two recipes instead of twelve")
    parser.add_argument("--out", type=Path, required=True, help="a folder for runs and numbers")
    return parser.parse_args(argv)


def import_verbs() -> None:
    """Imports what trains and evaluates, once for all forks."""
    for module in ("train", "evaluate", "run.session", "evaluation.session", "run.updates"):
        importlib.import_module(f"lmtrain.{module}")


def lmtrain(out: Path, verb: str, *words: str) -> None:
    """Runs a verb in a fork of this process, which has imported all that it needs; its output goes to out/log.txt."""
    log = out / "log.txt"
    child = os.fork()
    if not child:
        code = 1
        try:
            with log.open("a") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            code = importlib.import_module(f"lmtrain.{verb}").main(list(words))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        raise SystemExit(f"lmtrain.{verb} {' '.join(words)} failed:\n{log.read_text()[-3000:]}")


def split(pairs: Path, held_out: Path | None, out: Path) -> None:
    """Writes every tenth pair to out/held_out.jsonl and the others to out/trained.jsonl; or copies held_out."""
    lines = pairs.read_text(encoding="utf-8").splitlines(keepends=True)
    tenth = [line for i, line in enumerate(lines) if not i % 10]
    kept = held_out.read_text(encoding="utf-8").splitlines(keepends=True) if held_out else tenth
    trained = lines if held_out else [line for i, line in enumerate(lines) if i % 10]
    (out / "held_out.jsonl").write_text("".join(kept), encoding="utf-8")
    (out / "trained.jsonl").write_text("".join(trained), encoding="utf-8")


def train(options: argparse.Namespace, name: str, *words: str) -> Path:
    run = options.out / name
    lmtrain(options.out, "train", str(options.out / "trained.jsonl"), f"model={options.model}", f"peft={options.peft}",
            f"data.val_path={options.out / 'held_out.jsonl'}", "optimizer=adamw", "logger=none",
            "callbacks.samples.every_n_validations=0", "report.enabled=false", "export.enabled=false",
            f"run.dir={run}", *words)  # fmt: skip
    return run


def scores(options: argparse.Namespace, model: Path | str, name: str, *words: str) -> dict[str, Any]:
    folder = options.out / "evaluations"
    lmtrain(options.out, "evaluate", f"run_dir={model}", f"evaluate.dir={folder}", f"evaluate.name={name}", *words)
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())["scores"]
    return found


def text_loss(options: argparse.Namespace, model: Path | str, name: str) -> float | None:
    if options.text is None:
        return None
    return float(
        scores(options, model, name, "data=text", f"data.val_path={options.text}", "evaluate.limit=20")["loss"]
    )


def measure(options: argparse.Namespace, name: str, *words: str) -> dict[str, Any]:
    """Trains with the settings `words`; returns the run's settings and its losses on the pairs held out."""
    run = train(options, name, *words)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    config = yaml.safe_load((run / "config.yaml").read_text())
    losses = [r["val/loss"] for r in records if "val/loss" in r]
    found = {"updates": records[-1]["step"], "epochs": config["trainer"]["max_epochs"], "losses": losses,
             "rate": config["optimizer"]["lr"], "held_out": losses[-1], "config": config}  # fmt: skip
    print(f"{name}: {found['updates']} updates, rate {found['rate']:.1e}, {losses[0]:.3f} -> {losses[-1]:.4f} "
          f"(least {min(losses):.4f})", flush=True)  # fmt: skip
    return found


def ask(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Returns the share of trained answers that are right when asked again, and the loss on other text."""
    run = options.out / name
    asked = ["data=chat_jsonl", f"data.val_path={options.out / 'trained.jsonl'}", f"evaluate.answers={ASKED}",
             "evaluate.metrics=[exact_match]", "evaluate.max_new_tokens=64", "evaluate.checkpoint=last"]  # fmt: skip
    exact = scores(options, run, f"{name}-asked", *asked)["exact_match"]
    text = text_loss(options, run, f"{name}-text")
    print(f"{name}: {exact:.0%} of {ASKED} trained answers right, other text {text}", flush=True)
    return {"exact": exact, "text": text}


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
    import_verbs()
    options.out.mkdir(parents=True, exist_ok=True)
    split(options.pairs, options.held_out, options.out)
    before = text_loss(options, options.model, "before-text")
    print(f"before: other text {before}", flush=True)
    found = {"planned": measure(options, "planned") | ask(options, "planned")}
    for batch, epochs, rate in RATES if options.rates else RECIPES:
        name = f"b{batch:g}_e{epochs}_r{rate:.2f}"
        found[name] = measure(options, name, *recipe(found["planned"], batch, epochs, rate))
    best = min(found, key=lambda name: found[name]["held_out"])
    found[best] |= ask(options, best)
    trained = len((options.out / "trained.jsonl").read_text(encoding="utf-8").splitlines())
    table = Table(title=f"{options.pairs.name}: {trained:,} pairs, {options.model}")
    for column in ("batch, epochs, rate", "updates", "rate", "held-out loss", "trained answers right", "other text"):
        table.add_column(column, justify="left" if "," in column else "right")
    for name, one in found.items():
        exact = f"{one['exact']:.0%}" if "exact" in one else ""
        harm = f"{one['text'] - before:+.3f}" if before is not None and "text" in one else ""
        table.add_row(name, f"{one['updates']:,}", f"{one['rate']:.1e}", f"{one['held_out']:.4f}", exact, harm)
    Console(width=120).print(table)
    ratio = found["planned"]["held_out"] / found[best]["held_out"]
    print(f"planned: {ratio:.3f} times the least held-out loss. {setting()}")
    (options.out / "numbers.json").write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
