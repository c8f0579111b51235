"""A config file of another program is answered with a command to paste, which composes to what the file says."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from inprocess import run
from lmtrain.config import compose, keys

LLAMA_FACTORY = """
model_name_or_path: Qwen/Qwen3-0.6B
trust_remote_code: true
stage: dpo
do_train: true
finetuning_type: lora
lora_rank: 8
lora_target: all
pref_beta: 0.2
pref_loss: orpo
dataset: mine, theirs
template: qwen3_nothink
cutoff_len: 512
packing: true
per_device_train_batch_size: 2
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 3.0
lr_scheduler_type: cosine
bf16: true
badam_mode: layer
resume_from_checkpoint: null
"""
AXOLOTL = """
base_model: HuggingFaceTB/SmolLM2-135M
datasets: [{path: some/chats, type: chat_template, split: 'train[:20%]'}]
adapter: qlora
load_in_8bit: false
lora_target_modules: [q_proj, v_proj]
deepspeed: deepspeed_configs/zero2.json
micro_batch_size: 1
saves_per_epoch: 4
evals_per_epoch: 4
eval_steps: 20
optimizer: adamw_torch_4bit
output_dir: "out; rm -rf $(HOME)"
"""
TRAINER = {"model_name_or_path": "no/such/folder", "dataset_name": "trl-lib/Capybara", "max_steps": 20, "eval_steps": 5,
           "num_train_epochs": 2, "fp16": True}  # fmt: skip
WANTED: dict[str, dict[str, Any]] = {
    "llama_factory.yaml": {
        "objective.name": "dpo", "objective.loss": "orpo", "objective.beta": 0.2, "peft.r": 8, "data.seq_len": 512,
        "model.name_or_path": "Qwen/Qwen3-0.6B", "model.trust_remote_code": False, "data.packing": "off",
        "data.micro_batch_size": 2, "data.global_batch_size": 16, "trainer.max_epochs": 3, "trainer.max_steps": None,
        "schedule.name": "cosine", "schedule.min_lr_ratio": 0.0, "trainer.precision": "bf16-mixed",
        "data.path": ["data/a.jsonl", "data/b.jsonl"],
    },
    "axolotl.yml": {
        "objective.name": "sft", "data.source": "hub", "data.name": "some/chats", "data.train_split": "train[:20%]",
        "peft.quantization": "nf4", "peft.target_modules": ["q_proj", "v_proj"], "trainer.strategy": "auto",
        "data.global_batch_size": 1, "trainer.val_check_interval": 20, "trainer.save_every_n_steps": 500,
        "optimizer.name": "adamw", "run.dir": "out; rm -rf $(HOME)",
    },
    "trainer.json": {"data.name": "trl-lib/Capybara", "trainer.max_steps": 20, "trainer.max_epochs": 2,
                     "model.name_or_path": "OWNER/MODEL", "trainer.precision": "16-mixed"},
}  # fmt: skip
NOT_IN_IT = {
    "llama_factory.yaml": ["trust_remote_code", "template", "packing", "badam_mode"],
    "axolotl.yml": ["saves_per_epoch", "evals_per_epoch", "trainer=deepspeed", "optimizer"],
    "trainer.json": ["model_name_or_path"],
}


@pytest.mark.parametrize("name", WANTED)
def test_the_command_says_what_the_file_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    known = {"mine": {"file_name": "a.jsonl"}, "theirs": {"file_name": "b.jsonl"}}
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(known))
    texts = {"llama_factory.yaml": LLAMA_FACTORY, "axolotl.yml": AXOLOTL, "trainer.json": json.dumps(TRAINER)}
    Path(name).write_text(texts[name])
    ended = run("train", name)
    assert ended.code == 2
    command, _, below = ended.err.partition("\n\nnot in it")
    words = shlex.split(command.partition("python -m lmtrain.train")[2].replace("\\\n", " "))
    made = compose.check(compose.compose(words))
    got = {key: keys.value_of(made, key) for key in WANTED[name]}
    assert json.loads(json.dumps(got, default=list)) == WANTED[name]
    for key in NOT_IN_IT[name]:
        assert f"\n  {key} " in below, ended.err
    assert "resume_from_checkpoint" not in ended.err


def test_a_json_of_rows_is_data(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([{"prompt": "Hi", "completion": "Hello"}]))
    ended = run("train", str(tmp_path / "rows.json"), "model=gpt_nano", "--cfg")
    assert ended.code == 0, ended.err
    assert "name: sft" in ended.out
