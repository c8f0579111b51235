"""The data as the model sees it: `python -m lmtrain.inspect objective=sft data=chat_jsonl data.path=chats.jsonl`."""

import sys

from lmtrain import cli, errors
from lmtrain.schema import Config


def inspect(config: Config) -> int:
    """Prints what became of the rows, how long they are, and some of them token by token; writes inspect.html."""
    from rich.console import Console

    from lmtrain import inspect_page, inspection
    from lmtrain.build import quiet_libraries

    quiet_libraries()
    found = inspection.look(config)
    console = Console()
    inspection.show(found, console)
    if config.inspect.html is not None:
        print(f"written: {inspect_page.write(found, config.inspect.html)}")
    return errors.FINISHED


def main(argv: list[str] | None = None) -> int:
    return cli.run("inspect", inspect, argv)


if __name__ == "__main__":
    sys.exit(main())
