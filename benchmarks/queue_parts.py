"""The parts of gpu_queue.py, most valuable first, at sizes for a GPU and for a CPU (`toy`)."""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import attention_errors
import dpo
import learning
import legs
import pretrain
import queue_cases
import sft
import torch
from legs import Failed, Leg, Lines
from shapes import LOGGER, SHAPES, overrides, write_bins
from workload import made_conversations, write_model, write_shape

import rollouts

HERE = Path(__file__).resolve().parent
REPO = HERE.parent
SRC = "src/lmtrain/"
# What a training step is made of: a change elsewhere leaves its measurements valid.
MODEL = (SRC + "models", SRC + "losses", SRC + "objectives", SRC + "optim", SRC + "run/build.py", "conf/model")
STEP = (*MODEL, SRC + "callbacks/metrics.py", SRC + "callbacks/stopping.py", SRC + "data/loaders.py",
        SRC + "data/modules.py", "conf/trainer", "conf/optimizer")  # fmt: skip
TUNED = (*STEP, SRC + "adapters", SRC + "data/chat", SRC + "data/examples")


@dataclass(frozen=True)
class Place:
    """Where and how parts are made."""

    toy: bool
    folder: Path  # of this part, removed afterwards
    scratch: Path  # of all parts: prepared data and weights
    nanogpt: Path | None
    bins: Path | None  # of package_bins.py; without them, tokens are random, or bytes
    trl_python: Path | None
    found: dict[str, dict[str, Any]]  # numbers of other parts on this card

    def pick(self, toy: str, full: str) -> list[str]:
        return (toy if self.toy else full).split()


@dataclass(frozen=True)
class Part:
    question: str
    seconds: float  # expected on an H100
    files: tuple[str, ...]  # whose code its numbers depend on
    make: Callable[[Place], dict[str, Any]]
    needs: tuple[str, ...] = ()  # packages, "nanogpt", "cuda", or the numbers of another part


def python(argv: list[str], *, env: dict[str, str] | None = None, cwd: Path | None = None) -> list[str]:
    """Runs a Python command; returns the lines of its output."""

    def facts(lines: Lines) -> dict[str, Any]:
        return {"said": [text for _, text in lines]}

    found: list[str] = legs.run(Leg([sys.executable, *argv], lambda _: [], facts, cwd, env or {}), None).facts["said"]
    return found


def benchmark(main: Callable[[list[str]], int], place: Place, argv: list[str]) -> dict[str, Any]:
    """Runs another benchmark and returns the JSON that it writes."""
    path = place.folder / "numbers.json"
    if main([*argv, f"--json={path}"]) != 0:
        raise Failed("every contender failed")
    numbers: dict[str, Any] = json.loads(path.read_text())
    return numbers


def beside_nanogpt(place: Place) -> list[str]:
    return [f"--nanogpt={place.nanogpt}"] if place.nanogpt else []


def gpu_tests(place: Place) -> dict[str, Any]:
    files = ("tests/losses/test_losses.py", "tests/models/test_attention.py", "tests/models/test_prefixes.py")
    chosen = files[1:2] if place.toy else files
    said = python(["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-p", "no:xdist", *chosen], cwd=REPO)
    return {"said": said[-1]}


def verify(place: Place) -> dict[str, Any]:
    """Compares a killed and resumed run on packed rows with an uninterrupted one, with deterministic algorithms."""
    data = place.scratch / "cases"
    queue_cases.prepare(data, wide=False)
    words = [*queue_cases.sft(data).split(), "trainer.deterministic=true", f"run.root={place.folder}"]
    words += ["data.seq_len=128", "data.global_batch_size=4", "data.micro_batch_size=4"] if place.toy else []
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    return {"said": python(["-m", "lmtrain.verify", *words], env=env)[-1]}


def attention_kernels(place: Place) -> dict[str, Any]:
    found = attention_errors.measure("cpu" if place.toy else "cuda")
    wrong = {name: of for name, of in found.items() if isinstance(of, list) and not max(of) < 0.02}
    return {"said": f"{len(wrong)} of {len(found)} are off by more than 2 %: {', '.join(wrong)}", "errors": found}


def gpt_bins(place: Place) -> tuple[list[str], Path]:
    """Returns the overrides of gpt_small's step, 64 rows of 1,024, and the folder of its bins."""
    shape, bins = SHAPES["char" if place.toy else "small"], place.bins or place.scratch / "bins"
    rows, precision = (4, "fp32") if place.toy else (64, "bf16")
    if not bins.exists():
        write_bins(bins, shape.vocab_size, -(-shape.vocab_size // 128) * 128)
    words = overrides(shape, bins, micro_batch_size=rows, steps=100, every=50, precision=precision)
    return [*words, f"data.global_batch_size={rows}"], bins


VARIANTS: dict[str, dict[str, Any]] = {
    "as_is": {},
    "bf16_stream": {"bf16_stream": True},
    "loss_kernel": {"loss_kernel": [4096, 8]},
    "loss_kernel_16_warps": {"loss_kernel": [8192, 16]},
    "fp8_head": {"fp8_head": "all"},
    "fp8_logits": {"fp8_head": "forward"},
    "one_region_bf16": {"one_region": True, "bf16_stream": True},
    "tuned": {"inductor": {"coordinate_descent_tuning": True}},
    "all": {"one_region": True, "bf16_stream": True, "fp8_head": "all"},
    "muon": {"overrides": ["optimizer=muon"]},
}


def switches(names: list[str], turns: int, steps: int, nanogpt: bool = False) -> Callable[[Place], dict[str, Any]]:
    def make(place: Place) -> dict[str, Any]:
        chosen = [name for name in names if name in ("as_is", "one_region_bf16")] if place.toy else names
        variants = {name: VARIANTS[name] for name in chosen}
        if place.nanogpt and nanogpt:
            variants["nanogpt"] = {"nanogpt": str(place.nanogpt)}
        spec = {"overrides": gpt_bins(place)[0], "embedding_rows": 128 if place.toy else 50304, "variants": variants}
        spec |= {"turns": 1, "steps": 1} if place.toy else {"turns": turns, "steps": steps}
        (place.folder / "spec.json").write_text(json.dumps(spec))
        found: dict[str, Any] = json.loads(python([str(HERE / "leg_switches.py"), f"{place.folder}/spec.json"])[-1])
        return found

    return make


def beside_nanogpts_step(place: Place) -> dict[str, Any]:
    size = place.pick("--shape=char --rounds=1 --steps=6 --warmup=2 --every=1 --threads=1",
                      "--shape=small --rows=64 --rounds=2 --steps=60 --warmup=20 --every=20")  # fmt: skip
    who = "--contenders=bare,lmtrain" if place.toy else "--contenders=lmtrain,nanogpt_model"
    return benchmark(pretrain.main, place, [*size, who, *beside_nanogpt(place)])


def to_a_loss(steps: int, ours: int, *own: str) -> Callable[[Place], dict[str, Any]]:
    def make(place: Place) -> dict[str, Any]:
        size = place.pick("--shape=char --rows=12 --steps=6 --train-tokens=50000 --val-tokens=2000 --threads=1",
                          "--shape=small --rows=64 --train-tokens=60000000")  # fmt: skip
        if not place.toy:
            size += [f"--steps={steps}", f"--our-steps={ours}", *([f"--bins={place.bins}"] if place.bins else [])]
        return benchmark(learning.main, place, [*size, *own, *beside_nanogpt(place)])

    return make


def budget(deeper: int) -> Callable[[Place], dict[str, Any]]:
    """A run of a minute, at the depth that budget.minutes chooses or at another: promise, end and bits per byte."""

    def make(place: Place) -> dict[str, Any]:
        minutes, run, chosen = 1.0, place.folder / "run", place.found.get("budget", {}).get("depth", 0)
        words = ["experiment=dial", f"data.cache_dir={place.scratch}/cache", f"run.dir={run}", *LOGGER]
        words += [f"model.depth={max(1, chosen + deeper)}"] if deeper and not place.toy else []
        if place.toy:
            text = place.scratch / "text.txt"
            text.write_text("".join(file.read_text() for file in sorted(HERE.glob("*.py"))))
            words += [str(text), "tokenizer=bytes", "trainer.num_threads=1", "report.enabled=false"]
            words += ["export.enabled=false", "callbacks.samples.every_n_validations=0"]
            words += ["trainer.max_steps=12", "model.depth=2"]  # a typed length decides: no test depends on a clock
        began = time.time()
        said = python(["-m", "lmtrain.train", *words, f"budget.minutes={minutes}"])
        rows, whole = (
            [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()],
            time.time() - began,
        )
        depths = [line.split("model.depth=")[1].split(",")[0] for line in said if " chose model.depth=" in line]
        curve = [(row["time"] - began, row["val/bits_per_byte"]) for row in rows if "val/bits_per_byte" in row]
        forecast = json.loads((run / "summary.json").read_text()).get("forecast")
        return {"depth": int(depths[0]) if depths else chosen + deeper, "bits_per_byte": curve[-1][1], "curve": curve,
                "forecast": forecast, "process_s": whole, "minutes": minutes}  # fmt: skip

    return make


def tuned(main: Callable[[list[str]], int], contenders: str, *own: str) -> Callable[[Place], dict[str, Any]]:
    """sft.py or dpo.py, with the shape of Llama 3.2 1B (1.24 B parameters)."""

    def make(place: Place) -> dict[str, Any]:
        rows = "--rows" if main is sft.main else "--pairs"
        size = place.pick(f"--rounds=1 --steps=2 --warmup=1 --seq-len=512 --threads=1 --made=60 {rows}=2",
                          "--rounds=1 --steps=24 --warmup=8 --every=8 --trl-micro-batch-size=8")  # fmt: skip
        if not place.toy:
            size += ["--rows=64", "--seq-len=2048"] if main is sft.main else ["--pairs=32", "--seq-len=1024"]
            shape = place.scratch / "shape"
            size += [f"--model={shape if shape.exists() else write_shape(shape)}", f"--scratch={place.scratch}"]
        trl = place.trl_python or Path("none")
        return benchmark(main, place, [*size, f"--contenders={contenders}", f"--trl-python={trl}", *own])

    return make


def sampling(place: Place) -> dict[str, Any]:
    return rollouts.measure(*((64, 2, 8, 16, 1) if place.toy else (1024, 16, 64, 256, 2)))


EIGHT_BILLIONS = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                  "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                  "tie_word_embeddings": False}  # fmt: skip


def qlora(place: Place) -> dict[str, Any]:
    """The weights of an 8 B shape, in bf16, are written once (16 GB)."""
    size = ["--rounds=1", "--steps=16", "--warmup=8", "--every=8", "--rows=32", "--seq-len=2048", "--peft=qlora"]
    model = place.scratch / "eight_billions" / "model"
    if not model.exists():
        shape = write_shape(place.scratch / "shape_8b", EIGHT_BILLIONS)
        write_model(model, shape, made_conversations(1), torch.bfloat16)
    scratch = [f"--scratch={model.parent}", "--contenders=lmtrain", "--trl-python=none"]
    return benchmark(sft.main, place, [*size, *scratch])


# A checkpoint of gpt_small is 1.5 GB.
SAVES = ["trainer.log_every_n_steps=1", "trainer.save_every_n_steps=15", "checkpoint.keep_last=100"]
RUNS = {
    "adamw": [],
    "muon": ["optimizer=muon"],
    "checkpointing": ["trainer.activation_checkpointing=true"],
    "saves": SAVES,
    "async_saves": [*SAVES, "checkpoint.async_save=true"],
}


def runs(place: Place) -> dict[str, Any]:
    """Short runs of the main job in one process: speed, memory, graphs, waits of the host, stalls of saves."""
    words, _ = gpt_bins(place)
    size = ["trainer.max_steps=34", "trainer.log_every_n_steps=2", f"data.cache_dir={place.folder}/cache"]
    size = [*size, "trainer.save_every_n_steps=null"]
    chosen = {"async_saves": RUNS["async_saves"]} if place.toy else RUNS
    cases = {name: [*words, *size, *own] for name, own in chosen.items()}
    (place.folder / "cases.json").write_text(json.dumps(cases))
    said = python([str(HERE / "leg_runs.py"), f"{place.folder}/cases.json", str(place.folder)])
    return {"runs": json.loads(said[-1])}


def cases(first: str, last: str) -> Callable[[Place], dict[str, Any]]:
    def make(place: Place) -> dict[str, Any]:
        return queue_cases.run_all(place.scratch / "cases", place.folder, first, last, place.toy)

    return make


SWITCHES = ("leg_switches", "loss_kernel", "fp8_head", "kernels")
FINETUNE = ("benchmarks/finetune.py", "benchmarks/workload.py", "benchmarks/leg_trl.py")
PARTS = {
    "tests": Part("Do the tests marked gpu pass?", 45, (SRC + "models", SRC + "losses", "tests/models"), gpu_tests,
                  ("pytest",)),
    "attention": Part("Which attention kernels are right, by row length and heads?", 20,
                      ("benchmarks/attention_errors.py",), attention_kernels),
    "verify": Part("Does a killed and resumed run on packed rows equal one that was not?", 60, TUNED, verify,
                   ("cuda",)),
    "switches": Part("What do larger regions, bf16, 8 bits and other kernels gain, and where does the time go?", 230,
                     (*MODEL, *(f"benchmarks/{name}.py" for name in SWITCHES)),
                     switches([*VARIANTS], 4, 12, nanogpt=True)),
    "stream_curve": Part("Does gpt_small learn as well with a bf16 residual stream, over 300 steps?", 140,
                         (*MODEL, "benchmarks/leg_switches.py"), switches(["as_is", "bf16_stream"], 5, 48)),
    "gpt_small": Part("How many tokens a second, next to nanoGPT?", 110, STEP, beside_nanogpts_step),
    "recipes": Part("Which recipe reaches nanoGPT's loss in the fewest steps?", 190, (*STEP, "conf/schedule"),
                    to_a_loss(600, 240, "--together", "--contenders=nanogpt,muon_2x,muon_4x,modern"), ("nanogpt",)),
    "time_to_loss": Part("In what part of nanoGPT's time does lmtrain reach its loss?", 200, (*STEP, "conf/schedule"),
                         to_a_loss(600, 240, "--contenders=nanogpt,muon_4x"), ("nanogpt",)),
    "budget": Part("Does budget.minutes keep its promise?", 75, (*STEP, SRC + "planning"), budget(0)),
    "budget_shallower": Part("Would two layers fewer have been better?", 75, (*STEP, SRC + "planning"), budget(-2),
                             ("budget",)),
    "budget_deeper": Part("Would two layers more have been better?", 75, (*STEP, SRC + "planning"), budget(2),
                          ("budget",)),
    "sft": Part("SFT of 1.24 B parameters: tokens a second, next to TRL?", 110, (*TUNED, *FINETUNE),
                tuned(sft.main, "lmtrain,trl_padded")),
    "dpo": Part("DPO of 1.24 B parameters: pairs a second, next to TRL?", 120, (*TUNED, *FINETUNE),
                tuned(dpo.main, "lmtrain,trl")),
    "rollouts": Part("Rollouts: tokens a second, next to transformers' generate?", 75,
                     (SRC + "rollouts", "benchmarks/rollouts.py"), sampling),
    "qlora_8b": Part("QLoRA of 8 B parameters: memory and tokens a second?", 120, (*TUNED, *FINETUNE), qlora,
                     ("bitsandbytes", "cuda")),
    "sft_fp8": Part("SFT in fp8: tokens a second?", 60, (*TUNED, *FINETUNE),
                    tuned(sft.main, "lmtrain", "--precision=fp8"), ("torchao", "cuda")),
    "runs": Part("Muon, checkpointing and saves: what do they cost?", 110, (*STEP, SRC + "checkpoints"), runs),
    "cases_pretraining": Part("Does every kind of pretraining run?", 110, ("src", "conf"), cases("gpt_small", "int8")),
    "cases_tuning": Part("Does every kind of fine-tuning run?", 110, ("src", "conf"), cases("int8", "pretrain_gpu")),
    "cases_exact": Part("Are losses in fp32 those of the CPU?", 90, ("src", "conf"), cases("pretrain_gpu", "")),
}  # fmt: skip
