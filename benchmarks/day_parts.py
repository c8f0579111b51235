"""The six parts of gpu_day.py with their measurements, and the sizes for a GPU and for a CPU."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dpo
import learning
import legs
import loss
import pretrain
import sft
import torch
from legs import Failed, Leg, Lines
from shapes import LOGGER, SHAPES, write_text_bins
from workload import write_shape

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
GPU_TESTS = ("tests/losses/test_losses.py", "tests/models/test_attention.py", "tests/models/test_prefixes.py")


@dataclass(frozen=True)
class Size:
    """The sizes of all measurements."""

    name: str  # full or toy
    cuda: bool
    nanogpt: Path | None
    trl_python: Path | None
    pretrain: tuple[str, ...]
    learning: tuple[str, ...]
    tune: tuple[str, ...]  # of sft.py and dpo.py
    sft: tuple[str, ...]
    dpo: tuple[str, ...]
    large: bool  # fine-tune the shape of Llama 3.2 1B (1.24 B parameters) instead of a toy model
    shape: str  # of the short runs, a key of SHAPES
    rows: int
    steps: int


def sizes(options: Any) -> Size:
    cuda = torch.cuda.is_available()
    given = {"cuda": cuda, "nanogpt": options.nanogpt, "trl_python": options.trl_python}
    if options.toy or not cuda:
        return Size(
            name="toy",
            **given,
            pretrain=("--shape=char", "--rounds=1", "--steps=6", "--warmup=1", "--every=1"),
            learning=("--shape=char", "--rows=12", "--steps=20", "--train-tokens=100000", "--val-tokens=4000"),
            tune=("--rounds=1", "--steps=3", "--warmup=1", "--seq-len=256", "--threads=1"),
            sft=("--rows=2",),
            dpo=("--pairs=2",),
            large=False,
            shape="char",
            rows=4,
            steps=20,
        )
    return Size(
        name="full",
        **given,
        pretrain=("--shape=small", "--rows=64", "--rounds=2", "--steps=70", "--warmup=20"),
        learning=("--shape=small", "--rows=64", "--steps=600"),
        tune=("--rounds=1", "--steps=24", "--warmup=8"),
        sft=("--rows=64", "--seq-len=2048", "--trl-micro-batch-size=16"),
        dpo=("--pairs=32", "--seq-len=1024", "--trl-micro-batch-size=8"),
        large=True,
        shape="small",
        rows=64,
        steps=60,
    )


@dataclass(frozen=True)
class Measurement:
    """One measurement."""

    name: str
    make: Callable[[Size, Path], dict[str, Any]]
    needs: tuple[str, ...] = ()  # required packages
    gpu: bool = False
    toy: bool = True  # whether it runs at toy sizes; False if another measurement runs the same code


@dataclass(frozen=True)
class Part:
    name: str
    measurements: list[Measurement] = field(default_factory=list)


def gpu_tests(size: Size, folder: Path) -> dict[str, Any]:
    """Runs the tests marked gpu."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *GPU_TESTS]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=legs.LIMIT_S)
    if done.returncode != 0:
        raise Failed(f"{done.stdout[-3000:]}\n{done.stderr[-1000:]}")
    return {"passed": done.stdout.strip().splitlines()[-1]}


def benchmark(main: Callable[[list[str]], int], argv: list[str], folder: Path) -> dict[str, Any]:
    """Runs another benchmark and returns the JSON that it writes."""
    path = folder / "numbers.json"
    if main([*argv, f"--json={path}"]) != 0:
        raise Failed("every contender failed")
    numbers: dict[str, Any] = json.loads(path.read_text())
    return numbers


def beside_nanogpt(size: Size) -> list[str]:
    return [f"--nanogpt={size.nanogpt}"] if size.nanogpt else []


def gpt_small(size: Size, folder: Path) -> dict[str, Any]:
    """lmtrain, a bare loop over the same model, and nanoGPT's model, interleaved."""
    contenders = "bare,lmtrain,nanogpt_model"
    argv = [*size.pretrain, f"--contenders={contenders}", *beside_nanogpt(size)]
    return benchmark(pretrain.main, argv, folder)


def loss_alone(size: Size, folder: Path) -> dict[str, Any]:
    return benchmark(loss.main, ["--calls=3"] if size.name == "toy" else [], folder)


def to_nanogpts_loss(size: Size, folder: Path) -> dict[str, Any]:
    return benchmark(learning.main, [*size.learning, *beside_nanogpt(size)], folder)


def tuned(main: Callable[[list[str]], int], contenders: str, *own: str) -> Callable[[Size, Path], dict[str, Any]]:
    """A measurement by sft.py or dpo.py."""

    def make(size: Size, folder: Path) -> dict[str, Any]:
        argv = [*size.tune, *(size.sft if main is sft.main else size.dpo), f"--contenders={contenders}", *own]
        python = size.trl_python or Path(sys.executable)
        has_trl = subprocess.run([str(python), "-c", "import trl, datasets"], capture_output=True).returncode == 0
        argv.append(f"--trl-python={python if has_trl else 'none'}")
        if size.large:
            argv.append(f"--model={write_shape(folder / 'shape')}")
        return benchmark(main, argv, folder)

    return make


def short_run(name: str, *own: str, gpu: bool = False, needs: tuple[str, ...] = (), toy: bool = False) -> Measurement:
    """Runs the main job for a few steps in a separate process."""

    def make(size: Size, folder: Path) -> dict[str, Any]:
        bins = folder.parent / "bins"
        if not bins.exists():
            write_text_bins(bins, 2_000_000 if size.large else 100_000, 20_000)
        (folder / "cases.json").write_text(json.dumps({name: [*run_overrides(size, bins), *own]}))
        command = [sys.executable, str(HERE / "leg_runs.py"), str(folder / "cases.json"), str(folder)]

        def facts(lines: Lines) -> dict[str, Any]:
            return dict(json.loads(lines[-1][1])[name])

        found = legs.run(Leg(command, lambda _: [], facts), 1 if not size.cuda else None).facts
        if "error" in found:
            raise Failed(found["error"])
        return found

    return Measurement(name, make, needs, gpu, toy)


def run_overrides(size: Size, bins: Path) -> list[str]:
    shape = SHAPES[size.shape]
    return [
        *shape.model, *LOGGER, "data=bins", f"data.path={bins}", f"data.cache_dir={bins.parent / 'cache'}",
        f"data.seq_len={shape.seq_len}", f"data.global_batch_size={size.rows}", f"data.micro_batch_size={size.rows}",
        "optimizer=adamw", "optimizer.lr=6e-4", "schedule=constant", f"trainer.max_steps={size.steps}",
        "trainer.log_every_n_steps=2", "trainer.val_check_interval=null", "trainer.limit_val_batches=1",
        "trainer.save_every_n_steps=null", "callbacks.samples.every_n_validations=0", "export.enabled=false",
        f"trainer.precision={'bf16-mixed' if size.cuda else '32-true'}",
    ]  # fmt: skip


# A checkpoint of gpt_small is 1.5 GB, and the run saves four.
SAVES = ("trainer.log_every_n_steps=1", "trainer.save_every_n_steps=15", "checkpoint.keep_last=100")
MOE = ("model=moe_small",)


def exact_resume(size: Size, folder: Path) -> dict[str, Any]:
    """`lmtrain.verify`: compares a killed and resumed run with an uninterrupted one, with deterministic algorithms."""
    bins = folder / "bins"
    write_text_bins(bins, 200_000, 20_000)
    overrides = [*run_overrides(size, bins), "trainer.deterministic=true", f"run.root={folder}"]
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [sys.executable, "-m", "lmtrain.verify", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=2 * (legs.LIMIT_S or 600))
    if done.returncode != 0:
        raise Failed((done.stdout + done.stderr)[-2000:])
    return {"said": done.stdout.strip().splitlines()[-1]}


PARTS = {
    "1": Part(
        "pretraining", [Measurement("gpu_tests", gpu_tests, ("pytest",), True), Measurement("gpt_small", gpt_small)]
    ),
    "2": Part("learning", [Measurement("loss_alone", loss_alone), Measurement("to_nanogpts_loss", to_nanogpts_loss)]),
    "3": Part(
        "sft",
        [
            Measurement("sft_full", tuned(sft.main, "lmtrain,trl_padded"), toy=False),
            Measurement("sft_lora", tuned(sft.main, "lmtrain,trl_padded", "--lora")),
            Measurement("sft_bf16_true", tuned(sft.main, "lmtrain", "--precision=bf16-true"), toy=False),
            Measurement("sft_fp8", tuned(sft.main, "lmtrain", "--precision=fp8"), ("torchao",), gpu=True, toy=False),
        ],
    ),
    "4": Part(
        "dpo",
        [
            Measurement("dpo_full", tuned(dpo.main, "lmtrain,trl")),
            Measurement("dpo_precomputed", tuned(dpo.main, "lmtrain_precomputed"), toy=False),
        ],
    ),
    "5": Part(
        "runs",
        [
            short_run("adamw"),
            short_run("muon", "optimizer=muon"),
            short_run("lion", "optimizer=lion"),
            short_run("not_compiled", "trainer.compile=false", gpu=True),
            short_run("16-mixed", "trainer.precision=16-mixed", gpu=True),
            short_run("fsdp", "trainer.strategy=fsdp"),
            short_run("deepspeed", "trainer.strategy=deepspeed", gpu=True, needs=("deepspeed",)),
            short_run("moe_small", *MOE, gpu=True),
        ],
    ),
    "6": Part(
        "saving",
        [
            short_run("saves", *SAVES),
            short_run("async_saves", *SAVES, "checkpoint.async_save=true", toy=True),
            Measurement("exact_resume", exact_resume),
        ],
    ),
}
