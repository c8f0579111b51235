"""Many turns with a model in the terminal: `python -m lmtrain.chat run_dir=outputs/my_run`."""

import sys

from lmtrain import cli
from lmtrain.config.schema import Config


def chat(config: Config) -> int:
    """Reads lines until the end of input and answers each; lines that begin with / are commands."""
    from lmtrain.generation import conversation

    return conversation.chat(config)


main = cli.main_of("chat", chat)


if __name__ == "__main__":
    sys.exit(main())
