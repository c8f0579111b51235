"""Training: composes and checks the config, builds, fits and exports. `python -m lmtrain.train [overrides]`."""

import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from lmtrain import cli
from lmtrain.distributed import ranks

if TYPE_CHECKING:
    from lmtrain.config.schema import Config


def train(config: "Config", again: "Callable[[list[str]], Config]", began: float) -> int:
    """Trains a model with `config`; returns the exit code. Slow imports are deferred until a status line is shown.

    Args:
        again: composes the config once more, with overrides that a budget has chosen.
        began: when the command was given, a time.time().
    """
    config = _with_updates(config)
    if config.budget.chosen is not None:
        from lmtrain.planning import budget

        config = budget.settle(config, began, lambda chosen: _with_updates(again(chosen)))
    from lmtrain.run.start import start

    return start(config)


def _with_updates(config: "Config") -> "Config":
    from lmtrain.run.start import keep_precision

    keep_precision(config)  # before what follows resolves auto
    if config.budget.updates is not None:
        from lmtrain.run import updates

        updates.settle(config)
    return config


def main(argv: list[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    began = ranks.began or time.time()
    try:
        return cli.run("train", lambda config, again: train(config, again, began), argv)
    finally:
        os.environ.pop(ranks.BEGAN, None)  # set by `settle`; the next command of this process has its own


if __name__ == "__main__":
    cli.program(["train", *sys.argv[1:]])
