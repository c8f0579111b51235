"""A cross-cutting feature is one class: a test feature appears in plan, model, summary, fingerprint and export."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from inprocess import TWO_STEPS, message, run
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
    assert "the final norm times 2" in (tmp_path / "run" / "plan.txt").read_text()
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


def test_a_feature_that_is_off_says_nothing() -> None:
    assert [type(f).__name__ for f in features.FEATURES] == [
        "Memory", "Fp8", "Rounding",
        "ReportingRollouts", "Averaging", "StoppingEarly", "Streaming", "Budgeted", "Growing",
    ]  # fmt: skip
    assert all(getattr(Feature(), name)(None, None) in ([], None, {}) for name in ("plan_rows", "content", "summary"))
