"""Which rate and which micro-batch: `python -m lmtrain.tune [overrides]`; `tune.apply=true` trains with them."""

import sys

from lmtrain import cli
from lmtrain.config.schema import Config


def tune(config: Config) -> int:
    """Looks for both in trials of their own, prints the overrides to type, and with tune.apply trains with them."""
    from lmtrain.planning import tuning

    return tuning.tune(config)


main = cli.main_of("tune", tune)


if __name__ == "__main__":
    sys.exit(main())
