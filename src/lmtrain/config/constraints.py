"""Annotations of schema fields: what a key affects, who may set it, which commands read it, constraints. No torch.

    seq_len: Annotated[int, TRAJECTORY, at_least(1)]
    path: Annotated[str | None, PREPARED, SOURCE]
    generate: Annotated[GenerateConfig, ReadBy(("generate",))]

A constraint is called with a key and its value and raises UserError if the value is invalid. Null is valid wherever the
type allows it.

Somebody else's file may set a key as its mark of type Open says. Without one it may set keys of numbers, booleans or
one of a `choice` of words, and no others: text and containers count only where the user types them. So a key whose
declaration was forgotten is closed.
"""

import enum
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lmtrain.errors import UserError, did_you_mean
from lmtrain.secrets import names_in

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
    CODE = "code"  # the key lets code from outside lmtrain run: only the user may set it, for each command anew


CONTENT, TRAINING, CODE = Mark


class Theirs(NamedTuple):
    """What is known of somebody else's files: their folder, and the packages whose classes the user has allowed."""

    folder: Path
    packages: tuple[str, ...]


@dataclass(frozen=True)
class Open:
    """A mark on a key: the values to which somebody else's file may set it."""

    to: str  # these values, in words
    # Called with each value within the key that is no container, and the innermost name that it has there ('' if none).
    fits: Callable[[str, Any, Theirs], bool]


def _no_address(name: str, value: Any, theirs: Theirs) -> bool:
    return "://" not in str(value)


def _below(name: str, value: Any, theirs: Theirs) -> bool:
    try:
        place = Path(str(value)).expanduser().resolve()
    except (OSError, RuntimeError, ValueError):  # no such user, a NUL character
        return False
    return any(place.is_relative_to(folder.resolve()) for folder in (Path.cwd(), theirs.folder))


def just(*values: Any) -> Open:
    """Returns a mark that opens a key to these values, of which the first should be its default."""
    said = " or ".join(f"`{str(value).lower()}`" for value in values)
    return Open(said or "nothing", lambda name, value, theirs: value in values)


OPEN = Open("anything", lambda name, value, theirs: True)
CLOSED = just()
CACHE = Open("the default", lambda name, value, theirs: value in ("~/.cache/lmtrain", os.environ.get("LMTRAIN_CACHE")))
SOURCE = Open("local paths and names on the hub, no address (`://`)", _no_address)
NEW_FOLDER = Open("a folder below the working folder or that of the file", _below)
NUMBERS = Open("numbers, true and false", lambda name, value, theirs: isinstance(value, int | float))


def classes(*modules: str) -> Open:
    """Returns a mark that opens a key to classes of these modules, or packages, and to names without a dot."""
    return Open(
        f"names{f', and classes of {_in_code(modules)}' if modules else ''}",
        lambda name, value, theirs: "." not in str(value) or _is_of(value, (*modules, *theirs.packages)),
    )


def only(*names: str, of: tuple[str, ...] = ()) -> Open:
    """Returns a mark that opens these names within a mapping, and `_target_` to classes of the modules `of`.

    The name '' stands for a value that is directly in a list. Packages that the user has allowed are modules `of` too.
    """

    def fits(name: str, value: Any, theirs: Theirs) -> bool:
        if name == "_target_":
            return _is_of(value, (*of, *theirs.packages))
        return name in names and _no_address(name, value, theirs)

    inside = _in_code(tuple(filter(None, names))) or "names"
    return Open(f"{inside}{f'; classes of {_in_code(of)}' if of else ''}", fits)


def _in_code(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _is_of(target: Any, places: tuple[str, ...]) -> bool:
    return any(f"{target}.".startswith(f"{place}.") for place in places)


@dataclass(frozen=True)
class ReadWhere:
    """A mark on a key or section that is read only if `holds(config)`; otherwise typing the key is refused."""

    holds: Callable[[Any], bool]
    instead: str  # how to meet the condition: 'set trainer.strategy=deepspeed'


@dataclass(frozen=True)
class ReadBy:
    """A mark on a key or section that only these commands read, among those that compose a run's config."""

    verbs: tuple[str, ...]


@dataclass(frozen=True)
class OneOf:
    """A constraint that accepts only these texts; values that are not text (true, a number) pass."""

    options: tuple[str, ...]

    def __call__(self, key: str, value: Any) -> None:
        if isinstance(value, str) and value not in self.options:
            hint = did_you_mean(value, self.options)
            raise UserError(f"{key}={value} is not known{hint} (options: {', '.join(self.options)})")


def choice(*options: str) -> OneOf:
    return OneOf(options)


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
above_zero = _number(lambda value: 0 < value < math.inf, "a number above 0")
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


def no_secret(key: str, value: list[str] | None) -> None:
    for name in (name for text in value or () for name in names_in(text)):
        found = f"{key} has the value of the environment variable {name}, which every checkpoint and export would hold"
        raise UserError(f"{found}: choose another token")


def name_or_names(key: str, value: Any) -> None:
    """Raises UserError unless the value is null, a text or a list of texts, which OmegaConf's types can't express."""
    names = [value] if isinstance(value, str) else value
    if names is not None and (not isinstance(names, list) or not all(isinstance(name, str) for name in names)):
        raise UserError(f"{key}={value}: a name or a list of names, [a,b], is needed")


def two_betas(key: str, value: Any) -> None:
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if not is_pair or not all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in value):
        raise UserError(f"{key}={value}: two numbers are needed, from 0 up to (not including) 1: [0.9,0.95]")
