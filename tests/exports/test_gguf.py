"""An export converted to GGUF by llama.cpp's own script gives transformers' tokens and text in llama.cpp."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from chats import CITIES, write_chats
from inprocess import run
from loopback_hub import HUB
from support import REPO

STORIES = HUB / "models" / "karpathy" / "stories260K"
SMOLLM2 = HUB / "models" / "HuggingFaceTB" / "SmolLM2-135M-Instruct"
TEXTS = ["Once upon a time", "  two spaces\n\nand  twice é☃ 日本", "Lily's 12 cats!",
         " <|im_start|>user\nx<|im_end|>\n "]  # fmt: skip
QUESTIONS = [f"how far is {city}?" for city in CITIES]
# ChatML after the BOS token: llama.cpp puts that before every chat if the tokenizer puts it before texts.
TEMPLATE = """{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
SFT = ["objective=sft", "data=chat_jsonl", "data.seq_len=256", "data.global_batch_size=8", "data.micro_batch_size=8",
       "trainer.precision=32-true", "trainer.max_steps=60", "optimizer.lr=0.005", "schedule.warmup_steps=5",
       "data.val_fraction=0.1", "logger=none", "callbacks.samples.every_n_validations=0"]  # fmt: skip
ADDED = 'tokenizer.add_tokens=["<|im_start|>","<|im_end|>"]'
SCRATCH = ["model=llama_nano", "model.num_hidden_layers=2", "model.hidden_size=64", "model.num_attention_heads=4",
           "model.num_key_value_heads=2", "model.dropout=0", "tokenizer=hub"]  # fmt: skip
KINDS = {
    "sentencepiece": [ADDED],
    "merged": [ADDED, "peft=lora", "export.merge=true", "optimizer.lr=0.02"],
    "byte-level": SCRATCH,
}


def python() -> str:
    found = Path(os.environ.get("LMTRAIN_GGUF_PYTHON", REPO / ".venv-gguf" / "bin" / "python"))
    if not found.exists():
        pytest.skip(f"needs llama.cpp in an environment of its own: make env-gguf ({found} is not there)")
    return str(found)


def llama_cpp(*argv: object) -> None:
    script = Path(__file__).with_name("llama_cpp.py")
    done = subprocess.run([python(), str(script), *map(str, argv)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copies real weights and writes the sentencepiece model that their tokenizer was made from."""
    folder = tmp_path_factory.mktemp("base") / "stories260K"
    shutil.copytree(STORIES, folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    llama_cpp("vocabulary", folder)
    return folder


def export(kind: str, request: pytest.FixtureRequest, folder: Path) -> Path:
    """Fine-tunes a model and returns the folder that it was exported to."""
    given = [f"data.path={write_chats(folder / 'chats.jsonl', 60)}", f"run.dir={folder / 'run'}", *KINDS[kind]]
    if kind == "byte-level":
        given.append(f"tokenizer.name_or_path={SMOLLM2}")
    else:
        (folder / "template.jinja").write_text(TEMPLATE)
        base = request.getfixturevalue("stories")
        given += ["model=pretrained", f"model.name_or_path={base}", f"data.chat_template={folder / 'template.jinja'}"]
    done = run("train", *SFT, *given)
    assert done.code == 0, done.err
    return folder / "run" / ("export_merged" if kind == "merged" else "export")


def transformers_answer(model: Any, tokenizer: Any, question: str) -> dict[str, Any]:
    """Answers as any user would ask: with the folder's chat template, generation settings and model."""
    turn = [{"role": "user", "content": question}]
    given = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        found = model.generate(**given, max_new_tokens=40)[0, given["input_ids"].shape[1] :]
    ends = model.generation_config.eos_token_id
    return {
        "text": tokenizer.decode(found, skip_special_tokens=True),
        "why": "stop" if int(found[-1]) in (ends if isinstance(ends, list) else [ends]) else "length",
        "prompt_tokens": given["input_ids"].shape[1],
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_llama_cpp_says_what_transformers_says(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    python()
    if not HUB.exists():
        pytest.skip(f"needs real models, and {HUB} is not there")
    folder = export(kind, request, tmp_path)
    asked, answered = tmp_path / "asked.json", tmp_path / "answered.json"
    asked.write_text(json.dumps({"texts": TEXTS, "questions": QUESTIONS}))
    llama_cpp("answer", folder, tmp_path / "model.gguf", asked, answered)
    found = json.loads(answered.read_text())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    assert found["ids"] == [tokenizer(text)["input_ids"] for text in TEXTS]
    expected = [transformers_answer(model, tokenizer, question) for question in QUESTIONS]
    assert found["answers"] == expected
    assert {answer["why"] for answer in expected} == {"stop"}, "it learned to end its turn"
