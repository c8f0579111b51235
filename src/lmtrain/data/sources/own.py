"""A source of a user's own: a class that data.source names, built with data.source_options."""

import hashlib
import inspect
import sys
from collections.abc import Mapping
from typing import Any

from lmtrain.config.schema import Data
from lmtrain.config.targets import building, class_named
from lmtrain.errors import UserError


def open_own(cfg: Data) -> Any:
    """The object of the class that data.source names, with what the key of prepared data needs.

    Its identity is what the class says it is and the text of the module it stands in: a changed class is read anew.

    Raises:
        UserError: the class can't be imported, its arguments are others, it raises, or it lacks what a source has.
    """
    # Composing has refused what run.allow_target doesn't open.
    cls = class_named(cfg.source, "data.source", [cfg.source.split(".")[0]])
    options = cfg.source_options or {}
    try:
        inspect.signature(cls).bind(**options)
    except TypeError as error:
        raise UserError(f"data.source_options={options}: {cfg.source}: {error}") from None
    reads = ["pieces", "text_bytes"] if cfg.rows == "text" else ["records"]
    with building("data.source", cfg.source):  # a property may raise too
        source = cls(**options)
        missing = [n for n in ("label", "settings", "resolved", "notes", *reads) if not hasattr(source, n)]
        if missing:
            raise UserError(
                f"data.source={cfg.source} is no source of {'text' if cfg.rows == 'text' else 'rows'}: it lacks "
                f"{', '.join(missing)} (lmtrain.data.sources.choose.Source says what they are)"
            )
        settings = _mapping(source.settings, cfg.source)
        source.settings = {**settings, "class": cfg.source, "options": options, "code": _code_of(cls)}
    return source


def _mapping(settings: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(settings, Mapping):
        raise UserError(f"data.source={name}: its settings are {settings!r}: make them a dict of what shapes its data")
    return settings


def _code_of(cls: type) -> str:
    """A digest of the module that holds the class."""
    try:
        text = inspect.getsource(sys.modules[cls.__module__])
    except (OSError, TypeError):  # made at run time
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
