"""Finds learning rate and micro-batch size: `python -m lmtrain.tune [overrides]`; tune.apply=true trains with them."""

import sys

from lmtrain import cli

main = cli.door("tune", "lmtrain.planning.tuning:tune")


if __name__ == "__main__":
    sys.exit(main())
