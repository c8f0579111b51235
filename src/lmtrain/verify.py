"""Proves exact resume on your own config and machine: `python -m lmtrain.verify [overrides]`."""

import sys

from lmtrain import cli
from lmtrain.config.schema import Config


def verify(config: Config) -> int:
    """Trains a few steps whole, then killed and resumed; 0 where rows, numbers and weights are equal, 1 if not."""
    from lmtrain.run.verify import verify

    return verify(config)


main = cli.main_of("verify", verify)


if __name__ == "__main__":
    sys.exit(main())
