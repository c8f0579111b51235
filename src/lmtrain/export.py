"""Export of a run's checkpoint to a Hugging Face folder: `python -m lmtrain.export run_dir=outputs/my_run`."""

from lmtrain import cli

main = cli.door("export", "lmtrain.exports.export:export", "loading torch, transformers and the model")
cli.run_as_program(__name__, main)
