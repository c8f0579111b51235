"""Training: composes and checks the config, builds, fits and exports. `python -m lmtrain.train [overrides]`."""

import os
import sys
import time
from typing import TYPE_CHECKING

from lmtrain import cli
from lmtrain.distributed import ranks

if TYPE_CHECKING:
    from lmtrain.config.schema import Config


def train(config: "Config") -> int:
    """Trains a model with `config`; returns the exit code. Slow imports are deferred until a status line is shown."""
    from lmtrain.run.start import keep_precision, start

    keep_precision(config)  # before what follows resolves auto

    if config.budget.updates is not None:
        from lmtrain.run import updates

        updates.settle(config)
    if config.budget.chosen is not None:
        from lmtrain.planning import budget

        chosen = budget.settle(config, _began or time.time())
        if chosen:
            return main([*ranks.typed(), *chosen])
    return start(config)


_main = cli.main_of("train", train)
_began: float | None = None  # when the command that this process carries out was given, a time.time()


def main(argv: list[str] | None = None) -> int:
    """Runs a command, which calls this once more if a budget chooses further overrides; returns the exit code."""
    global _began
    before, _began = _began, _began or ranks.began or time.time()
    try:
        return _main(argv)
    finally:
        _began = before
        if before is None:
            os.environ.pop(ranks.BEGAN, None)  # set by `settle`; the next command of this process has its own


if __name__ == "__main__":
    cli.program(["train", *sys.argv[1:]])
