"""Text generation: `python -m lmtrain.generate run_dir=outputs/my_run generate.prompt="def main"`."""

import sys

from lmtrain import cli

main = cli.door("generate", "lmtrain.generation.generate:generate", "loading torch, transformers and the model")


if __name__ == "__main__":
    sys.exit(main())
