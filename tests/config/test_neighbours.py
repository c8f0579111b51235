"""Settings of Lightning, transformers, TRL, nanoGPT, litgpt and axolotl are answered with lmtrain's matching key."""

import dataclasses
import inspect
import re

import lightning.pytorch as pl
import pytest
from omegaconf import OmegaConf

from inprocess import message, run
from lmtrain.config import compose as config
from lmtrain.config import explain
from lmtrain.config.aliases import NEIGHBOURS, absent, used_here
from lmtrain.config.defaults import conf_dir, options_of
from lmtrain.config.keys import flat
from lmtrain.config.overrides import leaves
from lmtrain.config.sections import all_keys
from lmtrain.errors import UserError

WORDS = """
# the first words
datamodule -> data
dataset -> data
dataset_name -> data.name
dataset_config_name -> data.config_name
optim -> optimizer
scheduler -> schedule
lr_scheduler -> schedule
lr_scheduler_type -> schedule
lr -> optimizer.lr
learning_rate -> optimizer.lr
weight_decay -> optimizer.weight_decay
warmup_steps -> schedule.warmup_steps
warmup_iters -> schedule.warmup_steps
warmup_ratio -> schedule.warmup_ratio
min_lr -> schedule.min_lr_ratio
ckpt_path -> run.resume
resume -> run.resume
resume_from_checkpoint -> run.resume
init_from -> model
out_dir -> run.dir
output_dir -> run.dir
hydra.run.dir -> run.dir
task_name -> run.name
run_name -> run.name
name -> run.name
wandb.name -> logger.wandb.name
wandb.project -> logger.wandb.project
batch_size -> data.global_batch_size
data.batch_size -> data.global_batch_size
per_device_train_batch_size -> data.micro_batch_size
global_batch_size -> data.global_batch_size
gradient_accumulation_steps -> data.global_batch_size
trainer.accumulate_grad_batches -> data.global_batch_size
accumulate_grad_batches -> data.global_batch_size
block_size -> data.seq_len
max_length -> data.seq_len
max_seq_length -> data.seq_len
sequence_len -> data.seq_len
seq_len -> data.seq_len
max_steps -> trainer.max_steps
max_iters -> trainer.max_steps
epochs -> trainer.max_epochs
num_epochs -> trainer.max_epochs
num_train_epochs -> trainer.max_epochs
max_epochs -> trainer.max_epochs
eval_interval -> trainer.val_check_interval
eval_steps -> trainer.val_check_interval
trainer.check_val_every_n_epoch -> trainer.val_check_interval
save_steps -> trainer.save_every_n_steps
logging_steps -> trainer.log_every_n_steps
grad_clip -> trainer.gradient_clip_val
max_grad_norm -> trainer.gradient_clip_val
devices -> trainer.devices
strategy -> trainer.strategy
precision -> trainer.precision
dtype -> trainer.precision
bf16 -> trainer.precision=bf16-mixed
fp16 -> trainer.precision=16-mixed
compile -> trainer.compile
gradient_checkpointing -> trainer.activation_checkpointing
save_total_limit -> checkpoint.keep_last
n_layer -> model.num_hidden_layers
model.n_layer -> model.num_hidden_layers
n_head -> model.num_attention_heads
model.n_head -> model.num_attention_heads
n_embd -> model.hidden_size
model.n_embd -> model.hidden_size
dropout -> model.dropout
model_name_or_path -> model
base_model -> model
text_column -> data.text_column
micro_batch_size -> data.micro_batch_size
# Lightning's Trainer, its ModelCheckpoint and EarlyStopping
fast_dev_run -> trainer.fast_dev_run
gradient_clip_val -> trainer.gradient_clip_val
log_every_n_steps -> trainer.log_every_n_steps
val_check_interval -> trainer.val_check_interval
check_val_every_n_epoch -> trainer.val_check_interval
limit_val_batches -> trainer.limit_val_batches
overfit_batches -> trainer.overfit_batches
accelerator -> trainer.accelerator
num_nodes -> trainer.num_nodes
gpus -> trainer.devices
save_dir -> run.root
save_top_k -> checkpoint.keep_best
every_n_train_steps -> trainer.save_every_n_steps
patience -> callbacks.early_stopping.patience
num_workers -> data.num_workers
# transformers: TrainingArguments and its example scripts
per_device_eval_batch_size -> data.micro_batch_size
train_batch_size -> data.global_batch_size
eval_strategy -> trainer.val_check_interval
evaluation_strategy -> trainer.val_check_interval
eval_on_start -> trainer.val_before_training=true
save_strategy -> trainer.save_every_n_steps
logging_dir -> run.root
report_to -> logger
adam_beta1 -> optimizer.betas
adam_beta2 -> optimizer.betas
adam_epsilon -> optimizer.eps
label_smoothing -> objective.label_smoothing
torch_compile -> trainer.compile
metric_for_best_model -> checkpoint.monitor
greater_is_better -> checkpoint.mode
dataloader_num_workers -> data.num_workers
preprocessing_num_workers -> data.num_proc
dataset_num_proc -> data.num_proc
use_cpu -> trainer.accelerator=cpu
no_cuda -> trainer.accelerator=cpu
fsdp -> trainer=fsdp
fsdp_config -> trainer.fsdp
deepspeed -> trainer=deepspeed
tokenizer_name -> tokenizer.name_or_path
tokenizer_name_or_path -> tokenizer.name_or_path
trust_remote_code -> model.trust_remote_code
attn_implementation -> model.attention
torch_dtype -> trainer.precision
train_file -> data.path
validation_file -> data.val_path
max_train_samples -> data.num_samples
streaming -> data.streaming
push_to_hub -> export.push_to
hub_model_id -> export.push_to
model_max_length -> data.seq_len
# TRL: SFTConfig, DPOConfig, ModelConfig; peft
loss_type -> objective.loss
beta -> objective.beta
precompute_ref_log_probs -> objective.reference
reference_free -> objective.reference
ref_model -> objective.reference
max_prompt_length -> data.max_prompt_length
max_completion_length -> objective.max_new_tokens
num_generations -> objective.group_size
epsilon -> objective.clip_low
cliprange -> objective.clip_low
epsilon_high -> objective.clip_high
kl_coef -> objective.kl_coef
init_kl_coef -> objective.kl_coef
scale_rewards -> objective.loss
importance_sampling_level -> objective.loss
steps_per_generation -> objective.updates_per_rollout
generation_batch_size -> objective.rollout_batch_size
mask_truncated_completions -> objective.mask_cut_off
reward_funcs -> reward
truncation_mode -> data.on_too_long
packing -> data.packing=best_fit_decreasing
padding_free -> data.packing=best_fit_decreasing
assistant_only_loss -> data.train_on
completion_only_loss -> data.train_on
dataset_text_field -> data.text_column
chat_template_path -> data.chat_template
chat_template_kwargs -> data.template_options
use_peft -> peft=lora
use_lora -> peft=lora
lora_target_modules -> peft.target_modules
lora_modules_to_save -> peft.modules_to_save
lora_r -> peft.r
lora_rank -> peft.r
lora_alpha -> peft.alpha
lora_dropout -> peft.dropout
memory_lr -> optimizer.groups
lora_lr -> optimizer.groups
base_model_lr -> optimizer.groups
use_rslora -> peft.use_rslora
use_dora -> peft.use_dora
load_in_4bit -> peft=qlora
load_in_8bit -> peft=qlora_8bit
bnb_4bit_quant_type -> peft.quantization
dataset_train_split -> data.train_split
dataset_split -> data.train_split
split -> data.train_split
dataset_test_split -> data.val_split
# nanoGPT and configs of models
n_layers -> model.num_hidden_layers
num_layers -> model.num_hidden_layers
depth -> model.depth
n_heads -> model.num_attention_heads
num_heads -> model.num_attention_heads
d_model -> model.hidden_size
dim -> model.hidden_size
eval_iters -> trainer.limit_val_batches
log_interval -> trainer.log_every_n_steps
beta1 -> optimizer.betas
beta2 -> optimizer.betas
betas -> optimizer.betas
momentum -> optimizer.momentum
device -> trainer.accelerator
wandb_log -> logger=wandb
wandb_project -> logger.wandb.project
wandb_run_name -> logger.wandb.name
start -> generate.prompt
prompt -> generate.prompt
temperature -> generate.temperature
# litgpt
model_name -> model
train.epochs -> trainer.max_epochs
train.max_norm -> trainer.gradient_clip_val
max_norm -> trainer.gradient_clip_val
eval.max_iters -> trainer.limit_val_batches
data_dir -> data.path
data_path -> data.path
mask_prompt -> data.train_on
min_lr_ratio -> schedule.min_lr_ratio
num_cycles -> schedule.num_cycles
# axolotl
datasets -> data.mixture
dataset_prepared_path -> data.cache_dir
cache_dir -> data.cache_dir
val_set_size -> data.val_fraction
sample_packing -> data.packing=best_fit_decreasing
train_on_inputs -> data.train_on
chat_template -> data.chat_template
special_tokens -> tokenizer.add_tokens
tokens -> tokenizer.add_tokens
adapter -> peft
lora_model_dir -> peft.adapter
lora_target_linear -> peft.target_modules
flash_attention -> model.attention
cosine_min_lr_ratio -> schedule.min_lr_ratio
tensor_parallel_size -> trainer.fsdp.tensor_parallel_size
rl -> objective
dpo_beta -> objective.beta
activation_checkpointing -> trainer.activation_checkpointing
# LLaMA-Factory
stage -> objective
finetuning_type -> peft
template -> data.chat_template
cutoff_len -> data.seq_len
max_samples -> data.num_samples
dataset_dir -> data.path
eval_dataset -> data.val_path
val_size -> data.val_fraction
lora_target -> peft.target_modules
pref_beta -> objective.beta
pref_loss -> objective.loss
adapter_name_or_path -> peft.adapter
quantization_bit -> peft=qlora
neat_packing -> data.packing=best_fit_decreasing
flash_attn -> model.attention
fp8 -> trainer.precision
# accelerate, DeepSpeed and scripts of one's own
mixed_precision -> trainer.precision
use_amp -> trainer.precision=bf16-mixed
num_gpus -> trainer.devices
use_wandb -> logger=wandb
# the lightning-hydra template
hparams_search -> sweep=optuna
optimized_metric -> checkpoint.monitor
log_dir -> run.root
tags -> logger.wandb.tags
limit_train_batches -> trainer.max_steps
limit_test_batches -> trainer.limit_val_batches
num_sanity_val_steps -> trainer.val_before_training=true
trainer.callbacks -> callbacks.extra
min_epochs -> callbacks.early_stopping.patience
min_steps -> callbacks.early_stopping.patience
enable_progress_bar -> callbacks.progress.style
enable_checkpointing -> checkpoint.keep_last
max_time -> run.time_limit
default_root_dir -> run.root
trainer.logger -> logger
"""
PAIRS = [tuple(line.split(" -> ")) for line in WORDS.splitlines() if " -> " in line]


@pytest.fixture(scope="module")
def valid() -> list[str]:
    """Returns the keys of a plain run, which are those `compose` knows when it refuses a key."""
    return [name for name, _ in flat(OmegaConf.to_container(config.compose([]))) if name]


def test_each_word_gets_the_key_that_is_meant(valid: list[str]) -> None:
    assert set(valid).isdisjoint(word for word, _ in PAIRS)
    said = {word: explain.unknown_key(word, valid).partition("; here it is ")[2].split(" ")[0] for word, _ in PAIRS}
    assert said == dict(PAIRS)


def test_there_are_enough_words_and_none_is_untested() -> None:
    assert len(PAIRS) == len(dict(PAIRS)) >= 150
    assert dict(PAIRS).keys() >= NEIGHBOURS.keys()  # the others are last parts of lmtrain's own keys


GROUPS = {folder.name for folder in conf_dir().iterdir() if folder.is_dir()}


def is_accepted(word: str) -> bool:
    """Returns whether the schema takes the value of an answer such as trainer.compile=true or peft=lora."""
    key, _, text = word.partition("=")
    if key in GROUPS:
        return text in options_of(key, [conf_dir()])
    found = next(k for k in all_keys() if k.name == key)
    one = OmegaConf.structured(dataclasses.make_dataclass("One", [("value", found.type)]))
    OmegaConf.merge(one, {"value": (value := leaves([word])[key])})
    for constraint in found.constraints:
        constraint(key, value)
    return True


def test_every_answer_names_a_key_and_a_value_that_it_takes() -> None:
    known = {k.name for k in all_keys()} | {k.name.rpartition(".")[0] for k in all_keys()} | GROUPS
    for name, here in NEIGHBOURS.items():
        key, with_ = re.split("[ =]", here)[0], re.search(r"\(with ([\w./]+=[\w/]+)", here)
        if key not in known:  # one of a class of its own
            own, last = (conf_dir() / key.partition(".")[0]).glob("*.yaml"), key.rpartition(".")[2]
            assert any(re.search(rf"^ *{last}:", file.read_text(), re.MULTILINE) for file in own), name
        assert with_ is None or is_accepted(with_[1]), here
        assert all(is_accepted(word) for word in here.partition(" (")[0].split() if "=" in word and "*" not in word), (
            here
        )


@pytest.mark.parametrize(
    ("typed", "answer"),
    [("max_prompt_length=512", "data.max_prompt_length=512"), ("dataset_split=train", "data.train_split=train"),
     ("overfit_batches=3", "trainer.overfit_batches=3"), ("lora_target_modules=[q_proj,v_proj]",
      "peft.target_modules=[q_proj, v_proj] (with peft=lora)"), ("learning_rate=1e-3", "optimizer.lr=0.001"),
     ("use_lora=true", "peft=lora"), ("use_lora=false", "peft, to be left as it is"),
     ("use_amp=true", "trainer.precision=bf16-mixed"), ("num_gpus=2", "trainer.devices=2"),
     ("batch_size=12", "data.global_batch_size=12 data.micro_batch_size=12")],
)  # fmt: skip
def test_values_that_mean_the_same_under_another_name(typed: str, answer: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"; here it is {answer}")):
        config.compose([typed])


def test_what_belongs_elsewhere_is_not_guessed() -> None:
    for word in ("use_loras", "dataset_splits_test", "training_mode"):
        with pytest.raises(UserError) as refusal:
            config.compose([f"{word}=x"])
        assert "rslora" not in str(refusal.value)
        assert "did you mean" not in str(refusal.value)


def test_every_argument_of_lightnings_trainer_is_answered(valid: list[str]) -> None:
    for name in inspect.signature(pl.Trainer).parameters:
        if name in ("callbacks", "logger"):  # config groups of lmtrain
            continue
        if f"trainer.{name}" in valid:
            continue
        for key in (name, f"trainer.{name}"):
            assert used_here(key, valid) or absent(key), key


def test_a_number_per_epoch_is_no_number_of_steps() -> None:
    """saves_per_epoch=1 is not trainer.save_every_n_steps=1, a save after each step."""
    for name, ours in (("saves_per_epoch", "save_every_n_steps"), ("trainer.evals_per_epoch", "val_check_interval")):
        done = run("train", f"{name}=1")
        assert done.code == 2
        assert f"trainer.{ours}=n counts steps" in done.err


def test_the_arguments_of_transformers_that_people_set_are_answered(valid: list[str]) -> None:
    from transformers import TrainingArguments

    names = {f.name for f in dataclasses.fields(TrainingArguments)} - set(valid)
    answered = {name for name in names if used_here(name, valid) or absent(name)}
    assert len(answered) >= 50


TYPED = {  # on the command line
    "data.block_size=128": "here it is data.seq_len",
    "trainer.max_time=1": "here it is run.time_limit (HH:MM:SS",
    "lora_r=8": "here it is peft.r=8 (with peft=lora)",
    "--report_to=wandb": "logger=wandb",
    "--fast-dev-run": "trainer.fast_dev_run",
    "--lora_r=8": "peft=lora peft.r=8",
    "model=GPT_small": "did you mean model=gpt_small?",
    "model=GPT2": "did you mean model=gpt_small?",
    "trainer.limit_val_batches=0.5": "it counts micro-batches",
    "trainer.val_check_interval=0.25": "it counts optimizer steps",
    "trainer.devices=[0]": "CUDA_VISIBLE_DEVICES=0 and trainer.devices=1",
}


@pytest.mark.parametrize("typed", TYPED)
def test_words_and_values_as_they_are_typed(typed: str) -> None:
    ended = run("train", typed)
    assert ended.code == 2
    assert TYPED[typed] in message(ended.err)


def test_yes_and_no_are_booleans() -> None:
    c = config.check(
        config.compose(["trainer.compile=no", "trainer.activation_checkpointing=Yes", "data.append_eos=off"])
    )
    assert (c.trainer.compile, c.trainer.activation_checkpointing, c.data.append_eos) == (False, True, False)
    with pytest.raises(UserError, match="options: auto"):
        config.check(config.compose(["trainer.compile=perhaps"]))
