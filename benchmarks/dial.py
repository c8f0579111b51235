"""The experiments behind experiment=dial: learning rates at several depths, and the best depth for a given time.

python benchmarks/dial.py --json numbers.json rates     the loss at half, the same and twice the rule's rate
python benchmarks/dial.py --json numbers.json law       depths and lengths, and the law fitted to them
python benchmarks/dial.py --json numbers.json search    the dial against 24 random shapes, rates and batches
python benchmarks/dial.py --json numbers.json forecast a.txt b.txt     what validations at two thirds say of the end

The text is the source of the standard library; `forecast` accepts your own files too. Each run is a process with one
thread; results that are already in the file of `--json` are not computed again. The law has the form of Hoffmann et al.
2022 (arXiv:2203.15556): bits per byte = E + A / N^0.34 + B / D^0.28, where N is the number of weights in the layers and
D the number of tokens, both as far as the text can use them (Muennighoff et al. 2023).
"""

import argparse
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

from lmtrain.config.compose import check, compose
from lmtrain.data.corpus import build_corpus
from lmtrain.models import dial

RATES = {2: 300, 4: 200, 6: 100}  # depth: steps
FACTORS = (0.5, 1.0, 2.0)
FITTED = (
    *((2, 293), (2, 534), (2, 1782), (2, 4455), (3, 196), (3, 653), (3, 1634), (3, 2622), (4, 75), (4, 200), (4, 252)),
    *((4, 500), (4, 632), (4, 1887), (5, 130), (5, 327), (6, 100)),
)  # depth, steps: at most five minutes each on two cores
LEFT_OUT = ((5, 1000), (4, 2308))  # runs that the law is to foretell
SEARCHED, DRAWN = 60, 24  # CPU seconds for the steps of each candidate; number of random candidates
FORECASTS = ((2, 300), (2, 1200), (3, 400), (3, 800), (4, 400))  # depth, steps
ROW, ROWS = 256, 4  # tokens per row; rows per step, times the number of layers


def tokens(depth: int, steps: int) -> int:
    return ROW * ROWS * depth * steps


def score(depth: int, steps: int, factor: float = 1.0) -> float:
    """Returns the bits per byte of the held-out modules."""
    rate = 6e-3 * (depth / 4) ** -0.5 * factor
    return bits([f"model.num_hidden_layers={depth}", f"trainer.max_steps={steps}", f"optimizer.lr={rate:.4g}"])


def rates(kept: Kept) -> None:
    for factor, (depth, steps) in itertools.product(FACTORS, RATES.items()):
        name = f"depth {depth}, rate x {factor:g}, {steps} steps"
        kept.number("bits_per_byte", name, functools.partial(score, depth, steps, factor))


def terms(depth: int, trained: float, unique: float) -> tuple[float, float]:
    """Returns what the law multiplies by A and by B."""
    without = {name: getattr(dial, name) for name in ("E", "A", "B")}
    found = []
    for one in ({"E": 0.0, "A": 1.0, "B": 0.0}, {"E": 0.0, "A": 0.0, "B": 1.0}):
        vars(dial).update(one)
        found.append(dial.expected(depth, trained, unique))
    vars(dial).update(without)
    return found[0], found[1]


def law(kept: Kept) -> None:
    unique = build_corpus(check(compose(["experiment=dial"]))).epoch_tokens
    found = []
    for depth, steps in (*FITTED, *LEFT_OUT):
        held = dial.regularization(6e-3 * (depth / 4) ** -0.5, steps, tokens(depth, steps) / unique)
        words = [f"model.depth={depth}", f"trainer.max_steps={steps}", *(f"{key}={it}" for key, it in held.items())]
        name = f"depth {depth}, {steps} steps"
        found.append((depth, steps, kept.number("bits_per_byte", name, functools.partial(bits, words))))
    losses, fitted = np.array([loss for *_, loss in found]), len(FITTED)
    parts = np.array([terms(depth, tokens(depth, steps), unique) for depth, steps, _ in found])
    weighted = parts[:fitted] / losses[:fitted, None]  # relative errors
    (a, b), *_ = np.linalg.lstsq(weighted, 1 - dial.E / losses[:fitted], rcond=None)
    print(f"bits per byte = {dial.E} + {a:.4g} / N^{dial.ALPHA} + {b:.4g} / D^{dial.BETA}")
    for (depth, steps, loss), part in zip(found, parts, strict=True):
        said = "left out" if (depth, steps) in LEFT_OUT else "fitted"
        print(f"depth {depth}, {steps} steps: {loss:.3f}, {dial.E + part @ (a, b):.3f} by the law ({said})")
    print(setting())


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
    return scores[-1][1] / dial.forecast(scores, steps, decayed=False)[0] - 1


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
    parser.add_argument("part", choices=("rates", "law", "search", "forecast"))
    parser.add_argument("texts", nargs="*", type=Path, help="more texts, for forecast")
    options = parser.parse_args()
    series = {
        "rates": rates,
        "law": law,
        "search": search,
        "forecast": functools.partial(forecasts, texts=options.texts),
    }
    series[options.part](Kept(options.json))
    return 0


if __name__ == "__main__":
    sys.exit(main())
