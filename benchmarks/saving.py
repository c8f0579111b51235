"""Times a checkpoint against torch.save of the same tensors, with and without fsync, in alternation in one process.

python benchmarks/saving.py --millions 400 --folder DISK         of weights, with the two moments of Adam: 12 bytes each
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from machine import machine

from lmtrain.checkpoints import store

LAYERS = 24


def shapes(weights: int) -> Iterator[tuple[int, ...]]:
    """Yields the shapes of a GPT-2 with about so many weights, a tenth of them in its embedding."""
    width = int((0.9 * weights / LAYERS / 12) ** 0.5)
    yield weights // 10 // width, width
    for _ in range(LAYERS):
        yield from ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
        yield from ((3 * width,), (width,), (4 * width,), *[(width,)] * 5)


def state(weights: int) -> dict[str, Any]:
    tensors = [torch.full(shape, 1 / (i + 1)) for i, shape in enumerate(shapes(weights))]
    moments = {i: {"step": torch.tensor(3.0), "exp_avg": t + 1, "exp_avg_sq": t + 2} for i, t in enumerate(tensors)}
    optimizer = {"state": moments, "param_groups": [{"params": list(moments)}]}
    return {"state_dict": dict(zip(map(str, moments), tensors, strict=True)), "optimizer_states": [optimizer]}


def checkpoint(content: dict[str, Any], folder: Path) -> None:
    store.publish({**content, "global_step": 1}, folder / store.name_of(1))


def saved(content: dict[str, Any], folder: Path) -> None:
    torch.save(content, folder / "one.pt")


def synced(content: dict[str, Any], folder: Path) -> None:
    with (folder / "one.pt").open("wb") as file:
        torch.save(content, file)
        os.fsync(file.fileno())


WAYS = {
    "a checkpoint": checkpoint,
    "torch.save and fsync": synced,
    "torch.save, not on the disk when it returns": saved,
}


def measure(way: str, content: dict[str, Any], folder: Path) -> tuple[float, float]:
    """Returns seconds and CPU seconds; begins with nothing left to write from before."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        os.sync()
        before, start = os.times(), time.perf_counter()
        WAYS[way](content, Path(place))
        seconds, after = time.perf_counter() - start, os.times()
    return seconds, sum(after[:2]) - sum(before[:2])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    given = parser.parse_args()
    needed = 12_000_000 * given.millions
    if shutil.disk_usage(given.folder).free < 2 * needed:
        parser.error(f"{given.folder} has less than {2 * needed / 1e9:.1f} GB free")
    content = state(1_000_000 * given.millions)
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for turn in range(given.rounds + 1):  # the first, in which memory is new, doesn't count
        for way in list(WAYS)[:: 1 if turn % 2 else -1]:
            found[way].append(measure(way, content, given.folder))
            print(f"{way}: {found[way][-1][0]:.2f} s", flush=True)
    print("\n| | s | CPU s | ratio of rounds |\n| --- | ---: | ---: | --- |")
    for way, times in found.items():
        seconds, cpu = (statistics.median(column) for column in zip(*times[1:], strict=True))
        ratios = [ours[0] / other[0] for ours, other in zip(found["a checkpoint"][1:], times[1:], strict=True)]
        print(f"| {way} | {seconds:.2f} | {cpu:.2f} | {', '.join(f'{r:.2f}' for r in ratios)} |")
    print(f"\n{machine()}")


if __name__ == "__main__":
    main()
