"""callbacks=ema: the average of the weights is validated, exported and resumed; training itself is unchanged."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import lmtrain
from inprocess import message, run, train_tiny
from lmtrain.callbacks.metrics import without_times
from lmtrain.checkpoints import store
from support import EXPORT, SAMPLES, TINY, rows
from tiny_pretrained import save_pretrained

DECAY = 0.8
SIX = [
    *("trainer.max_steps=6", "trainer.val_check_interval=3", "trainer.save_every_n_steps=1", "checkpoint.keep_last=9"),
    *("optimizer.lr=1e-2", "schedule.warmup_steps=0", "run.dir=run", "run.resume=auto", "export.dtype=float32"),
]
EMA = [*SIX, EXPORT, SAMPLES, "callbacks=ema", f"callbacks.ema.decay={DECAY}"]


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def averages(folder: str) -> dict[str, torch.Tensor]:
    """Computes the average by its formula, in fp64, from the weights in every step's checkpoint."""
    mean: dict[str, torch.Tensor] = {}
    for path in store.scan(Path(folder) / "checkpoints"):
        for name, value in store.load_weights(path).items():
            value = value.double()
            mean[name] = DECAY * mean[name] + (1 - DECAY) * value if name in mean else value
    return mean


def logged(folder: str) -> list[dict[str, Any]]:
    return [without_times(row) for row in rows(Path(folder) / "metrics.jsonl")]


def test_what_is_validated_and_exported_is_the_average(corpus: Path) -> None:
    plain = train_tiny(corpus, *SIX, "run.dir=plain")
    ended = train_tiny(corpus, *EMA)
    assert (plain.code, ended.code) == (0, 0), ended.err
    assert "decay 0.8: validated and exported" in Path("run/plan.txt").read_text()
    train = [[row for row in logged(name) if "train/loss" in row] for name in ("run", "plain")]
    assert train[0] == train[1]
    expected = averages("run")
    exported = AutoModelForCausalLM.from_pretrained("run/export").state_dict()
    for name, value in expected.items():
        assert torch.allclose(exported[name.removeprefix("model.model.")].double(), value, rtol=1e-5, atol=1e-7), name
    # The loss of the averaged weights, computed by a run without averaging.
    other = lmtrain.build(lmtrain.compose([*TINY, "data=text", f"data.path={corpus}", *SIX, "run.dir=other",
                                           "trainer.limit_val_batches=1"]))  # fmt: skip
    other.objective.model.model.load_state_dict(exported)
    last = logged("run")[-1]["val/loss"]
    assert other.validate()["val/loss"] == pytest.approx(last, rel=1e-6)
    assert logged("plain")[-1]["val/loss"] != pytest.approx(last, rel=1e-3)


def test_every_verb_and_python_take_the_average(corpus: Path) -> None:
    assert train_tiny(corpus, *EMA).code == 0
    exported = AutoModelForCausalLM.from_pretrained("run/export").state_dict()
    Path("run/export").rename("first")
    assert run("export", "run_dir=run", "export.dtype=float32").code == 0
    again = AutoModelForCausalLM.from_pretrained("run/export").state_dict()
    assert all(torch.equal(again[name], value) for name, value in exported.items())
    words = [*TINY, "data=text", f"data.path={corpus}", *EMA, "trainer.max_steps=7", "trainer.limit_val_batches=1"]
    longer = lmtrain.build(lmtrain.compose(words))
    assert longer.validate()["val/loss"] == pytest.approx(logged("run")[-1]["val/loss"], rel=1e-6)  # of the checkpoint
    longer.fit()
    assert longer.validate()["val/loss"] == pytest.approx(logged("run")[-1]["val/loss"], rel=1e-6)


def test_a_stopped_run_goes_on_bit_for_bit(corpus: Path) -> None:
    whole = train_tiny(corpus, *EMA, "run.dir=whole")
    assert whole.code == 0, whole.err
    with pytest.raises(ZeroDivisionError):
        train_tiny(corpus, *EMA, "callbacks.extra=[{_target_: inprocess.Breaks, at: 5}]",
                   "run.allow_target=[inprocess]")  # fmt: skip
    done = train_tiny(corpus, *EMA)
    assert done.code == 0, done.err
    assert logged("whole") == logged("run")
    a, b = (store.load(Path(name) / "checkpoints" / "last") for name in ("whole", "run"))
    kept, again = (c["callbacks"]["WeightAverage"]["average"] for c in (a, b))
    assert kept
    assert kept.keys() == again.keys()
    assert all(torch.equal(kept[name], again[name]) for name in kept)
    for name, value in averages("run").items():
        if name in kept:
            assert torch.allclose(kept[name].double(), value, rtol=1e-5, atol=1e-7), name


def test_only_what_is_trained_is_averaged(corpus: Path, tmp_path: Path) -> None:
    base = save_pretrained(tmp_path / "base")
    small = ["data.seq_len=32", "data.global_batch_size=6", "data.micro_batch_size=2", "trainer.precision=32-true"]
    quiet = ["logger=none", "callbacks.samples.every_n_validations=0", "trainer.limit_val_batches=1"]
    adapts = ["model=pretrained", f"model.name_or_path={base}", "peft=lora"]
    ended = run("train", *adapts, "data=text", f"data.path={corpus}", *small, *quiet, *EMA)
    assert ended.code == 0, ended.err
    average = store.load(Path("run/checkpoints/last"))["callbacks"]["WeightAverage"]["average"]
    assert average
    assert all("lora_" in name for name in average)
    expected = averages("run")
    assert all(torch.allclose(average[name].double(), expected[name], rtol=1e-5, atol=1e-7) for name in average)


def test_sharded_weights_are_refused(corpus: Path) -> None:
    ended = train_tiny(corpus, "callbacks=ema", "trainer.strategy=fsdp")
    assert ended.code == 2
    assert "callbacks.ema.enabled=true does not go with trainer.strategy=fsdp" in message(ended.err)


def test_a_setting_of_it_turns_it_on() -> None:
    assert lmtrain.compose(["callbacks.ema.decay=0.9"]).callbacks.ema.enabled
    assert not lmtrain.compose(["callbacks.ema.decay=0.9", "callbacks.ema.enabled=false"]).callbacks.ema.enabled
