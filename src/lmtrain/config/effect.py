"""What typed words come to: keys that nothing reads are refused, a bare data.path and a model's name choose options.

A key set to its default anyway is let through: it says what happens. Imports no torch.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lmtrain.config import sections
from lmtrain.config.config_files import options_of
from lmtrain.config.constraints import TRAINING, ReadBy
from lmtrain.config.keys import annotations_of, unread
from lmtrain.config.override_text import as_typed, typed_keys
from lmtrain.config.schema import Config
from lmtrain.config.trust import CLOSED
from lmtrain.errors import UserError

# Set in a sweep's trials ("1") and a pipeline's stages ("stage"): what has no effect in one may have it in another, and
# they don't all print what they have in common.
TRIAL = "LMTRAIN_TRIAL"

ROW = 1024  # tokens of a row of a pretrained model that was named alone, if it takes so many
_ABSENT = object()
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# The option of `data` that reads a file with this suffix as text.
_READ_AS = {
    ".txt": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "jsonl",
    ".tsv": "jsonl", ".parquet": "parquet", ".arrow": "parquet", ".md": "text", ".rst": "text",
}  # fmt: skip
_RECORDS = {"conversations": "chat_jsonl", "pairs": "preference_jsonl"}  # options of `data`, by what the rows are


# One command line serves them all; generate and export take all but a few keys from the run.
_OF_RUNS = ("train", "prepare", "inspect", "tune", "verify", "estimate")
_OF_EXPORTS = ("generate", "export")


def without_effect(verb: str, overrides: Sequence[str], config: Config, default: Callable[[str], Any]) -> list[str]:
    """A message for each typed key that nothing reads, in the order typed.

    Args:
        default: the value of a key where it is not typed.
    """
    messages = []
    for key in typed_keys(overrides):
        waits = unread(key, config)
        why = _of_another_verb(verb, key, config) or (waits and f"here: {waits.instead}")
        if why is not None and _value(config, key) != default(key):
            messages.append(f"{key} has no effect {why}")
    return messages


def refuse(verb: str, overrides: Sequence[str], config: Config, default: Callable[[str], Any]) -> None:
    """Raises UserError for the first typed key that nothing reads."""
    if os.environ.get(TRIAL):
        return
    for message in without_effect(verb, overrides, config, default):
        raise UserError(message)


def _of_another_verb(verb: str, key: str, config: Config) -> str | None:
    annotations = annotations_of(key, config)
    if verb == "evaluate" and "." in key and TRAINING in annotations:
        return "in `lmtrain evaluate`, which trains nothing (evaluate.limit=100 takes fewer rows)"
    if verb in _OF_EXPORTS:
        own = ("run_dir", verb, "seed", *CLOSED)
        if any(key == name or key.startswith(f"{name}.") for name in own):
            return None
        reads = ", ".join(f"{name}.*" if name == verb else name for name in own)
        return f"in `lmtrain {verb}`, which takes all else from the run itself (it reads {reads})"
    readers = next((mark.verbs for mark in annotations if isinstance(mark, ReadBy)), None)
    if verb not in _OF_RUNS or readers is None or verb in readers:
        return None
    here = "; the folder of this run is run.dir" if key == "run_dir" else ""
    by = " and ".join(f"lmtrain {v}" for v in readers) + (" reads" if len(readers) == 1 else " read")
    return f"in `lmtrain {verb}`: {by} it{here}"


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
    known = [suffix for suffix in inside if suffix in _READ_AS]
    return next((suffix for suffix in known if suffix not in (".md", ".rst")), next(iter(known), ""))


def with_model_named(overrides: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """The overrides, with `model=` and a folder or a hub name as model=pretrained and its name_or_path.

    A run's folder stands for its export. Options of `model` stay what they are.

    Args:
        folders: of options.

    Raises:
        UserError: the name is a path, and there is no such folder; or a run's, which has exported nothing.
    """
    found = list[str]()
    for override in overrides:
        name = override.removeprefix("model=").strip("'\"")
        if override.startswith("model=") and _is_a_models_name(name, folders):
            found += ["model=pretrained", as_typed("model.name_or_path", _weights_of(name))]
        else:
            found.append(override)
    return found


def _is_a_models_name(name: str, folders: Sequence[Path]) -> bool:
    if name.startswith((".", "/", "~")):
        return True
    return name not in options_of("model", folders) and ("/" in name or (bool(name) and Path(name).is_dir()))


def _weights_of(name: str) -> str:
    """A hub name as it is, a folder's path; of a run the folder of its export."""
    path = Path(name).expanduser()
    if not path.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") != 1:
            raise UserError(f"model={name}: no such folder, and a name of the hub is owner/model")
        return name
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        return str(path)
    if (path / "export" / "config.json").is_file():
        return str(path / "export")
    raise UserError(
        f"model={name}: the folder holds no model (config.json). Of a run, python -m lmtrain.export run_dir={name} "
        f"writes it"
    )


def positions_of(name_or_path: str) -> int | None:
    """How many tokens a model in a folder takes, by its config.json; None where it is on the hub or that lacks it."""
    try:
        found = json.loads((Path(name_or_path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    positions = found.get("max_position_embeddings", found.get("n_positions")) if isinstance(found, dict) else None
    return positions if isinstance(positions, int) and positions > 0 else None


def inferred_source(overrides: Sequence[str], tree: DictConfig, folders: Sequence[Path]) -> str | None:
    """The option of `data` that reads a typed data.path where none was chosen, or None.

    Args:
        tree: the composed config, of which no file opens anything that was not typed (trust.py).
        folders: of options.

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
    records = option_holding(sections.rows_trained_on(tree), folders)
    if option is None or (records is not None and option == "text"):
        kinds = records or "text (plain text), jsonl (json, csv), parquet or bins"
        raise UserError(f"data.path={first}: its name doesn't tell what it holds; say it with data={kinds}")
    return records or option


EPOCHS = {"text": 20, "rows": 3}  # at most, of a file of the user's where no length is typed: more rarely helps
_LENGTHS = ("trainer.max_steps", "trainer.max_epochs", "trainer.overfit_batches", "trainer.fast_dev_run", "experiment",
            "debug", "data.streaming", "data.ring_bytes")  # fmt: skip


def epochs_at_most(overrides: Sequence[str], option: str) -> list[str]:
    """The override that ends a run on a user's file after some epochs, where nothing typed says how long it is.

    Args:
        option: of `data`, that reads the file.
    """
    if {*_LENGTHS, "budget.tokens", "budget.flops"} & typed_keys(overrides).keys():
        return []
    return [f"trainer.max_epochs={EPOCHS['text' if option in set(_READ_AS.values()) else 'rows']}"]


def option_holding(rows: str, folders: Sequence[Path]) -> str | None:
    """The option of `data` that reads a user's file of such rows: chat_jsonl for conversations. None for text.

    Args:
        rows: as of ObjectiveConfig.rows.
        folders: of options.
    """
    if "." not in rows:
        return _RECORDS.get(rows)
    files = (file for folder in folders for file in sorted((folder / "data").glob("*.yaml")) if file.is_file())
    holding = (f for f in files if f"rows: {rows}" in f.read_text(encoding="utf-8", errors="replace").splitlines())
    return next((file.stem for file in holding), None)


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


def inference_note(overrides: Sequence[str], config: Config, proposed: str = "") -> list[str]:
    """What the plan says where a name chose the model, or a path the reader.

    Args:
        proposed: what was made of a file that was named alone.
    """
    typed = typed_keys(overrides)
    notes = [proposed] if proposed else []
    weights = getattr(config.model, "name_or_path", None)
    if weights and typed.get("model") not in (None, "pretrained"):
        notes.append(
            f"model={typed['model']} trains {weights} further, in rows of {config.data.seq_len:,} tokens (data.seq_len)"
        )
    chosen = config.budget.chosen is None and config.trainer.max_epochs in EPOCHS.values()  # and not the budget
    if typed.get("trainer.max_epochs") is None and chosen and "data" not in typed:
        notes.append(_ends(config))
    if proposed or "data.path" not in typed or {"data", "data.source", "experiment"} & typed.keys():
        return notes
    if not config.data.path:
        return notes
    return [
        *notes,
        f"data.path={typed['data.path']} chose its reader, {config.data.source} ({config.data.format}), and "
        f"is all the data there is; data=... chooses another reader",
    ]


def _ends(config: Config) -> str:
    t = config.trainer
    return (
        f"no length was given: the run ends after {t.max_epochs} epochs, or trainer.max_steps={t.max_steps} where that "
        f"is earlier; trainer.max_epochs=... or trainer.max_steps=... changes it"
    )


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
