"""The table of models (benchmarks/model_table.py): nine of them go through the columns that take no second run."""

from pathlib import Path

import pytest
import torch
from model_page import COLUMNS, GOOD, PAGE, on_page, padded_on, page, verdict
from model_table import Trial, train, tried
from safetensors.torch import load_file
from tiny_models import names

from lmtrain.run_folder import trained
from lmtrain.run_folder.folder import RunDir
from support import thinned

SIX = ("gemma3", "qwen3_5", "lfm2", "granitemoehybrid", "nemotron_h", "falcon_h1")
NINE = (*SIX, "gpt_oss", "bloom", "mamba")  # ways in which families differ
QUICK = ("trains", "packs", "exports", "reloads")


@pytest.mark.parametrize("name", thinned(NINE, 3))
def test_a_family_trains_and_comes_back(name: str, tmp_path: Path) -> None:
    trial = Trial(name, tmp_path)
    found = {column: getattr(trial, column)() for column in QUICK}
    assert set(found.values()) <= set(GOOD), found
    live, _, _ = trained.from_run(trial.run, "last", {})
    assert (found["packs"] == "as rows") == (live.unpacked_because is not None)
    assert (found["packs"] == "as rows") == (name in padded_on(PAGE.read_text(encoding="utf-8")))


def test_the_page_names_every_model_once_with_its_reason() -> None:
    good = dict.fromkeys(COLUMNS, "yes")
    results = [
        {"model": "llama", **good},
        {"model": "bloom", **good, "packs": "as rows"},
        {"model": "bert", "trains": "refused: one | message"},
        {"model": "gemma3", **good, "merges": "off by 0.1"},
        {"model": "gemma3n", "not built": "ImportError: timm"},
        {"model": "xlm", "trains": "refused: XLMWithLMHeadModel can't read rows (TypeError: f(x)), xlm in 3 ways"},
        {"model": "xmod", "trains": "refused: XmodForCausalLM can't read rows (ValueError: no), xmod in 1.5 ways"},
    ]
    text = page(results)
    assert on_page(text) == {found["model"]: verdict(found) for found in results}
    assert "| causal language models | 2 | 3 | 0 | 0 |" in text
    assert "| xlm, xmod | *trains*: its class can't read rows, it in ... ways |" in text
    assert "| bert | *trains*: one / message |" in text
    assert "| gemma3 | *merges*: off by 0.1 |" in text
    assert "| gemma3n | a tiny random model can't be made" in text
    assert padded_on(text) == {"bloom"}


@pytest.mark.slow
@pytest.mark.parametrize("name", SIX)
def test_two_ranks_train_the_adapter_that_one_does(name: str, tmp_path: Path) -> None:
    base, weights = Trial(name, tmp_path).base, []
    for devices in (1, 2):
        rows = ["data.seq_len=64", "data.global_batch_size=2", f"trainer.devices={devices}"]
        train(base, tmp_path / f"{devices}", "peft=lora", "export.enabled=true", *rows)
        weights.append(load_file(RunDir(tmp_path / f"{devices}").export / "adapter_model.safetensors"))
    assert weights[0].keys() == weights[1].keys()
    for key, expected in weights[0].items():
        torch.testing.assert_close(weights[1][key], expected, rtol=1e-4, atol=1e-5, msg=key)
    assert any(key.endswith("lora_B.weight") and tensor.abs().max() > 1e-3 for key, tensor in weights[0].items())


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", names())
def test_the_page_is_true(name: str, tmp_path: Path) -> None:
    found = tried(name, tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    assert verdict(found) == on_page(text)[name], found
    assert (found.get("packs") == "as rows") == (name in padded_on(text)) or verdict(found) != "passes"
