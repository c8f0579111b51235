"""Interpolations `${...}` in configs: resolved exactly once, with few allowed resolvers. Imports no torch."""

import contextlib
import re
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from omegaconf import Container, DictConfig, Node, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from omegaconf.grammar_parser import parse
from omegaconf.resolvers import oc

from lmtrain.errors import UserError
from lmtrain.secrets import shown_in

# Resolvers that parse text into config (oc.create, oc.decode) are not allowed: a config must be readable as written.
RESOLVERS = ("oc.env", "oc.select", "oc.dict.keys", "oc.dict.values", "now", "power_law")


def power_law(
    value: float, at: float, base: float, exponent: float, multiple: float = 0, above: float | None = None
) -> float | int:
    """Scales a setting to another depth, width or size: `value` x (`at` / `base`) ** `exponent`.

    Args:
        multiple: the result is rounded to a multiple of it, at least one; 0 rounds to four significant digits.
        above: the exponent where `at` is above `base`, if it is another one there.

    Raises:
        ValueError: `at` or `base` is not above 0, or the result is too large.
    """
    if at <= 0 or base <= 0:
        raise ValueError(f"power_law: {at} and {base} have to be above 0")
    exponent = above if above is not None and at > base else exponent
    found = value * (at / base) ** exponent
    if not abs(found) < 2**40:
        raise ValueError(f"power_law: {value} x ({at} / {base}) ** {exponent} is too large")
    return max(multiple, multiple * round(found / multiple)) if multiple else float(f"{found:.4g}")


OmegaConf.register_new_resolver("power_law", power_law, replace=True)

_readers: ContextVar[list[str] | None] = ContextVar("_readers", default=None)


def _env(key: str, default: Any = oc._DEFAULT_MARKER_) -> str | None:
    """OmegaConf's `oc.env`, which besides notes the variable for `variables_read`."""
    names = _readers.get()
    if names is not None:
        names.append(str(key))
    return oc.env(key, default)


OmegaConf.register_new_resolver("oc.env", _env, replace=True)  # once, for the whole process


@contextlib.contextmanager
def variables_read() -> Iterator[list[str]]:
    """Yields a list that collects the environment variables that interpolations read within the context."""
    names: list[str] = []
    token = _readers.set(names)
    try:
        yield names
    finally:
        _readers.reset(token)


def resolved(tree: DictConfig) -> dict[str, Any]:
    """Returns the resolved plain values of a config; any `${` left in them is literal text.

    Raises:
        UserError: an interpolation can't be parsed or resolved, or uses another resolver; the message names the key.
    """
    try:
        for _, node in interpolated(tree):
            _check(node._get_full_key(None), str(node._value()))
        return plain(tree)
    except OmegaConfBaseException as error:
        at = getattr(error, "full_key", None)
        said = str(error).strip().split("\n")[0]
        raise UserError(f"{f'{at}: ' if at else ''}{said} (in the config)") from None
    except RecursionError:
        raise UserError("an interpolation of the config refers to itself") from None


def plain(node: Node) -> Any:
    """Returns a node's value with interpolations resolved, in a third of the time of OmegaConf.to_container."""
    try:
        content = node._dereference_node()._value()
    except OmegaConfBaseException as error:
        error.full_key = node._get_full_key(None)
        raise
    if isinstance(content, dict):
        return {name: plain(inner) for name, inner in content.items()}
    return [plain(inner) for inner in content] if isinstance(content, list) else content


def escaped(value: Any) -> Any:
    """Returns a copy of plain values in which each `${` is escaped, so that resolving it gives the values back."""
    return shown_in(value, lambda text: re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def interpolated(node: Any, key: str = "") -> Iterator[tuple[str, Node]]:
    """Yields the dotted key and node of every text below `node` that contains `${`."""
    content = node._content if isinstance(node, Container) else None
    if isinstance(content, dict | list):  # not so if the container has no value, or an interpolation is its value
        for name, inner in content.items() if isinstance(content, dict) else enumerate(content):
            yield from interpolated(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(node, Node) and node._is_interpolation():
        yield key, node


def _check(key: str, text: str) -> None:
    try:
        names = list(_resolvers(parse(text)))
    except GrammarParseError as error:
        said = str(error).strip().split("\n")[0]
        raise UserError(f"{key}: {text!r} is not an interpolation ({said}); for the text itself write \\${{") from None
    wrong = next((name for name in names if name not in RESOLVERS), None)
    if wrong is not None:
        known = ", ".join(RESOLVERS)
        raise UserError(f"{key}: ${{{wrong}:...}} can't be used ({known} can): write its value, or \\${{ for text")


def _resolvers(node: Any) -> Iterator[str]:
    """Yields the names of the resolvers in a parsed text, as written."""
    if type(node).__name__ == "InterpolationResolverContext":
        yield node.resolverName().getText()
    for child in getattr(node, "children", None) or ():
        yield from _resolvers(child)
