"""The data as the model sees it: `python -m lmtrain.inspect objective=sft data=chat_jsonl data.path=chats.jsonl`."""

import sys

from lmtrain import cli, terminal
from lmtrain.config.schema import Config


def inspect(config: Config) -> int:
    """Prints what became of the rows, how long they are, and some of them token by token; writes inspect.html."""
    terminal.status.say("loading torch and transformers")
    from lmtrain.reports import inspection

    return inspection.inspect(config)


main = cli.main_of("inspect", inspect)


if __name__ == "__main__":
    sys.exit(main())
