"""The shortest end-to-end check, for `make smoke`: imports, pretraining, resuming, SFT, DPO and export.

It detects gross breakage; the rest of the suite checks exact results.
"""

import importlib
import pkgutil
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

import lmtrain
from chats import write_rows
from inprocess import run, stops_at, train_tiny
from support import EXPORT, SAMPLES, TINY, rows

STEPS = ["trainer.max_steps=4", "trainer.val_check_interval=2", "trainer.limit_val_batches=1"]
CHAT = ["data.chat_template=vicuna", "data.seq_len=256", "data.val_fraction=0.1"]


@pytest.fixture(scope="module")
def pretrained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smoke") / "pretrained"
    ended = train_tiny(corpus, EXPORT, SAMPLES, *STEPS, "model.max_position_embeddings=256", f"run.dir={folder}")
    assert ended.code == 0, ended.err
    return folder


def test_every_module_is_imported() -> None:
    for module in pkgutil.walk_packages(lmtrain.__path__, "lmtrain."):
        importlib.import_module(module.name)


def losses(folder: Path) -> list[float]:
    return [row["train/loss"] for row in rows(folder / "metrics.jsonl") if "train/loss" in row]


def test_a_stopped_run_goes_on_bit_for_bit(corpus: Path, pretrained: Path, tmp_path: Path) -> None:
    same = [*STEPS, "model.max_position_embeddings=256", f"run.dir={tmp_path / 'run'}"]
    assert train_tiny(corpus, *same, *stops_at(2)).code == 75
    assert train_tiny(corpus, *same, "run.resume=auto").code == 0
    assert len(losses(pretrained)) == 4
    assert losses(tmp_path / "run") == losses(pretrained)


def test_an_export_is_loaded_and_writes_on(pretrained: Path) -> None:
    assert AutoModelForCausalLM.from_pretrained(pretrained / "export").config.hidden_size == 32
    done = run("generate", f"run_dir={pretrained}", "generate.max_new_tokens=4")
    assert done.code == 0, done.err


def test_sft_and_dpo_go_on_from_it(pretrained: Path, tmp_path: Path) -> None:
    model = pretrained / "export"
    for objective, data in (("sft", "chat_jsonl"), ("dpo", "preference_jsonl")):
        path = write_rows(tmp_path / f"{objective}.jsonl", data)
        words = ["model=pretrained", f"model.name_or_path={model}", f"objective={objective}", f"data={data}",
                 f"data.path={path}", f"run.dir={tmp_path / objective}"]  # fmt: skip
        tiny = [
            word for word in [*TINY, EXPORT, SAMPLES] if not word.startswith(("model.", "tokenizer=", "data.seq_len"))
        ]
        ended = run("train", *tiny, *STEPS, *CHAT, *words)
        assert ended.code == 0, ended.err
        assert len(losses(tmp_path / objective)) == 4
        model = tmp_path / objective / "export"
