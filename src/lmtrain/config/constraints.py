"""Annotations of schema fields: what a key affects, which commands read it, constraints. Imports no torch.

    seq_len: Annotated[int, TRAJECTORY, at_least(1)]
    generate: Annotated[GenerateConfig, ReadBy(("generate",))]

A constraint is called with a key and its value and raises UserError if the value is invalid. Null is valid wherever the
type allows it.
"""

import enum
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lmtrain.errors import UserError, did_you_mean

Constraint = Callable[[str, Any], None]


class Shapes(enum.Enum):
    """What a key affects, which decides what happens when it is changed; the values are what `explain` says of it."""

    PREPARED = "the prepared data (on resume the tokens themselves are compared)"  # a change uses another folder
    MODEL = "the model: a change is refused on resume"  # it needs another reference too
    TRAJECTORY = "what is learned: a change is refused on resume"
    RATE = "how fast and how long: may change on resume"  # which is reported, here and below
    MACHINE = "where and how the same is computed: may change on resume"
    VALIDATION = "what scores are of: may change on resume, but then earlier scores are not compared with later ones"
    SHOWN = "nothing that is learned"  # output, file locations, which files are kept


PREPARED, MODEL, TRAJECTORY, RATE, MACHINE, VALIDATION, SHOWN = Shapes


class Mark(enum.Enum):
    """Additional properties of a key."""

    CONTENT = "content"  # the key names something (a file, a model) whose content is compared instead of the name
    TRAINING = "training"  # only training reads this key, or the keys of this section


CONTENT, TRAINING = Mark


@dataclass(frozen=True)
class ReadWhere:
    """A mark on a key or section that is read only if `holds(config)`; otherwise typing the key is refused."""

    holds: Callable[[Any], bool]
    instead: str  # how to meet the condition: 'set trainer.strategy=deepspeed'


@dataclass(frozen=True)
class ReadBy:
    """A mark on a key or section that only these commands read, among those that compose a run's config."""

    verbs: tuple[str, ...]


def choice(*options: str) -> Constraint:
    """Returns a constraint that accepts only these texts; values that are not text (true, a number) pass."""

    def check(key: str, value: Any) -> None:
        if isinstance(value, str) and value not in options:
            hint = did_you_mean(value, options)
            raise UserError(f"{key}={value} is not known{hint} (options: {', '.join(options)})")

    return check


_PART = r"[A-Za-z0-9_+][A-Za-z0-9._+-]*"


def name_of_file(key: str, value: Any) -> None:
    """Raises UserError unless the value is null or a file name, without folders, that needs no quotes."""
    _check_name(key, value, _PART, "")


def name_of_folder(key: str, value: Any) -> None:
    """Raises UserError unless the value is null or a relative path whose parts pass `name_of_file`."""
    _check_name(key, value, rf"{_PART}(/{_PART})*", " '/'")


def _check_name(key: str, value: Any, pattern: str, more: str) -> None:
    if value is not None and not re.fullmatch(pattern, str(value)):
        raise UserError(f"{key}={value!r}: use a-z, A-Z, digits, '.' '_' '-' '+'{more} only, no '.' or '-' in front")


def not_empty(key: str, value: Any) -> None:
    if not str(value).strip():
        raise UserError(f"{key} is empty: name a folder (an environment variable that is empty has to be unset)")


def choice_or_class(*options: str) -> Constraint:
    """Returns a constraint that accepts one of these names, or the dotted path of a class."""
    known = choice(*options, "package.module.Class")
    return lambda key, value: None if "." in str(value) else known(key, value)


def _number(fits: Callable[[Any], bool], needed: str) -> Constraint:
    def check(key: str, value: Any) -> None:
        if value is not None and not fits(value):
            raise UserError(f"{key}={value}: {needed} is needed")

    return check


def at_least(least: int) -> Constraint:
    return _number(lambda value: value >= least, f"at least {least}")


def between(first: int, last: int) -> Constraint:
    return _number(lambda value: first <= value <= last, f"a whole number from {first} to {last}")


def auto_or_count(key: str, value: Any) -> None:
    if value not in ("auto", None) and (type(value) is not int or value < 1):
        raise UserError(f"{key}={value}: auto, or a whole number from 1 up, is needed")


not_negative = _number(lambda value: 0 <= value < math.inf, "a number from 0 up")
not_positive = _number(lambda value: value <= 0, "a number of at most 0")
above_zero = _number(lambda value: 0 < value < math.inf, "a number above 0")
above_one = _number(lambda value: 1 < value < math.inf, "a number above 1")
share = _number(lambda value: 0 <= value < 1, "a share from 0 up to (not including) 1")
less_than_half = _number(lambda value: 0 <= value < 0.5, "a share below 0.5 (else most labels would be wrong)")
up_to_one = _number(lambda value: 0 <= value <= 1, "a share from 0 to 1")


def representable(key: str, value: Any) -> None:
    """Raises UserError for values no key may have: infinite or NaN, beyond 64 bits, text with a NUL or not UTF-8."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key}={value}: a finite number is needed")
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise UserError(f"{key}={value}: whole numbers have 64 bits, so {2**63 - 1} is the largest")
    if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):  # undecodable bytes are typed as surrogates
        raise UserError(f"{key}={value}: it can't hold a NUL character or what is not valid UTF-8")


def regular_expression(key: str, value: str) -> None:
    try:
        re.compile(value)
    except re.error as error:
        raise UserError(f"{key}={value!r} is not a regular expression: {error}") from None


def name_or_names(key: str, value: Any) -> None:
    """Raises UserError unless the value is null, a text or a list of texts, which OmegaConf's types can't express."""
    names = [value] if isinstance(value, str) else value
    if names is not None and (not isinstance(names, list) or not all(isinstance(name, str) for name in names)):
        raise UserError(f"{key}={value}: a name or a list of names, [a,b], is needed")


def two_betas(key: str, value: Any) -> None:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if not is_pair or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in value):
        raise UserError(f"{key}={value}: two numbers are needed, from 0 up to (not including) 1: [0.9,0.95]")
