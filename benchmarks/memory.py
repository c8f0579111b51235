"""Memory per device with each strategy: measured on CPU ranks, against the estimate of the plan.

python benchmarks/memory.py         what is measured, and how, is in benchmarks/README.md
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
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
from lmtrain.models import flops

STRATEGIES = {
    "ddp": [],
    "fsdp": ["trainer.strategy=fsdp"],
    "fsdp_tp": ["trainer.strategy=fsdp_tp"],
    "zero2": ["trainer.strategy=deepspeed", "trainer.deepspeed.stage=2"],
    "zero3": ["trainer.strategy=deepspeed", "trainer.deepspeed.stage=3"],
}
STEPS = 5


@dataclass(frozen=True)
class Model:
    """The overrides of a model, and of a minimal twin of the same depth."""

    large: list[str]
    small: list[str]


def _model(preset: str, inner: str = "model.intermediate_size", width: int = 1408, bank: bool = False) -> Model:
    """Returns a model of 26 M parameters, 8 layers as in the preset; `inner` is the key of the feed-forward width."""
    grouped = [] if preset in ("gpt_nano", "llama_nano", "memory_nano") else ["model.num_key_value_heads=4"]
    own = [f"model={preset}", "model.num_hidden_layers=8", "model.num_attention_heads=8", *grouped]
    heads = [[f"model.head_dim={n}"] if grouped else [] for n in (64, 2)]
    banks = [[f"memory.memory_dim={n}", f"memory.num_chapters={n}"] if bank else [] for n in (256, 8)]
    return Model(
        [*own, "model.hidden_size=512", f"{inner}={width}", *heads[0], *banks[0]],
        [*own, "model.hidden_size=16", f"{inner}=16", *heads[1], *banks[1]],
    )


_DEEP = ["model=llama_nano", "model.num_hidden_layers=12", "model.num_attention_heads=12"]
MODELS = {
    "llama_85m": Model(
        [*_DEEP, "model.hidden_size=768", "model.intermediate_size=2048"],
        [*_DEEP, "model.hidden_size=24", "model.intermediate_size=32"],
    ),
    "gpt2": _model("gpt_nano", width=2048),
    "llama": _model("llama_nano"),
    "qwen3": _model("qwen3_small", width=1536),
    "moe": _model("moe_small", "model.moe_intermediate_size", 192),
    "memory": _model("memory_nano", bank=True),
}
# Return freed memory to the system at once; glibc would keep blocks under 32 MiB. Larger models' blocks are above.
ENV = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_MMAP_MAX_": "1000000",
    "LMTRAIN_DEEPSPEED_ON_CPU": "1",
    "DS_ACCELERATOR": "cpu",
}


@dataclass
class Point:
    """One strategy on a number of devices."""

    model: str
    strategy: str
    devices: int
    computed_mib: float
    measured_mib: float  # maximum over the ranks, minus that of the same run with the minimal twin


def settings(folder: Path, strategy: str, count: int, model: list[str], rows: int = 1, seq_len: int = 64) -> list[str]:
    """Returns the command line of a run: `rows` rows of `seq_len` tokens on each of `count` devices."""
    fixed = ["data=text", f"data.path={folder / 'text.txt'}", f"data.cache_dir={folder / 'cache'}", "tokenizer=bytes"]
    steps = [f"trainer.max_steps={STEPS}", "trainer.log_every_n_steps=1", "trainer.save_every_n_steps=null"]
    steps += ["trainer.val_check_interval=null", "data.val_fraction=0", "export.enabled=false", "logger=none"]
    sizes = [f"data.seq_len={seq_len}", f"data.micro_batch_size={rows}", f"data.global_batch_size={rows * count}"]
    longest = [f"model.max_position_embeddings={seq_len}"]
    place = ["trainer.accelerator=cpu", "trainer.precision=32-true", f"trainer.devices={count}", *STRATEGIES[strategy]]
    return [*fixed, *steps, *sizes, *model, *longest, *place, "optimizer=adamw"]


def computed(argv: list[str]) -> float:
    """Returns the bytes per device that the run's plan states."""
    config = check(compose(argv))
    devices.resolve_auto(config)
    with torch.device("meta"):
        model = build_trainable_model(config, build_corpus(config).tokenizer)
    return sum(flops.memory_estimate(model, config).values())


def measured(folder: Path, jobs: list[list[str]], count: int) -> list[int]:
    """Returns the peak bytes of any rank in each run, all on the same `count` ranks."""
    here = Path(tempfile.mkdtemp(dir=folder))
    named = [[*argv, f"run.dir={here / str(number)}"] for number, argv in enumerate(jobs)]
    (here / "jobs.json").write_text(json.dumps(named))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    command += [str(Path(__file__).with_name("memory_ranks.py")), str(here / "jobs.json")]
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, **ENV, "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=600)
    if done.returncode != 0:
        raise SystemExit((done.stdout + done.stderr)[-3000:])
    ranks = [json.loads((here / f"{rank}.json").read_text()) for rank in range(count)]
    return [max(of_job) for of_job in zip(*ranks, strict=True)]


def compare(folder: Path, names: list[str], strategy: str, count: int, rows: int, seq_len: int) -> list[Point]:
    """Returns a point for each model: the memory of a rank minus that with the minimal twin."""
    sizes = [size for name in names for size in (MODELS[name].small, MODELS[name].large)]
    jobs = [settings(folder, strategy, count, size, rows, seq_len) for size in sizes]
    held = measured(folder, jobs, count)
    return [
        Point(name, strategy, count, computed(jobs[2 * i + 1]) / 2**20, (held[2 * i + 1] - held[2 * i]) / 2**20)
        for i, name in enumerate(names)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="default: %(default)s")
    parser.add_argument("--devices", default="1,2,4", help="default: %(default)s")
    parser.add_argument("--models", default="llama_85m", help=f"of {','.join(MODELS)} (%(default)s)")
    parser.add_argument("--rows", type=int, default=1, help="of a micro-batch (%(default)s)")
    parser.add_argument("--seq-len", type=int, default=64, help="tokens of a row (%(default)s)")
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    options = parser.parse_args()
    points = []
    with tempfile.TemporaryDirectory(prefix="lmtrain_benchmark_") as temporary:
        folder = Path(temporary)
        (folder / "text.txt").write_text("What one device holds, and how it falls with their number. " * 500)
        names = options.models.split(",")
        for strategy, count in itertools.product(options.strategies.split(","), map(int, options.devices.split(","))):
            for p in compare(folder, names, strategy, count, options.rows, options.seq_len):
                points.append(p)
                print(f"{p.model}, {strategy} x {count}: computed {p.computed_mib:,.0f} MiB, "
                      f"measured {p.measured_mib:,.0f} MiB", flush=True)  # fmt: skip
    show(points)
    if options.json:
        numbers = {"machine": machine(), "points": [asdict(point) for point in points]}
        options.json.write_text(json.dumps(numbers, indent=2) + "\n")
    return 0


def show(points: list[Point]) -> None:
    table = Table()
    for column in ("model", "strategy", "devices", "computed MiB", "measured MiB", "measured over computed"):
        table.add_column(column, justify="left" if column in ("model", "strategy") else "right")
    for p in points:
        ratio = f"{p.measured_mib / p.computed_mib:.2f}"
        table.add_row(p.model, p.strategy, str(p.devices), f"{p.computed_mib:,.0f}", f"{p.measured_mib:,.0f}", ratio)
    Console(width=None if sys.stdout.isatty() else 100).print(table)


if __name__ == "__main__":
    sys.exit(main())
