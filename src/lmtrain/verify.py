"""Verifies exact resume on the user's own config and machine: `python -m lmtrain.verify [overrides]`."""

from lmtrain import cli

main = cli.door("verify", "lmtrain.run.verify:verify")
cli.run_as_program(__name__, main)
