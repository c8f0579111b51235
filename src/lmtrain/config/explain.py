"""Explains rejected overrides: the nearest valid key, lmtrain's name for another project's, the options of a group."""

import difflib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lmtrain.config import aliases
from lmtrain.config.aliases import LEFT, NEIGHBOURS, OPTIONS, absent, answer, used_here
from lmtrain.config.defaults import PARTS, conf_dir, options_of
from lmtrain.config.keys import Key, flat
from lmtrain.config.overrides import Word, parse
from lmtrain.config.proposers import READ_AS, RECORDS, suffix_of
from lmtrain.config.safe_yaml import check_search_path
from lmtrain.errors import UserError


def unknown_key(key: str, valid: Iterable[str], value: Any = None) -> str:
    """Returns the message for a key that doesn't exist, with lmtrain's equivalent or the nearest valid key.

    Args:
        value: the value it was set to, which is repeated in the suggestion if it means the same there.
    """
    valid = list(valid)
    here, why = used_here(key, valid), absent(key)
    if why is not None:
        return f"there is no key {key!r}: {why}"
    if here is not None and re.split("[ =]", here)[0] == key:
        return f"{key} has no meaning with the {key.partition('.')[0]} chosen here (--cfg prints the keys that have)"
    if here is not None:
        return f"there is no key {key!r}; here it is {answer(here, value)}"
    if key.startswith(OPEN):
        return f"there is no key {key!r} yet: write +{key}=... to add it"
    candidates = _nearest(key, valid)
    if candidates:
        return f"there is no key {key!r}; did you mean {' or '.join(candidates)}?"
    section = key.split(".")[0]
    siblings = [v for v in valid if v.startswith(f"{section}.") and v.count(".") == 1]
    if siblings:
        return f"there is no key {key!r}; keys under {section}: {', '.join(siblings)}"
    return f"there is no key {key!r}; --cfg prints every key with its default"


OPEN = "model.extra."  # where a user may add any key


def _nearest(key: str, valid: list[str]) -> list[str]:
    """Returns at most three valid keys similar to `key`.

    The order is: keys whose last part is nearly that of `key` (optimizer.warmup_step), if no key has the same last
    part; the most similar key; keys with the same last part; other similar keys.
    """
    parents = [key.rsplit(".", n)[0] for n in range(1, key.count(".") + 1)]
    choices = [v for v in valid if v not in parents]
    near = difflib.get_close_matches(key, choices, n=3, cutoff=0.7)
    last = {v: v.rsplit(".", 1)[-1] for v in choices}
    name = key.rsplit(".", 1)[-1]
    same = [v for v in choices if last[v] == name]
    similar = [] if same else difflib.get_close_matches(name, set(last.values()), n=1, cutoff=0.85)
    found = sorted((v for v in choices if last[v] in similar), key=lambda v: v not in near)
    found += near[:1] + same + near[1:]
    return list(dict.fromkeys(found))[:3]


def other_variant(key: str, folders: Iterable[Path]) -> str | None:
    """Returns the message for a key of other options of its group (optimizer.momentum with adamw), or None."""
    group, _, own = key.partition(".")
    options = []
    for file in sorted(f for d in folders for f in (d / group).glob("*.yaml") if f.stem not in PARTS):
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
        if own in dict(flat(tree)):
            options.append(f"{group}={file.stem}")
    if not options:
        return None
    return f"{key} has no meaning with the {group} chosen here; it belongs to {', '.join(options)}"


_ABSENT = object()


def unknown_option(group: str, option: str, folders: Iterable[Path]) -> str:
    """Returns the message for `group=option` if the group has no such option."""
    known = options_of(group, folders)
    plain = option.lower().replace("-", "_")
    near = [f"{group}={name}" for name in difflib.get_close_matches(plain, known, n=1)]
    meant = OPTIONS.get(f"{group}={option.lower()}") or next(iter(near), None)
    hint = f"did you mean {meant}? " if meant else ""
    if group == "model":
        hint += f"weights of the hub are model=pretrained model.name_or_path={option}, or model=owner/{option}; "
    return f"there is no {group}={option}; {hint}options: {', '.join(known)}"


def missing_config(error: MissingConfigException, folders: list[Path], words: Sequence[Word]) -> str:
    """Returns the message for a YAML file that Hydra did not find."""
    missing = error.missing_cfg_file or ""
    for word in words:
        if missing == f"{word.key}/{word.value}" and any((d / word.key).is_dir() for d in folders):
            return unknown_option(word.key, str(word.value), folders)
    if missing.startswith("hydra/launcher/"):
        extra = missing.removeprefix("hydra/launcher/").partition("_")[0]
        return f'hydra/launcher={Path(missing).name} is not installed: pip install "lmtrain[{extra}]" (submitit, ray)'
    if "/" not in missing:
        return f"--config-name {missing}: no {missing}.yaml in {' or '.join(map(str, folders))}"
    return str(error).split("\n\n")[0].strip()


def unknown_flags(unknown: Sequence[str], argv: Sequence[str], verb: str) -> str:
    """Returns the message for settings typed as flags (--lr 1e-4), with the equivalent command.

    Args:
        unknown: the arguments that lmtrain doesn't know, as typed.
        argv: all arguments, since the value of an unknown flag may follow it.
    """
    flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
    settings = list[str]()
    left_out = list[str]()
    for word, after in itertools.pairwise([*argv, "-"]):
        flag, equals, value = word.partition("=")
        key = flag.lstrip("-").replace("-", "_")
        if flag not in flags or not key:
            continue
        given = value if equals else None if after.startswith("-") or "=" in after else after
        setting = absent(key) or _setting(key, given)
        if absent(key) or LEFT in setting:
            left_out.append(f"{flag}: {setting}")
        else:
            settings.append(setting)
    if left_out and not settings:
        return "; ".join(left_out)
    bare = [re.sub(r" \(.*\)", "", setting) for setting in settings] or ["trainer.max_steps=100"]
    needed = [match[1] for setting in settings if (match := re.search(r"\(with ([\w/]+=\w+)", setting))]
    command = f"python -m lmtrain.{verb} {' '.join(dict.fromkeys([*needed, *bare]))}"
    return "; ".join([f"{', '.join(flags or unknown)}: settings are written without dashes: {command}", *left_out])


def _setting(key: str, value: str | None) -> str:
    """Returns key=value for a flag of another program, or key=... if the value doesn't mean the same in lmtrain."""
    # Lightning's command line has our keys: --trainer.max_steps 5.
    here = used_here(key, ()) or (f"{key}=*" if "." in key else key)
    found = answer(here, "..." if value is None else value)
    name, space, rest = found.partition(" ")
    return found if "=" in name or LEFT in found else f"{name}=...{space}{rest}"


def check_words(words: Sequence[Word], for_sweep: bool) -> None:
    """Raises UserError for hydra.* and sweep.* in a single run, which would silently ignore them; or see below."""
    for key, is_search in ((word.key, word.key == "hydra.searchpath") for word in words):
        if not for_sweep and not is_search and (key.startswith(("hydra.", "hydra/", "sweep.")) or key == "sweep"):
            here = f"; here it is {answer(NEIGHBOURS[key])}" if key in NEIGHBOURS else " (a sweep, -m, reads it)"
            raise UserError(f"{key} has no effect on a single run{here}")
    for word in words:
        if word.key == "hydra.searchpath":
            check_search_path(word.value, word.key)
    _check_suffix({word.key: word.value for word in words if word.sets})


def _check_suffix(typed: Mapping[str, Any]) -> None:
    """Raises UserError if data and the suffix of data.path disagree (data=jsonl data.path=x.txt): the suffix wins."""
    option, path, records = typed.get("data"), typed.get("data.path"), tuple(RECORDS.values())
    held = READ_AS.get(suffix_of(path)) if isinstance(path, str) else None
    if "data.format" in typed or held is None or option not in ("text", "jsonl", "parquet", *records):
        return
    if held == "text" if option in records else held != option:
        kind = "plain text" if held == "text" else suffix_of(str(path))[1:]
        instead = f"data.format=... if it holds something else{'' if option in records else f', or data={held}'}"
        raise UserError(f"data={option} data.path={path}: the file's name says {kind}; write {instead}")


def refuse_removal(key: str, kept: Iterable[Key]) -> None:
    """Raises UserError for ~key if it is one of the keys `kept`, or a section of them: its default would come back."""
    inside = next((k for k in kept if k.name == key or k.name.startswith(f"{key}.")), None)
    if inside is None:
        return
    value = "null" if inside.name == key and ("None" in str(inside.type) or inside.type is Any) else "..."
    raise UserError(f"~{key}: it can't be left out: set {inside.name}={value}")


# Groups whose options set single keys, and so add up; those of all others are alternatives.
ADD_UP = ("callbacks", "trainer", "logger", "debug", "experiment")


def _refuse_alternatives(group: str, options: Any) -> None:
    """Raises UserError for several of lmtrain's own options of a group of alternatives, of which the last would win."""
    if group in ADD_UP or not isinstance(options, list):
        return
    names = [name for name in options if (conf_dir() / group / f"{name}.yaml").is_file()]
    if len(names) > 1:
        typed = ",".join(map(str, options))
        raise UserError(f"{group}=[{typed}]: they are alternatives: choose one, {group}={names[-1]}")


def with_plain_groups(words: Sequence[Word], folders: list[Path]) -> list[Word]:
    """Returns the words with `+group=x` as `group=x` (every config has all groups) and `~group` as `group=none`.

    Raises UserError for `~group` of a group that has no option none, and for several options that are alternatives.
    """
    found = list[Word]()
    for word in words:
        group, override = word.key, word.override
        if not any((d / group).is_dir() for d in folders):
            found.append(word)
        elif override.is_delete():
            options = options_of(group, folders)
            if override.value_type is not None or "none" not in options:
                off = f"~{group} or {group}=none turns it off; " if "none" in options else ""
                known = f"{off}options: {', '.join(options)}"
                raise UserError(f"{word.typed}: the group {group} can't be left out; {known}")
            found.append(parse(f"{group}=none"))
        else:
            _refuse_alternatives(group, word.value)
            is_added = override.is_add() or override.is_force_add()
            found.append(parse(word.text.lstrip("+")) if is_added else word)
    return found


def refused(
    error: Exception, folders: list[Path], words: Sequence[Word], compose: Callable[[list[Word]], DictConfig]
) -> str:
    """Returns the message for words that parse but cannot be applied; it names the first of them.

    Args:
        compose: composes the config with a subset of the words.
    """
    groups = {g.name for d in folders for g in d.iterdir() if g.is_dir()}
    said = _on_one_line(error)
    for word in words:
        message = _wrong_value(word, groups, folders)
        if "DictConfig with ListConfig" in said and f"override {word.text}" in said:
            key, _, value = word.typed.partition("=")
            return f"{key}={value}: a list is needed, {key}=[{value}]"
        if message is not None:
            return message
        key = word.key
        if f"Could not override '{key}'" in str(error) and "No match in the defaults list" in str(error):
            return f"{key}: this config is a run's own and offers no options: set single keys, {key}.<key>=<value>"
    try:
        base = compose([word for word in words if word.key in groups])
    except (HydraException, OmegaConfBaseException, ValueError):  # the options are incompatible: use Hydra's message
        return said
    for word in words:
        key = word.key
        if word.override.is_add() or key in groups or OmegaConf.select(base, key, default=_ABSENT) is not _ABSENT:
            continue
        if OmegaConf.select(base, f"{key.split('.')[0]}.name", default=None) == "custom":
            return f"there is no key {key!r} yet: write +{key}=... to add it"
        valid = [name for name, _ in flat(OmegaConf.to_container(base, resolve=False)) if name]
        return other_variant(key, folders) or unknown_key(key, [*valid, *sorted(groups)], word.value)
    return said


def _wrong_value(word: Word, groups: set[str], folders: list[Path]) -> str | None:
    """Returns the message for several values outside a sweep or a value that can't name an option; else None."""
    if word.override.is_sweep_override():
        key, _, value = word.typed.partition("=")
        one = f"for one list write '{key}=[{value}]', for one text '{key}=\"{value}\"'"
        return f"{key}={value}: several values are a sweep, started with -m; {one}"
    if word.key in groups and not isinstance(word.value, str | list):
        options = ", ".join(options_of(word.key, folders))
        return f"{word.typed}: {word.key} is set by the name of an option ({options}), keys by {word.key}.<key>="
    return None


def _on_one_line(error: Exception) -> str:
    cause = error.__cause__
    text = str(error) if cause is None or str(cause) in str(error) else f"{error}: {cause}"
    return "; ".join(line.strip().rstrip(".") for line in text.splitlines() if line.strip())


def wrong_type(error: OmegaConfBaseException, tree: Any, valid: Iterable[str]) -> str:
    """Returns the message for a value that the schema rejects; `valid` are all keys."""
    key, message = str(getattr(error, "full_key", None) or ""), str(error).strip().split("\n")[0]
    if "not in '" in message:
        return other_variant(key, [conf_dir()]) or unknown_key(key, valid)
    if "missing mandatory" in message.lower():
        return f"{key} has no value: set {key}=..."
    if "'None' for field" in message:
        pretrained = key == "data.seq_len" and OmegaConf.select(tree, "model.init") == "pretrained"
        why = " (a pretrained model brings none; 1024 is usual)" if pretrained else ""
        return f"{key} has no value here: set {key}=...{why}"
    wanted = next((words for part, words in aliases.WANTED.items() if part in message.lower()), None)
    if not key:  # OmegaConf gives no key for an entry of a list of mappings
        return f"an entry of callbacks.extra or optimizer.groups: {wanted or message}"
    if wanted is None:
        return f"{key}: {message}"
    value = OmegaConf.select(tree, key, default=None)
    if isinstance(value, float) and key in aliases.SHARES:
        return f"{key}={value}: a whole number is needed: {aliases.SHARES[key]}"
    if isinstance(value, float) and value.is_integer() and "whole number" in wanted:
        return f"{key}={value}: {wanted}: write {key}={value:.0f}"
    if key == "trainer.devices" and OmegaConf.is_list(value):
        which = ",".join(map(str, value))
        there = f"CUDA_VISIBLE_DEVICES={which} and {key}={len(value)}"
        return f"{key}=[{which}]: a number of devices is needed; which ones: {there}"
    value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return f"{key}={value}: {wanted}, found {type(value).__name__} {value!r}"
