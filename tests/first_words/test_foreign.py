"""A config file of another program is answered key by key."""

import json
from pathlib import Path

import pytest
import yaml

from inprocess import run

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
GRPO = """
model_name_or_path: HuggingFaceTB/SmolLM2-135M-Instruct
reward_funcs: [my_rewards.short]
num_generations: 8
temperature: 1.0
beta: 0.0
"""
# What the answer has for some keys of each file.
ANSWERS = {
    "llama_factory.yaml": {
        "stage": "objective=dpo",
        "lora_rank": "peft.r=8 (with peft=lora)",
        "badam_mode": "nothing here has that name",
        "trust_remote_code": "model.trust_remote_code=true",
        "do_train": "the verb says it",
    },
    "axolotl.yml": {
        "adapter": "peft=qlora",
        "optimizer": "optimizer",
        "saves_per_epoch": "trainer.save_every_n_steps=n counts steps",
        "datasets": "data.mixture (with data=mixture; data.path or data.name for one)",
    },
    "grpo.yaml": {
        "reward_funcs": "reward (with objective=grpo)",
        "num_generations": "objective.group_size=8 (with objective=grpo)",
        "temperature": "objective.temperature with objective=grpo",
        "beta": "objective.kl_coef with objective=grpo",
    },
}


@pytest.mark.parametrize("name", ANSWERS)
def test_each_key_is_answered_and_no_command_promised(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command would have to say all that the other program does without being told, and in which format."""
    monkeypatch.chdir(tmp_path)
    texts = dict(zip(ANSWERS, (LLAMA_FACTORY, AXOLOTL, GRPO), strict=True))
    Path(name).write_text(texts[name])
    ended = run("train", name)
    assert ended.code == 2
    assert f"{name} has keys of another program, whose configs are not translated" in ended.err
    assert "command" not in ended.err
    told = dict(line.split(maxsplit=1) for line in ended.err.splitlines() if line.startswith("  "))
    for key, answer in ANSWERS[name].items():
        assert answer in told[key], ended.err
    foreign = {key for key, value in yaml.safe_load(texts[name]).items() if value is not None}
    assert told.keys() == foreign


def test_a_json_of_rows_is_data(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([{"prompt": "Hi", "completion": "Hello"}]))
    ended = run("train", str(tmp_path / "rows.json"), "model=gpt_nano", "--cfg")
    assert ended.code == 0, ended.err
    assert "name: sft" in ended.out
