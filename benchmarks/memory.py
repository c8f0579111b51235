"""What each device holds under each strategy: measured on CPU ranks, beside what the plan computes.

python benchmarks/memory.py         what is measured, and how, is in benchmarks/README.md
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from machine import machine
from rich.console import Console
from rich.table import Table

from lmtrain.adapters.finetune import build_trainable_model
from lmtrain.config.compose import check, compose
from lmtrain.data.corpus import build_corpus
from lmtrain.distributed import devices
from lmtrain.files import read_jsonl
from lmtrain.models import flops

STRATEGIES = {
    "ddp": [],
    "fsdp": ["trainer.strategy=fsdp"],
    "fsdp_tp": ["trainer.strategy=fsdp_tp"],
    "zero2": ["trainer.strategy=deepspeed", "trainer.deepspeed.stage=2"],
    "zero3": ["trainer.strategy=deepspeed", "trainer.deepspeed.stage=3"],
}
STEPS = 6
LARGE = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
SMALL = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 12, "num_attention_heads": 12}
# What is freed goes back to the system at once: glibc would keep blocks under 32 MiB, and larger models' are above.
ENV = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000", "LMTRAIN_DEEPSPEED_ON_CPU": "1",
       "DS_ACCELERATOR": "cpu"}  # fmt: skip


@dataclass
class Point:
    """One strategy on so many devices."""

    strategy: str
    devices: int
    computed_mib: float
    measured_mib: float  # most of any rank, less what the same run of a model of next to nothing takes


def settings(folder: Path, strategy: str, count: int, shape: dict[str, int]) -> list[str]:
    fixed = ["data=text", f"data.path={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}", "tokenizer=bytes"]
    steps = [f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=1", "trainer.save_every_n_steps=null"]
    steps += ["trainer.val_check_interval=null", "data.val_fraction=0", "export.enabled=false", "logger=none"]
    rows = ["data.seq_len=64", "data.micro_batch_size=1", f"data.global_batch_size={count}"]
    model = ["model=llama_nano", "model.max_position_embeddings=64", *(f"model.{k}={v}" for k, v in shape.items())]
    place = ["trainer.accelerator=cpu", "trainer.precision=32-true", f"trainer.devices={count}", *STRATEGIES[strategy]]
    return [*fixed, *steps, *rows, *model, *place, "optimizer=adamw"]


def computed(argv: list[str]) -> float:
    """Bytes of one device, as the plan of the run says."""
    config = check(compose(argv))
    devices.resolve_auto(config)
    with torch.device("meta"):
        model = build_trainable_model(config, build_corpus(config).tokenizer)
    return sum(flops.memory_estimate(model, config).values())


def measured(folder: Path, argv: list[str]) -> int:
    """Most bytes that one rank holds between its second step and the last but one."""
    run = Path(tempfile.mkdtemp(dir=folder))
    command = [sys.executable, "-m", "lmtrain.train", *argv, f"run.dir={run / 'run'}"]
    log = (run / "log").open("w")
    parent = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **ENV})
    most = 0
    while parent.poll() is None:
        step = max((row["step"] for row in read_jsonl(run / "run" / "metrics.jsonl")), default=0)
        if 2 <= step < STEPS - 1:
            most = max([most, *map(anonymous_bytes, ranks_of(parent.pid))])
        time.sleep(0.005)
    if parent.returncode != 0:
        raise SystemExit((run / "log").read_text()[-3000:])
    return most


def ranks_of(pid: int) -> list[int]:
    """The ranks that a run has started, or the run itself."""
    try:
        found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        found = []
    return found or [pid]


def anonymous_bytes(pid: int) -> int:
    """Host memory of a process that is no file's; pages it shares with others count by its share."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="default: %(default)s")
    parser.add_argument("--devices", default="1,2,4", help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=LARGE["num_hidden_layers"], help="of the model (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    points = []
    with tempfile.TemporaryDirectory(prefix="lmtrain_benchmark_") as name:
        folder = Path(name)
        (folder / "text.txt").write_text("What one device holds, and how it falls with their number. " * 500)
        for strategy in options.strategies.split(","):
            for count in map(int, options.devices.split(",")):
                large, small = (
                    settings(folder, strategy, count, {**shape, "num_hidden_layers": options.layers})
                    for shape in (LARGE, SMALL)
                )
                size = measured(folder, large) - measured(folder, small)
                points.append(Point(strategy, count, computed(large) / 2**20, size / 2**20))
                print(f"{strategy} x {count}: computed {points[-1].computed_mib:,.0f} MiB, "
                      f"measured {points[-1].measured_mib:,.0f} MiB", flush=True)  # fmt: skip
    show(points)
    if options.json:
        numbers = {"machine": machine(), "points": [asdict(point) for point in points]}
        options.json.write_text(json.dumps(numbers, indent=2) + "\n")
    return 0


def show(points: list[Point]) -> None:
    table = Table()
    for column in ("strategy", "devices", "computed MiB", "measured MiB", "measured over computed"):
        table.add_column(column, justify="left" if column == "strategy" else "right")
    for p in points:
        ratio = f"{p.measured_mib / p.computed_mib:.2f}"
        table.add_row(p.strategy, str(p.devices), f"{p.computed_mib:,.0f}", f"{p.measured_mib:,.0f}", ratio)
    Console(width=None if sys.stdout.isatty() else 100).print(table)


if __name__ == "__main__":
    sys.exit(main())
