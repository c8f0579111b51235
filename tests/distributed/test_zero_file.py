"""A user's own DeepSpeed file: invalid files are refused before anything is built, and conflicts are overruled."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from inprocess import TWO_STEPS, message, train_tiny
from lmtrain.config.compose import check, compose
from lmtrain.config.strategies import engine_config, overruled
from lmtrain.distributed import devices
from support import TINY, Run

ZERO = ["trainer.strategy=deepspeed", "trainer.accelerator=cpu"]
ZERO2 = {"zero_optimization": {"stage": 2}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "can't be read"),
        ("{stage: 3}", "can't be read"),
        ("[]", "holds no JSON object"),
        ({}, "zero_optimization.stage has to be 1, 2 or 3"),
        ({"zero_optimization": {"stage": 0}}, "without ZeRO set trainer.strategy=ddp"),
        (
            {"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}},
            'zero_optimization.reduce_bucket_size is "a',
        ),
        ({"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "needs trainer.deepspeed.stage=3"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/no/such/disk"}}},
            "nvme_path=/no/such/disk is not writable: name a folder",
        ),
        ({"zero_optimization": {"stage": 2, "reduce_bucket": 1}}, "reduce_bucket: Extra inputs are not permitted"),
    ],
)
def test_what_is_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any, said: str
) -> None:
    if "Extra" in said:
        pytest.importorskip("deepspeed")
    monkeypatch.setenv("LMTRAIN_DEEPSPEED_ON_CPU", "1")
    path = tmp_path / "zero.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    done = train_tiny(corpus, f"run.dir={tmp_path / 'run'}", *ZERO, f"trainer.deepspeed.config={path}")
    assert done.code == 2, done.err
    assert said in message(done.err)
    assert not (tmp_path / "run").exists()


def test_the_plan_and_the_engine_speak_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries without a conflict are kept: values equal to the run's, and disabled precisions."""
    monkeypatch.chdir(tmp_path)
    zero = {
        "stage": 3,
        "sub_group_size": 1000,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "none"},
    }
    said = {
        "zero_optimization": zero,
        "gradient_clipping": 1.0,
        "fp16": {"enabled": False},
        "wall_clock_breakdown": True,
    }
    Path("zero.json").write_text(json.dumps(said))
    config = check(compose([*TINY, *ZERO, "optimizer=adamw", "trainer.deepspeed.config=zero.json"]))
    devices.resolve_auto(config)
    d = config.trainer.deepspeed
    assert (d.stage, d.offload_optimizer, d.offload_parameters) == (3, "cpu", None)
    assert d.config == str(tmp_path / "zero.json")
    told = engine_config(config.trainer)
    assert told["zero_optimization"] == zero
    assert told["wall_clock_breakdown"] is True
    assert told["train_micro_batch_size_per_gpu"] == 1
    assert "fp16" not in told


def test_what_the_file_says_otherwise_is_overruled_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a typical user's file, neither entries that agree with the config nor those left open are reported."""
    monkeypatch.chdir(tmp_path)
    own = {
        "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.5, "fp16": {"enabled": True}, "bf16": {"enabled": False}, "steps_per_print": 7,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}, "scheduler": {"type": "WarmupLR"},
    }  # fmt: skip
    Path("zero.json").write_text(json.dumps(ZERO2 | own))
    config = check(compose([*TINY, *ZERO, "optimizer=adamw", "trainer.deepspeed.config=zero.json"]))
    told = engine_config(config.trainer)
    assert told["steps_per_print"] == 7
    assert told["gradient_clipping"] == config.trainer.gradient_clip_val == 1.0
    assert not {"train_batch_size", "optimizer", "scheduler", "fp16"} & set(told)
    assert overruled(config) == [
        "train_batch_size (data.global_batch_size holds)",
        "gradient_clipping (trainer.gradient_clip_val holds)",
        "fp16 (trainer.precision holds)",
        "optimizer (optimizer.* holds)",
        "scheduler (schedule.* holds)",
    ]
    config.data.global_batch_size, config.trainer.gradient_clip_val, config.trainer.precision = 8, 0.5, "16-mixed"
    assert overruled(config) == ["optimizer (optimizer.* holds)", "scheduler (schedule.* holds)"]


@pytest.mark.parametrize(
    ("name", "stage", "optimizer", "parameters"),
    [
        ("deepspeed_stage_2", 2, None, None),
        ("deepspeed_stage_2_offload", 2, "cpu", None),
        ("deepspeed_stage_3", 3, None, None),
        ("deepspeed_stage_3_offload", 3, "cpu", "cpu"),
        ("deepspeed_stage_3_offload_nvme", 3, "nvme", "nvme"),
    ],
)
def test_lightnings_names(name: str, stage: int, optimizer: str | None, parameters: str | None) -> None:
    trainer = check(compose([*TINY, f"trainer.strategy={name}", "optimizer=adamw"])).trainer
    d = trainer.deepspeed
    assert (trainer.strategy, d.stage, d.offload_optimizer, d.offload_parameters) == (
        "deepspeed", stage, optimizer, parameters)  # fmt: skip


def test_nvme_says_what_to_install(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if AsyncIOBuilder().is_compatible(verbose=False) or torch.cuda.is_available():
        pytest.skip("libaio is here")
    monkeypatch.setenv("LMTRAIN_DEEPSPEED_ON_CPU", "1")
    nvme = ["trainer.deepspeed.stage=3", "trainer.deepspeed.offload_optimizer=nvme"]
    done = train_tiny(corpus, f"run.dir={tmp_path / 'run'}", *ZERO, *nvme, f"trainer.deepspeed.nvme_path={tmp_path}")
    assert done.code == 2, done.err
    assert "apt install libaio-dev" in message(done.err)


@pytest.mark.slow
def test_deepspeed_says_nothing_where_it_is_not_used(corpus: Path, lmtrain: Run) -> None:
    """transformers imports DeepSpeed when a model is saved, to check whether the model is one of its engines."""
    pytest.importorskip("deepspeed")
    done = lmtrain(
        "train", *TINY, *TWO_STEPS, "data=text", f"data.path={corpus}", "trainer.accelerator=cpu", "run.name=a"
    )
    exported = lmtrain("export", "run_dir=outputs/a")
    assert done.returncode == exported.returncode == 0, done.stderr + exported.stderr
    said = done.stdout + done.stderr + exported.stdout + exported.stderr
    assert "real_accelerator" not in said
    assert "WARNING" not in said
