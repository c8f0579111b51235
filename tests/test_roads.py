"""Six user workflows, each from raw input to a result in at most four commands, run one by one as a user types them.

Only the settings that make a run small are added, and a local folder replaces the name of a hub model.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from support import rows
from tiny_pretrained import save_pretrained

pytestmark = pytest.mark.slow

TINY = [
    "trainer.max_steps=3", "data.global_batch_size=4", "data.micro_batch_size=2", "trainer.precision=32-true",
    "callbacks.samples.max_new_tokens=4", "logger=none", "trainer.accelerator=cpu",
]  # fmt: skip
SHAPE = ["tokenizer=bytes", "model.num_hidden_layers=2", "model.num_attention_heads=2", "model.hidden_size=32",
         "model.max_position_embeddings=64"]  # fmt: skip
CHAT = ["data.chat_template=zephyr", "data.seq_len=256"]
MINE = "objective=custom objective._target_=mine.Mine run.allow_target=[mine]"  # as the first lines of the skeleton say
FACTS = [(f"How much is {n} and {n}?", f"It is {2 * n}.", f"It is {n}.") for n in range(1, 61)]


def texts(folder: Path) -> None:
    (folder / "texts").mkdir()
    for n in range(5):
        (folder / f"texts/{n}.txt").write_text("".join(f"Line {i} of text {n} says little.\n" for i in range(200)))


def table(folder: Path) -> None:
    lines = [f'{i},"The ship number {i} sailed in the year {1700 + i}."' for i in range(300)]
    (folder / "table.csv").write_text("\n".join(["id,text", *lines]) + "\n")


def share_gpt(folder: Path) -> None:
    found = [{"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]} for q, a, _ in FACTS]
    (folder / "sharegpt.json").write_text(json.dumps(found))
    save_pretrained(folder / "base", max_position_embeddings=256)


def pairs(folder: Path) -> None:
    found = [{"prompt": q, "chosen": a, "rejected": b} for q, a, b in FACTS]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    save_pretrained(folder / "base", max_position_embeddings=256)


def answers(said: list[str], folder: Path) -> None:
    """Checks that the chat has continued the typed text."""
    assert "it continues each text" in said[1]
    assert len(said[1].strip().splitlines()) > 3


def transformers_reads_it(said: list[str], folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "outputs/a/export")
    tokenizer = AutoTokenizer.from_pretrained(folder / "outputs/a/export")
    ids = tokenizer("The ship", return_tensors="pt")["input_ids"]
    assert model.generate(ids, max_new_tokens=3, do_sample=False).shape[1] > ids.shape[1]
    assert "perplexity" in said[1]


def adapter_is_in_the_weights(said: list[str], folder: Path) -> None:
    """Checks that merged weights are the base plus the LoRA update, scale x B A, computed from the adapter's file."""
    from safetensors.torch import load_file

    assert "learned" in said[0]
    base, merged = (
        AutoModelForCausalLM.from_pretrained(folder / name).state_dict() for name in ("base", "outputs/a/export_merged")
    )
    adapter = load_file(folder / "outputs/a/export/adapter_model.safetensors")
    config = json.loads((folder / "outputs/a/export/adapter_config.json").read_text())
    names = [name for name in adapter if name.endswith("lora_A.weight")]
    assert names
    for name in names:
        down, up = adapter[name].float(), adapter[name.replace("lora_A", "lora_B")].float()
        weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
        expected = base[weight].float() + config["lora_alpha"] / config["r"] * up @ down
        assert torch.allclose(merged[weight].float(), expected, atol=2e-3)  # exported in bfloat16


def prefers(said: list[str], folder: Path) -> None:
    assert config_of(folder)["objective"]["name"] == "dpo"
    assert "accuracy" in said[1]
    assert "val/rewards/margin" in rows(folder / "outputs/a/metrics.jsonl")[-1]


def own_class_trained(said: list[str], folder: Path) -> None:
    assert config_of(folder)["objective"]["_target_"] == "mine.Mine"
    assert "1 passed" in said[1]


def two_ranks_trained(said: list[str], folder: Path) -> None:
    assert json.loads((folder / "outputs/a/summary.json").read_text())["device"] == "2 x cpu"
    assert "fsdp" in (folder / "outputs/a/plan.txt").read_text() or config_of(folder)["trainer"]["strategy"] == "fsdp"
    assert said[1].startswith("Line")


def config_of(folder: Path) -> dict[str, Any]:
    return yaml.safe_load((folder / "outputs/a/config.yaml").read_text())


Road = tuple[Callable[[Path], None], list[tuple[str, list[str]]], Callable[[list[str], Path], None]]
ROADS: dict[str, Road] = {
    "text folder to chat": (texts, [
        ("lmtrain.train texts run.name=a", [*TINY, *SHAPE]),
        ("lmtrain.chat outputs/a", []),
    ], answers),
    "CSV to model": (table, [
        ("lmtrain.train table.csv run.name=a", [*TINY, *SHAPE]),
        ("lmtrain.evaluate outputs/a", []),
    ], transformers_reads_it),
    "ShareGPT to merged export": (share_gpt, [
        ("lmtrain.inspect sharegpt.json model=base peft=lora", CHAT),
        ("lmtrain.train sharegpt.json model=base peft=lora run.name=a", [*TINY, *CHAT, "optimizer.lr=0.01"]),
        ("lmtrain.export outputs/a export.merge=true", []),
    ], adapter_is_in_the_weights),
    "pairs to DPO": (pairs, [
        ("lmtrain.train pairs.jsonl model=base run.name=a", [*TINY, *CHAT]),
        ("lmtrain.evaluate outputs/a", []),
    ], prefers),
    "own objective": (texts, [
        ("lmtrain.new objective mine", []),
        ("pytest -q -p no:cacheprovider test_mine.py", []),
        (f"lmtrain.train texts {MINE} run.name=a", [*TINY, *SHAPE]),
    ], own_class_trained),
    "two-rank FSDP": (texts, [
        ("lmtrain.train texts trainer.devices=2 trainer.strategy=fsdp run.name=a", [*TINY, *SHAPE]),
        ('lmtrain.generate outputs/a "Line 7"', ["generate.max_new_tokens=5"]),
    ], two_ranks_trained),
}  # fmt: skip


@pytest.mark.parametrize("name", ROADS)
def test_road(name: str, tmp_path: Path) -> None:
    prepare, commands, check = ROADS[name]
    assert len(commands) <= 4
    prepare(tmp_path)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(tmp_path)])}
    said = []
    for command, small in commands:
        words = [sys.executable, "-m", *shlex.split(command), *small]
        typed = "Line 7 of\n/exit\n" if "lmtrain.chat" in command else ""
        done = subprocess.run(
            words, cwd=tmp_path, env=environ, input=typed, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout[-1500:]}{done.stderr[-1500:]}"
        said.append(done.stdout)
    check(said, tmp_path)
