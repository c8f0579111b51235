"""Explains a rejected override: the nearest valid key, the word used here for a neighbour's, the options of a group."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lmtrain.errors import UserError
from lmtrain.neighbours import NEIGHBOURS, OPTIONS
from lmtrain.schema import Config


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterable[str]:
    """All dotted keys of a nested mapping, inner nodes included."""
    for key, value in tree.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")


def unknown_key(key: str, valid: Iterable[str]) -> str:
    """The message for a key that isn't there, with the nearest one that is."""
    valid = list(valid)
    here = _word_used_here(key, valid)
    if here is not None:
        note = " (accumulation is derived from it, data.micro_batch_size and the devices)"
        return f"there is no key {key!r}; here it is {here}{note if 'accum' in key else ''}"
    candidates = _nearest(key, valid)
    if candidates:
        return f"there is no key {key!r}; did you mean {' or '.join(candidates)}?"
    section, last = key.split(".")[0], key.split(".")[-1]
    if last in NEIGHBOURS:
        return f"there is no key {key!r}; here it is {NEIGHBOURS[last]}"
    if any(key.startswith(f"{node}.") for node in OPEN):
        return f"there is no key {key!r} yet: write +{key}=... to add it"
    siblings = [v for v in valid if v.startswith(f"{section}.") and v.count(".") == 1]
    if siblings:
        return f"there is no key {key!r}; keys under {section}: {', '.join(siblings)}"
    return f"there is no key {key!r}; --cfg prints every key with its default"


OPEN = ("model.extra",)  # nodes to which a user may add keys of their own


def _word_used_here(key: str, valid: list[str]) -> str | None:
    """What a neighbour's key is called here: the key as a whole, or its first part (datamodule.path)."""
    head, _, rest = key.partition(".")
    renamed = f"{NEIGHBOURS[head]}.{rest}" if rest and head in NEIGHBOURS else None
    if key in NEIGHBOURS:
        return NEIGHBOURS[key]
    if renamed in NEIGHBOURS:
        return NEIGHBOURS[renamed]
    return renamed if renamed in valid else None


def _nearest(key: str, valid: list[str]) -> list[str]:
    """At most three keys that look like it: the most similar one, those with the same last word, other similar ones."""
    parents = [key.rsplit(".", n)[0] for n in range(1, key.count(".") + 1)]
    if any(parent in OPEN for parent in parents):
        return []
    choices = [v for v in valid if v not in parents]
    near = difflib.get_close_matches(key, choices, n=3, cutoff=0.7)
    same_name = [v for v in choices if v.rsplit(".", 1)[-1] == key.rsplit(".", 1)[-1]]
    return list(dict.fromkeys(near[:1] + same_name + near[1:]))[:3]


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


def _options(group: str, folders: Iterable[Path]) -> list[str]:
    return sorted({f.stem for d in folders for f in (d / group).glob("*.yaml") if f.stem != "base"})


def unknown_option(group: str, option: str, folders: Iterable[Path]) -> str:
    """The message for `group=option` where no such yaml exists."""
    options = _options(group, folders)
    near = [f"{group}={name}" for name in difflib.get_close_matches(option, options, n=1)]
    meant = OPTIONS.get(f"{group}={option}") or next(iter(near), None)
    hint = f"did you mean {meant}? " if meant else ""
    return f"there is no {group}={option}; {hint}options: {', '.join(options)}"


def missing_config(error: MissingConfigException, folders: list[Path], overrides: list[str]) -> str:
    """The message for a yaml that Hydra did not find."""
    missing = error.missing_cfg_file or ""
    for override in overrides:
        group, _, option = override.lstrip("+").partition("=")
        if missing == f"{group}/{option}" and any((d / group).is_dir() for d in folders):
            return unknown_option(group, option, folders)
    if missing.startswith("hydra/launcher/"):
        extra = missing.removeprefix("hydra/launcher/").partition("_")[0]
        return f'hydra/launcher={Path(missing).name} is not installed: pip install "lmtrain[{extra}]" (submitit, ray)'
    if "/" not in missing:
        return f"--config-name {missing}: no {missing}.yaml in {' or '.join(map(str, folders))}"
    return str(error).split("\n\n")[0].strip()


def unreadable(override: str) -> str:
    """The message for an argument that Hydra's grammar rejects."""
    key, equals, value = override.partition("=")
    if not equals:
        return f"cannot read {override!r}: write key=value or group=option; a value that holds spaces needs quotes"
    holds = "spaces, commas, brackets, quotes or ="
    if value.startswith(("[", "{")):
        return (
            f"cannot read {override!r}: in a list or mapping each text that holds {holds} needs double quotes, and the "
            f"whole single ones for the shell: 'optimizer.groups=[{{pattern: \"a|(b)\", lr: 1e-4}}]'"
        )
    return (
        f"cannot read {override!r}: a value that holds {holds} needs quotes twice, for the shell and for Hydra: "
        f"'{key}=\"{value}\"'"
    )


def unknown_flag(flag: str) -> str:
    """The message for --something, as other programs write their settings."""
    key = flag.lstrip("-").partition("=")[0].replace("-", "_")
    example = f"{NEIGHBOURS.get(key, key)}=..." if key else "trainer.max_steps=100"
    return f"{flag} is no option: settings are written without dashes, {example} (--help lists options and keys)"


def refuse_sweep_keys(overrides: list[str]) -> None:
    """Raises UserError for hydra.* and sweep.* on a single run, where they would be ignored without a word."""
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0]
        if key.startswith(("hydra.", "hydra/", "sweep.")) or (key == "sweep" and "=" in override):
            if key == "hydra.searchpath":
                continue
            here = f"; here it is {NEIGHBOURS[key]}" if key in NEIGHBOURS else " (a sweep, -m, reads it)"
            raise UserError(f"{key} has no effect on a single run{here}")


def refused(
    error: Exception, folders: list[Path], overrides: list[str], compose: Callable[[list[str]], DictConfig]
) -> str:
    """The message for overrides that parse but cannot be applied: names the first such one.

    Args:
        compose: composes the config with some of the overrides.
    """
    groups = {g.name for d in folders for g in d.iterdir() if g.is_dir()}
    parsed = [OverridesParser.create().parse_override(text) for text in overrides]
    for override in parsed:
        message = _wrong_group_value(override, groups, folders) or _sweep_outside_multirun(override)
        if message is not None:
            return message
        key = override.key_or_group
        if f"Could not override '{key}'" in str(error) and "No match in the defaults list" in str(error):
            return f"{key}: this config is a run's own and offers no options: set single keys, {key}.<key>=<value>"
    try:
        base = compose([o.input_line or "" for o in parsed if o.key_or_group in groups])
    except (HydraException, OmegaConfBaseException):  # the choices of options don't go together: Hydra says why
        return _on_one_line(error)
    for override in parsed:
        key = override.key_or_group
        if override.is_add() or key in groups or OmegaConf.select(base, key, default=_ABSENT) is not _ABSENT:
            continue
        valid = flatten(OmegaConf.to_container(base, resolve=False))  # type: ignore[arg-type]
        return other_variant(key, folders) or unknown_key(key, [*valid, *sorted(groups)])
    return _on_one_line(error)


def _wrong_group_value(override: Override, groups: set[str], folders: list[Path]) -> str | None:
    group = override.key_or_group
    if group not in groups:
        return None
    options = ", ".join(_options(group, folders))
    if override.is_delete():
        return f"~{group}: the group {group} can't be left out; choose one of its options: {options}"
    if not override.is_sweep_override() and not isinstance(override.value(), str | list):
        return (
            f"{override.input_line}: {group} is a group, set by the name of an option ({options}); "
            f"single keys are set as {group}.<key>=<value>"
        )
    return None


def _sweep_outside_multirun(override: Override) -> str | None:
    if not override.is_sweep_override():
        return None
    key, _, value = (override.input_line or "").partition("=")
    return (
        f"{key}={value}: several values are a sweep, started with -m; for one list write '{key}=[{value}]', for one "
        f"text '{key}=\"{value}\"'"
    )


def _on_one_line(error: Exception) -> str:
    cause = error.__cause__
    text = str(error) if cause is None or str(cause) in str(error) else f"{error}: {cause}"
    return "; ".join(line.strip().rstrip(".") for line in text.splitlines() if line.strip())


_WANTED = {  # what omegaconf's message says -> what is needed
    "to Integer": "a whole number is needed",
    "to Float": "a number is needed",
    "not a valid bool": "true or false is needed",
    "not a ListConfig": "a list is needed, such as [a,b]",
    "to string": "one text is needed",
    "to Dict": "a mapping is needed, such as {key: value}",
    "with type hint 'typing.Dict": "a mapping is needed, such as {key: value}",
    "to Union[int, str]": "one value is needed",
    "is not a subclass of": "this is a section: set its keys one by one",
}


def wrong_type(error: OmegaConfBaseException, tree: Any) -> str:
    """The message for a value that the schema refuses."""
    key, message = str(getattr(error, "full_key", None) or ""), str(error).strip().split("\n")[0]
    if "not in '" in message:
        return unknown_key(key, flatten({f.name: _fields(f.type) for f in dataclasses.fields(Config)}))
    if "missing mandatory" in message.lower():
        return f"{key} has no value: set {key}=..."
    if "'None' for field" in message:
        return f"{key} has no value here: set {key}=..."
    wanted = next((words for part, words in _WANTED.items() if part in message), None)
    if not key:  # omegaconf doesn't know where: an entry of a list of mappings
        return f"an entry of callbacks.extra or optimizer.groups: {wanted or message}"
    if wanted is None:
        return f"{key}: {message}"
    value = OmegaConf.select(tree, key, default=None)
    value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return f"{key}={value}: {wanted}, found {type(value).__name__} {value!r}"


def _fields(type_: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(type_):
        return {}
    return {f.name: _fields(f.type) for f in dataclasses.fields(type_)}
