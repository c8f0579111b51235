"""Cost estimate of a run: `python -m lmtrain.estimate model=llama_7b trainer.devices=8 estimate.device=h100`."""

from lmtrain import cli

main = cli.door("estimate", "lmtrain.planning.estimation:estimate")
cli.run_as_program(__name__, main)
