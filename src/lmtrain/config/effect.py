"""Nothing typed is ignored: keys that nothing reads with the options chosen, and the source of a bare data.path.

A key set to its default anyway is let through: it says what happens. Imports no torch.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lmtrain.config.precision import FP8
from lmtrain.config.schema import Config
from lmtrain.config.trust import CLOSED
from lmtrain.errors import UserError

TRIAL = "LMTRAIN_TRIAL"  # set in a sweep's trials: what has no effect in one may have it in another

_ABSENT = object()
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# The option of `data` that reads a file with this suffix as text.
_READ_AS = {
    ".txt": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "jsonl",
    ".tsv": "jsonl", ".parquet": "parquet", ".arrow": "parquet",
}  # fmt: skip
_RECORDS = {"sft": "chat_jsonl", "dpo": "preference_jsonl"}  # by objective


@dataclass(frozen=True)
class Rule:
    """Keys that begin with `prefix` are read where `read` holds; `instead` is what makes it hold."""

    prefix: str
    read: Callable[[Config], bool]
    instead: str


def _from_hub(c: Config) -> bool:
    return c.data.source == "mixture" or (c.data.source == "hub" and not c.data.path)


_HUB = "it names data of the hub, and this data comes from elsewhere: choose data=wikitext or another, or leave it out"
_OR_RING = "; files are streamed with data.ring_bytes=... beside it"
RULES = (
    Rule("trainer.deepspeed", lambda c: c.trainer.strategy == "deepspeed", "set trainer.strategy=deepspeed"),
    Rule(
        "trainer.fsdp.tensor_parallel_size",
        lambda c: c.trainer.strategy == "fsdp_tp",
        "set trainer.strategy=fsdp_tp",
    ),
    Rule("trainer.fsdp", lambda c: c.trainer.strategy in ("fsdp", "fsdp_tp"), "set trainer.strategy=fsdp"),
    Rule("trainer.fp8_recipe", lambda c: c.trainer.precision == FP8, "set trainer.precision=fp8 too"),
    Rule("trainer.spike_window", lambda c: c.trainer.spike_factor is not None, "set trainer.spike_factor=2.0 too"),
    Rule("objective.gamma", lambda c: getattr(c.objective, "loss", None) == "simpo", "set objective.loss=simpo"),
    Rule("objective.dpop_lambda", lambda c: getattr(c.objective, "loss", None) == "dpop", "set objective.loss=dpop"),
    Rule(
        "data.path",
        lambda c: c.data.source not in ("python_stdlib", "mixture") and "." not in c.data.source,
        "choose what reads it: data=text, jsonl, parquet, bins, chat_jsonl or preference_jsonl",
    ),
    Rule("data.source_options", lambda c: "." in c.data.source, "set data.source=package.module.Class too"),
    Rule("data.name", _from_hub, _HUB),
    Rule("data.config_name", _from_hub, _HUB),
    Rule("data.revision", _from_hub, _HUB),
    Rule("data.streaming", lambda c: c.data.ring_bytes is not None or _from_hub(c), f"{_HUB}{_OR_RING}"),
    *(
        Rule(f"data.ring_{name}", lambda c: c.data.ring_bytes is not None, "set data.ring_bytes too")
        for name in ("shard_tokens", "window", "val_tokens", "patience")
    ),
    Rule("data.curriculum", lambda c: c.data.curriculum.by is not None, "set data.curriculum.by=length too"),
    Rule("data.fim", lambda c: c.data.fim.rate > 0, "set data.fim.rate=0.5 too"),
    Rule("data.batch_warmup", lambda c: c.data.batch_warmup.start_size is not None, "set data.batch_warmup.start_size"),
    Rule("data.val_fraction", lambda c: not c.data.val_path, "data.val_path names what is held out"),
)

_TRAINING = ("train", "prepare", "inspect", "tune", "verify", "estimate")  # one command line serves them all
# Keys that only some verbs read: the verbs, or for verbs that read few keys those they read.
_OF_VERBS = {
    "run_dir": ("export", "generate", "inspect"),
    "generate": ("generate",),
    "inspect": ("inspect",),
    "tune": ("tune",),
    "export.checkpoint": ("export",),
}
_READS_ONLY = {
    "generate": ("run_dir", "generate", "seed", *CLOSED),
    "export": ("run_dir", "export", "seed", *CLOSED),
}
_OF_TRAINING = (
    "optimizer", "schedule", "callbacks", "trainer.max_steps", "trainer.max_epochs", "trainer.max_time",
    "trainer.val_check_interval", "trainer.save_every_n_steps", "trainer.log_every_n_steps",
    "trainer.gradient_clip_val",
)  # fmt: skip


def typed_keys(overrides: Sequence[str]) -> dict[str, str]:
    """Dotted key to the text of its value, of overrides as they are typed."""
    pairs = (o.lstrip("+").partition("=") for o in overrides if not o.startswith("~"))
    return {key: value for key, _, value in pairs}


def without_effect(verb: str, overrides: Sequence[str], config: Config, default: Callable[[str], Any]) -> list[str]:
    """A message for each typed key that nothing reads, in the order typed.

    Args:
        default: the value of a key where it is not typed.
    """
    messages = []
    for key in typed_keys(overrides):
        why = _of_another_verb(verb, key) or _without_its_option(key, config)
        if why is not None and _value(config, key) != default(key):
            messages.append(f"{key} has no effect {why}")
    return messages


def refuse(verb: str, overrides: Sequence[str], config: Config, default: Callable[[str], Any]) -> None:
    """Raises UserError for the first typed key that nothing reads."""
    if os.environ.get(TRIAL):
        return
    for message in without_effect(verb, overrides, config, default):
        raise UserError(message)


def _begins(key: str, prefix: str) -> bool:
    return key == prefix or key.startswith(f"{prefix}.")


def _of_another_verb(verb: str, key: str) -> str | None:
    if verb == "evaluate" and "." in key and any(_begins(key, of_training) for of_training in _OF_TRAINING):
        return "in `lmtrain evaluate`, which trains nothing (evaluate.limit=100 takes fewer rows)"
    if verb in _READS_ONLY:
        if any(_begins(key, own) for own in _READS_ONLY[verb]):
            return None
        reads = ", ".join(f"{name}.*" if name == verb else name for name in _READS_ONLY[verb])
        return f"in `lmtrain {verb}`, which takes all else from the run itself (it reads {reads})"
    readers = next((verbs for own, verbs in _OF_VERBS.items() if _begins(key, own)), None)
    if verb not in _TRAINING or readers is None or verb in readers:
        return None
    here = "; the folder of this run is run.dir" if key == "run_dir" else ""
    by = " and ".join(f"lmtrain {v}" for v in readers) + (" reads" if len(readers) == 1 else " read")
    return f"in `lmtrain {verb}`: {by} it{here}"


def _without_its_option(key: str, config: Config) -> str | None:
    for rule in RULES:
        if _begins(key, rule.prefix):
            return None if rule.read(config) else f"here: {rule.instead}"
    return None


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config.get(name, _ABSENT) if isinstance(config, Mapping) else getattr(config, name, _ABSENT)
    return config


def default_in(tree: DictConfig) -> Callable[[str], Any]:
    """The values of a composed config without the command line, as `without_effect` asks for them."""
    return lambda key: OmegaConf.select(tree, key, default=_ABSENT)


def suffix_of(path: str) -> str:
    """The suffix that tells what a file, or the files of a glob, hold; '' where none does."""
    name = Path(re.sub(r"\?.*", "", path) if path.startswith(("http://", "https://")) else path)
    return (Path(name.stem) if name.suffix.lower() in _COMPRESSED else name).suffix.lower()


def _suffix_there(path: str) -> str:
    """As `suffix_of`; of a folder, the first known one in it."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return suffix_of(path)
    if folder.resolve() == Path(folder.anchor or "/").resolve():
        raise UserError(f"data.path={path} is the whole file system: name the folder that holds the data")
    inside = (suffix_of(p.name) for p in sorted(folder.rglob("*")) if p.is_file() and not p.name.startswith("."))
    return next((suffix for suffix in inside if suffix in _READ_AS), "")


def inferred_source(overrides: Sequence[str], tree: DictConfig) -> str | None:
    """The option of `data` that reads a typed data.path where none was chosen, or None.

    Raises:
        UserError: the path doesn't tell.
    """
    typed = typed_keys(overrides)
    path = OmegaConf.select(tree, "data.path")
    if "data.path" not in typed or not path or tree.data.get("source") != "python_stdlib":
        return None
    if {"data", "data.source"} & typed.keys():
        return None
    first = str(path if isinstance(path, str) else path[0])
    if any((Path(first).expanduser() / name).is_file() for name in ("train.bin", "meta.json")):
        return "bins"
    option = _READ_AS.get(_suffix_there(first))
    records = _RECORDS.get(str(tree.objective.name))
    if option is None or (records is not None and option == "text"):
        kinds = records or "text (plain text), jsonl (json, csv), parquet or bins"
        raise UserError(f"data.path={first}: its name doesn't tell what it holds; say it with data={kinds}")
    return records or option


def for_text(overrides: Sequence[str], objective: Callable[[list[str]], str]) -> list[str]:
    """The overrides, with data=mixture as the option that mixes text with objective=causal_lm.

    Args:
        objective: its name, where only these overrides of groups are made.
    """
    if "data=mixture" not in overrides:
        return list(overrides)
    groups = [o for o in overrides if "." not in o.partition("=")[0]]
    instead = "data=text_mixture" if objective(groups) == "causal_lm" else "data=mixture"
    return [instead if o == "data=mixture" else o for o in overrides]


def inference_note(overrides: Sequence[str], config: Config) -> list[str]:
    """What the plan says where the source was told by the path."""
    typed = typed_keys(overrides)
    if "data.path" not in typed or {"data", "data.source", "experiment"} & typed.keys() or not config.data.path:
        return []
    return [
        f"data.path={typed['data.path']} chose what reads it, {config.data.source} ({config.data.format}), and "
        f"is all the data there is; data=... chooses another reader"
    ]


def check_suffix(overrides: Sequence[str]) -> None:
    """Raises UserError for data=jsonl data.path=x.txt, which would be read as the suffix says and not as typed."""
    typed = typed_keys(overrides)
    option, path = typed.get("data", ""), typed.get("data.path", "").strip("'\"")
    held = _READ_AS.get(suffix_of(path))
    if "data.format" in typed or held is None or option not in ("text", "jsonl", "parquet", *_RECORDS.values()):
        return
    wrong = held == "text" if option in _RECORDS.values() else held != option
    if wrong:
        kind = "plain text" if held == "text" else f"{suffix_of(path)[1:]}"
        instead = f"data={held}, or " if option not in _RECORDS.values() else ""
        raise UserError(
            f"data={option} data.path={path}: the file's name says {kind}; write {instead}data.format=... if it holds "
            f"something else"
        )
