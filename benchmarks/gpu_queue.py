"""Measurements that need a GPU, as a queue: each call makes those that are missing until its minutes are over.

python benchmarks/gpu_queue.py --minutes 9 --out FOLDER    the most valuable first; each is written to FOLDER at once
python benchmarks/gpu_queue.py --toy --out FOLDER          all parts on a CPU, at sizes that say nothing
python benchmarks/gpu_queue.py --page                      writes benchmarks/gpu/README.md from results.jsonl

A part is missing if neither benchmarks/gpu/results.jsonl nor FOLDER/results.jsonl has its numbers for this card and the
present code of the files that it depends on. benchmarks/README.md has the command for a machine that is lent.
"""

import argparse
import contextlib
import gzip
import hashlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from code_versions import REPO, code_of

HERE = Path(__file__).resolve().parent
KEPT = HERE / "gpu"
PIECE, PIECES = 15 * 2**20, 2  # bytes of a piece of the compile caches, and how many are kept
PACKAGES = ("torch", "triton", "transformers", "lightning")
Row = dict[str, Any]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9.0, help="no part begins that would end later (%(default)s)")
    parser.add_argument("--out", type=lambda p: Path(p).resolve(), default=KEPT, help="for results and compile caches")
    parser.add_argument("--caches", type=Path, default=KEPT, help="where earlier compile caches are (%(default)s)")
    parser.add_argument("--only", help="names of parts, separated by commas, made in this order even if not missing")
    parser.add_argument("--nanogpt", type=lambda p: Path(p).resolve(), help="a folder with nanoGPT's model.py")
    parser.add_argument("--bins", type=lambda p: Path(p).resolve(), help="made by package_bins.py, for gpt_small")
    parser.add_argument("--trl-python", type=Path, help="a python that has TRL; default: this one, if it has")
    parser.add_argument("--commit", help="of the working tree; default: asks git")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--page", action="store_true")
    options = parser.parse_args(argv)
    if options.toy and options.out == KEPT:
        parser.error("--toy: name another folder with --out")
    return options


def card() -> str:
    """Returns the GPU's name, asked without a CUDA context: parts run in forks of this process."""
    ask = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    return "CPU"


def versions() -> dict[str, str]:
    found = {"python": ".".join(map(str, sys.version_info[:3]))}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def read(*files: Path) -> list[Row]:
    return [json.loads(line) for file in files if file.exists() for line in file.read_text().splitlines()]


def waiting(parts: dict[str, Any], rows: list[Row], here: str) -> list[str]:
    """Returns the missing parts: first those never measured on this card, last those that failed with this code."""
    codes = {name: code_of(part.files) for name, part in parts.items()}
    mine = [row for row in rows if row["card"] == here and row["part"] in parts]
    made = {row["part"] for row in mine if "numbers" in row and row["code"] == codes[row["part"]]}
    failed = {row["part"] for row in mine if "error" in row and row["code"] == codes[row["part"]]}
    before = {row["part"] for row in mine if "numbers" in row}
    return sorted((name for name in parts if name not in made), key=lambda name: (name in failed, name in before))


def expected(part: Any, name: str, rows: list[Row], here: str) -> float:
    """Returns the seconds that a part took last on this card, or that it is said to take."""
    took = [row["seconds"] for row in rows if row["part"] == name and row["card"] == here]
    return took[-1] if took else part.seconds


def lacking(part: Any, options: Any, here: str, made: Iterable[str]) -> str | None:
    """Returns what a part needs and is not there: a package, or a part of `made`."""
    has = {"nanogpt": options.nanogpt is not None, "cuda": here != "CPU", **dict.fromkeys(made, True)}
    return next((n for n in part.needs if not has.get(n, n in has or importlib.util.find_spec(n) is not None)), None)


def attempt(part: Any, place: Any, limit: float) -> Row:
    """Makes a part in a fork of this process; returns {"numbers"} or {"error"}, and the time it took."""
    began, answer = time.monotonic(), place.folder / "answer.json"
    child = os.fork()
    if child == 0:
        os.setsid()
        try:
            found = {"numbers": part.make(place)}
        except BaseException:
            found = {"error": traceback.format_exc()[-4000:]}
        answer.write_text(json.dumps(found))
        os._exit(0)
    while (ended := os.wait4(child, os.WNOHANG))[0] == 0:
        if time.monotonic() - began > limit:
            with contextlib.suppress(ProcessLookupError):  # it is ending
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.05)
    took = {"seconds": round(time.monotonic() - began, 1), "cpu_s": round(ended[2].ru_utime + ended[2].ru_stime, 1)}
    row: Row = json.loads(answer.read_text()) if answer.exists() else {"error": f"ended at its limit, {limit:.0f} s"}
    return row | took


class Pieces:
    """A file to write to that is cut into pieces."""

    def __init__(self, stem: Path) -> None:
        self.stem, self.size = stem, 0

    def write(self, data: bytes) -> int:
        while data:
            number, within = divmod(self.size, PIECE)
            now, data = data[: PIECE - within], data[PIECE - within :]
            with self.stem.with_name(f"{self.stem.name}.{number}").open("ab" if within else "wb") as file:
                file.write(now)
            self.size += len(now)
        return 0

    def flush(self) -> None:
        """Does nothing: every write is complete."""


def caches_name(here: str) -> str:
    """Returns a name that only the same card and versions share: code compiled for others must not be used."""
    return "caches_" + hashlib.sha256(json.dumps([here, versions()]).encode()).hexdigest()[:12]


@contextlib.contextmanager
def compile_caches(folder: Path, name: str, earlier: Path, out: Path) -> Iterator[None]:
    """Lets inductor and Triton use the caches of earlier calls, and writes theirs to `out`, the newest files first."""
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
    pieces = sorted(earlier.glob(f"{name}.*"))
    if pieces:
        whole = folder / "whole"
        folder.mkdir(parents=True)
        whole.write_bytes(b"".join(piece.read_bytes() for piece in pieces))
        # A cache larger than its pieces was cut off at the end of a file.
        with contextlib.suppress(tarfile.ReadError, EOFError), tarfile.open(whole, "r:gz") as tar:
            tar.extractall(folder, filter="data")
        whole.unlink()
    yield
    files = sorted((f for f in folder.rglob("*") if f.is_file()), key=lambda file: -file.stat().st_mtime)
    if not files:
        return
    to = Pieces(out / name)
    packed = gzip.GzipFile(fileobj=to, mode="wb", compresslevel=3)  # type: ignore[call-overload]
    with packed, tarfile.open(fileobj=packed, mode="w|") as tar:
        for file in files:
            packed.flush()
            if to.size + file.stat().st_size > PIECE * PIECES - PIECE // 8:
                print(f"compile caches: {len(files)} files do not fit {PIECES} pieces; the newest are kept")
                break
            tar.add(file, file.relative_to(folder))


def main(argv: list[str] | None = None) -> int:
    options, began = parse(argv), time.monotonic()
    sys.path.insert(0, str(REPO / "src"))
    if options.page:
        import queue_page

        return queue_page.write(read(KEPT / "results.jsonl"), KEPT / "README.md")
    options.out.mkdir(parents=True, exist_ok=True)
    results, here, name = options.out / "results.jsonl", "CPU" if options.toy else card(), caches_name(card())
    if options.toy:  # parts that need CUDA are left out
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lmtrain_queue_")))
        stack.enter_context(compile_caches(folder / "caches", name, options.caches, options.out))
        failed = run_parts(options, folder, results, here, began)
    return 1 if failed else 0


def run_parts(options: argparse.Namespace, folder: Path, results: Path, here: str, began: float) -> list[str]:
    """Makes parts until the time is over; returns the names of those that failed."""
    import legs
    from queue_parts import PARTS, Place

    if options.toy:
        import lmtrain.train  # noqa: F401  # legs are forks of this process: what it has imported, they need not

        legs.FORK = True
    trl = options.trl_python or (Path(sys.executable) if importlib.util.find_spec("trl") else None)
    rows = read(results, *([] if options.toy or options.out == KEPT else [KEPT / "results.jsonl"]))
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPO, capture_output=True, text=True, check=False).stdout
    facts = {"card": here, "versions": versions(), "commit": options.commit or git.strip(), "toy": options.toy}
    facts |= {"date": date.today().isoformat(), "command": " ".join(sys.argv)}
    until, failed = began + 60 * options.minutes, []
    chosen = options.only.split(",") if options.only else waiting(PARTS, rows, here)
    if unknown := set(chosen) - set(PARTS):
        raise SystemExit(f"error: --only {','.join(unknown)}: choose among {', '.join(PARTS)}")
    for name in chosen:
        part, left = PARTS[name], until - time.monotonic()
        found = {row["part"]: row["numbers"] for row in rows if "numbers" in row and row["card"] == here}
        lacks, seconds = lacking(part, options, here, found), expected(part, name, rows, here)
        if lacks or seconds > left:
            print(f"{name}: " + (f"needs {lacks}" if lacks else f"{seconds:.0f} s, of which {left:.0f} are left"))
            continue
        place = Place(options.toy, folder / name, folder / "scratch", options.nanogpt, options.bins, trl, found)
        place.folder.mkdir()
        place.scratch.mkdir(exist_ok=True)
        print(f"\n=== {name}: {part.question} ({seconds:.0f} s expected, {left:.0f} s left)", flush=True)
        limit = left if options.toy else min(left, 2 * seconds + 30)
        row = {"part": name, "code": code_of(part.files), **facts, **attempt(part, place, limit)}
        shutil.rmtree(place.folder)  # checkpoints are large
        rows.append(row)
        with results.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"=== {name}: {row.get('error', 'made')} ({row['seconds']:.0f} s)", flush=True)
        failed += [name] if "error" in row else []
    return failed


if __name__ == "__main__":
    sys.exit(main())
