"""Many turns with a model: `python -m lmtrain.chat outputs/my_run`, in the terminal or, with --web, on a local page."""

import sys

from lmtrain import cli
from lmtrain.config.schema import Config


def chat(config: Config) -> int:
    """Answers lines from the terminal, or with chat.web on a page that it serves; returns the exit code."""
    if config.chat.web:
        from lmtrain.generation import web

        return web.serve(config)
    from lmtrain.generation import conversation

    return conversation.chat(config)


main = cli.main_of("chat", chat)


if __name__ == "__main__":
    sys.exit(main())
