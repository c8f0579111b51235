"""Many turns with a model in the terminal: `python -m lmtrain.chat run_dir=outputs/my_run`."""

import sys
from typing import TYPE_CHECKING

from lmtrain import cli, errors
from lmtrain.config import trust
from lmtrain.config.schema import Config
from lmtrain.errors import UserError

if TYPE_CHECKING:
    from lmtrain.generation.conversation import Talk

HELP = """/reset           begin anew
/system [TEXT]   set the system turn (without text: none) and begin anew
/save [FILE]     add the conversation to FILE (chat.jsonl), as data=chat_jsonl reads it
/exit            leave, as Ctrl-D does; Ctrl-C stops an answer"""


def chat(config: Config) -> int:
    """Reads lines until the end of input and answers each; lines that begin with / are commands."""
    from lmtrain.generation.conversation import Talk
    from lmtrain.run.quiet import quiet_libraries
    from lmtrain.run_folder import subject, trained

    quiet_libraries()
    if config.run_dir is None:
        raise UserError("which model? set run_dir=outputs/<name>, an exported folder or a hub name")
    model, tokenizer = trained.load(config.run_dir, config.generate.checkpoint, trust.granted(config))
    subject.place(model, config.trainer.accelerator)
    talk = Talk(model, tokenizer, config.generate, config.seed)
    print(HELP, flush=True)
    while True:
        try:
            line = input("\n> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return errors.FINISHED
        if line == "/exit":
            return errors.FINISHED
        try:
            turn(talk, line)
        except UserError as error:
            errors.print_error(str(error))
        except KeyboardInterrupt:
            print("\n(stopped; this turn is forgotten)", flush=True)


def turn(talk: "Talk", line: str) -> None:
    """One line of the user's: a command or a question."""
    command, _, rest = line.partition(" ")
    if command == "/reset":
        talk.reset()
        print("(a new conversation)")
    elif command == "/system":
        talk.system = rest.strip() or None
        talk.reset()
        print("(a new conversation, with this system turn)" if talk.system else "(a new conversation)")
    elif command == "/save":
        print(f"(written: {talk.save(rest.strip() or 'chat.jsonl')})")
    elif command.startswith("/"):
        print(HELP)
    elif line:
        talk.ask(line, lambda text: print(text, end="", flush=True), lambda words: print(f"({words})"))
        print()


def main(argv: list[str] | None = None) -> int:
    return cli.run("chat", chat, argv)


if __name__ == "__main__":
    sys.exit(main())
