"""A run's checkpoint to a Hugging Face folder: `python -m lmtrain.export run_dir=outputs/my_run`."""

import sys

from lmtrain import cli, terminal
from lmtrain.config.schema import Config


def export(config: Config) -> int:
    """Writes <run_dir>/export, or export_merged, from the checkpoint that export.checkpoint names."""
    terminal.status.say("loading torch, transformers and the model")
    from lmtrain.exports import export

    return export.export(config)


main = cli.main_of("export", export)


if __name__ == "__main__":
    sys.exit(main())
