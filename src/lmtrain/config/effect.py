"""Effects of typed overrides: unread keys are refused; a bare data.path and a model name choose config options.

An unread key that is set to its default value is accepted, since it states what happens anyway. Imports no torch.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from lmtrain.config import sections
from lmtrain.config.constraints import PREPARED, TRAINING, ReadBy
from lmtrain.config.defaults import options_of
from lmtrain.config.keys import annotations_of, unread
from lmtrain.config.override_text import as_typed, shell_word, typed_keys
from lmtrain.config.schema import Config
from lmtrain.config.trust import CODE
from lmtrain.errors import UserError

# Environment variable set in the trials of a sweep ("1") and the stages of a pipeline ("stage"). They accept keys
# without effect, since a key may have an effect in other trials or stages, and don't repeat output they share.
TRIAL = "LMTRAIN_TRIAL"

ROW = 1024  # default data.seq_len, in tokens, with model=<name or folder>; less if the model has fewer positions
_ABSENT = object()
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# File suffix -> the option of `data` that reads it.
_READ_AS = {
    ".txt": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "jsonl",
    ".tsv": "jsonl", ".parquet": "parquet", ".arrow": "parquet", ".md": "text", ".rst": "text",
}  # fmt: skip
_RECORDS = {"conversations": "chat_jsonl", "pairs": "preference_jsonl"}  # kind of rows -> option of `data`


# Commands that share one set of keys; generate and export take all but a few keys from the run's own config.
_OF_RUNS = ("train", "prepare", "inspect", "tune", "verify", "estimate")
_OF_EXPORTS = ("generate", "export")


def without_effect(verb: str, overrides: Sequence[str], config: Config, default: Callable[[str], Any]) -> list[str]:
    """Returns a message for each typed key that nothing reads and that differs from its default, in typed order.

    Args:
        default: returns the value that a key has if it is not typed.
    """
    messages = []
    for key in typed_keys(overrides):
        waits = unread(key, config)
        why = _of_another_verb(verb, key, config) or (waits and f"here: {waits.instead}")
        if why is not None and _value(config, key) != default(key):
            messages.append(f"{key} has no effect {why}")
    return messages


def refuse(verb: str, overrides: Sequence[str], config: Config, default: Callable[[str], Any]) -> None:
    """Raises UserError for the first key reported by `without_effect`, except in sweep trials and pipeline stages."""
    if os.environ.get(TRIAL):
        return
    for message in without_effect(verb, overrides, config, default):
        raise UserError(message)


def _of_another_verb(verb: str, key: str, config: Config) -> str | None:
    annotations = annotations_of(key, config)
    if verb == "evaluate" and "." in key and TRAINING in annotations:
        return "in `lmtrain evaluate`, which trains nothing (evaluate.limit=100 takes fewer rows)"
    if verb == "evaluate" and key.startswith("data.") and PREPARED in annotations and not names_data(config):
        instead = "name the data too (data=text data.val_path=test.txt), or set evaluate.data=named"
        return f"in `lmtrain evaluate` on what the run held out, with the run's own settings: {instead}"
    if verb in _OF_EXPORTS:
        own = ("run_dir", verb, "seed", *CODE)
        if any(key == name or key.startswith(f"{name}.") for name in own):
            return None
        reads = ", ".join(f"{name}.*" if name == verb else name for name in own)
        return f"in `lmtrain {verb}`, which takes all other settings from the run itself (it reads {reads})"
    readers = next((mark.verbs for mark in annotations if isinstance(mark, ReadBy)), None)
    if verb not in _OF_RUNS or readers is None or verb in readers:
        return None
    here = "; the folder of this run is run.dir" if key == "run_dir" else ""
    by = " and ".join(f"lmtrain {v}" for v in readers) + (" reads" if len(readers) == 1 else " read")
    return f"in `lmtrain {verb}`: {by} it{here}"


def names_data(config: Config) -> bool:
    """Returns whether `lmtrain evaluate` gets its data from the command; otherwise it is the run's validation split."""
    data, choice = config.data, config.evaluate.data
    if choice != "auto":
        return choice == "named"
    return bool(data.val_path or data.path) or data.source != "python_stdlib" or data.rows != "text"


def _value(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config.get(name, _ABSENT) if isinstance(config, Mapping) else getattr(config, name, _ABSENT)
    return config


def default_in(tree: DictConfig) -> Callable[[str], Any]:
    """Returns a function that looks up a dotted key in a composed config, for `default` of `without_effect`."""
    return lambda key: OmegaConf.select(tree, key, default=_ABSENT)


def suffix_of(path: str) -> str:
    """Returns the lower-case suffix of a file, glob or URL, ignoring a compression suffix; '' if there is none."""
    name = Path(re.sub(r"\?.*", "", path) if path.startswith(("http://", "https://")) else path)
    return (Path(name.stem) if name.suffix.lower() in _COMPRESSED else name).suffix.lower()


def _suffix_there(path: str) -> str:
    """Returns `suffix_of` a path; for a folder, that of its first file with a known suffix (.md and .rst last)."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return suffix_of(path)
    if folder.resolve() == Path(folder.anchor or "/").resolve():
        raise UserError(f"data.path={path} is the whole file system: name the folder that holds the data")
    inside = (suffix_of(p.name) for p in sorted(folder.rglob("*")) if p.is_file() and not p.name.startswith("."))
    known = [suffix for suffix in inside if suffix in _READ_AS]
    return next((suffix for suffix in known if suffix not in (".md", ".rst")), next(iter(known), ""))


def with_model_named(overrides: Sequence[str], folders: Sequence[Path]) -> list[str]:
    """Returns the overrides with `model=<folder or hub name>` replaced by model=pretrained and model.name_or_path.

    A run folder is replaced by the folder of its export. The names of options of `model` are left unchanged.

    Args:
        folders: the folders with config groups and their options.

    Raises:
        UserError: the folder does not exist or holds no model, or the name has not the form owner/model.
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
    """Returns a hub name unchanged, or the path of a model folder; for a run, that of its export (merged)."""
    path = Path(name).expanduser()
    if not path.is_dir():
        if name.startswith((".", "/", "~")) or name.count("/") != 1:
            raise UserError(f"model={name}: no such folder, and a name of the hub is owner/model")
        return name
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        return str(path)
    for export in (path / "export_merged", path / "export"):
        if (export / "config.json").is_file():
            return str(export)
    if (path / "export" / "adapter_config.json").is_file():
        raise UserError(
            f"model={name}: the run exported an adapter. To start from the whole model, merge it first: python -m "
            f"lmtrain.export {shell_word('run_dir', name)} export.merge=true; to go on training the adapter, name its "
            f"base in model= and set peft=lora {shell_word('peft.adapter', str(path / 'export'))}"
        )
    written = f"Of a run, python -m lmtrain.export {shell_word('run_dir', name)} writes it"
    raise UserError(f"model={name}: the folder holds no model (config.json). {written}")


def fit_rows(composed: Any, is_named: bool) -> None:
    """Sets data.seq_len to the positions of a model in a folder if it exceeds them, or if a named model has none set.

    is_named: whether the model was typed as model=<name or folder>.
    """
    model, rows, name = composed.model, composed.data.get("seq_len"), composed.model.get("name_or_path")
    most = positions_of(name) if name else None
    if rows is None and is_named:
        composed.data.seq_len = min(most or ROW, ROW)
    elif isinstance(rows, int) and most is not None and most < rows and not (model.get("extra") or {}):
        composed.data.seq_len = most


def positions_of(name_or_path: str) -> int | None:
    """Returns the maximum sequence length in the config.json of a model folder; None for hub names or if missing."""
    return _size_in_folder(name_or_path, "max_position_embeddings", "n_positions")


def width_of(name_or_path: str) -> int | None:
    """Returns the number of channels in the config.json of a model folder; None for hub names or if missing."""
    return _size_in_folder(name_or_path, "hidden_size", "n_embd")


def _size_in_folder(name_or_path: str, *names: str) -> int | None:
    """Returns the first of these fields in the config.json of a model folder that is there; None if it is no size."""
    try:
        found = json.loads((Path(name_or_path) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    found = found.get("text_config", found) if isinstance(found, dict) else None
    size = next((found[name] for name in names if name in found), None) if isinstance(found, dict) else None
    return size if isinstance(size, int) and size > 0 else None


def inferred_source(overrides: Sequence[str], tree: DictConfig, folders: Sequence[Path]) -> str | None:
    """Returns the option of `data` that reads a typed data.path, or None if an option was chosen or no path typed.

    Args:
        tree: the composed config, which has passed `trust.refuse`.
        folders: the folders with config groups and their options.

    Raises:
        UserError: the path does not show which kind of data it holds.
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


EPOCHS = {"text": 15, "rows": 3}  # maximum over a user's file if no run length is typed; more epochs rarely help
LENGTHS = ("trainer.max_steps", "trainer.max_epochs", "trainer.fast_dev_run")  # typed, they override a budget
# Keys that say, or may say, how long a run is.
_LENGTHS = {*LENGTHS, "trainer.overfit_batches", "experiment", "debug", "data.streaming", "data.ring_bytes",
            "budget.tokens", "budget.flops"}  # fmt: skip


def epochs_at_most(overrides: Sequence[str], option: str) -> list[str]:
    """Returns the override that limits a run on a user's file to EPOCHS; none if the run length was typed.

    A time budget on prompts has no limit either, as their completions are new in every epoch.

    Args:
        option: the option of `data` that reads the file.
    """
    typed = typed_keys(overrides)
    if _LENGTHS & typed.keys() or (option == "prompts_jsonl" and "budget.minutes" in typed):
        return []
    return [f"trainer.max_epochs={EPOCHS['text' if option in _READ_AS.values() else 'rows']}"]


def option_holding(rows: str, folders: Sequence[Path]) -> str | None:
    """Returns the option of `data` that reads a file of these rows (chat_jsonl for conversations); None for text.

    Args:
        rows: as in ObjectiveConfig.rows.
        folders: the folders with config groups and their options.
    """
    if "." not in rows:
        return _RECORDS.get(rows)
    files = (file for folder in folders for file in sorted((folder / "data").glob("*.yaml")) if file.is_file())
    holding = (f for f in files if f"rows: {rows}" in f.read_text(encoding="utf-8", errors="replace").splitlines())
    return next((file.stem for file in holding), None)


def for_text(overrides: Sequence[str], objective: Callable[[list[str]], str]) -> list[str]:
    """Returns the overrides with data=mixture replaced by data=text_mixture if the objective is causal_lm.

    Args:
        objective: returns the name of the objective that a list of group overrides selects.
    """
    groups = [o for o in overrides if "." not in o.partition("=")[0]]
    if "data=mixture" in overrides and objective(groups) == "causal_lm":
        return ["data=text_mixture" if o == "data=mixture" else o for o in overrides]
    return list(overrides)


def inference_note(overrides: Sequence[str], config: Config, proposed: str = "") -> list[str]:
    """Returns the plan's notes on choices that were inferred: the model, the run length, the reader of data.path.

    Args:
        proposed: the note on a data file that was named as a bare word, or ''.
    """
    typed = typed_keys(overrides)
    notes = [proposed] if proposed else []
    weights = getattr(config.model, "name_or_path", None)
    fitted = weights is not None and "data.seq_len" not in typed and positions_of(weights) == config.data.seq_len
    rows = f"{config.data.seq_len:,} tokens (data.seq_len{', as many as it has positions' if fitted else ''})"
    if weights and typed.get("model") not in (None, "pretrained"):
        notes.append(f"model={typed['model']} trains {weights} further, in rows of {rows}")
    elif fitted:
        notes.append(f"{weights} is trained in rows of {rows}")
    t = config.trainer
    inferred = (bool(proposed) or "data.path" in typed) and not {"data", "data.source"} & typed.keys()
    no_length = not _LENGTHS & typed.keys() and config.budget.chosen is None
    if inferred and no_length and t.max_epochs in EPOCHS.values():
        ends = f"the run ends after trainer.max_epochs={t.max_epochs}, or trainer.max_steps={t.max_steps} if earlier"
        notes.append(f"no length was given: {ends}; each of them can be set")
    if inferred and "experiment" not in typed and config.data.path and not proposed:
        reader = f"its reader, {config.data.source} ({config.data.format})"
        notes.append(f"data.path={typed['data.path']} chose {reader}; data=... chooses another reader")
    return notes


def check_suffix(overrides: Sequence[str]) -> None:
    """Raises UserError if data and the suffix of data.path disagree (data=jsonl data.path=x.txt): the suffix wins."""
    typed = typed_keys(overrides)
    option, path = typed.get("data", ""), typed.get("data.path", "").strip("'\"")
    held = _READ_AS.get(suffix_of(path))
    if "data.format" in typed or held is None or option not in ("text", "jsonl", "parquet", *_RECORDS.values()):
        return
    of_records = option in _RECORDS.values()
    if held == "text" if of_records else held != option:
        kind = "plain text" if held == "text" else suffix_of(path)[1:]
        instead = f"data.format=... if it holds something else{'' if of_records else f', or data={held}'}"
        raise UserError(f"data={option} data.path={path}: the file's name says {kind}; write {instead}")
