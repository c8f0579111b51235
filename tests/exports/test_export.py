"""The exported folder is the trained model: equal logits, generated text, and nothing that breaks other readers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from inprocess import Ended, message, run, train_tiny
from lmtrain.models.attention import generation_mode
from lmtrain.run_folder import trained
from lmtrain.run_folder.folder import RunDir
from support import EXPORT, TINY

FAMILIES = ["gpt_nano", "llama_nano", pytest.param("moe_small", marks=pytest.mark.slow)]


@pytest.mark.parametrize("family", FAMILIES)
def test_export_gives_the_training_models_logits(family: str, corpus: Path, tmp_path: Path) -> None:
    shrink = ["model.moe_intermediate_size=16", "model.num_experts=4"] if family == "moe_small" else []
    shrink += ["model.num_key_value_heads=2"] if family != "gpt_nano" else []
    shrink += ["model.head_dim=16"] if family == "moe_small" else []
    settings = [*TINY, EXPORT, "data=text", f"data.path={corpus}", f"model={family}", "tokenizer=bytes", *shrink]
    done = run("train", *settings, "trainer.max_steps=5", f"run.dir={tmp_path / 'run'}")
    assert done.code == 0, done.out + done.err
    trained_run = RunDir(tmp_path / "run")
    live, _, checkpoint = trained.from_run(trained_run, "last", {})
    assert checkpoint.name == "step_00000005"
    exported = AutoModelForCausalLM.from_pretrained(trained_run.export)
    tokenizer = AutoTokenizer.from_pretrained(trained_run.export)
    ids = torch.tensor([tokenizer("line 3 of file 2: the number")["input_ids"]])
    with torch.no_grad(), generation_mode(live):
        expected, found = live.eval()(ids).logits, exported.eval()(ids).logits
    assert torch.allclose(expected, found, atol=1e-5)
    text = exported.generate(ids, max_new_tokens=8, do_sample=False)
    assert text.shape[1] > ids.shape[1]

    config = json.loads((trained_run.export / "config.json").read_text())
    assert config["vocab_size"] == exported.get_input_embeddings().num_embeddings
    assert config.get("pad_token_id") is None, "no pad token is added"
    assert (
        json.loads((trained_run.export / "generation_config.json").read_text())["eos_token_id"]
        == tokenizer.eos_token_id
    )
    assert (trained_run.export / "lmtrain_config.yaml").read_text() == trained_run.config.read_text()


def test_a_model_of_few_positions(corpus: Path, tmp_path: Path) -> None:
    """The export is compared with the model on a row that the model has positions for."""
    few = ["data.seq_len=16", "model.max_position_embeddings=16", "trainer.max_steps=1", "report.enabled=false"]
    done = run("train", *TINY, EXPORT, "data=text", f"data.path={corpus}", *few, f"run.dir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    done = run("export", f"run_dir={tmp_path / 'run'}", "export.checkpoint=last")
    assert done.code == 0, done.err


def test_weights_in_double_precision(corpus: Path, tmp_path: Path) -> None:
    settings = [*TINY, EXPORT, "data=text", f"data.path={corpus}", "trainer.max_steps=1", "report.enabled=false"]
    done = run("train", *settings, "trainer.precision=64-true", f"run.dir={tmp_path / 'run'}")
    assert done.code == 0, done.err
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export").dtype == torch.float32


def test_export_verb_and_generate(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = [*TINY, "data=text", f"data.path={corpus}", "trainer.max_steps=4", "trainer.save_every_n_steps=2"]
    done = run("train", *settings, "run.dir=run")
    assert done.code == 0, done.err
    done = run("export", "run_dir=run", "export.checkpoint=step_00000002", "export.dtype=bfloat16")
    assert done.code == 0, done.err
    assert "from step_00000002" in done.out
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export")
    assert exported.dtype == torch.bfloat16
    texts = [generated(where).out for where in ("run", "run", "run/export")]
    assert texts[0] == texts[1], "the same seed gives the same text"
    assert all(text.startswith("line") and len(text) > 6 for text in texts)
    missing = run("export", "run_dir=run", "export.checkpoint=step_00000009")
    assert missing.code == 2
    assert "step_00000002" in message(missing.err)


def generated(where: str) -> Ended:
    return run("generate", f"run_dir={where}", "generate.prompt=line", "generate.max_new_tokens=8")


def test_an_export_keeps_its_cache_of_keys_and_values(corpus: Path, tmp_path: Path) -> None:
    """Trainers switch the cache off for activation checkpointing, and save that: generation becomes slow."""
    ended = train_tiny(corpus, EXPORT, "trainer.activation_checkpointing=true", f"run.dir={tmp_path / 'run'}")
    assert ended.code == 0, ended.err
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "run" / "export" / name).read_text())["use_cache"] is True
