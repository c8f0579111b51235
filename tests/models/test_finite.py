"""Weights that are NaN or infinite are named where they are loaded, before anything is computed with them."""

import json
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from safetensors.torch import load_file, save_file

from inprocess import message, run, train_tiny
from lmtrain.errors import UserError
from lmtrain.files import strict_json
from lmtrain.models.folder import check_finite
from tiny_pretrained import SHORT, save_pretrained

WEIGHT = "model.layers.1.mlp.up_proj.weight"
WORDS = f"holds weights that are not finite numbers ({WEIGHT}; 1 of 20 tensors)"


def spoil(file: Path, name: str = WEIGHT, value: float = math.nan) -> None:
    weights = load_file(file)
    weights[name][3, 5] = value
    save_file(weights, file, {"format": "pt"})


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_pretrained(tmp_path_factory.mktemp("spoilt"), tie_word_embeddings=True)
    spoil(folder / "model.safetensors")
    return folder


def test_no_command_computes_with_them(
    spoilt: Path, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text, cpu = ["data=text", f"data.path={corpus}", "data.seq_len=32"], "trainer.accelerator=cpu"
    commands = {
        "train": [*SHORT, f"model.name_or_path={spoilt}", f"data.path={corpus}", "run.dir=run"],
        "generate": [f"run_dir={spoilt}", "generate.prompt=1 2"],
        "evaluate": [f"run_dir={spoilt}", *text, cpu],
    }
    for verb, words in commands.items():
        ended = run(verb, *words)
        assert ended.code == 2, verb
        assert WORDS in message(ended.err), verb
    assert not (tmp_path / "run").exists()


class Spoils(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step == 2:
            with torch.no_grad():
                next(pl_module.parameters()).view(-1)[0] = math.inf


def test_those_of_a_checkpoint_are_named(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A callback of one's own spoils a weight after the last step."""
    monkeypatch.chdir(tmp_path)
    own = [f"callbacks.extra=[{{_target_: {__name__}.Spoils}}]", f"run.allow_target=[{__name__}]"]
    assert train_tiny(corpus, "run.dir=run", *own).code == 1  # its last validation is not finite
    ended = run("generate", "run_dir=run", "generate.prompt=a", "generate.checkpoint=last", *own[1:])
    assert ended.code == 2
    assert "step_00000002 holds weights that are not finite" in message(ended.err)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_each_kind_in_each_dtype(value: float, dtype: torch.dtype) -> None:
    sound = {"a": torch.full((3, 70_000), 3e4).to(dtype), "none": torch.zeros(0), "ids": torch.arange(3)}
    check_finite(sound.items(), "here")  # a sum of these is beyond float16
    odd = sound["a"].clone()
    odd[1, 69_999] = value
    with pytest.raises(UserError, match=r"^here holds weights that are not finite numbers \(b; 1 of 2 tensors\)"):
        check_finite([*sound.items(), ("b", odd)], "here")


def test_json_holds_no_number_that_json_lacks() -> None:
    tree = {"a": [1.5, math.nan, (math.inf, None)], "b": {"c": -math.inf, "d": "NaN", "e": 3}}
    text = strict_json(tree)
    assert json.loads(text, parse_constant=pytest.fail) == {
        "a": [1.5, None, [None, None]],
        "b": {"c": None, "d": "NaN", "e": 3},
    }
