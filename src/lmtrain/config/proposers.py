"""What lmtrain adds to the words that a user types, and why. Imports no torch.

A proposer is a function of the typed overrides and of facts about files and models. It returns overrides with the
reason for each, and never contradicts a typed key. PROPOSERS lists them in the order in which they are asked; Hydra
composes what they propose before the typed words, which therefore win. `python -m lmtrain.train ... --why` prints both.
What rows of a data file that is named by a bare word are trained as is proposed by first_words/proposal.py.
"""

import functools
import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lmtrain.config import sections
from lmtrain.config.defaults import options_of
from lmtrain.config.keys import at
from lmtrain.config.override_text import as_typed, shell_word
from lmtrain.config.overrides import Word, parse
from lmtrain.errors import UserError
from lmtrain.files import is_arrow_stream, shown_files

ROW = 1024  # default data.seq_len, in tokens, with model=<name or folder>; less if the model has fewer positions
EPOCHS = {"text": 15, "rows": 3}  # maximum over a user's file if no run length is typed; more epochs rarely help
LENGTHS = ("trainer.max_steps", "trainer.max_epochs", "trainer.fast_dev_run")  # typed, they override a budget
# Keys that say, or may say, how long a run is.
_LENGTHS = {*LENGTHS, "trainer.overfit_batches", "experiment", "debug", "data.streaming", "data.ring_bytes",
            "budget.tokens", "budget.flops", "budget.updates"}  # fmt: skip
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
# File suffix -> the option of `data` that reads it.
READ_AS = {
    ".txt": "text", ".text": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "jsonl",
    ".tsv": "jsonl", ".parquet": "parquet", ".arrow": "parquet", ".md": "text", ".rst": "text",
}  # fmt: skip
RECORDS = {"conversations": "chat_jsonl", "pairs": "preference_jsonl"}  # kind of rows -> option of `data`


@dataclass(frozen=True)
class Proposal:
    """An override that lmtrain adds, and why."""

    override: str
    reason: str  # '' if it is that of the proposal before
    instead: str = ""  # the typed key whose word it replaces
    in_plan: bool = True  # whether the plan says it; --why says everything


class WordFacts:
    """What proposers decide by.

    Args:
        words: the typed overrides.
        folders: the folders with config groups and their options.
        compose: composes the config with some of the words, and refuses what somebody else's file may not set.
    """

    def __init__(
        self, words: Sequence[Word], folders: Sequence[Path], compose: Callable[[Sequence[Word]], DictConfig]
    ) -> None:
        self.words, self.folders, self._compose = words, folders, compose
        self.typed: dict[str, Any] = {word.key: word.value for word in words if word.sets}
        self.proposals: list[Proposal] = []  # so far

    @functools.cached_property
    def composed(self) -> DictConfig:
        """The config without the keys of `data` but its path, which only the reader to be chosen may define."""
        return self._compose([w for w in self.used() if not w.key.startswith("data.") or w.key == "data.path"])

    def replaced(self) -> set[str]:
        """Returns the typed keys whose words are replaced by proposals."""
        return {proposal.instead for proposal in self.proposals if proposal.instead}

    def used(self) -> list[Word]:
        """Returns what Hydra composes: the proposals so far, then the typed words, which win."""
        kept = [word for word in self.words if word.key not in self.replaced() or not word.sets]
        return [*(parse(proposal.override) for proposal in self.proposals), *kept]


def propose(facts: WordFacts) -> None:
    """Adds all proposals to the facts; raises UserError if a typed word shows no way to read what it names."""
    for proposer in PROPOSERS:
        facts.proposals += proposer(facts)


def named_model(facts: WordFacts) -> list[Proposal]:
    """Proposes model=pretrained for `model=<folder or hub name>`; for a run, with the folder of its export.

    The names of options of `model` keep their meaning.

    Raises:
        UserError: the folder does not exist or holds no model, or the name has not the form owner/model.
    """
    name = facts.typed.get("model")
    if not isinstance(name, str) or not _is_a_models_name(name, facts.folders):
        return []
    weights = _weights_of(name)
    chosen = Proposal("model=pretrained", f"model={name} trains {weights} further", instead="model")
    return [chosen, Proposal(as_typed("model.name_or_path", weights), "")]


def text_mixture(facts: WordFacts) -> list[Proposal]:
    """Proposes data=text_mixture for data=mixture if the objective is causal_lm, which trains on text."""
    if facts.typed.get("data") != "mixture" or facts.composed.objective.get("name") != "causal_lm":
        return []
    reason = "data=mixture is one of text, since objective=causal_lm trains on text"
    return [Proposal("data=text_mixture", reason, instead="data", in_plan=False)]


def reader(facts: WordFacts) -> list[Proposal]:
    """Proposes the option of `data` that reads a typed data.path, and a number of epochs if no length was typed.

    Raises:
        UserError: the path does not show which kind of data it holds.
    """
    if "data.path" not in facts.typed or {"data", "data.source"} & facts.typed.keys():
        return []
    tree = facts.composed
    path = tree.data.get("path")
    if not path or tree.data.get("source") != "python_stdlib":
        return []
    option = _reading(str(path if isinstance(path, str) else path[0]), tree, facts.folders)
    reason = f"data.path={facts.typed['data.path']} chose its reader, data={option}; data=... chooses another reader"
    return [Proposal(f"data={option}", reason), *epochs(facts.typed, option)]


def _reading(path: str, tree: DictConfig, folders: Sequence[Path]) -> str:
    if holds_tokens(Path(path).expanduser()):
        return "bins"
    option = READ_AS.get(_suffix_there(path))
    records = option_holding(sections.rows_trained_on(tree), folders)
    if option is None or (records is not None and option == "text"):
        kinds = records or "text (plain text), jsonl (json, csv), parquet or bins"
        raise UserError(f"data.path={path}: its name doesn't tell what it holds; say it with data={kinds}")
    return records or option


def epochs(typed: Container[str], option: str) -> list[Proposal]:
    """Proposes at most EPOCHS over a user's file; nothing if the run length was typed.

    A time budget on prompts has no limit either, as their completions are new in every epoch.

    Args:
        option: the option of `data` that reads the file.
    """
    if any(key in typed for key in _LENGTHS) or (option == "prompts_jsonl" and "budget.minutes" in typed):
        return []
    most = EPOCHS["text" if option in READ_AS.values() else "rows"]
    ends = f"the run ends after trainer.max_epochs={most}, or trainer.max_steps if that is earlier; both can be set"
    reason = f"at most {most} epochs: more rarely help" if "budget.minutes" in typed else f"no length was given: {ends}"
    return [Proposal(f"trainer.max_epochs={most}", reason, in_plan="budget.minutes" not in typed)]


def switched_on(facts: WordFacts) -> list[Proposal]:
    """Proposes to enable early stopping or the average of the weights if one of its keys is typed."""
    found = []
    for section in ("callbacks.early_stopping", "callbacks.ema"):
        key = next((key for key in facts.typed if key.startswith(f"{section}.")), None)
        if key is not None and f"{section}.enabled" not in facts.typed:
            found.append(Proposal(f"{section}.enabled=true", f"{key} was typed", in_plan=False))
    return found


def one_warmup(facts: WordFacts) -> list[Proposal]:
    """Proposes null for the default of one of warmup_steps and warmup_ratio if the other is typed."""
    typed = [key for key in ("schedule.warmup_steps", "schedule.warmup_ratio") if key in facts.typed]
    if len(typed) != 1:
        return []
    other = "schedule.warmup_ratio" if typed[0].endswith("steps") else "schedule.warmup_steps"
    return [Proposal(f"{other}=null", f"{typed[0]} says how long the warmup is", in_plan=False)]


def held_out(facts: WordFacts) -> list[Proposal]:
    """Proposes that a typed data.val_fraction is exact for small data as well."""
    if "data.val_fraction" not in facts.typed or "data.min_val_rows" in facts.typed:
        return []
    return [Proposal("data.min_val_rows=0", "data.val_fraction was typed, and is exact", in_plan=False)]


PROPOSERS = (named_model, text_mixture, reader, switched_on, one_warmup, held_out)


def row_length(typed: Mapping[str, Any], tree: DictConfig, is_named: bool) -> list[Proposal]:
    """Proposes data.seq_len for a composed config: the positions of a model in a folder if it exceeds them.

    A model that was typed as model=<name or folder> has rows of ROW tokens, or fewer, where nothing else says it.
    """
    model, rows, name = tree.model, tree.data.get("seq_len"), tree.model.get("name_or_path")
    if "data.seq_len" in typed or not name:
        return []
    most = positions_of(name)
    if rows is None and is_named:
        fitted = most is not None and most <= ROW
        length = min(most or ROW, ROW)
    elif isinstance(rows, int) and most is not None and most < rows and not (model.get("extra") or {}):
        fitted, length = True, most
    else:
        return []
    why = "as many as it has positions" if fitted else "the usual number"
    said = f"{name} is trained in rows of {length:,} tokens (data.seq_len, {why})"
    return [Proposal(f"data.seq_len={length}", said)]


def option_holding(rows: str, folders: Sequence[Path]) -> str | None:
    """Returns the option of `data` that reads a file of these rows (chat_jsonl for conversations); None for text.

    Args:
        rows: as in ObjectiveConfig.rows.
        folders: the folders with config groups and their options.
    """
    if "." not in rows:
        return RECORDS.get(rows)
    files = (file for folder in folders for file in sorted((folder / "data").glob("*.yaml")) if file.is_file())
    holding = (f for f in files if f"rows: {rows}" in f.read_text(encoding="utf-8", errors="replace").splitlines())
    return next((file.stem for file in holding), None)


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
    known = [suffix for suffix in inside if suffix in READ_AS]
    return next((suffix for suffix in known if suffix not in (".md", ".rst")), next(iter(known), ""))


_TOKENS = re.compile(r"(?<![a-z])(train|val|valid|validation|tokens|chunk)(?![a-z])")


def holds_tokens(path: Path) -> bool:
    """Returns whether a folder, or a file, holds token ids instead of text or rows, by names and columns.

    A .bin or .npy counts only where nothing lies beside it that could be read as text or rows, and a .bin, which may be
    anything, only if its name says train, val, tokens or chunk, as of nanoGPT, llm.c and litdata.
    """
    if any((path / name).is_file() for name in ("train.bin", "meta.json")):
        return True
    if path.is_dir() and path.resolve() == Path(path.anchor or "/").resolve():
        return False
    files = shown_files(path)
    suffixes, there = {file.suffix for file in files}, set(files)
    if suffixes & {".ds", ".mds"} or any(f.suffix == ".idx" and f.with_suffix(".bin") in there for f in files):
        return True
    columnar = next((file for file in files if file.suffix in (".parquet", ".arrow")), None)
    if columnar is not None:
        try:
            return "input_ids" in column_names(columnar)
        except (OSError, ValueError):  # its reader says what is wrong with it
            return False
    named = any(f.suffix == ".npy" or (f.suffix == ".bin" and _TOKENS.search(f.stem)) for f in files)
    return named and not (suffixes & READ_AS.keys()) - {".json", ".md"}


def column_names(file: Path) -> list[str]:
    """Returns the names of the columns of a Parquet or Arrow file; raises OSError, ValueError if it can't be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if file.suffix == ".parquet":
        return list(pq.read_schema(file).names)
    with pa.OSFile(str(file)) as source:
        return list((pa.ipc.open_stream if is_arrow_stream(source) else pa.ipc.open_file)(source).schema.names)


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
        merge = f"python -m lmtrain.export {shell_word('run_dir', name)} export.merge=true"
        further = f"its base as model=, and peft=lora {shell_word('peft.adapter', str(path / 'export'))}"
        raise UserError(f"model={name}: the run exported an adapter. Merge it, {merge}, or train it further: {further}")
    written = f"Of a run, python -m lmtrain.export {shell_word('run_dir', name)} writes it"
    raise UserError(f"model={name}: the folder holds no model (config.json). {written}")


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
    found = at(found, ["text_config"]) or found
    size = next((found[name] for name in names if name in found), None) if isinstance(found, dict) else None
    return size if isinstance(size, int) and size > 0 else None
