"""Configs for the data tests: the real defaults from conf/ with the values that a test sets."""

import copy
import dataclasses
import functools
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from lmtrain.config.schema_data import DataConfig, TokenizerConfig

CONF = Path(__file__).parents[2] / "conf"


@functools.cache
def _load(group: str, option: str) -> dict:
    tree = OmegaConf.load(CONF / group / f"{option}.yaml")
    plain = OmegaConf.to_container(tree, resolve=False)
    merged: dict = {}
    for name in plain.pop("defaults", []):
        if isinstance(name, str) and name != "_self_":
            merged |= _load(group, name)
    return {**merged, **plain}


def data_of(values: dict) -> DataConfig:
    """Returns a DataConfig made of plain values, those of its sections included."""
    made = {f.name: f.default_factory for f in dataclasses.fields(DataConfig)}
    sections = {name: made[name] for name in values if dataclasses.is_dataclass(made[name])}
    return DataConfig(**values | {name: section(**values[name]) for name, section in sections.items()})


@pytest.fixture
def data_config(tmp_path):
    """Returns a factory: data_config("wikitext", min_length=5) is that option of conf/data with a cache in tmp_path."""

    def make(option: str = "text", **settings) -> DataConfig:
        defaults = copy.deepcopy(_load("data", option))
        values = {**defaults, "seq_len": 64, "cache_dir": str(tmp_path / "cache"), **settings}
        unknown = set(values) - {f.name for f in dataclasses.fields(DataConfig)}
        assert not unknown
        return data_of(values)

    return make


@pytest.fixture
def tokenizer_config():
    """Returns a factory: tokenizer_config("bpe", vocab_size=300) is that option of conf/tokenizer."""

    def make(option: str = "bytes", **settings) -> TokenizerConfig:
        return TokenizerConfig(**{**copy.deepcopy(_load("tokenizer", option)), **settings})

    return make
