"""Export of a run's checkpoint to a Hugging Face folder: `python -m lmtrain.export run_dir=outputs/my_run`."""

import sys

from lmtrain import cli

main = cli.door("export", "lmtrain.exports.export:export", "loading torch, transformers and the model")


if __name__ == "__main__":
    sys.exit(main())
