"""Explains a rejected override: the nearest valid key, the word used here for a neighbour's, the options of a group."""

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

# What nanoGPT, litgpt, transformers, TRL, axolotl and the lightning-hydra template call it -> our key.
NEIGHBOURS = {
    "datamodule": "data",
    "dataset": "data",
    "dataset_name": "data.name",
    "dataset_config_name": "data.config_name",
    "optim": "optimizer",
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "lr_scheduler_type": "schedule",
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "warmup_steps": "schedule.warmup_steps",
    "warmup_iters": "schedule.warmup_steps",
    "warmup_ratio": "schedule.warmup_ratio",
    "min_lr": "schedule.min_lr_ratio",
    "ckpt_path": "run.resume",
    "resume": "run.resume",
    "resume_from_checkpoint": "run.resume",
    "init_from": "model.init",
    "out_dir": "run.dir",
    "output_dir": "run.dir",
    "hydra.run.dir": "run.dir",
    "task_name": "run.name",
    "run_name": "run.name",
    "name": "run.name",
    "wandb.name": "logger.wandb.name",
    "wandb.project": "logger.wandb.project",
    "batch_size": "data.global_batch_size",
    "data.batch_size": "data.global_batch_size",
    "per_device_train_batch_size": "data.micro_batch_size",
    "micro_batch_size": "data.micro_batch_size",
    "global_batch_size": "data.global_batch_size",
    "gradient_accumulation_steps": "data.global_batch_size",
    "trainer.accumulate_grad_batches": "data.global_batch_size",
    "accumulate_grad_batches": "data.global_batch_size",
    "block_size": "data.seq_len",
    "max_length": "data.seq_len",
    "max_seq_length": "data.seq_len",
    "sequence_len": "data.seq_len",
    "seq_len": "data.seq_len",
    "max_steps": "trainer.max_steps",
    "max_iters": "trainer.max_steps",
    "epochs": "trainer.max_epochs",
    "num_epochs": "trainer.max_epochs",
    "num_train_epochs": "trainer.max_epochs",
    "max_epochs": "trainer.max_epochs",
    "eval_interval": "trainer.val_check_interval",
    "eval_steps": "trainer.val_check_interval",
    "trainer.check_val_every_n_epoch": "trainer.val_check_interval",
    "save_steps": "trainer.save_every_n_steps",
    "logging_steps": "trainer.log_every_n_steps",
    "grad_clip": "trainer.gradient_clip_val",
    "max_grad_norm": "trainer.gradient_clip_val",
    "devices": "trainer.devices",
    "strategy": "trainer.strategy",
    "precision": "trainer.precision",
    "dtype": "trainer.precision",
    "bf16": "trainer.precision",
    "fp16": "trainer.precision",
    "compile": "trainer.compile",
    "gradient_checkpointing": "trainer.activation_checkpointing",
    "save_total_limit": "checkpoint.keep_last",
    "callbacks.model_checkpoint": "checkpoint",
    "n_layer": "model.num_hidden_layers",
    "model.n_layer": "model.num_hidden_layers",
    "n_head": "model.num_attention_heads",
    "model.n_head": "model.num_attention_heads",
    "n_embd": "model.hidden_size",
    "model.n_embd": "model.hidden_size",
    "dropout": "model.dropout",
    "model_name_or_path": "model.name_or_path",
    "base_model": "model.name_or_path",
    "text_column": "data.text_column",
}


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterable[str]:
    """All dotted keys of a nested mapping, inner nodes included."""
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")


def unknown_key(key: str, valid: Iterable[str]) -> str:
    """The message for a key that isn't there, with the nearest one that is."""
    valid = list(valid)
    word = NEIGHBOURS.get(key)
    if word is not None:
        note = " (accumulation is derived from it, data.micro_batch_size and the devices)"
        return f"there is no key {key!r}; here it is {word}{note if 'accum' in key else ''}"
    near = difflib.get_close_matches(key, valid, n=3, cutoff=0.7)
    last = key.rsplit(".", 1)[-1]
    same_name = [v for v in valid if v.rsplit(".", 1)[-1] == last]
    candidates = list(dict.fromkeys(near[:1] + same_name + near[1:]))[:3]
    if not candidates:
        section = key.split(".")[0]
        candidates = [v for v in valid if v.startswith(f"{section}.") and v.count(".") == 1]
        if candidates:
            return f"there is no key {key!r}; keys under {section}: {', '.join(candidates)}"
        return f"there is no key {key!r}; --cfg prints every key with its default"
    return f"there is no key {key!r}; did you mean {' or '.join(candidates)}?"


def other_variant(key: str, folders: Iterable[Path]) -> str | None:
    """The message for a key that other options of its group have (optimizer.momentum with optimizer=adamw), or None."""
    group, *path = key.split(".")
    options = []
    for file in sorted(f for d in folders for f in (d / group).glob("*.yaml") if f.stem != "base"):
        node: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
        for name in path:
            node = node.get(name, _ABSENT) if isinstance(node, Mapping) else _ABSENT
        if node is not _ABSENT:
            options.append(f"{group}={file.stem}")
    if not path or not options:
        return None
    return f"{key} has no meaning with the {group} chosen here; it belongs to {', '.join(options)}"


_ABSENT = object()


def unknown_option(group: str, option: str, folders: Iterable[Path]) -> str:
    """The message for `group=option` where no such yaml exists."""
    options = sorted({f.stem for d in folders for f in (d / group).glob("*.yaml") if f.stem != "base"})
    near = difflib.get_close_matches(option, options, n=1)
    hint = f"did you mean {group}={near[0]}? " if near else ""
    return f"there is no {group}={option}; {hint}options: {', '.join(options)}"
