"""The fingerprint of a run: settings and file contents that decide what is learned and may not change on resume.

Every checkpoint stores the fingerprint as plain containers:
  keys      the values of all config keys that shape the model or the training trajectory
  contents  hashes or descriptions of what names and settings refer to: the tokens ("data"), the tokenizer, the model's
            architecture, the frozen base, an adapter's initial weights, the reference
A checkpoint is independent of the number of devices, so the fingerprint leaves out where and how a run is computed.
Those settings may change on resume; their previous values are read from the run's config.yaml.
"""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

from lmtrain.config import environment
from lmtrain.config.constraints import MACHINE, MODEL, PREPARED, RATE, TRAJECTORY, VALIDATION, Shapes
from lmtrain.config.keys import annotations_of, flat, keys_in, unread, value_of, values
from lmtrain.config.schema import Config
from lmtrain.config.sections import GONE
from lmtrain.errors import UserError, did_you_mean
from lmtrain.secrets import same

Fingerprint = dict[str, dict[str, Any]]


def fingerprint(config: Config, contents: dict[str, Any]) -> Fingerprint:
    """Builds a run's fingerprint (see the module); the `auto` values of `config` must be resolved."""
    found = values(config, MODEL, TRAJECTORY, by_content=False)
    keys = {k: environment.hashed(k, v, config.kept) for k, v in found.items()}
    return json.loads(json.dumps({"keys": keys, "contents": contents}, default=str))


def short_hash(value: Any) -> str:
    """Returns the first 16 hex digits of the SHA-256 of a value serialized as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def of_model(config: Config) -> dict[str, Any]:
    """Returns the config values that the model's forward depends on, except those compared by content."""
    return values(config, MODEL, by_content=False)


@dataclass
class Difference:
    """A fingerprint entry that differs from the checkpoint's; `because` maps keys that explain it to both values."""

    name: str
    then: Any
    now: Any
    because: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def __str__(self) -> str:
        keys = "".join(f"; {key} then {then}, now {now}" for key, (then, now) in self.because.items())
        return f"{self.name} (then {self.then}, now {self.now}{keys})"

    def is_allowed(self, allowed: list[str]) -> bool:
        return self.name in allowed or bool(self.because and all(key in allowed for key in self.because))


FEATURE = "feature."  # prefix of contents that a checkpoint has only if the feature is enabled


def changes(theirs: dict[str, Any], ours: Fingerprint, before: dict[str, Any], config: Config) -> list[Difference]:
    """Returns the differences between a checkpoint's fingerprint (`theirs`) and this run's (`ours`).

    Args:
        before: the config the run was last started with, as returned by `read_config`.
    """
    now = ours["contents"]
    found = [
        Difference(name, then, ours["keys"][name])
        for name, then in theirs["keys"].items()
        if name in ours["keys"] and not same(then, ours["keys"][name])
    ]
    gone = {name: then for name, then in theirs["keys"].items() if name in GONE and name not in ours["keys"]}
    gone = {name: then for name, then in gone.items() if then is not None and GONE[name] not in (None, then)}
    found += [Difference(name, then, "removed") for name, then in gone.items()]
    for name in {**theirs["contents"], **{name: None for name in now if name.startswith(FEATURE)}}:
        then = theirs["contents"].get(name)
        if (name in now or name.startswith(FEATURE)) and not same(then, now.get(name)):
            found += _content(name, then, now.get(name), found, before, config)
    return found


def _content(
    name: str, then: Any, now: Any, keys: list[Difference], before: dict[str, Any], config: Config
) -> list[Difference]:
    """Returns the difference of one content entry; empty if the differing `keys` already explain it."""
    if name == "model":
        if any(change.name.startswith("model.") or MODEL in annotations_of(change.name, config) for change in keys):
            return []
        if isinstance(then, dict):  # the architecture: report only the fields that differ
            fields = [k for k in {**then, **now} if then.get(k) != now.get(k)]
            then, now = {k: then.get(k) for k in fields}, {k: now.get(k) for k in fields}
    inside = [key for key in keys_in(config) if key.name.startswith(f"{name.split('.')[0]}.")]
    behind = [key.name for key in inside if key.by_content or key.shapes is PREPARED]
    pairs = {k: (before[k], environment.written(k, value_of(config, k), config.kept)) for k in behind if k in before}
    return [Difference(name, then, now, {k: pair for k, pair in pairs.items() if not same(*pair)})]


def not_compared(theirs: dict[str, Any], ours: Fingerprint, config: Config) -> list[str]:
    """Returns the keys of `ours` that are set and read but have no recorded value in the checkpoint."""
    told = {name.split(".")[0] for name, value in theirs["contents"].items() if value is not None}
    return [
        name
        for name, value in ours["keys"].items()
        if name not in theirs["keys"]
        and value is not None
        and not (MODEL in annotations_of(name, config) and name.split(".")[0] in told)
        and unread(name, config) is None  # an unread key has no effect
    ]


def read_config(tree: Any, config: Config) -> dict[str, Any]:
    """Returns the values that a config.yaml of any version has for the keys of `config`; unknown keys are left out."""
    there = dict(flat(tree))
    found = {}
    for key in keys_in(config):
        section, _, name = key.name.rpartition(".")
        node = there.get(section)
        if isinstance(node, dict) and (name in node or key.may_be_absent):
            found[key.name] = node.get(name)
    return found


# Keys that may change on resume. Of those that shape the rates, these matter only to a run that goes on.
MAY_CHANGE = (RATE, MACHINE, VALIDATION)
_GOES_ON = ("trainer.max_steps", "trainer.max_epochs", "run.schedule_on_resume")


def changed_since(before: dict[str, Any], config: Config, *shapes: Shapes) -> dict[str, str]:
    """Maps the keys that affect one of `shapes` and have changed to both values, as "old -> new"."""
    now = {k: environment.written(k, v, config.kept) for k, v in values(config, *shapes).items()}
    return {key: f"{before[key]} -> {now[key]}" for key in now if key in before and before[key] != now[key]}


def trained_otherwise(before: dict[str, Any], config: Config, *shapes: Shapes) -> dict[str, str]:
    """Returns `changed_since` for a finished run, which trains no step; `auto` agrees with what it was resolved to."""
    changed = changed_since(before, config, *shapes).items()
    return {key: both for key, both in changed if key not in _GOES_ON and value_of(config, key) != "auto"}


def check_names(allowed: list[str], ours: Fingerprint, config: Config) -> None:
    """Raises UserError for a name in run.allow_change that is neither a config key nor an entry of `contents`."""
    known = [*ours["contents"], *GONE, *(key.name for key in keys_in(config))]
    for name in allowed:
        if name not in known:
            hint = did_you_mean(name, known, most=2) or f": a key, or one of {', '.join(ours['contents'])}"
            raise UserError(f"run.allow_change: {name} is not known{hint}")
