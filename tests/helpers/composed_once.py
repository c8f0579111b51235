"""Composes the yamls of conf/ once in a process for each choice of options, and parses a text once: tests ask for
thousands of configs.

Values that are set come on top of a copy, as Hydra sets them. Processes that tests start have nothing of this.
"""

import copy
import functools
from typing import Any

import yaml
from hydra._internal import config_loader_impl as loader
from hydra._internal.defaults_list import DefaultsList
from omegaconf import DictConfig

from support import REPO

# Hydra's own options and ours, which no test writes; where there are others, from a user's folder, all is read anew.
OURS = {"hydra.conf", str(REPO / "conf"), ""}


class _Defaults(list[Any]):
    """A list of defaults that knows what it was made of."""

    def __init__(self, defaults: list[Any], key: tuple[Any, ...]) -> None:
        super().__init__(defaults)
        self.key = key


def install() -> None:
    create, compose, load = (
        loader.create_defaults_list,
        loader.ConfigLoaderImpl._compose_config_from_defaults_list,
        yaml.load,
    )
    lists: dict[tuple[Any, ...], DefaultsList] = {}
    trees: dict[tuple[Any, ...], DictConfig] = {}
    texts = functools.lru_cache(512)(load)

    def defaults_of(repo: Any, config_name: Any, overrides_list: list[Any], **how: Any) -> DefaultsList:
        sources = tuple(source.path for source in repo.get_sources())
        if set(sources) != OURS or any(o.is_sweep_override() for o in overrides_list):
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
            trees[defaults.key] = compose(self, defaults=defaults, repo=repo)
        return copy.deepcopy(trees[defaults.key])

    def loaded(stream: Any, Loader: Any) -> Any:
        return copy.deepcopy(texts(stream, Loader)) if isinstance(stream, str) else load(stream, Loader)

    loader.create_defaults_list = defaults_of
    loader.ConfigLoaderImpl._compose_config_from_defaults_list = composed  # type: ignore[method-assign]
    yaml.load = loaded  # of which yaml.safe_load makes use
