"""Objects of classes that the config names with `_target_`."""

import importlib
from typing import Any

from lmtrain.errors import UserError


def build_target(entry: dict[str, Any]) -> Any:
    """An object from {_target_: package.module.Class, ...arguments}; config.check has allowed the package."""
    target = entry["_target_"]
    module_name, _, name = target.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(f"_target_={target} can't be imported: {error}") from error
    arguments = {k: v for k, v in entry.items() if k != "_target_"}
    try:
        return cls(**arguments)
    except TypeError as error:
        raise UserError(f"_target_={target}: {error}") from error
