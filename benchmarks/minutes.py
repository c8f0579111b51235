"""The best model in a given time: budget.minutes against nanoGPT and transformers' Trainer, in bits per byte.

python benchmarks/minutes.py --nanogpt DIR --minutes 2 --text book.txt --json numbers.json

The last 100,000 characters of each text are held out. Ours is `lmtrain.train TEXT budget.minutes=M`, with another seed
each round; how far off its forecast was is kept too. nanoGPT is its CPU recipe on characters (4 layers of 128, rows
of 64, 12 per step) at three learning rates, of which the best counts; after the first round only that one is run.
Trainer is the default shape of GPT-2 on the same characters, rows of 256, with the defaults of TrainingArguments.
Both get as many steps as fit into the time, by a short run before; whole processes are timed. Results that are already
in the file of `--json` are not computed again.
"""

import argparse
import functools
import itertools
import json
import math
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from char import RECIPE
from kept import Kept
from machine import setting, warn_if_busy

HERE = Path(__file__).resolve().parent
HELD_OUT = 100_000  # characters
RATES = (1e-3, 2e-3, 4e-3)
SHORT = {"nanogpt": 200, "trainer": 4}  # steps of the short run that sets the length; nanoGPT warms up for 100


class Result(NamedTuple):
    bits_per_byte: float
    seconds: float  # of the whole process
    forecast_off: float | None = None  # the final bits per byte over the forecast, minus one


class Text:
    """A text split in two, as text files and, for nanoGPT and Trainer, as bins of characters."""

    def __init__(self, path: Path, folder: Path) -> None:
        whole = path.read_text(encoding="utf-8", errors="ignore")
        cut = len(whole) - HELD_OUT
        self.folder, self.name = folder / path.stem, path.stem
        self.folder.mkdir(parents=True)
        known = {character: number for number, character in enumerate(sorted(set(whole)))}
        for split, part in (("train", whole[:cut]), ("val", whole[cut:])):
            (self.folder / f"{split}.txt").write_text(part, encoding="utf-8")
            np.array([known[character] for character in part], dtype=np.uint16).tofile(self.folder / f"{split}.bin")
        (self.folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(known)}))
        self.characters = len(known)
        self.bytes_per_character = len(whole[cut:].encode()) / HELD_OUT

    def bits(self, nats: float) -> float:
        """Converts a loss per character to bits per byte."""
        return nats / math.log(2) / self.bytes_per_character


def timed(command: list[str], cwd: Path) -> float:
    began = time.time()
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}: {(done.stdout + done.stderr)[-2000:]}")
    return time.time() - began


def ours(text: Text, minutes: float, folder: Path, seed: int) -> Result:
    run = folder / "run"
    paths = [f"data.val_path={text.folder}/val.txt", f"run.dir={run}", f"data.cache_dir={folder}/cache"]
    command = [sys.executable, "-m", "lmtrain.train", f"{text.folder}/train.txt", f"budget.minutes={minutes:g}", *paths]
    seconds = timed([*command, "trainer.accelerator=cpu", f"seed={seed}"], folder)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    end = next(r["val/bits_per_byte"] for r in reversed(rows) if "val/bits_per_byte" in r)
    summary = json.loads((run / "summary.json").read_text())
    made = summary.get("forecast")
    return Result(end, seconds, None if made is None else end / made["val/bits_per_byte"] - 1)


def nanogpt(text: Text, nanogpt_folder: Path, rate: float, folder: Path, steps: int) -> Result:
    data = nanogpt_folder / "data" / f"minutes_{text.name}"
    data.unlink(missing_ok=True)  # a link left by an earlier call
    data.symlink_to(text.folder)
    settings = RECIPE.format(steps=steps).split()
    own = [f"--learning_rate={rate}", f"--min_lr={rate / 10}", f"--eval_interval={steps}", f"--dataset={data.name}"]
    seconds = timed([sys.executable, "train.py", *settings, *own, f"--out_dir={folder}"], nanogpt_folder)
    score = [sys.executable, HERE / "leg_score_nanogpt.py", folder / "ckpt.pt", text.folder / "val.bin"]
    found = subprocess.run(score, cwd=nanogpt_folder, stdout=subprocess.PIPE, text=True, check=True)
    return Result(text.bits(json.loads(found.stdout.splitlines()[-1])["val/loss"]), seconds)


def trainer(text: Text, folder: Path, steps: int) -> Result:
    words = [str(text.folder), str(text.characters), str(steps), str(folder / "loss.json")]
    seconds = timed([sys.executable, str(HERE / "leg_default_trainer.py"), *words], folder)
    return Result(text.bits(json.loads((folder / "loss.json").read_text())["val/loss"]), seconds)


def steps_within(seconds: float, short: int, run: Callable[[int], Result]) -> int:
    """Returns the number of steps that fit into the time, by the times of two short runs."""
    few, more = run(short).seconds, run(3 * short).seconds
    each = max(1e-3, (more - few) / (2 * short))
    return max(short, int((seconds - few) / each) + short)


def measure(kept: Kept, contender: str, where: str, at: str, seconds: float, run: Callable[..., Result]) -> None:
    """Runs a contender; one without a time budget gets as many steps as fit into the time."""
    if at in kept.found.get("bits_per_byte", {}):
        return
    steps = []
    if contender in SHORT:
        choose = functools.partial(steps_within, seconds, SHORT[contender], run)
        steps = [int(kept.number("steps", f"{where}, {contender}", choose))]
    result = run(*steps)
    kept.number("seconds", at, lambda: result.seconds)
    if result.forecast_off is not None:
        kept.number("forecast_off", at, lambda: result.forecast_off)
    kept.number("bits_per_byte", at, lambda: result.bits_per_byte)


def best_rates(kept: Kept, where: str) -> tuple[float, ...]:
    """Returns the rates to try: all in the first round, then only the best."""
    found = {r: kept.found.get("bits_per_byte", {}).get(f"{where}, nanogpt {r:g}, round 1") for r in RATES}
    scores = {rate: bits for rate, bits in found.items() if bits is not None}
    return (min(scores, key=lambda r: scores[r]),) if len(scores) == len(RATES) else RATES


def contenders(
    text: Text, rates: Sequence[float], options: argparse.Namespace, root: Path, number: int
) -> dict[str, Callable[..., Result]]:
    """Returns the contenders by the name of their numbers; each takes a number of steps, except ours."""

    def fresh() -> Path:
        return Path(tempfile.mkdtemp(dir=root))

    found: dict[str, Callable[..., Result]] = {"ours": lambda: ours(text, options.minutes, fresh(), 1336 + number)}
    for rate in rates:
        found[f"nanogpt {rate:g}"] = lambda n, rate=rate: nanogpt(text, options.nanogpt, rate, fresh(), n)
    found["trainer"] = lambda n: trainer(text, fresh(), n)
    return {name: run for name, run in found.items() if name.split()[0] in options.contenders.split(",")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=lambda p: Path(p).resolve(), required=True, help="a folder with nanoGPT")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--minutes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--contenders", default="ours,nanogpt,trainer")
    parser.add_argument("--json", type=Path, required=True, help="where numbers are kept; read at the start")
    options = parser.parse_args()
    warn_if_busy()
    kept = Kept(options.json)
    with tempfile.TemporaryDirectory(prefix="lmtrain_minutes_") as name:
        texts = [Text(path, Path(name)) for path in options.text]
        for number, text in itertools.product(range(1, options.rounds + 1), texts):
            where = f"{text.name}, {options.minutes:g} min"
            rates = RATES if number == 1 else best_rates(kept, where)
            for contender, run in contenders(text, rates, options, Path(name), number).items():
                at = f"{where}, {contender}, round {number}"
                measure(kept, contender.split()[0], where, at, 60 * options.minutes, run)
    print(setting())
    return 0


if __name__ == "__main__":
    sys.exit(main())
