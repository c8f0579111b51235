"""Where the seconds of a run go before its first step and after its last line, and whether a budget holds.

python benchmarks/starting.py                                # until the first step of README's main command, twice
python benchmarks/starting.py --whole budget.minutes=1       # a whole run: its seconds, and those after its last line

A thread of the run's process notes every few milliseconds what the main thread does: which package it imports, or in
which of PARTS it is. What waits for a child process (a tokenizer that is trained) counts as the part that waits. The
first run begins with empty caches (data, tokenizers and compiled code), the second with those of the first.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import NoReturn

COMMAND = ("experiment=python_stdlib", "budget.minutes=5")
EVERY_S = 0.005
# What the main thread is doing if its innermost frame in one of these files (and functions, if named) is this one.
PARTS = (
    ("torch/_inductor/", "", "compiling"),
    ("torch/_dynamo/convert_frame", "", "compiling"),
    ("torch/_functorch/", "", "compiling"),
    ("data/bpe_training", "train", "training a tokenizer"),
    ("data/text/prepare", "prepare", "text to tokens"),
    ("data/corpus", "build_corpus", "text to tokens"),
    ("distributed/precision", "", "measuring bf16 against fp32"),
    ("planning/budget", "measure", "measuring steps"),
    ("config/compose", "", "composing the config"),
    ("run/plan", "", "the plan"),
    ("run/build", "", "building the run"),
    ("loops/fit_loop", "", "first steps"),
)
OTHER, IMPORTS = "other", "importing "


def doing(frame: FrameType | None) -> str:
    """Returns what a thread with this innermost frame is doing."""
    module = None
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if file == "<frozen importlib._bootstrap>" and function == "_find_and_load":
            module = module or str(frame.f_locals.get("name", ""))
        elif module is None:
            for path, name, part in PARTS:
                if path in file and name in ("", function):
                    return part
        frame = frame.f_back
    if module is None:
        return OTHER
    package, _, rest = module.partition(".")
    return IMPORTS + (f"torch.{rest.split('.')[0]}" if package == "torch" and rest.startswith("_") else package)


def sample(main_thread: int, file: Path) -> None:
    """Appends (time.time(), what the main thread does) to a file until the process ends."""
    with file.open("w", buffering=1) as out:
        while True:
            time.sleep(EVERY_S)
            out.write(f"{time.time():.4f} {doing(sys._current_frames().get(main_thread))}\n")


def worker(file: str, words: list[str]) -> NoReturn:
    threading.Thread(target=sample, args=(threading.get_ident(), Path(file)), daemon=True).start()
    from lmtrain import cli

    cli.program(["train", *words])


def run(words: list[str], folder: Path, whole: bool) -> tuple[float, float, float, Counter[str]]:
    """Returns the seconds to the first step, of the whole process, and after its last line; and those of each part."""
    samples = folder / "samples"
    paths = [f"run.dir={tempfile.mkdtemp(dir=folder)}/run", f"data.cache_dir={folder}/cache"]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "PYTHONUNBUFFERED": "1"}
    began = time.time()
    process = subprocess.Popen(
        [sys.executable, __file__, "--worker", str(samples), *words, *paths],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
    )  # fmt: skip
    assert process.stdout is not None
    first, last, said = 0.0, began, []
    for line in process.stdout:
        last = time.time()
        said.append(line)
        if not first and re.match(r"step +\d", line):
            first = last
            if not whole:
                process.kill()
                break
    process.wait()
    ended = time.time()
    if not first or (whole and process.returncode != 0):
        raise SystemExit("".join(said[-40:]))
    return first - began, ended - began, ended - last, seconds_of_parts(samples, began, first)


def seconds_of_parts(samples: Path, began: float, until: float) -> Counter[str]:
    """Returns the seconds of each part between two times; what passes before the first sample is Python's start."""
    parts: Counter[str] = Counter()
    before, part = began, "starting Python"
    for line in samples.read_text().splitlines():
        at, _, now = line.partition(" ")
        if float(at) > until:
            break
        parts[part] += float(at) - before
        before, part = float(at), now
    return parts


def table(parts: Counter[str]) -> str:
    """Returns a Markdown table of the parts that take more than a tenth of a second, longest first."""
    small = {p for p, s in parts.items() if s < 0.1}
    rows = [(p, s) for p, s in parts.most_common() if p not in small]
    rows.append((f"{len(small)} smaller parts", sum(parts[p] for p in small)))
    return "\n".join(["| part | seconds |", "| --- | ---: |", *(f"| {p} | {s:.2f} |" for p, s in rows)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true", help="let the run end; with filled caches only")
    parser.add_argument("--cache", type=Path, help="a folder of caches to begin with, kept (default: a new one)")
    parser.add_argument("overrides", nargs="*", help=f"after {' '.join(COMMAND)}")
    options = parser.parse_intermixed_args()
    words = [*COMMAND, *options.overrides]
    from machine import setting, warn_if_busy

    warn_if_busy()
    with tempfile.TemporaryDirectory() as made:
        folder = (options.cache or Path(made)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for caches in ("filled",) if options.cache or options.whole else ("empty", "filled"):
            first, all_, after, parts = run(words, folder, options.whole)
            print(f"\ncaches {caches}: first step after {first:.1f} s\n\n{table(parts)}", flush=True)
            if options.whole:
                print(f"\nthe process took {all_:.2f} s, of which {after:.2f} s after its last line")
    print(setting())
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(sys.argv[2], sys.argv[3:])
    sys.exit(main())
