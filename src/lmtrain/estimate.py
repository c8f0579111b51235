"""Cost estimate of a run: `python -m lmtrain.estimate model=llama_7b trainer.devices=8 estimate.device=h100`."""

import sys

from lmtrain import cli

main = cli.door("estimate", "lmtrain.planning.estimation:estimate")


if __name__ == "__main__":
    sys.exit(main())
