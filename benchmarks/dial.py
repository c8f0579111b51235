"""The experiments behind experiment=dial: learning rates at several depths, and the best depth for a given time.

python benchmarks/dial.py --json numbers.json rates     the loss at half, the same and twice the rule's rate
python benchmarks/dial.py --json numbers.json law       the law fitted to the runs in dial_runs.csv
python benchmarks/dial.py --json numbers.json runs      these runs on the standard library, made again
python benchmarks/dial.py --json numbers.json search    the dial against 24 random shapes, rates and batches
python benchmarks/dial.py --json numbers.json forecast a.txt b.txt     what validations at two thirds say of the end

The text is the source of the standard library; `forecast` accepts your own files too. Each run is a process with one
thread; results that are already in the file of `--json` are not computed again.
"""

import argparse
import csv
import functools
import itertools
import math
import random
import resource
import sys
from pathlib import Path

import numpy as np
from kept import Kept, train
from machine import setting
from scipy.optimize import least_squares

from lmtrain.config.compose import check, compose
from lmtrain.data.corpus import build_corpus
from lmtrain.models import dial

RATES = {2: 300, 4: 200, 6: 100}  # depth: steps
FACTORS = (0.5, 1.0, 2.0)
# Runs of up to five minutes, to which the law is fitted; longer ones, one of 60 steps and other vocabularies are left
# out. Unique tokens are those of a vocabulary of 1,024.
RUNS = Path(__file__).with_name("dial_runs.csv")
CODE = "standard library"  # the text that the law is for; others differ by a factor, and in what copying saves
FREE = {  # what is fitted, and its bounds
    "BETA": (0.15, 0.45), "WEIGHTS": (1e3, 1e7), "TOKENS": (1e4, 1e8), "COPIES_LESS": (0.0, 0.2),
    "COPIES_AFTER": (5e5, 2e7), "COPIES_SOONER": (0.0, 2.0), "WITHIN": (0.1, 0.8), "WORN": (0.5, 40.0),
}  # fmt: skip
START = {name: getattr(dial, name) for name in FREE}
SEARCHED, DRAWN = 60, 24  # CPU seconds for the steps of each candidate; number of random candidates
FORECASTS = ((2, 300), (2, 1200), (3, 400), (3, 800), (4, 400))  # depth, steps
ROW, ROWS = 256, 4  # tokens per row; rows per step, times the number of layers


def tokens(depth: int, steps: int) -> int:
    return ROW * ROWS * depth * steps


def rate(depth: int) -> float:
    return float(dial.recipe(depth)["model.learning_rate"])


def score(depth: int, steps: int, factor: float = 1.0) -> float:
    """Returns the bits per byte of the held-out modules."""
    lr = rate(depth) * factor
    return bits([f"model.num_hidden_layers={depth}", f"trainer.max_steps={steps}", f"optimizer.lr={lr:.4g}"])


def rates(kept: Kept) -> None:
    for factor, (depth, steps) in itertools.product(FACTORS, RATES.items()):
        name = f"depth {depth}, rate x {factor:g}, {steps} steps"
        kept.number("bits_per_byte", name, functools.partial(score, depth, steps, factor))


def made(kept: Kept) -> None:
    """Makes the runs of RUNS on the standard library again."""
    unique = build_corpus(check(compose(["experiment=dial", "tokenizer.vocab_size=1024"]))).epoch_tokens
    for run in runs():
        if run["text"] != CODE:
            continue
        depth, steps = int(run["layers"]), int(run["steps"])
        epochs = tokens(depth, steps) * dial.longer(int(run["vocabulary"])) / unique
        held = dial.regularization(rate(depth), steps, epochs)
        words = [f"model.depth={depth}", f"tokenizer.vocab_size={run['vocabulary']}", f"trainer.max_steps={steps}"]
        name = f"depth {depth}, vocabulary {run['vocabulary']}, {steps} steps"
        kept.number("bits_per_byte", name, functools.partial(bits, [*words, *(f"{k}={v}" for k, v in held.items())]))


def runs() -> list[dict[str, str]]:
    with RUNS.open() as file:
        return list(csv.DictReader(file))


def by_law(run: dict[str, str], constants: dict[str, float]) -> float:
    """Returns the bits per byte of a run by the law with these constants."""
    vars(dial).update(constants)
    depth, longer = int(run["layers"]), dial.longer(int(run["vocabulary"]))
    return dial.expected(depth, longer * tokens(depth, int(run["steps"])), float(run["unique_tokens"]))


def law(_: Kept) -> None:
    found = runs()
    texts = list(dict.fromkeys(run["text"] for run in found))
    losses, used = np.array([float(run["bits_per_byte"]) for run in found]), [run["used"] == "fitted" for run in found]

    def off(x: np.ndarray) -> np.ndarray:
        """Returns the relative errors: of a run on another text by its factor and its share of copying."""
        shared = dict(zip(FREE, x, strict=False))
        factors, shares = np.split(x[len(FREE) :], 2)
        of_text = {CODE: (1.0, shared["COPIES_LESS"])}
        of_text |= zip(texts[1:], zip(factors, shares, strict=True), strict=True)
        laws = [of_text[r["text"]][0] * by_law(r, {**shared, "COPIES_LESS": of_text[r["text"]][1]}) for r in found]
        return np.array(laws) / losses - 1

    others = len(texts) - 1
    bounds = np.array([*FREE.values(), *[(0.4, 2.0)] * others, *[(0.0, 0.2)] * others]).T
    start = np.array([*START.values(), *[1.15] * others, *[0.02] * others])
    x = least_squares(lambda x: off(x)[used], start, bounds=bounds, x_scale=np.abs(start)).x
    print(", ".join(f"{name} {value:.4g}" for name, value in zip(FREE, x, strict=False)))
    for name, factor, share in zip(texts[1:], *np.split(x[len(FREE) :], 2), strict=True):
        print(f"{name}: times {factor:.3f}, COPIES_LESS {share:.3f}")
    errors = list(zip(found, off(x), strict=True))
    for run, error in errors:
        of = f"{run['text']}, {run['layers']} layers, {run['vocabulary']} tokens, {run['steps']} steps"
        print(f"{of}: {error:+.1%} ({run['used']}) {run['note']}")
    on_code = [error for run, error in errors if (run["text"], run["used"]) == (CODE, "fitted")]
    print(f"root mean square of the fitted runs on code: {np.sqrt(np.mean(np.square(on_code))):.2%}")


def bits(words: list[str]) -> float:
    rows = train(["experiment=dial", *words])
    return next(row["val/bits_per_byte"] for row in reversed(rows) if "val/bits_per_byte" in row)


def processor_seconds(words: list[str]) -> float:
    """Returns the CPU time of a step, which other work on the machine hardly affects."""

    def of(steps: int) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        train(["experiment=dial", *words, f"trainer.max_steps={steps}", "trainer.limit_val_batches=1"])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return (of(210) - of(10)) / 200  # the time of the start varies by half a second


def drawn() -> list[list[str]]:
    """Draws depth, width, learning rate and rows at random, in a wide range around the values of the dial."""
    draw, found = random.Random(0), list[list[str]]()
    for _ in range(DRAWN):
        depth, width = draw.randint(1, 5), 32 * draw.randint(2, 6)
        rate, rows = 6e-3 * 10 ** draw.uniform(-0.7, 0.5), draw.choice([4, 8, 12, 16, 32])
        shape = [f"num_hidden_layers={depth}", f"hidden_size={width}", f"num_attention_heads={width // 32}"]
        shape.append(f"intermediate_size={8 * width // 3}")
        found.append([*(f"model.{s}" for s in shape), f"optimizer.lr={rate:.3g}", f"data.global_batch_size={rows}"])
    return found


def search(kept: Kept) -> None:
    for words in [*([f"model.num_hidden_layers={depth}"] for depth in (2, 3)), *drawn()]:
        name = " ".join(word.partition(".")[2] for word in words)
        step = kept.number("processor_s", name, functools.partial(processor_seconds, words))
        steps = round(SEARCHED / step)
        kept.number(
            "bits_per_byte", f"{name}, {steps} steps", functools.partial(bits, [*words, f"trainer.max_steps={steps}"])
        )
    print(setting())


def forecast_off(words: list[str], steps: int) -> float:
    """Returns the error of the forecast of a run's final loss from ten validations: end / forecast - 1."""
    every = math.ceil(steps / 10.5)
    rows = train(["experiment=dial", *words, f"trainer.max_steps={steps}", f"trainer.val_check_interval={every}"])
    scores = [(row["step"], row["val/bits_per_byte"]) for row in rows if "val/bits_per_byte" in row]
    return scores[-1][1] / dial.forecast(scores, steps, decayed=False) - 1


def forecasts(kept: Kept, texts: list[Path]) -> None:
    of_text = {text.stem: ["data=text", f"data.path={text.absolute()}"] for text in texts}
    for (name, data), (depth, steps) in itertools.product({"python_stdlib": [], **of_text}.items(), FORECASTS):
        words = [*data, f"model.depth={depth}"]
        kept.number(
            "forecast_off", f"{name}, depth {depth}, {steps} steps", functools.partial(forecast_off, words, steps)
        )
    print(setting())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="where numbers are kept; read at the start")
    parser.add_argument("part", choices=("rates", "law", "runs", "search", "forecast"))
    parser.add_argument("texts", nargs="*", type=Path, help="more texts, for forecast")
    options = parser.parse_args()
    series = {
        "rates": rates,
        "law": law,
        "runs": made,
        "search": search,
        "forecast": functools.partial(forecasts, texts=options.texts),
    }
    series[options.part](Kept(options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
