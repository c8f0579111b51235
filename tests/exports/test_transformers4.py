"""Exports that are promised to load in transformers 4, read by its last release in an environment of its own."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from inprocess import run
from lmtrain.exports.hf_folder import logits
from lmtrain.models.folder import change_config, read_config, with_earlier_names
from lmtrain.run_folder import trained
from lmtrain.run_folder.folder import RunDir
from support import REPO
from tiny_pretrained import SHORT, save_pretrained

IDS = list(range(3, 35))
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}},
    "gpt2": {},
    "qwen3_moe": {},
}


def read(*folders: str) -> list[dict[str, Any]]:
    """Returns what transformers 4 makes of BASE:FOLDER, see transformers4.py."""
    found = Path(os.environ.get("LMTRAIN_TRANSFORMERS4_PYTHON", REPO / ".venv-transformers4" / "bin" / "python"))
    if not found.exists():
        pytest.skip(f"needs transformers 4 in an environment of its own: make env-transformers4 ({found} isn't there)")
    script = Path(__file__).with_name("transformers4.py")
    ended = subprocess.run([found, script, json.dumps(IDS), *folders], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout.splitlines()[-1])
    assert said["version"].startswith("4.57.")
    return list(said["read"])


def trained_on(family: str, corpus: Path, folder: Path) -> tuple[Path, RunDir]:
    base = save_pretrained(folder / "base", family, **FAMILIES[family])
    change_config(base, **with_earlier_names(read_config(base)))  # as version 4 wrote it
    words = [*SHORT, f"data.path={corpus}", f"model.name_or_path={base}", f"run.dir={folder / 'run'}"]
    ended = run("train", *words, "peft=lora", "export.merge=true", "optimizer.lr=0.1")
    assert ended.code == 0, ended.err
    return base, RunDir(folder / "run")


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_the_oldest_promised_version_reads_exports(family: str, corpus: Path, tmp_path: Path) -> None:
    base, folder = trained_on(family, corpus, tmp_path)
    live, _, _ = trained.from_run(folder, "last", {})
    expected = logits(live, torch.tensor([IDS]))
    adapter, merged = read(f"{base}:{folder.export}", f":{folder.export_merged}")
    torch.testing.assert_close(torch.tensor(merged["logits"]), expected, rtol=1e-4, atol=1e-4)
    if family != "qwen3_moe":
        assert not adapter["lost"]
        torch.testing.assert_close(torch.tensor(adapter["logits"]), expected, rtol=1e-4, atol=1e-4)
        return
    # The card says that this one needs version 5. If nothing is lost any more, it has to say otherwise.
    weights = load_file(folder.export / "adapter_model.safetensors")
    assert sorted(adapter["lost"]) == sorted(name for name in weights if ".experts." in name)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_the_card_says_which_adapters_need_version_5(family: str, corpus: Path, tmp_path: Path) -> None:
    _, folder = trained_on(family, corpus, tmp_path)
    card = (folder.export / "README.md").read_text()
    assert ("needs transformers 5" in card) == (family == "qwen3_moe")
    assert "needs transformers 5" not in (folder.export_merged / "README.md").read_text()
    if family == "qwen3_moe":
        config = read_config(folder.export_merged)
        assert config["num_experts"] == config["num_local_experts"] == 4
