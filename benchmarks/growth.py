"""How the costs of starts, ends, saves and preparation grow: CPU seconds and memory at three sizes, ten times apart.

python benchmarks/growth.py         what is measured, and how, is in benchmarks/README.md
"""

import argparse
import functools
import itertools
import json
import math
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from lmtrain.config.compose import check, compose, to_yaml
from lmtrain.data.corpus import build_corpus
from lmtrain.data.sources.files import FileSource
from lmtrain.data.store import contents

STEEPEST = 1.1  # the largest exponent allowed
FLAT = 1.3  # memory at a size / memory at a tenth of it, where it should not grow
NOISE_S = 0.3  # CPU seconds below which an exponent means nothing


@dataclass(frozen=True)
class Case:
    """What is measured: `make(folder, size)` writes its input, `work(folder)` is what costs, in another process."""

    unit: str
    largest: int
    make: Callable[[Path, int], None]
    work: Callable[[Path], Any]
    flat: bool = False  # whether its memory should not grow

    def sizes(self, quick: bool) -> list[int]:
        return [self.largest // (n * (10 if quick else 1)) for n in (100, 10, 1)]


def make_files(folder: Path, size: int) -> None:
    for i in range(size):
        (folder / f"{i:06}.txt").write_text(f"file {i} of many\n")


def start_on_files(folder: Path) -> None:
    """Starts twice: the second start recalls the hashes of the first."""
    contents.REMEMBER_FROM = 1  # bytes: as if the files were large
    config = check(compose([f"data.path={folder}", f"data.cache_dir={folder.parent}/cache"]))
    for _ in range(2):
        FileSource(config.data)


@functools.cache
def config_text() -> str:
    return to_yaml(compose([]))


def make_log(folder: Path, size: int) -> None:
    (folder / "config.yaml").write_text(config_text())
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, size + 1):
            row = {"step": step, "tokens_seen": 4096 * step, "rows": 7 * step, "bad_steps": 0, "lr": 1e-3}
            row |= {"train/loss": 3 + 1 / step, "grad_norm": 0.5 + 1 / step, "tokens_per_s": 12345.6, "step_ms": 12.3}
            file.write(json.dumps(row | {"time": 1.7e9 + step}) + "\n")
            if step % 1000 == 0:
                file.write(json.dumps({"step": step, "val/loss": 3 + 1 / step}) + "\n")


def go_on(folder: Path) -> None:
    from lmtrain.run_folder.cut_back import cut_back

    cut_back(folder / "metrics.jsonl", _last_step(folder) - 5, True, print)


def _last_step(folder: Path) -> int:
    with (folder / "metrics.jsonl").open("rb") as file:
        file.seek(-400, os.SEEK_END)
        return int(json.loads(file.read().splitlines()[-1])["step"])


def report(folder: Path) -> None:
    from lmtrain.reports.report import reported_run
    from lmtrain.run_folder.folder import RunDir

    reported_run(RunDir(folder))


def make_runs(folder: Path, size: int) -> None:
    for i in range(size):
        (folder / str(i)).mkdir()
        make_log(folder / str(i), 200)
        (folder / str(i) / "summary.json").write_text(json.dumps({"status": "finished", "step": 200}))


def list_runs(folder: Path) -> None:
    from lmtrain.reports.listing import runs_under

    runs_under(folder)


def make_number(folder: Path, size: int) -> None:
    (folder / "size").write_text(str(size))


def save(folder: Path) -> None:
    """Writes a checkpoint of so many weights, with Adam's two moments of each."""
    import torch

    from lmtrain.checkpoints import store

    size = int((folder / "size").read_text()) // 24
    weights = {str(i): torch.randn(size) for i in range(24)}
    moments = {i: {"exp_avg": torch.randn(size), "exp_avg_sq": torch.randn(size)} for i in range(24)}
    store.publish(
        {"state_dict": weights, "optimizer_states": [{"state": moments}], "global_step": 1}, folder / store.name_of(1)
    )


def make_checkpoints(folder: Path, size: int) -> None:
    from lmtrain.checkpoints import manifest, store

    for step in range(1, size + 1):
        (folder / store.name_of(step)).mkdir()
        files = {name: {"bytes": 1, "sha256": "0" * 64} for name in ("model.pt", "trainer.pt")}
        content = {"step": step, "metrics": {"val/loss": 3 + 1 / step}, "files": files}
        (folder / store.name_of(step) / manifest.NAME).write_text(
            json.dumps({"version": 2, **content, "sha256": manifest._hash({"version": 2, **content})})
        )


def prune(folder: Path) -> None:
    """Does what follows a save: decides which of so many checkpoints to keep."""
    from lmtrain.checkpoints import retention

    retention.to_keep(retention.scores(folder, "val/loss"), 3, 3, 1, "min")


def make_chats(folder: Path, size: int) -> None:
    with (folder / "chats.jsonl").open("w") as file:
        for i in range(size):
            turns = [{"role": role, "content": f"{role} number {i} says " + "words of one turn " * 20}
                     for role in ("user", "assistant")]  # fmt: skip
            file.write(json.dumps({"messages": turns}) + "\n")


def make_pairs(folder: Path, size: int) -> None:
    with (folder / "pairs.jsonl").open("w") as file:
        for i in range(size):
            row = {"prompt": f"question {i}", "chosen": f"good {i} " * 30, "rejected": f"bad {i} " * 30}
            file.write(json.dumps(row) + "\n")


def make_text(folder: Path, size: int) -> None:
    line = "    a line of code that begins with white space, as all of them do\n"
    with (folder / "text.txt").open("w") as file:
        for _ in range(size * 1_000_000 // len(line) // 1000):
            file.write(line)


CHATS = ["tokenizer=bytes", "data.chat_template=alpaca", "data.seq_len=1024", "model.max_position_embeddings=1024"]


def prepare(*overrides: str) -> Callable[[Path], None]:
    def work(folder: Path) -> None:
        (data,) = (p for p in folder.iterdir() if p.suffix in (".jsonl", ".txt"))
        build_corpus(check(compose([*overrides, f"data.path={data}", f"data.cache_dir={folder}/cache"])))

    return work


def make_documents(folder: Path, size: int) -> None:
    """Writes the index of so many documents of 15 tokens on average, and their tokens, all alike."""
    ends = np.cumsum(np.random.default_rng(1).integers(1, 30, size)).astype("<u8")
    ends.tofile(folder / "train_00000.docs")
    np.zeros(int(ends[-1]), "<u2").tofile(folder / "train_00000.bin")


def documents_in(folder: Path) -> Any:
    from lmtrain.data.store.shards import Shard

    path = folder / "train_00000.bin"
    return Shard(path, "uint16", path.stat().st_size // 2, {"docs": path.with_suffix(".docs")})


def read_windows(folder: Path) -> None:
    """Reads a step of 64 windows at the start and one from the middle of the second epoch, as after a resume."""
    from lmtrain.data.order import step_rows
    from lmtrain.data.text.windows import Windows

    windows = Windows([documents_in(folder)], 1024, seed=1, isolate_documents=True)
    for step in (0, 3 * len(windows) // 128):
        windows.read(step_rows(step, rows=len(windows), global_batch_size=64, seed=1))


def lay_out(folder: Path) -> None:
    """Packs whole documents into rows, and reads a step of them."""
    from lmtrain.data.corpus import text_rows
    from lmtrain.data.order import step_rows

    config = check(compose(["data=text", "data.path=x", "data.packing=best_fit_decreasing", "data.seq_len=256"]))
    rows, _ = text_rows([documents_in(folder)], config, 1)
    rows.read(step_rows(3, rows=len(rows), global_batch_size=64, seed=1))


CASES = {
    "windows of documents": Case("documents", 10_000_000, make_documents, read_windows, flat=True),
    "documents packed into rows": Case("documents", 10_000_000, make_documents, lay_out),
    "two starts on a source of files": Case("files", 100_000, make_files, start_on_files),
    "going on: logs cut back": Case("rows", 1_000_000, make_log, go_on, flat=True),
    "the page at the end": Case("rows", 100_000, make_log, report, flat=True),
    "lmtrain.runs": Case("runs", 2_000, make_runs, list_runs),
    "a checkpoint": Case("weights", 100_000_000, make_number, save),
    "after a save": Case("checkpoints", 1_000, make_checkpoints, prune),
    "SFT rows": Case(
        "rows",
        20_000,
        make_chats,
        prepare("objective=sft", "data=chat", *CHATS),
    ),
    "DPO rows": Case(
        "rows",
        20_000,
        make_pairs,
        prepare("objective=dpo", "data=preference", *CHATS),
    ),
    "a text whose lines begin with white space": Case(
        "kB", 64_000, make_text, prepare("data=text", "model=llama_nano", "data.seq_len=256"), flat=True
    ),
}


def measure(name: str, folder: Path) -> dict[str, float]:
    """Returns the CPU seconds and the peak memory in MB of the work, its own processes included."""
    before = os.times()
    CASES[name].work(folder)
    after = os.times()
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {"cpu_s": sum(after[:4]) - sum(before[:4]), "mb": peak / 1024}


def at_size(name: str, size: int) -> dict[str, float]:
    """Measures one size: its input is written by this process, the work done by another, forked from it."""
    with tempfile.TemporaryDirectory(prefix="growth") as place:
        folder = Path(place) / "input"
        folder.mkdir()
        CASES[name].make(folder, size)
        with ProcessPoolExecutor(1, get_context("fork")) as pool:
            return pool.submit(measure, name, folder).result()


def exponent(smaller: float, larger: float) -> float:
    """Returns the power of the size, ten times larger, by which the cost grew; 0 for costs lost in the noise."""
    return math.log10(larger / max(smaller, 1e-3)) if larger > NOISE_S else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="tenths of the sizes")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    given = parser.parse_args()
    too_steep = []
    print("| | sizes | CPU s | exponents | peak MB |\n| --- | --- | ---: | ---: | ---: |")
    for name, case in CASES.items():
        if given.only not in name:
            continue
        sizes = case.sizes(given.quick)
        found = [at_size(name, size) for size in sizes]
        cpu, memory = [one["cpu_s"] for one in found], [one["mb"] for one in found]
        powers = [exponent(a, b) for a, b in itertools.pairwise(cpu)]
        grows = case.flat and memory[-1] > FLAT * memory[-2]
        too_steep += [name] if max(powers) > STEEPEST or grows else []
        print(
            f"| {name} | {', '.join(f'{n:,}' for n in sizes)} {case.unit} | {', '.join(f'{s:.2f}' for s in cpu)} | "
            f"{', '.join(f'{p:.2f}' if p else '-' for p in powers)} | {', '.join(f'{m:,.0f}' for m in memory)}"
            f"{' (flat)' if case.flat else ''} |",
            flush=True,
        )
    print(f"\n{machine()}")
    if too_steep:
        print(f"grows faster than its size, or than it should: {', '.join(too_steep)}")
    return 1 if too_steep else 0


if __name__ == "__main__":
    sys.exit(main())
