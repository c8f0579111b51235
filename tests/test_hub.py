"""The most commonly copied commands run against a loopback hub that serves datasets and tokenizers by their names."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from loopback_hub import serving
from support import rows

GPT_SMALL = "model=gpt_small data=wikitext trainer.max_steps=3 data.global_batch_size=4 data.micro_batch_size=2 "
GPT_SMALL += "data.seq_len=128"


def train(folder: Path, env: dict[str, str], *argv: str) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "lmtrain.train", *argv],
        cwd=folder,
        env={**env, "LMTRAIN_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    (run_dir,) = (folder / "outputs").iterdir()
    return run_dir


@pytest.mark.slow
def test_gpt_small_on_wikitext_unmodified(tmp_path: Path) -> None:
    with serving(tmp_path / "hf") as env:
        run_dir = train(tmp_path, env, *GPT_SMALL.split())
    config = (run_dir / "config.yaml").read_text()
    assert "name: Salesforce/wikitext" in config
    assert "name_or_path: gpt2" in config
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "finished"
    logged = rows(run_dir / "metrics.jsonl")
    losses = [row["train/loss"] for row in logged if "train/loss" in row]
    assert 10 < losses[0] < 11.5  # ln 50257 = 10.8
    (val,) = [row["val/loss"] for row in logged if "val/loss" in row]
    assert val < losses[0]
    model = AutoModelForCausalLM.from_pretrained(run_dir / "export")
    assert model.num_parameters() == 124_439_808 + (50304 - 50257) * 768  # the vocabulary is padded to a multiple of 64
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "export")
    assert len(tokenizer) == 50257
    with torch.no_grad():
        out = model.generate(**tokenizer("The history of", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert out.shape[1] == 7
