"""The data as the model sees it: `python -m lmtrain.inspect objective=sft data=chat_jsonl data.path=chats.jsonl`."""

import sys

from lmtrain import cli, errors, terminal
from lmtrain.config import trust
from lmtrain.config.schema import Config
from lmtrain.errors import UserError


def inspect(config: Config) -> int:
    """Prints what became of the rows, how long they are, and some of them token by token; writes inspect.html."""
    terminal.status.say("loading torch and transformers")
    from lmtrain.reports import inspect_page, inspection
    from lmtrain.run.quiet import quiet_libraries

    quiet_libraries()
    if config.run_dir is not None and config.inspect.text is None:
        raise UserError("run_dir is read with inspect.text only: the chapters of a memory that a text reads")
    if config.inspect.text is not None:
        return _show_chapters(config, config.inspect.text)
    found = inspection.look(config)
    console = terminal.console()
    inspection.show(found, console)
    if config.inspect.html is not None:
        print(f"written: {inspect_page.write(found, config.inspect.html)}")
    return errors.FINISHED


def _show_chapters(config: Config, text: str) -> int:
    """Prints which chapters of its memory the model of run_dir reads."""
    from lmtrain.reports import chapters
    from lmtrain.run_folder import trained

    if config.run_dir is None:
        raise UserError("inspect.text: which model? set run_dir to a run or an export with a memory")
    model, tokenizer = trained.load(config.run_dir, "best", trust.granted(config))
    terminal.status.stop()
    chapters.show(model, tokenizer, text, terminal.console(), config.inspect.html)
    return errors.FINISHED


def main(argv: list[str] | None = None) -> int:
    return cli.run("inspect", inspect, argv)


if __name__ == "__main__":
    sys.exit(main())
