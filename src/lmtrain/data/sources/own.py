"""A source of a user's own: a class that data.source names, built with data.source_options."""

import hashlib
import inspect
import sys
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
    with building("data.source", cfg.source):
        source = cls(**options)
    needed = ["label", "settings", "resolved", "notes", *(("pieces",) if cfg.rows == "text" else ("records",))]
    missing = [name for name in needed if not hasattr(source, name)]
    if missing:
        raise UserError(
            f"data.source={cfg.source} is no source of {'text' if cfg.rows == 'text' else 'rows'}: it lacks "
            f"{', '.join(missing)} (lmtrain.data.sources.choose.Source says what they are)"
        )
    source.settings = {**source.settings, "class": cfg.source, "options": options, "code": _code_of(cls)}
    return source


def _code_of(cls: type) -> str:
    """A digest of the module that holds the class."""
    try:
        text = inspect.getsource(sys.modules[cls.__module__])
    except (OSError, TypeError):  # made at run time
        return ""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
