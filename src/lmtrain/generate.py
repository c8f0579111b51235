"""Text generation: `python -m lmtrain.generate run_dir=outputs/my_run generate.prompt="def main"`."""

from lmtrain import cli

main = cli.door("generate", "lmtrain.generation.generate:generate", "loading torch, transformers and the model")
cli.run_as_program(__name__, main)
