"""The exported folder is the trained model: same logits, text from it, and nothing that other readers stumble over."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmtrain.models.attention import generation_mode
from lmtrain.run import trained
from lmtrain.run.folder import RunDir
from support import TINY, Run

FAMILIES = ["gpt_nano", "llama_nano", pytest.param("moe_small", marks=pytest.mark.slow)]


@pytest.mark.parametrize("family", FAMILIES)
def test_export_gives_the_training_models_logits(family: str, corpus: Path, tmp_path: Path, lmtrain: Run) -> None:
    shrink = ["model.moe_intermediate_size=16", "model.num_experts=4"] if family == "moe_small" else []
    shrink += ["model.num_key_value_heads=2"] if family != "gpt_nano" else []
    shrink += ["model.head_dim=16"] if family == "moe_small" else []
    settings = [*TINY, "data=text", f"data.path={corpus}", f"model={family}", "tokenizer=bytes", *shrink]
    done = lmtrain("train", *settings, "trainer.max_steps=5", "run.dir=run")
    assert done.returncode == 0, done.stdout + done.stderr
    run = RunDir(tmp_path / "run")
    live, _, checkpoint = trained.from_run(run, "last")
    assert checkpoint.name == "step_00000005"
    exported = AutoModelForCausalLM.from_pretrained(run.export)
    tokenizer = AutoTokenizer.from_pretrained(run.export)
    ids = torch.tensor([tokenizer("line 3 of file 2: the number")["input_ids"]])
    with torch.no_grad(), generation_mode(live):
        expected, found = live.eval()(ids).logits, exported.eval()(ids).logits
    assert torch.allclose(expected, found, atol=1e-5)
    text = exported.generate(ids, max_new_tokens=8, do_sample=False)
    assert text.shape[1] > ids.shape[1]

    config = json.loads((run.export / "config.json").read_text())
    assert config["vocab_size"] == exported.get_input_embeddings().num_embeddings
    assert config.get("pad_token_id") is None, "no pad token is added"
    assert json.loads((run.export / "generation_config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id
    assert (run.export / "lmtrain_config.yaml").read_text() == run.config.read_text()


@pytest.mark.slow
def test_export_verb_and_generate(corpus: Path, tmp_path: Path, lmtrain: Run) -> None:
    settings = [*TINY, "data=text", f"data.path={corpus}", "trainer.max_steps=4", "trainer.save_every_n_steps=2"]
    done = lmtrain("train", *settings, "run.dir=run", "export.enabled=false")
    assert done.returncode == 0, done.stderr
    done = lmtrain("export", "run_dir=run", "export.checkpoint=step_00000002", "export.dtype=bfloat16")
    assert done.returncode == 0, done.stderr
    assert "from step_00000002" in done.stdout
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export")
    assert exported.dtype == torch.bfloat16
    texts = [
        lmtrain("generate", f"run_dir={where}", "generate.prompt=line", "generate.max_new_tokens=8").stdout
        for where in ("run", "run", "run/export")
    ]
    assert texts[0] == texts[1], "the same seed gives the same text"
    assert all(text.startswith("line") and len(text) > 6 for text in texts)
    missing = lmtrain("export", "run_dir=run", "export.checkpoint=step_00000009")
    assert missing.returncode == 2
    assert "step_00000002" in missing.stderr
