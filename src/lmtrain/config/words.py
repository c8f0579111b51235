"""What a neighbour's word is called here, whatever section it is typed under. The table is aliases.py."""

import difflib
from collections.abc import Collection

from lmtrain.config.aliases import NEIGHBOURS
from lmtrain.config.lightning_arguments import ANSWERS

# Words of theirs that nothing here answers to, and why.
WITHOUT = {
    "full_determinism": "runs are reproducible as they are; seed=... chooses another",
    "do_train": "the verb says it: python -m lmtrain.train",
    "do_eval": "validation runs where there is a validation split; trainer.val_check_interval says how often",
    "do_predict": "there is no prediction; python -m lmtrain.generate writes text",
    "load_best_model_at_end": "the best checkpoint is kept: export.checkpoint=best with python -m lmtrain.export",
    "ignore_data_skip": "a resumed run continues with the next row at once; leave it out",
    "remove_unused_columns": "only the columns named are read; leave it out",
    "local_rank": "torchrun sets it in the environment; leave it out",
    "average_tokens_across_devices": "every step averages over the tokens of all devices as it is; leave it out",
    "auto_find_batch_size": "an out-of-memory message names the data.micro_batch_size to set",
    "use_cache": "training never uses it; leave it out",
    "fused": "AdamW is always torch's fused kernel, the fastest; leave it out",
    "tf32": "set trainer.precision instead",
    "ddp_find_unused_parameters": "leave it out",
}

# Hydra's own flags that stand for nothing here.
HYDRA_FLAGS = {
    "--hydra-help": "--help lists groups, options and keys, and --info says where configs come from",
    "--config-path": "write --config-dir DIR, a folder of your own configs laid out like conf/",
    "-cp": "write --config-dir DIR, a folder of your own configs laid out like conf/",
    "--run": "leave it out: without -m it is one run",
    "-r": "leave it out: without -m it is one run",
    "--resolve": "leave it out: --cfg prints resolved values",
    "--package": "write --cfg, or python -m lmtrain.explain SECTION, which shows one section",
    "-p": "write --cfg, or python -m lmtrain.explain SECTION, which shows one section",
    "--experimental-rerun": "write --config-dir RUN run.dir=ANOTHER: a run's folder holds its config.yaml",
}

# Sections of other projects, or ours, under which a word of the table keeps its meaning: data.block_size.
_SECTIONS = (
    "trainer", "data", "datamodule", "dataset", "model", "optimizer", "optim", "scheduler", "schedule",
    "lr_scheduler", "train", "training", "training_args", "args", "config", "run", "eval", "checkpoint",
    "logger", "lora", "lora_config", "peft", "peft_config", "generate", "export", "objective", "module",
    "litmodule", "tokenizer", "callbacks", "model_checkpoint", "early_stopping",
)  # fmt: skip
_AMBIGUOUS = ("name", "num_samples", "rank", "start", "tokens", "adapter", "project")  # mean other things in a section


def used_here(key: str, valid: Collection[str]) -> str | None:
    """Our key, group or option for a neighbour's; case and dashes don't count. None where it is no word of theirs.

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
    return WITHOUT.get(last, f"here it is {ANSWERS[last]}" if last in ANSWERS and last not in NEIGHBOURS else None)
