"""Caches Hydra's composition of conf/ per choice of options, parsed YAML files, overrides and interpolations, within
one process: tests compose thousands of configs.

Values are set on a copy, as Hydra sets them. Of the processes that tests start, only those of forked.py use this cache.
Cached configs are pickled, in this process only: OmegaConf's nodes are unpickled six times as fast as they are copied.
"""

import copy
import functools
import os
import pickle
from pathlib import Path
from typing import Any

import yaml
from hydra._internal import config_loader_impl as loader
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.defaults_list import DefaultsList
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, base

from lmtrain.config import interpolations
from support import REPO

# Hydra's own options and ours, which no test changes; a user's folder is checked for changes each time.
OURS = {"hydra.conf", str(REPO / "conf"), ""}


def written_in(folder: str) -> tuple[Any, ...]:
    """Returns the YAML files of a folder of options with what reveals a change of one: inode, mtime and size."""
    found = ((path, path.stat()) for path in sorted(Path(folder).rglob("*.yaml")))
    return tuple((str(path), stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in found)


class _Defaults(list[Any]):
    """A list of defaults with the key of the choices that it was made from."""

    def __init__(self, defaults: list[Any], key: tuple[Any, ...]) -> None:
        super().__init__(defaults)
        self.key = key


def install() -> None:
    _install_compositions()
    _install_parsing()


def _install_parsing() -> None:
    """Keeps what Hydra reads in an override without functions, such as those of sweeps, and OmegaConf in a text."""
    read = OverridesParser.parse_rule

    @functools.lru_cache(4096)
    def kept(text: str, rule: str) -> Any:
        return read(OverridesParser.create(), text, rule)

    def parsed(self: OverridesParser, s: str, rule_name: str) -> Any:
        return read(self, s, rule_name) if "(" in s else copy.copy(kept(s, rule_name))

    OverridesParser.parse_rule = parsed  # type: ignore[method-assign]
    base.parse = interpolations.parse = functools.lru_cache(4096)(base.parse)  # type: ignore[attr-defined]


def _install_compositions() -> None:
    create, compose, load = (
        loader.create_defaults_list,
        loader.ConfigLoaderImpl._compose_config_from_defaults_list,
        yaml.load,
    )
    lists: dict[tuple[Any, ...], DefaultsList] = {}
    trees: dict[tuple[Any, ...], bytes] = {}
    files: dict[tuple[Any, ...], bytes] = {}
    Plugins.instance()  # imports and registers the sources
    source: Any = SourcesRegistry.instance().resolve("file")
    of_file = source.load_config
    texts = functools.lru_cache(512)(load)

    def defaults_of(repo: Any, config_name: Any, overrides_list: list[Any], **how: Any) -> DefaultsList:
        folders = tuple(source.path for source in repo.get_sources())
        sources = (*folders, *(written_in(folder) for folder in folders if folder not in OURS))
        if any(o.is_sweep_override() for o in overrides_list):
            return create(repo=repo, config_name=config_name, overrides_list=overrides_list, **how)
        chosen = [o for o in overrides_list if repo.group_exists(o.key_or_group) and not isinstance(o.value(), dict)]
        key = (config_name, sources, tuple(o.input_line for o in chosen), *sorted(how.items()))
        if key not in lists:
            lists[key] = create(repo=repo, config_name=config_name, overrides_list=overrides_list, **how)
        known = lists[key]
        values = [override for override in overrides_list if not any(override is o for o in chosen)]
        return DefaultsList(_Defaults(known.defaults, key), known.defaults_tree, values, known.overrides)

    def composed(self: Any, defaults: list[Any], repo: Any) -> DictConfig:
        if not isinstance(defaults, _Defaults):
            return compose(self, defaults=defaults, repo=repo)
        if defaults.key not in trees:
            trees[defaults.key] = pickle.dumps(compose(self, defaults=defaults, repo=repo))
        return pickle.loads(trees[defaults.key])  # noqa: S301

    def loaded(stream: Any, Loader: Any) -> Any:
        return copy.deepcopy(texts(stream, Loader)) if isinstance(stream, str) else load(stream, Loader)

    def file_loaded(self: Any, config_path: str) -> Any:
        path = os.path.join(self.path, self._normalize_file_name(config_path))
        if not os.path.exists(path):
            return of_file(self, config_path)
        found = os.stat(path)
        key = (self.provider, self.path, config_path, found.st_ino, found.st_mtime_ns, found.st_size)
        if key not in files:
            files[key] = pickle.dumps(of_file(self, config_path))
        return pickle.loads(files[key])  # noqa: S301

    source.load_config = file_loaded
    ConfigRepository.__deepcopy__ = lambda self, memo: copy.copy(self)  # type: ignore[attr-defined]  # of unchanged sources
    loader.create_defaults_list = defaults_of
    loader.ConfigLoaderImpl._compose_config_from_defaults_list = composed  # type: ignore[method-assign]
    yaml.load = loaded  # yaml.safe_load calls it
