"""Many turns with a model in the terminal: `python -m lmtrain.chat outputs/my_run`."""

import sys

from lmtrain import cli
from lmtrain.config.schema import Config


def chat(config: Config) -> int:
    """Answers lines from the terminal; returns the exit code."""
    from lmtrain.generation import conversation

    return conversation.chat(config)


main = cli.main_of("chat", chat)


if __name__ == "__main__":
    sys.exit(main())
