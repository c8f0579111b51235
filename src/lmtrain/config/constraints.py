"""Annotations of schema fields: what a key shapes, who reads it when, constraints on its value. Imports no torch.

    seq_len: Annotated[int, TRAJECTORY, at_least(1)]
    generate: Annotated[GenerateConfig, ReadBy(("generate",))]

A constraint is called with the key and its value and raises UserError; null passes, where the type allows it.
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
    """What a key has an effect on, and so what happens when it is changed."""

    PREPARED = "prepared"  # the tokens on disk: another folder; on resume the tokens themselves are compared
    MODEL = "model"  # the model and what its forward computes: another reference, and refused on resume
    TRAJECTORY = "trajectory"  # what is learned: refused on resume
    RATE = "rate"  # how fast and how long: the user's right on resume, reported
    MACHINE = "machine"  # where and how the same is computed: may change on resume, reported
    VALIDATION = "validation"  # what is validated on: may change on resume, reported; scores before are not compared
    SHOWN = "shown"  # nothing that is learned: what people see, where files lie, what is kept


PREPARED, MODEL, TRAJECTORY, RATE, MACHINE, VALIDATION, SHOWN = Shapes


class Mark(enum.Enum):
    """More about a key."""

    CONTENT = "content"  # it names something (a file, a model): what that holds is compared, not its name
    TRAINING = "training"  # only training reads it, or what stands in this section


CONTENT, TRAINING = Mark


@dataclass(frozen=True)
class ReadWhere:
    """A key or section that is read only where `holds(config)`; typed elsewhere, it is refused."""

    holds: Callable[[Any], bool]
    instead: str  # what makes it hold: 'set trainer.strategy=deepspeed'


@dataclass(frozen=True)
class ReadBy:
    """A key or section that only these verbs read, of those that compose a run's config."""

    verbs: tuple[str, ...]


def choice(*options: str) -> Constraint:
    """One of these; for keys that are not text otherwise (true, a number), a text has to be one of them."""

    def check(key: str, value: Any) -> None:
        if isinstance(value, str) and value not in options:
            hint = did_you_mean(value, options)
            raise UserError(f"{key}={value} is not known{hint} (options: {', '.join(options)})")

    return check


_PART = r"[A-Za-z0-9_+][A-Za-z0-9._+-]*"


def name_of_file(key: str, value: Any) -> None:
    """A name that stays in its folder and can be typed as an override."""
    if value is not None and not re.fullmatch(_PART, str(value)):
        raise UserError(
            f"{key}={value!r}: use letters (a-z, A-Z), digits, '.', '_', '-' and '+' only, not '.' or '-' at its start"
        )


def name_of_folder(key: str, value: Any) -> None:
    """Accepts what `name_of_file` does, with folders of such names before it."""
    if value is not None and not re.fullmatch(rf"{_PART}(/{_PART})*", str(value)):
        raise UserError(
            f"{key}={value!r}: use letters (a-z, A-Z), digits, '.', '_', '-', '+' and '/' only, no part "
            f"starting with '.' or '-'"
        )


def not_empty(key: str, value: Any) -> None:
    if not str(value).strip():
        raise UserError(f"{key} is empty: name a folder (an environment variable that is empty has to be unset)")


def choice_or_class(*options: str) -> Constraint:
    """One of these, or the path of a class, which has a dot in it."""
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


not_negative = _number(lambda value: 0 <= value < math.inf, "a number from 0 up")
above_zero = _number(lambda value: 0 < value < math.inf, "a number above 0")
share = _number(lambda value: 0 <= value < 1, "a share from 0 up to (not including) 1")
up_to_one = _number(lambda value: 0 <= value <= 1, "a share from 0 to 1")


def representable(key: str, value: Any) -> None:
    """What every value has to be: of numbers finite ones, whole ones of 64 bits; text without a NUL character."""
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in inside:
        representable(key, one)
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key}={value}: a finite number is needed")
    if type(value) is int and not -(2**63) <= value < 2**63:
        raise UserError(f"{key}={value}: whole numbers have 64 bits, so {2**63 - 1} is the largest")
    if isinstance(value, str) and "\0" in value:
        raise UserError(f"{key}={value}: it can't hold a NUL character")


def name_or_names(key: str, value: Any) -> None:
    """One text or a list of them, which a type can't express."""
    names = [value] if isinstance(value, str) else value
    if names is not None and (not isinstance(names, list) or not all(isinstance(name, str) for name in names)):
        raise UserError(f"{key}={value}: a name or a list of names, [a,b], is needed")


def two_betas(key: str, value: Any) -> None:
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in value)
    ):
        raise UserError(f"{key}={value}: two numbers are needed, from 0 up to (not including) 1: [0.9,0.95]")
