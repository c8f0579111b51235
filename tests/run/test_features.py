"""A cross-cutting feature is one class: a test feature appears in plan, model, summary, fingerprint and export."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from safetensors.torch import load_file
from transformers import PreTrainedModel

import lmtrain
from inprocess import TWO_STEPS, message, run
from lmtrain.callbacks.parts import Parts, Phase, Placed
from lmtrain.config.schema import Config
from lmtrain.models.feature import Feature
from lmtrain.run import features
from support import EXPORT, TINY, rows


class Doubled(Feature):
    """A feature that doubles the output of the final norm; it is on in runs with this name."""

    factor = 2

    def is_on(self, config: Config) -> bool:
        return config.run.name == "doubled"

    def change_model(self, model: PreTrainedModel, config: Config) -> None:
        self.hook = model.transformer.ln_f.register_forward_hook(lambda _module, _inputs, out: out * self.factor)

    def restore_model(self, model: PreTrainedModel) -> None:
        self.hook.remove()

    def callbacks(self, parts: Parts) -> list[Placed]:
        self.steps = list[int]()
        return [(Phase.READS_SCORES, LambdaCallback(on_train_batch_end=lambda t, *_: self.steps.append(t.global_step)))]

    def advice(self, run: Any) -> list[str]:
        return [f"doubled for {run.total_steps} steps"]

    def plan_rows(self, model: PreTrainedModel, config: Config) -> list[tuple[str, str]]:
        return [("doubled", f"the final norm times {self.factor}")]

    def content(self, model: PreTrainedModel, config: Config) -> int:
        return self.factor

    def speed(self, config: Config) -> dict[str, str]:
        return {"final_norm": "doubled"}

    def summary(self, model: PreTrainedModel, config: Config) -> dict[str, int]:
        return {"final_norm_factor": self.factor}


@pytest.mark.parametrize("then", [3, "gone"])
def test_a_feature_of_a_tests_own(
    then: int | str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    feature = Doubled()
    words = [*TINY, *TWO_STEPS, EXPORT, "data=text", f"data.path={corpus}", "model=gpt_nano", "run.name=doubled"]
    plain = run("train", *words, f"run.dir={tmp_path}/plain")
    assert plain.code == 0, plain.err
    monkeypatch.setattr(features, "FEATURES", [*features.FEATURES, feature])
    done = run("train", *words, f"run.dir={tmp_path}/run")
    assert done.code == 0, done.err

    losses = [rows(tmp_path / name / "metrics.jsonl")[0]["train/loss"] for name in ("plain", "run")]
    assert losses[0] != losses[1]
    plan = (tmp_path / "run" / "plan.txt").read_text()
    assert "the final norm times 2" in plan
    assert "doubled for 2 steps" in plan
    assert feature.steps == [1, 2]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["final_norm_factor"], summary["speed_of"]["final_norm"]) == (2, "doubled")
    assert torch.isfinite(load_file(tmp_path / "run" / "export" / "model.safetensors")["transformer.wte.weight"]).all()

    if then == "gone":
        monkeypatch.setattr(features, "FEATURES", features.FEATURES[:-1])
    else:
        feature.factor = then
    again = run("train", *words, f"run.dir={tmp_path}/run", "run.resume=auto", "trainer.max_steps=3")
    assert again.code == 2
    assert "feature.doubled" in message(again.err)


def test_callbacks_run_in_the_order_of_their_phases(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order that docs/architecture.md gives reasons for, with the callbacks of features in their places."""
    monkeypatch.chdir(tmp_path)
    mine = ["callbacks.extra=[{_target_: lightning.pytorch.callbacks.LearningRateMonitor}]", "logger=csv"]
    mine += ["callbacks.samples.every_n_validations=1", "trainer.max_steps=2"]
    words = [*TINY, "data=text", f"data.path={corpus}", "callbacks=[early_stopping,ema]", *mine]
    made = lmtrain.build(lmtrain.compose([*words, "run.dir=run"]))
    names = [type(callback).__name__ for callback in made.trainer.callbacks]
    expected = ["Metrics", "BadSteps", "LearningRateMonitor", "WeightAverage", "Validation", "EarlyStopping",
                "Samples", "PlainLines", "Preemption", "WriteRecords", "Checkpoints"]  # fmt: skip
    assert [name for name in names if name in expected] == expected
    assert "Routing" not in names, "this model has no routers"


def test_a_feature_that_is_off_says_nothing() -> None:
    assert [type(f).__name__ for f in features.FEATURES] == [
        "Memory", "Fp8", "Rounding",
        "ReportingRollouts", "Averaging", "StoppingEarly", "Streaming", "Budgeted", "Growing",
    ]  # fmt: skip
    assert all(getattr(Feature(), name)(None, None) in ([], None, {}) for name in ("plan_rows", "content", "summary"))
    assert Feature().callbacks(None) == Feature().advice(None) == []
