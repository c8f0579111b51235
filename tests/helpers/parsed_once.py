"""Parses a YAML text once in a process: tests compose and read thousands of configs of the same files."""

import copy
import functools
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.config_source import ConfigResult

from support import REPO

CONF = REPO / "conf"  # no test writes there; other folders are read anew each time


def install() -> None:
    """From now on; what is returned is a copy, which a test may change."""
    load_config, safe_load = FileConfigSource.load_config, yaml.safe_load
    sources: dict[tuple[str, str], ConfigResult] = {}
    texts = functools.lru_cache(512)(safe_load)

    def source(self: FileConfigSource, config_path: str) -> ConfigResult:
        if not Path(self.path.removeprefix("file://")).is_relative_to(CONF):
            return load_config(self, config_path)
        key = (self.path, config_path)
        if key not in sources:
            sources[key] = load_config(self, config_path)
        return copy.deepcopy(sources[key])

    def plain(stream: Any) -> Any:
        return copy.deepcopy(texts(stream)) if isinstance(stream, str) else safe_load(stream)

    FileConfigSource.load_config = source  # type: ignore[method-assign]
    yaml.safe_load = plain
