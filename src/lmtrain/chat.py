"""Chat with a model in the terminal or, with --web, in a browser: `python -m lmtrain.chat outputs/my_run`."""

from typing import TYPE_CHECKING

from lmtrain import cli, terminal

if TYPE_CHECKING:
    from lmtrain.config.schema import Config


def chat(config: "Config") -> int:
    """Runs a chat in the terminal or, with chat.web, serves it as a local web page; returns the exit code."""
    terminal.status.say("loading torch, transformers and the model")
    if config.chat.web:
        from lmtrain.generation.web import serve

        return serve(config)
    from lmtrain.generation.conversation import chat as in_terminal

    return in_terminal(config)


main = cli.main_of("chat", chat)
cli.run_as_program(__name__, main)
