"""Aliases: what another project's name for a setting is here, under whatever section it is typed. See aliases.txt."""

import configparser
import difflib
from collections.abc import Collection
from pathlib import Path

_TABLES = configparser.ConfigParser(delimiters=("->",), interpolation=None)  # refuses a name that stands twice
_TABLES.read_string(Path(__file__).with_suffix(".txt").read_text(encoding="utf-8"))
NEIGHBOURS, OPTIONS, WITHOUT, HYDRA_FLAGS, LIGHTNING, VERBS = (
    dict(_TABLES[name]) for name in ("keys", "options", "without", "hydra_flags", "lightning", "verbs")
)

# Sections of other projects, or ours, under which a word of the table keeps its meaning: data.block_size.
_SECTIONS = (
    "trainer", "data", "datamodule", "dataset", "model", "optimizer", "optim", "scheduler", "schedule",
    "lr_scheduler", "train", "training", "training_args", "args", "config", "run", "eval", "checkpoint",
    "logger", "lora", "lora_config", "peft", "peft_config", "generate", "export", "objective", "module",
    "litmodule", "tokenizer", "callbacks", "model_checkpoint", "early_stopping",
)  # fmt: skip
_AMBIGUOUS = ("name", "num_samples", "rank", "start", "tokens", "adapter", "project")  # mean other things in a section


def used_here(key: str, valid: Collection[str]) -> str | None:
    """Our key, group or option for a neighbour's; case and dashes don't count. None where it is not a word of theirs.

    Args:
        valid: our keys, for those of which only the section has another name (datamodule.path).
    """
    key = key.lower().replace("-", "_")
    head, _, rest = key.partition(".")
    renamed = f"{NEIGHBOURS[head]}.{rest}" if rest and head in NEIGHBOURS else None
    last = key.rpartition(".")[2]
    for word in (key, renamed):
        if word in NEIGHBOURS:
            return NEIGHBOURS[word]
    if renamed in valid:
        return renamed
    inside = rest and all(part in _SECTIONS for part in key.split(".")[:-1]) and last not in _AMBIGUOUS
    return NEIGHBOURS.get(last) if inside else None


def misspelt(key: str, valid: Collection[str]) -> str | None:
    """The neighbour's word that a key is nearly written as; None where one of our keys is at least as near."""
    *sections, last = key.lower().replace("-", "_").split(".")
    if not all(part in _SECTIONS for part in sections):
        return None
    ours = {v.rpartition(".")[2] for v in valid}
    theirs = [word for word in NEIGHBOURS if "." not in word and word not in (*ours, *_AMBIGUOUS)]
    near = difflib.get_close_matches(last, [*ours, *theirs], n=1, cutoff=0.8)
    return near[0] if near and near[0] in theirs else None


def absent(key: str) -> str | None:
    """Why nothing here answers to a word of a neighbour's, or None."""
    *sections, last = key.lower().replace("-", "_").split(".")
    if not all(part in _SECTIONS for part in sections):
        return None
    return WITHOUT.get(last, f"here it is {LIGHTNING[last]}" if last in LIGHTNING and last not in NEIGHBOURS else None)


_ALIKE = (  # keys whose values other projects write the same way
    "optimizer.lr", "optimizer.weight_decay", "schedule.warmup_steps", "schedule.warmup_ratio", "data.seq_len",
    "data.micro_batch_size", "trainer.max_steps", "trainer.max_epochs", "trainer.gradient_clip_val", "peft.r",
    "peft.alpha", "peft.dropout", "model.num_hidden_layers", "model.num_attention_heads", "model.hidden_size",
    "trainer.log_every_n_steps", "trainer.save_every_n_steps", "data.val_fraction", "data.name", "run.name",
    "data.num_samples", "data.text_column", "data.path", "data.val_path", "run.dir",
    "trainer.devices", "trainer.num_nodes",
    "generate.prompt", "generate.max_new_tokens", "generate.temperature", "objective.beta", "run.root",
)  # fmt: skip
_SWITCHES = {  # what a switch of theirs that is on is here
    "bf16": "trainer.precision=bf16-mixed", "fp16": "trainer.precision=16-mixed", "compile": "trainer.compile=true",
    "torch_compile": "trainer.compile=true", "gradient_checkpointing": "trainer.activation_checkpointing=true",
    "activation_checkpointing": "trainer.activation_checkpointing=true", "resume": "run.resume=auto",
    "trust_remote_code": "model.trust_remote_code=true", "use_cpu": "trainer.accelerator=cpu",
    "packing": "data.packing=best_fit_decreasing", "sample_packing": "data.packing=best_fit_decreasing",
}  # fmt: skip


def with_value(name: str, here: str, value: object) -> str:
    """What `name: value` of another project is here: key=value where the value means the same, else the key alone.

    Args:
        here: as of `used_here`.
    """
    key, _, rest = here.partition(" ")
    if key == "model.name_or_path" and isinstance(value, str) and value:
        return f"model={value}"
    if name.rpartition(".")[2] in _SWITCHES and value in (True, None, "true", "True"):
        return _SWITCHES[name.rpartition(".")[2]]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if key in _ALIKE and isinstance(value, int | float | str) and not isinstance(value, bool) and value != "":
        return f"{key}={value} {rest}".strip()
    return here
