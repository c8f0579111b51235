"""Bare words on the command line: a run or a hub name for the verbs that read a model, data or a config for the others.

`chat outputs/first` is `chat run_dir=outputs/first`, and `train my_book.txt` is `train data.path=my_book.txt`. Any
other word raises a UserError with the command that was probably meant. Imports no torch.
"""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lmtrain.config.aliases import answer, used_here
from lmtrain.config.config_files import folders_of
from lmtrain.config.defaults import options_of
from lmtrain.config.override_text import as_typed, shell_word, typed_keys
from lmtrain.config.overrides import unreadable
from lmtrain.config.proposers import Proposal
from lmtrain.config.sections import all_keys
from lmtrain.errors import UserError, nearest
from lmtrain.first_words import config_file
from lmtrain.secrets import in_shell as quote
from lmtrain.secrets import shown

OF_MODELS = ("chat", "evaluate", "generate", "export")  # their first word is a run, a folder or a hub name
_SECOND = {"generate": "generate.prompt", "chat": "chat.against"}  # the key that their second word sets
CONFIGS = (".yaml", ".yml")
_GPT2 = re.compile(r"gpt2(-medium|-large|-xl)?")  # models of the hub that are named without their owner
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+", re.ASCII)
_KEY = re.compile(r"[~+]*[\w./@-]+", re.ASCII)  # the part of an override before the =
_GROUPS = ("experiment", "model", "objective", "data", "peft", "optimizer", "tokenizer", "schedule", "debug", "sweep")


@dataclass
class Read:
    """A command line whose bare words have been replaced by overrides."""

    typed: list[str]  # the overrides that were typed, or stand for a model
    of_file: list[str] = field(default_factory=list)  # those of a config file
    proposals: list[Proposal] = field(default_factory=list)  # those that stand for data files
    config: Path | None = None  # the yaml file that was named
    config_dir: str | None = None  # the folder and name of the root config
    config_name: str = "config"

    @property
    def ours(self) -> list[str]:
        """The overrides without those of a config file, which may be somebody else's."""
        return [*(proposal.override for proposal in self.proposals), *self.typed]

    @property
    def overrides(self) -> list[str]:
        return [*self.of_file, *self.ours]

    def reasons(self, proposals: Sequence[Proposal]) -> list[str]:
        """Returns a line for each override: those of the config file, these proposals, those that were typed."""
        rows = [
            *((word, f"{self.config} sets it") for word in self.of_file),
            *((proposal.override, proposal.reason or "as above") for proposal in proposals),
            *((word, "typed") for word in self.typed),
        ]
        width = min(60, max((len(word) for word, _ in rows), default=0))
        return [shown(f"{word:<{width}}  {reason}") for word, reason in rows]


def is_bare(word: str) -> bool:
    """Returns whether a word is neither key=value nor ~key; a text with = after something else than a key is bare."""
    key, sign, _ = word.partition("=")
    return not word.startswith("~") and (not sign or not _KEY.fullmatch(key))


def read(verb: str, words: Sequence[str], config_dir: str | None = None, config_name: str = "config") -> Read:
    """Converts the words after a verb to overrides.

    Args:
        config_dir, config_name: the folder and name of the root config, unless one of the words names it.

    Raises:
        UserError: the verb doesn't accept a word; the message has the command that was probably meant.
    """
    _refuse_spaces(verb, words)
    bare, typed = [w for w in words if is_bare(w)], [w for w in words if not is_bare(w)]
    read = Read(typed, config_dir=config_dir, config_name=config_name)
    if bare and verb in OF_MODELS:
        read.typed = [*typed, *_of_model(verb, bare, typed)]
        return read
    folders, _ = folders_of(config_dir, config_name)
    configs = [path for path in (Path(w).expanduser() for w in bare) if path.is_file() and path.suffix in CONFIGS]
    data = [w for w in bare if Path(w).expanduser() not in configs[:1]]
    for word in data:
        if not _is_data(word):
            raise UserError(_no_data(verb, word, bare, folders, typed))
    if configs:
        _read_config(read, configs[0], folders)
    if data:
        from lmtrain.first_words import proposal

        read.proposals = proposal.propose(data, [*read.of_file, *typed])
    return read


def _read_config(read: Read, path: Path, folders: Sequence[Path]) -> None:
    """Adds the overrides of a yaml file that are not typed; a run's whole config becomes the root config."""
    read.config, keys = path, typed_keys(read.typed)
    if path.resolve().parent in [(folder / "experiment").resolve() for folder in folders]:
        read.of_file = [f"experiment={path.stem}"] if "experiment" not in keys else []
        return
    tree = config_file.parsed(path)
    if config_file.is_whole(tree):
        read.config_dir, read.config_name = str(path.parent), path.stem
        return
    groups = sorted({d.name for folder in folders for d in folder.iterdir() if d.is_dir()})
    found = config_file.as_words(tree, path, groups)
    read.of_file = [word for word in found if word.lstrip("+").partition("=")[0] not in keys]


def _refuse_spaces(verb: str, words: Sequence[str]) -> None:
    """Raises UserError for `key = value` with spaces, of which each part is a word of its own."""
    for word, after in itertools.pairwise([*words, "a=b"]):
        if word.startswith("=") or after.startswith("=") or (word.endswith("=") and is_bare(after)):
            joined = re.sub(r" ?= ?", "=", " ".join(words))
            raise UserError(f"no space stands beside the = of a setting: python -m lmtrain.{verb} {joined}")


def _is_data(word: str) -> bool:
    if "://" in word:
        return True
    path = Path(word).expanduser()
    if path.is_dir():
        return not _holds_model(path)
    return path.is_file() and path.suffix not in (".py", *CONFIGS)


def _holds_model(path: Path) -> bool:
    return any((path / name).is_file() for name in ("config.yaml", "config.json", "adapter_config.json"))


def _of_model(verb: str, bare: list[str], typed: list[str]) -> list[str]:
    """Sets run_dir to the first word, and generate.prompt or, for `chat`, chat.against (a folder) to the second."""
    first, *rest = bare
    keys = typed_keys(typed)
    if "run_dir" in keys:
        first, rest = keys["run_dir"].strip("'\""), bare
        found = list[str]()
    else:
        found = [as_typed("run_dir", _model_of(verb, first, rest))]
    second = _SECOND.get(verb)
    fits = len(rest) == 1 and second not in keys and (verb != "chat" or Path(rest[0]).expanduser().is_dir())
    if second is not None and fits:
        found.append(as_typed(second, rest[0]))
    elif rest:
        raise UserError(_too_many(verb, first, rest))
    return found


def _too_many(verb: str, model: str, rest: list[str]) -> str:
    said, command = f"{rest[0]!r} is one word too many: ", f"python -m lmtrain.{verb} {quote(model)}"
    if verb == "evaluate" and Path(rest[0]).is_file():
        return f"{said}{command} {shell_word('data.val_path', rest[0])} scores the model on that file"
    if verb == "generate":
        return f'{said}put the prompt between quotes, {command} "{" ".join(rest)}"'
    return f"{said}{command}, and key=value for the rest"


def _model_of(verb: str, word: str, rest: list[str]) -> str:
    """Returns the word if it is a folder or may be a hub name; raises UserError otherwise."""
    path, command = Path(word).expanduser(), f"python -m lmtrain.{verb}"
    is_of_hub = _HUB_NAME.fullmatch(word) is not None and not path.parent.is_dir()
    if verb == "export" and (path.is_dir() or is_of_hub) and not (path / "config.yaml").is_file():
        found = f"{word} is not a run (a folder with config.yaml)"
        raise UserError(f"{found}, whose model it writes: {command} outputs/NAME")
    if path.is_dir():
        return str(path) if word.startswith("~") else word
    after = f' "{rest[0]}"' if rest else ""
    if path.is_file():
        holding = next((str(p) for p in path.absolute().parents if _holds_model(p)), "outputs/NAME")
        raise UserError(f"{word} is a file; a run or a model is named by its folder: {command} {quote(holding)}{after}")
    named = Path("outputs") / word
    if named.is_dir():
        raise UserError(f"there is no folder {word}; the run is {named}: {command} {quote(str(named))}{after}")
    if is_of_hub:
        return word
    if _GPT2.fullmatch(word) and verb != "export":
        raise UserError(f"there is no folder {word}; the model of the hub is {command} openai-community/{word}{after}")
    if " " in word:
        raise UserError(which_model(verb, word))
    near, hint = nearest(path), "python -m lmtrain.runs lists the runs there are"
    hint = f"did you mean {command} {quote(near)}{after}?" if near else hint
    raise UserError(f"{word}: no such folder, and a name of the hub is owner/model; {hint}")


def which_model(verb: str, prompt: str = "Once upon a time", named: str | None = None) -> str:
    """Returns the message for a command without a model, with one that names the run that changed last.

    named: what was typed as model=..., if anything.
    """
    if named is not None:
        return f"`lmtrain {verb}` takes its model as the first word: python -m lmtrain.{verb} {quote(named)}"
    runs = [p.parent for p in Path("outputs").glob("*/config.yaml")]
    newest = max(runs, key=lambda p: p.stat().st_mtime, default=Path("outputs/NAME"))
    text = f' "{prompt}"' if verb == "generate" else ""
    found = ", the newest run" if runs else ""
    others = "" if verb == "export" else "; an exported folder or a hub name (OWNER/MODEL) does too"
    return f"which model? python -m lmtrain.{verb} {quote(str(newest))}{text}{found}{others}"


def _no_data(verb: str, word: str, bare: list[str], folders: Sequence[Path], typed: Sequence[str]) -> str:
    """Returns the message for a word that names no data, with the command that was probably meant."""
    command, path = f"python -m lmtrain.{verb}", Path(word).expanduser()
    if path.is_dir():
        return _a_model(command, word, path)
    if _GPT2.fullmatch(word):
        return f"{word!r} is a model: {command} model=openai-community/{word} data.path=YOUR_TEXT"
    options = [f"{group}={word}" for group in _GROUPS if word in options_of(group, folders)]
    if options:
        return f"{word!r} is an option: {' or '.join(f'{command} {option}' for option in options)}"
    recipe = path.stem.removeprefix("train_").removeprefix("finetune_")
    if path.suffix in CONFIGS and path.is_file():
        return f"{word}: one config at a time, data and key=value: {command} {quote(word)} trainer.max_steps=100"
    if path.suffix in (".py", *CONFIGS) and recipe in options_of("experiment", folders):
        return f"{word}: a recipe of that name is {command} experiment={recipe} (configs are yaml here)"
    if path.suffix == ".py" and path.is_file():
        as_text = f"{command} data=text data.format=text {shell_word('data.path', word)}"
        return f"{word} is a Python file: configs are yaml here ({command} FILE.yaml); to train on its text: {as_text}"
    if path.exists():
        return f"{word} is a device, pipe or socket: name a file or a folder"
    near = nearest(path)
    if near is not None and not _HUB_NAME.fullmatch(word):
        rest = "".join(f" {shell_word(*w.split('=', 1))}" if "=" in w else f" {w}" for w in typed)
        return f"{word}: no such file or folder; did you mean {command} {quote(near)}{rest}?"
    if _HUB_NAME.fullmatch(word) and not path.suffix[1:].isalpha() and not path.parent.is_dir():
        model = f"A model of the hub: {command} model={word} data.path=YOUR_TEXT"
        dataset = f"A dataset of the hub: {command} data=wikitext data.name={word} data.config_name=null"
        return f"{word}: no such file or folder. {model}. {dataset}"
    key = _as_key(word, bare)
    if key is not None:
        return f"cannot read {word!r}: write key=value: {command} {key}"
    if "/" in word or path.suffix:
        return f"{word}: no such file or folder; data is {command} FILE_OR_FOLDER, a config {command} FILE.yaml"
    return unreadable(word)


def _a_model(command: str, word: str, path: Path) -> str:
    """Returns the message for a folder that holds a run or a model where data was expected."""
    from_it = f"{command} {shell_word('model', word)} data.path=YOUR_TEXT"
    if not (path / "config.yaml").is_file():
        return f"{word} holds a model; to train from it: {from_it}"
    goes_on = f"{command} --config-dir {quote(word)} {shell_word('run.dir', word)} run.resume=auto"
    return f"{word} is a run; to continue it: {goes_on}; to train a new run from its model: {from_it}"


def _as_key(word: str, bare: list[str]) -> str | None:
    """Returns key=value for a key of lmtrain or another project that was typed without =, or None."""
    names = {key.name for key in all_keys()}
    here = f"{word}=*" if word in names else used_here(word, names)
    if here is None:
        return None
    return answer(here, next(iter(bare[bare.index(word) + 1 :]), "..."))
