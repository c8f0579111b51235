"""Verifies exact resume on the user's own config and machine: `python -m lmtrain.verify [overrides]`."""

import sys

from lmtrain import cli

main = cli.door("verify", "lmtrain.run.verify:verify")


if __name__ == "__main__":
    sys.exit(main())
