"""A source of a user's own: a class that data.source names, built with data.source_options."""

import hashlib
import inspect
import sys
from collections.abc import Mapping
from typing import Any

from lmtrain.config.schema_data import DataConfig
from lmtrain.config.targets import build_target, building, class_named, lacking
from lmtrain.errors import UserError


def open_own(cfg: DataConfig) -> Any:
    """The object of the class that data.source names, with what the key of prepared data needs.

    Its identity is what the class says it is and the text of the module it stands in: a changed class is read anew.

    Raises:
        UserError: the class is not allowed, can't be imported or lacks what a source has; its arguments are others, or
            it raises.
    """
    # Composing refused what run.allow_target doesn't open. Of the options nothing but this module's may be built.
    opened, options = [cfg.source.rpartition(".")[0]], cfg.source_options or {}
    cls = class_named(cfg.source, "data.source", opened)
    reads = ["pieces", "text_bytes"] if cfg.rows == "text" else ["records"]
    missing = lacking(cls, ("label", "settings", "resolved", "notes", *reads))
    if missing:
        raise UserError(
            f"data.source={cfg.source} is no source of {'text' if cfg.rows == 'text' else 'rows'}: it lacks "
            f"{', '.join(missing)} (lmtrain.data.sources.choose.Source says what they are; those that __init__ sets "
            f"stand on the class with their type, label: str)"
        )
    if "_target_" in options or "_args_" in options:
        raise UserError("data.source_options: _target_ and _args_ have no meaning here; data.source names the class")
    source = build_target({"_target_": cfg.source, **options}, "data.source", cls, opened)
    with building("data.source", cfg.source):  # a property may raise
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
