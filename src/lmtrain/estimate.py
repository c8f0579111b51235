"""What a run would cost: `python -m lmtrain.estimate model=llama_7b trainer.devices=8 estimate.device=h100`."""

import sys

from lmtrain import cli
from lmtrain.config.schema import Config


def estimate(config: Config) -> int:
    """Prints parameters, FLOPs, sizes, memory under each strategy, time, and what would make it fit."""
    from lmtrain.planning import estimation

    return estimation.estimate(config)


main = cli.main_of("estimate", estimate)


if __name__ == "__main__":
    sys.exit(main())
