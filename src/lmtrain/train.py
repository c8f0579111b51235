"""Training: composes and checks the config, builds, fits and exports. `python -m lmtrain.train [overrides]`."""

import sys
import time
from typing import TYPE_CHECKING

from lmtrain import cli
from lmtrain.distributed import ranks

if TYPE_CHECKING:
    from lmtrain.config.schema import Config


def train(config: "Config") -> int:
    """Trains a model with `config`; returns the exit code. Slow imports are deferred until a status line is shown."""
    from lmtrain.run.start import start

    if config.budget.chosen is not None:
        from lmtrain.planning import budget

        chosen = budget.settle(config, BEGAN)
        if chosen:
            return main([*ranks.typed(), *chosen])
    return start(config)


BEGAN = time.time()
main = cli.main_of("train", train)


if __name__ == "__main__":
    if ranks.started_by() is not None:
        ranks.leave_after(main)
    sys.exit(main())
