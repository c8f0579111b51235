"""Chat with a model in the terminal or, with --web, in a browser: `python -m lmtrain.chat outputs/my_run`."""

import pkgutil

from lmtrain import cli
from lmtrain.config.schema import Config


def chat(config: Config) -> int:
    """Runs a chat in the terminal or, with chat.web, serves it as a local web page; returns the exit code."""
    place = "lmtrain.generation.web:serve" if config.chat.web else "lmtrain.generation.conversation:chat"
    return pkgutil.resolve_name(place)(config)


main = cli.main_of("chat", chat)
cli.run_as_program(__name__, main)
