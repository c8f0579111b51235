"""Which rate and which micro-batch: `python -m lmtrain.tune [overrides]`; `tune.apply=true` trains with them."""

import sys

from lmtrain import cli

main = cli.door("tune", "lmtrain.planning.tuning:tune")


if __name__ == "__main__":
    sys.exit(main())
