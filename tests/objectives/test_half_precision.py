"""Every objective trains, validates and writes in half precision as in fp32, up to rounding.

Lightning sets torch's default dtype to the precision's in every step of bf16-true and 16-true, so a tensor that is made
without a dtype loses bits, or stops the run where another one is written into it.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch.utils._python_dispatch import TorchDispatchMode

import lmtrain
from inprocess import run
from support import rows
from tiny_pretrained import save_pretrained

PROMPTED = ["data=chat_jsonl", "data.conversation_format=prompt_completion", "data.chat_template=null"]
PAIRED = ["data=preference_jsonl", "data.conversation_format=preference_text"]
DATA = {
    "causal_lm": ["data=jsonl"],
    "sft": PROMPTED,
    "dpo": PAIRED,
    "kto": ["data=unpaired_jsonl", "data.chat_template=zephyr"],
    "reward": PAIRED,
    "grpo": ["data=prompts_jsonl", "objective.group_size=2", "reward=regex", "reward.whole=false",
             "reward.pattern='[a-p]'"],
    "distill": [*PROMPTED, "data.packing=off", "objective.on_policy=1.0"],
    "mdlm": ["data=jsonl", "data.isolate_documents=false", "data.packing=null"],
}  # fmt: skip
WRITERS = ("grpo", "distill")  # train on what they sample, and a token that falls otherwise changes the next step
SETTINGS = [
    "model=pretrained", "model.dropout=0", "data.seq_len=64", "data.val_fraction=0.2", "data.global_batch_size=4",
    "data.micro_batch_size=2", "trainer.accelerator=cpu", "trainer.max_steps=3", "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=3", "trainer.limit_val_batches=1", "trainer.save_every_n_steps=null",
    "optimizer.lr=3e-3", "schedule=constant", "schedule.warmup_steps=0", "callbacks.samples.every_n_validations=1",
    "callbacks.samples.max_new_tokens=4", "callbacks.progress.style=none", "logger=none", "export.enabled=false",
    "report.enabled=false",
]  # fmt: skip


@dataclass(frozen=True)
class Bound:
    """How far half precision may be from fp32."""

    loss: float  # relative if the loss is above 1, else absolute
    validation: float  # the same after three updates
    norm: float  # of a gradient, relative
    log_prob: float  # mean distance between a token's when sampled and when trained on, in nats
    divergence: float  # of two models that are nearly the same, relative: a sum of small differences


# A number has 8 significant bits in bf16, 11 in fp16. The bounds are 2 to 4 times what is measured on a CPU, and a
# quarter of what bf16 times and masks of mdlm cost (4e-3 in the loss, 1.8e-2 in the norm).
BF16 = Bound(loss=1.5e-3, validation=5e-3, norm=1.5e-2, log_prob=1e-2, divergence=5e-2)
BOUNDS = {
    "bf16-mixed": BF16,
    "bf16-true": BF16,
    "16-true": Bound(loss=4e-4, validation=1e-3, norm=6e-3, log_prob=2e-3, divergence=1e-2),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    found = tmp_path_factory.mktemp("half")
    texts = [{"text": f"{i} is near {7 * i % 30}, I think. Is it?"} for i in range(24)]
    answers = [{"prompt": f"{i}? ", "completion": f"{i} is it"} for i in range(24)]
    pairs = [{"prompt": f"{i}? ", "chosen": f"{i} is it", "rejected": f"{i % 7} or so"} for i in range(24)]
    data = {"causal_lm": texts, "mdlm": texts, "sft": answers, "distill": answers, "dpo": pairs, "reward": pairs}
    data |= {"kto": [{**row, "label": i % 3 != 0} for i, row in enumerate(answers)]}
    data |= {"grpo": [{"prompt": row["prompt"]} for row in answers]}
    for name, made in data.items():
        (found / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    save_pretrained(found / "model", spare_rows=1, initializer_range=0.1)  # the spare row is mdlm's mask
    save_pretrained(found / "teacher", spare_rows=1, initializer_range=0.12)
    return found


def settings(folder: Path, objective: str, *argv: str) -> list[str]:
    own = [f"objective={objective}", *DATA[objective], f"data.path={folder / objective}.jsonl"]
    if objective in WRITERS:
        own.append("objective.max_new_tokens=6")
    if objective == "distill":
        own.append(f"objective.teacher={folder / 'teacher'}")
    return [*own, *SETTINGS, f"model.name_or_path={folder / 'model'}", *argv]


def trained(folder: Path, run_dir: Path, objective: str, *argv: str) -> list[dict[str, Any]]:
    """Returns the records of three steps, of which the last has a validation, after which a sample is written."""
    ended = run("train", *settings(folder, objective, *argv, f"run.dir={run_dir}"))
    assert ended.code == 0, ended.err
    if objective != "reward":  # its model writes nothing
        assert rows(run_dir / "samples.jsonl")[-1]["step"] == 3
    return rows(run_dir / "metrics.jsonl")


def beyond(objective: str, found: list[dict[str, Any]], exact: list[dict[str, Any]], bound: Bound) -> list[str]:
    """Returns descriptions of all differences beyond the bound."""
    wrong = []

    def check(name: str, ours: float, theirs: float, allowed: float) -> None:
        if not abs(ours - theirs) <= allowed:
            wrong.append(f"{name}: {ours:.6g} instead of {theirs:.6g}")

    losses = "train/logps/trainer" if objective == "grpo" else "train/loss"  # GRPO's loss is 0 at its first step
    steps = [(a, b) for a, b in zip(found, exact, strict=True) if losses in b]
    assert len(steps) == 3
    for ours, theirs in steps[:1] if objective in WRITERS else steps:
        size = abs(theirs[losses])
        # A score is one product of a hidden state, and a prompt's few sampled tokens are no average of many.
        most = bound.loss * max(1, size) * (3 if objective in ("reward", "grpo") else 1)
        most = bound.divergence * size if objective == "distill" else most
        check(f"step {ours['step']}: {losses}", ours[losses], theirs[losses], most)
        check(
            f"step {ours['step']}: grad_norm", ours["grad_norm"], theirs["grad_norm"], bound.norm * theirs["grad_norm"]
        )
    if objective == "grpo":
        for ours, _ in steps:
            check("sampler_difference", ours["train/sampler_difference"], 0.0, bound.log_prob)
    if objective not in WRITERS:
        (ours, theirs) = ([row["val/loss"] for row in each if "val/loss" in row][-1] for each in (found, exact))
        check("val/loss", ours, theirs, bound.validation * max(1, abs(theirs)))
    return wrong


@pytest.mark.parametrize("adapter", ["none", pytest.param("lora", marks=pytest.mark.slow)])
@pytest.mark.parametrize("objective", DATA)
def test_trains_as_in_fp32(folder: Path, tmp_path: Path, objective: str, adapter: str) -> None:
    exact = trained(folder, tmp_path / "fp32", objective, f"peft={adapter}", "trainer.precision=32-true")
    wrong = {}
    for precision, bound in BOUNDS.items():
        words = [f"peft={adapter}", f"trainer.precision={precision}"]
        wrong[precision] = beyond(objective, trained(folder, tmp_path / precision, objective, *words), exact, bound)
    assert not any(wrong.values()), wrong


class MadeInHalf(TorchDispatchMode):
    """Notes the lines of lmtrain that make bf16 tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = op(*args, **(kwargs or {}))
        each = made if isinstance(made, (list, tuple)) else [made]
        if any(isinstance(x, torch.Tensor) and x.dtype == torch.bfloat16 for x in each):
            frame: Any = sys._getframe(1)
            while frame is not None and "/lmtrain/" not in frame.f_code.co_filename:
                frame = frame.f_back
            if frame is not None:
                self.lines.add(f"{frame.f_code.co_filename.rpartition('/lmtrain/')[2]}:{frame.f_lineno}")
        return made


@pytest.mark.parametrize("objective", DATA)
def test_no_tensor_takes_the_default_dtype(
    folder: Path, tmp_path: Path, objective: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run in fp32 whose steps have a default of bf16, nothing is bf16; also not a quotient of integers."""
    watch = MadeInHalf()

    @contextlib.contextmanager
    def as_if_half(_: Precision) -> Iterator[None]:
        torch.set_default_dtype(torch.bfloat16)
        try:
            with watch:
                yield
        finally:
            torch.set_default_dtype(torch.float32)

    monkeypatch.setattr(Precision, "forward_context", as_if_half)
    trained(folder, tmp_path / "run", objective, "trainer.precision=32-true")
    assert watch.lines == set()


@pytest.mark.parametrize("precision", BOUNDS)
def test_predicts_in_half_precision(folder: Path, tmp_path: Path, precision: str) -> None:
    found = {}
    for each in ("32-true", precision):
        words = settings(folder, "causal_lm", f"trainer.precision={each}", f"run.dir={tmp_path / each}")
        made = lmtrain.build(lmtrain.compose([*words, "run.resume=none"]))
        predicted = made.trainer.predict(made.objective, dataloaders=made.datamodule.val_dataloader())
        found[each] = torch.cat([batch["log_probs"] for batch in predicted])
    assert found[precision].dtype == torch.float32
    assert (found[precision] - found["32-true"]).abs().max() < 20 * BOUNDS[precision].loss  # single tokens


@pytest.mark.parametrize("objective", ["sft", "grpo"])
def test_a_mixture_trains_in_double_precision(objective: str, folder: Path, tmp_path: Path) -> None:
    """torch multiplies experts in groups in fp32 and below only."""
    save_pretrained(tmp_path / "model", "qwen3_moe", initializer_range=0.1)
    found = {}
    for precision in ("32-true", "64-true"):
        words = [f"trainer.precision={precision}", f"model.name_or_path={tmp_path / 'model'}"]
        found[precision] = trained(folder, tmp_path / precision, objective, *words)
    for ours, theirs in zip(found["64-true"], found["32-true"], strict=True):
        for name in theirs.keys() & {"train/loss", "train/reward", "grad_norm", "val/loss"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-7)
