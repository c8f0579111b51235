"""Access to TRL, which has its own environment (`make env-trl`) and returns JSON, and data for comparisons."""

import json
import os
import random
import subprocess
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from workload import chatml_tokenizer

from loopback_hub import HUB
from support import REPO

SMOLLM2 = HUB / "models" / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
LLAMA3_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]

Messages = list[dict[str, str]]


def ask_trl(folder: Path, what: str, timeout: float = 900, **spec: Any) -> Any:
    """Returns what tests/parity/trl_reference.py computes; skips the test if TRL isn't installed."""
    python = Path(os.environ.get("LMTRAIN_TRL_PYTHON", REPO / ".venv-trl" / "bin" / "python"))
    if not python.exists():
        pytest.skip(f"needs TRL in an environment of its own: make env-trl ({python} is not there)")
    asked, answered = folder / f"{what}.json", folder / f"{what}_answer.json"
    asked.write_text(json.dumps({"what": what, **spec}))
    done = subprocess.run(
        [str(python), str(Path(__file__).with_name("trl_reference.py")), str(asked), str(answered)],
        env={**os.environ, "HF_HOME": str(folder / "hf")},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(answered.read_text())


def dialogues(count: int, *, real: bool) -> list[Messages]:
    """Returns multi-turn conversations, from the Schema-Guided Dialogue dataset or generated."""
    if real:
        file = HUB / "datasets" / "local" / "sgd-messages" / "data" / "validation-00000-of-00001.parquet"
        if not file.exists():
            pytest.skip(f"needs real conversations, and {file} is not there")
        return [row["messages"] for row in parquet.read_table(file).slice(0, count).to_pylist()]
    rng = random.Random(1)
    return [_dialogue(rng) for _ in range(count)]


def pairs(count: int, *, real: bool) -> list[dict[str, Messages]]:
    """Returns preference pairs {prompt, chosen, rejected}: the shortest of a dataset, or generated."""
    if real:
        file = HUB / "datasets" / "local" / "dpo-messages" / "data" / "train-00000-of-00001.parquet"
        if not file.exists():
            pytest.skip(f"needs real preferences, and {file} is not there")
        return sorted(parquet.read_table(file).to_pylist(), key=lambda row: len(str(row)))[:count]
    rng = random.Random(2)
    made = []
    for _ in range(count):
        turns = _dialogue(rng)
        other = {"role": "assistant", "content": _sentence(rng)}
        made.append({"prompt": turns[:-1], "chosen": turns[-1:], "rejected": [other]})
    return made


def tokenizer_on(conversations: list[Messages], folder: Path) -> PreTrainedTokenizerFast:
    """Trains a small BPE tokenizer with ChatML's special tokens and saves it in `folder`."""
    tokenizer = chatml_tokenizer((turn["content"] for turns in conversations for turn in turns), 800)
    tokenizer.save_pretrained(folder)
    return tokenizer


def smollm2_tokenizer() -> PreTrainedTokenizerFast:
    if not (SMOLLM2 / "tokenizer.json").exists():
        pytest.skip(f"needs SmolLM2's tokenizer, and {SMOLLM2} is not there")
    return AutoTokenizer.from_pretrained(SMOLLM2)


def smollm2_weights() -> Path:
    """Returns a folder with SmolLM2's weights, in the hub or as set by LMTRAIN_SMOLLM2."""
    folder = Path(os.environ.get("LMTRAIN_SMOLLM2", SMOLLM2))
    if not (folder / "model.safetensors").exists():
        pytest.skip(f"needs SmolLM2's weights, and {folder} has none: run smollm2.py of the hub there")
    return folder


def tiny_llama(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Saves a random model for the tokenizer, with weights large enough that its outputs depend on its inputs."""
    torch.manual_seed(0)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos", "pad")}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=True,
        **ids,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def lora_on(model: Path, folder: Path, *, trained: bool = False) -> Path:
    """Saves an adapter from which both sides start: new (B is zero), or as after some training."""
    torch.manual_seed(0)
    config = LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "v_proj"],
        task_type="CAUSAL_LM",
        init_lora_weights=not trained,
    )
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(folder)
    return folder


def _dialogue(rng: random.Random) -> Messages:
    turns = [{"role": "system", "content": _sentence(rng)}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 4)):
        turns.append({"role": "user", "content": _sentence(rng)})
        turns.append({"role": "assistant", "content": "\n".join(_sentence(rng) for _ in range(rng.randint(1, 3)))})
    return turns


def _sentence(rng: random.Random) -> str:
    verb, thing = rng.choice(["find", "count", "paint", "move"]), rng.choice(["boxes", "birds", "letters", "maps"])
    place, end = rng.choice(["north", "Zürich", "the attic", "room 12"]), rng.choice([".", "!", " 😊", "?", ": ok"])
    return (
        f"{rng.choice(['Please', 'I will', 'Could you', 'They'])} {verb} {rng.randint(2, 999)} {thing} in {place}{end}"
    )
