"""Finds learning rate and micro-batch size: `python -m lmtrain.tune [overrides]`; tune.apply=true trains with them."""

from lmtrain import cli

main = cli.door("tune", "lmtrain.planning.tuning:tune")
cli.run_as_program(__name__, main)
