"""All measurements that need a GPU, in one command of six parts, each under ten minutes on an H200.

python benchmarks/gpu_day.py                       all parts; numbers to gpu_day.json, a table to benchmarks/RESULTS.md
python benchmarks/gpu_day.py --parts 1,2           these parts; what the file already holds is kept and not made again
python benchmarks/gpu_day.py --toy                 to the end on a CPU, at sizes that say nothing

Measurements that lack a package are reported and skipped. benchmarks/README.md lists the files to bring to a machine
without a package index, and their sizes.
"""

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

NEEDED = ("torch", "lightning", "hydra", "omegaconf", "transformers", "tokenizers", "peft", "torchmetrics", "rich",
          "huggingface_hub", "filelock", "yaml", "numpy", "safetensors")  # fmt: skip


def missing(names: tuple[str, ...]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


if missing(NEEDED):  # before anything imports them
    print(
        f"error: not installed: {', '.join(missing(NEEDED))}; benchmarks/README.md says how to bring them",
        file=sys.stderr,
    )
    sys.exit(2)

import legs  # noqa: E402
from day_parts import PARTS, Measurement, Size, sizes  # noqa: E402
from day_table import append, rows_of  # noqa: E402
from machine import machine, setting  # noqa: E402

HERE = Path(__file__).resolve().parent
PART_SECONDS = 540  # after this time the remaining measurements of a part are left for the next call


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = ",".join(PARTS)
    parser.add_argument("--parts", default=numbers, help=f"of {numbers}: {', '.join(p.name for p in PARTS.values())}")
    parser.add_argument("--again", action="store_true", help="make the parts' measurements anew")
    parser.add_argument("--toy", action="store_true", help="sizes for a CPU; the default without a GPU")
    parser.add_argument("--nanogpt", type=lambda p: Path(p).resolve(), help="a folder with nanoGPT's model.py")
    parser.add_argument("--trl-python", type=Path, help="a python that has TRL; default: this one, if it has")
    parser.add_argument(
        "--leg-seconds", type=float, default=240, help="a process that takes longer is ended (%(default)s)"
    )
    parser.add_argument("--json", type=Path, default=Path("gpu_day.json"), help="default: %(default)s")
    parser.add_argument(
        "--results", type=Path, help="the table goes here; default: benchmarks/RESULTS.md, with --toy nowhere"
    )
    options = parser.parse_args(argv)
    unknown = [part for part in options.parts.split(",") if part not in PARTS]
    if unknown:
        parser.error(f"--parts {','.join(unknown)}: choose among {numbers}")
    return options


def load(path: Path) -> dict[str, Any]:
    """Reads the measurements made so far; those of another machine or size are refused."""
    if not path.exists():
        return {"parts": {}}
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def measure(measurement: Measurement, size: Size, folder: Path) -> dict[str, Any]:
    """Returns the numbers of a measurement, or {"not_made": reason}."""
    lacks = missing(measurement.needs)
    if lacks:
        return {"not_made": f"{', '.join(lacks)} not installed"}
    if measurement.gpu and not size.cuda:
        return {"not_made": "no GPU here"}
    if size.name == "toy" and not measurement.toy:
        return {"not_made": "at toy sizes: another one runs the same code"}
    try:
        return measurement.make(size, folder)
    except (legs.Skipped, legs.Failed) as reason:
        return {"not_made": str(reason)}
    except SystemExit as reason:
        return {"not_made": f"it ended: {reason}"}
    except Exception as error:  # one failure must not stop the other measurements
        return {"not_made": f"{type(error).__name__}: {error}"}


def run_part(
    number: str, size: Size, done: dict[str, Any], again: bool, save: Callable[[], None], folder: Path
) -> None:
    """Makes the part's measurements that `done` lacks, saving after each."""
    part, began = PARTS[number], time.monotonic()
    for measurement in part.measurements:
        name = measurement.name
        if name in done and "not_made" not in done[name] and not again:
            continue
        if time.monotonic() - began > PART_SECONDS:
            done[name] = {"not_made": f"the part's {PART_SECONDS} s are over: the same command goes on from here"}
            continue
        print(f"\n=== part {number}, {part.name}: {name}", flush=True)
        started, place = time.monotonic(), folder / f"{number}_{name}"
        place.mkdir(parents=True)
        numbers = measure(measurement, size, place)
        shutil.rmtree(place)  # checkpoints are large
        done[name] = numbers | {"seconds": round(time.monotonic() - started, 1)}
        print(f"=== {name}: {numbers.get('not_made', 'made')} ({done[name]['seconds']:.0f} s)", flush=True)
        save()


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    size = sizes(options)
    legs.LIMIT_S = options.leg_seconds
    numbers = load(options.json)
    here = {"machine": machine(), "setting": setting(), "date": date.today().isoformat(), "size": size.name}
    if numbers.get("machine", here["machine"]) != here["machine"] or numbers.get("size", size.name) != size.name:
        print(
            f"error: {options.json} is of {numbers['machine']}, {numbers['size']}: name another --json", file=sys.stderr
        )
        return 2
    numbers = here | numbers

    def save() -> None:
        options.json.write_text(json.dumps(numbers, indent=2) + "\n")

    with tempfile.TemporaryDirectory(prefix="lmtrain_gpu_day_") as folder:
        for part in options.parts.split(","):
            run_part(part, size, numbers["parts"].setdefault(part, {}), options.again, save, Path(folder))
    save()
    for row in rows_of(numbers):
        print(" | ".join(row))
    results = options.results or (None if size.name == "toy" else HERE / "RESULTS.md")
    if results:
        append(results, numbers)
    return 0


if __name__ == "__main__":
    sys.exit(main())
