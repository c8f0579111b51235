"""A frozen config can't be changed, and is the same config in every other way."""

import copy
import dataclasses

import pytest

from lmtrain.config import compose as rules
from lmtrain.config.constraints import MODEL, TRAJECTORY
from lmtrain.config.keys import freeze, values


def test_nothing_changes_a_frozen_config() -> None:
    config = rules.check(rules.compose([]))
    before, keys = rules.dump(config), values(config, MODEL, TRAJECTORY)
    freeze(config)
    for section, name, value in (
        (config, "seed", 1), (config.trainer, "devices", 2), (config.trainer.fsdp, "cpu_offload", True),
        (config.callbacks.samples, "rows", 1),
    ):  # fmt: skip
        with pytest.raises(AttributeError, match=name):
            setattr(section, name, value)
    assert rules.dump(config) == before
    assert values(config, MODEL, TRAJECTORY) == keys
    assert isinstance(config, rules.Config)


def test_copies_of_it_can_be_made() -> None:
    config = rules.check(rules.compose([]))
    freeze(config)
    assert rules.dump(copy.deepcopy(config)) == rules.dump(config)
    other = dataclasses.replace(config.data, seq_len=7)
    assert (other.seq_len, config.data.seq_len) != (7, 7)
    assert other.path == config.data.path
