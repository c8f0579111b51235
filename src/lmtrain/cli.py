"""The command line, `lmtrain VERB ...`: composes the config with Hydra and reports each mistake as one clear message.

Imports neither torch nor lightning, so `--help` and messages about misspelt keys appear at once.
"""

import argparse
import contextlib
import dataclasses
import importlib
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lmtrain import errors, terminal
from lmtrain.config.defaults import conf_dir, options_of, verb_help
from lmtrain.distributed import ranks, spinning
from lmtrain.distributed.ranks import print_in_turn
from lmtrain.distributed.stop_signals import Preempted, preempted_by_signals
from lmtrain.errors import RunError, UserError

if TYPE_CHECKING:
    from lmtrain.config.schema import Config
    from lmtrain.first_words import words

HELP = Path(__file__).with_name("help")  # the texts of --help
VERBS = {  # commands that take a config, and what they do
    "train": "train a model: compose, check, train, export",
    "prepare": "source text to tokenizer and bins, or rows to examples, without training",
    "inspect": "the data as the model sees it: samples with their mask, lengths, what was cut or dropped",
    "export": "a run's checkpoint to a Hugging Face folder",
    "generate": "text from a run, an export or a hub name",
    "chat": "a conversation with a run, an export or a hub model, in the terminal or in the browser (--web)",
    "evaluate": "loss, perplexity, bits per byte, answers or margins of a run, an export or a hub name",
    "estimate": "parameters, FLOPs, memory and time of a run from its config alone, and what would make it fit",
    "tune": "a learning rate and the largest micro-batch that suit a run; tune.apply=true trains with them",
    "verify": "proves exact resume on this very config and machine",
}
OTHERS = {  # commands that have a command line of their own
    "pipeline": "stages one after another, from raw text to an aligned model: pipeline=laptop",
    "sweep_report": "a table and a picture of a sweep's trials",
    "report": "a run as one HTML page: curves, samples, what it was trained on; several runs compared",
    "runs": "the runs under a folder: status, step, best score, age",
    "explain": "where values come from: a key, a section or the whole composition",
    "doctor": "what this machine can do, and what is missing",
    "new": "the skeleton of a reward, dataset, environment, objective, model, ... of your own, with its test",
}
PRINTING = ("inspect", "estimate", "generate", "chat")  # commands that end with the reader of their output
FIRST = ("train", "inspect", "chat", "evaluate", "report")  # what people need first, in this order


def main_of(verb: str, action: Callable[["Config"], int]) -> Callable[..., int]:
    """Returns the `main` of a verb that takes a config; it maps the arguments after the verb to an exit code."""

    def main(argv: list[str] | None = None) -> int:
        return run(verb, action, argv)

    return main


def _named(place: str) -> Any:
    """Imports a module and returns one of its functions; `place` is written as module:function."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def door(verb: str, place: str, meanwhile: str = "loading torch and transformers") -> Callable[..., int]:
    """Returns the `main` of a verb whose action `place` (module:function) is imported only after reading the config.

    meanwhile: the status line shown during the import.
    """

    def action(config: "Config") -> int:
        terminal.status.say(meanwhile)
        return int(_named(place)(config))

    return main_of(verb, action)


def say_first(verb: str, doing: str, more: str = "") -> None:
    """Says at once what a command begins with: a temporary status line on a terminal, a lasting line in a log (stderr).

    more: what the log says besides.
    """
    terminal.status.say(doing)
    alone = ranks.started_by() is None and "LMTRAIN_TRIAL" not in os.environ and ranks.BEGAN not in os.environ
    if alone:
        terminal.say_in_log(f"lmtrain {verb}: {doing}{more}")


def folder_door(verb: str, place: str, meaning: str, default: str | None = None, doing: str = "") -> Callable[..., int]:
    """Returns the `main` of a command that takes a folder and no config; `place` is as in `door`.

    meaning: what the folder is, for --help.
    default: the folder if none is named; None: one has to be named.
    doing: what takes seconds, said at once.
    """

    def main(argv: list[str] | None = None) -> int:
        parser = Parser(prog=f"python -m lmtrain.{verb}", description=OTHERS[verb])
        parser.add_argument("folder", type=Path, nargs="?", default=default, help=meaning)

        def action() -> int:
            folder = parser.parse_args(argv).folder
            if folder is None:
                raise UserError(f"which folder? {meaning}: python -m lmtrain.{verb} FOLDER")
            if doing:
                say_first(verb, doing)
            return int(_named(place)(folder.expanduser()))

        return plain(action)

    return main


def run_as_program(module: str, main: Callable[[], int]) -> None:
    """Ends the process with main's exit code if `module` is the program that runs (python -m lmtrain.VERB)."""
    if module == "__main__":
        ranks.leave(main())


def program(argv: list[str] | None = None) -> NoReturn:
    """Runs `lmtrain VERB [overrides]` and ends the process with its exit code; a time budget counts from its start."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["train"]:
        ranks.began = ranks.process_began()
    ranks.leave(main(words))


def plain(action: Callable[[], int], goes_on: bool = False) -> int:
    """Runs a command and returns its exit code. Errors that can be expected are printed as one message.

    goes_on: whether the command does more than print, so that it goes on if its output can't be written any more.
    """
    terminal.prepare_output(goes_on)
    try:
        code = action()
        sys.stdout.flush()
        return code
    except (UserError, RunError) as error:
        print_in_turn(error)
        return error.exit_code
    except BaseException as error:
        if isinstance(error, terminal.OutputGone) and error.left:  # as head and less do
            return errors.FINISHED
        message = _message_of(error)
        if message is None:
            raise
        errors.print_error(message)
        return _CODES.get(type(error), errors.FAILED)
    finally:
        terminal.status.stop()


_CODES = {Preempted: errors.PREEMPTED, KeyboardInterrupt: 130}


def _message_of(error: BaseException) -> str | None:
    """Returns the message for an error that a machine, a user or a file causes; None for any other, which is a bug."""
    if isinstance(error, terminal.OutputGone | Preempted):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (Ctrl-C); completed work is kept, and the same command continues"
    if isinstance(error, MemoryError | RuntimeError | SystemError) and errors.out_of_memory(error):
        return "out of memory: this machine's, user's or job's limit is used up: free some or raise it"
    if type(error).__name__ == "PanicException":  # of Rust libraries; a BaseException but no Exception
        return f"tokenizers, safetensors or another Rust library failed on a file: {error}"
    return errors.no_right(error)


_ONLY_PRINT = {"--cfg", "-c", "--why", "--info", "-i", "--help", "-h", "--version"}  # with these every verb only prints


def run(verb: str, action: Callable[..., int], argv: list[str] | None = None) -> int:
    """Runs one verb: parses `argv`, composes and checks the config, calls `action`; returns the exit code.

    The action of `train` is also given a function that composes the config once more, with further overrides.
    """
    spinning.watch()
    words = sys.argv[1:] if argv is None else argv
    with preempted_by_signals() if verb == "train" else contextlib.nullcontext():
        return plain(lambda: _run(verb, action, words), goes_on=verb not in PRINTING and _ONLY_PRINT.isdisjoint(words))


def _run(verb: str, action: Callable[..., int], words: list[str]) -> int:
    args = parse(verb, words)
    if args.version:
        return _print_version()
    if args.help:
        print(help_text(verb))
        return errors.FINISHED
    if args.cfg:
        _drop_job(args.overrides)
    _say_that_it_runs(verb, args, words)
    from lmtrain.config import environment

    environment.trust(args.trust)
    if args.info:
        return _show_info(args)
    if any(word.startswith("pipeline=") for word in args.overrides):
        raise UserError(f"pipelines are run by `lmtrain pipeline`, and `lmtrain {verb}` is one stage: leave it out")
    read = _read_words(verb, args, words)
    if args.multirun:
        return _sweep(verb, args)
    from lmtrain.config.override_text import typed_keys
    from lmtrain.first_words import words as first
    from lmtrain.run import beforehand

    checked = _composed(verb, args, read, words)
    if args.cfg or args.why:
        return errors.FINISHED
    if checked.run_dir is None and verb in first.OF_MODELS:
        raise UserError(first.which_model(verb, named=typed_keys(read.typed).get("model")))
    beforehand.refuse(verb, checked)
    if verb != "train":
        return action(checked)

    def again(chosen: list[str]) -> "Config":
        more = dataclasses.replace(read, typed=[*read.typed, *chosen])
        args.overrides = more.overrides
        return _composed(verb, args, more, [*words, *chosen])

    return action(checked, again)


def _say_that_it_runs(verb: str, args: argparse.Namespace, words: list[str]) -> None:
    terminal.be_quiet("run.quiet=true" in words)
    if args.cfg or args.why or args.info:  # on a terminal alone
        terminal.status.say("reading the config")
    else:
        say_first(verb, "reading the config", ", then the data; the plan follows" if verb == "train" else "")


def _composed(verb: str, args: argparse.Namespace, read: "words.Read", argv: list[str]) -> "Config":
    """Returns the checked config; with --cfg it is printed as soon as it is composed.

    argv: the words after the verb, as typed.
    """
    from lmtrain.config import compose as config
    from lmtrain.config import effect, trust
    from lmtrain.config.override_text import Command, typed_keys

    def default(key: str) -> Any:
        """Returns the value that a key has if only the other overrides are given."""
        others = [o for o in args.overrides if key not in typed_keys([o])]
        return effect.default_in(config.compose(others, args.config_dir, args.config_name, foreign=trust.JUDGED))(key)

    foreign = None if read.config is None else trust.Foreign(read.config, read.ours)
    made = config.composition(args.overrides, args.config_dir, args.config_name, foreign=foreign)
    proposals = [*read.proposals, *made.proposals]
    if args.why:
        print(*(terminal.visible(line) for line in read.reasons(proposals)), sep="\n", end="\n\n")
    if args.cfg:
        print(config.to_yaml(made.tree, args.package), end="", flush=True)
    notes = tuple(proposal.reason for proposal in proposals if proposal.reason and proposal.in_plan)
    # After printing, so that --cfg shows invalid configs too.
    checked = config.check(made.tree, Command(tuple(argv), tuple(read.of_file), notes))
    terminal.be_quiet(checked.run.quiet)
    # A recipe for training, as budget.updates, is proposed for every verb that reads the data.
    effect.refuse(verb, read.typed, checked, default)
    return checked


def _read_words(verb: str, args: argparse.Namespace, argv: list[str]) -> "words.Read":
    """Replaces bare words in args.overrides by the overrides they stand for; prints and returns what was inferred."""
    from lmtrain.first_words import words

    read = words.read(verb, args.overrides, args.config_dir, args.config_name)
    if read.config is not None and args.multirun:
        found = f"-m {read.config}: a sweep takes a config as an experiment"
        raise UserError(f"{found}: put it into DIR/experiment/, --config-dir DIR experiment={read.config.stem}")
    args.overrides, args.config_dir, args.config_name = read.overrides, read.config_dir, read.config_name
    if read.proposals and verb == "train" and not args.why and "run.quiet=true" not in argv:
        terminal.say_once(read.proposals[0].reason)
    return read


def _sweep(verb: str, args: argparse.Namespace) -> int:
    terminal.status.stop()
    from lmtrain.sweeps import run as sweep

    do = sweep.show if args.cfg else sweep.run
    return do(verb, args.overrides, args.config_dir, args.config_name)


def _drop_job(overrides: list[str]) -> None:
    """Removes `job` from Hydra's spelling `--cfg job`; raises UserError for --cfg hydra and --cfg all."""
    for word in ("hydra", "all"):
        if word in overrides:
            raise UserError(f"--cfg {word}: write --cfg or --cfg job, and --info for Hydra's own settings")
    if "job" in overrides:
        overrides.remove("job")


def _show_info(args: argparse.Namespace) -> int:
    """Prints Hydra's own --info: where configs come from and in which order they are merged."""
    from lmtrain.config import compose as config
    from lmtrain.config.config_files import folders_of, hydra_over

    kinds = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
    asked = [word for word in args.overrides if word in kinds]
    overrides = [word for word in args.overrides if word not in asked]
    overrides = config.composition(overrides, args.config_dir, args.config_name).words  # with lmtrain's own messages
    folders, search = folders_of(args.config_dir, args.config_name)
    with hydra_over(folders) as hydra:
        hydra.show_info(asked[0] if asked else "all", args.config_name, [*search, *overrides])
    return errors.FINISHED


class Parser(argparse.ArgumentParser):
    """A parser whose errors are messages like all others."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help says how)")


def _print_version() -> int:
    import platform

    from lmtrain import __version__

    print(f"lmtrain {__version__} (Python {platform.python_version()})")
    return errors.FINISHED


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of verbs and pipelines, and the overrides."""
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--trust", action="append", default=[])
    parser.add_argument("overrides", nargs="*")


def parse(verb: str, argv: list[str]) -> argparse.Namespace:
    """Parses flags and overrides, in any order."""
    parser = Parser(prog=f"python -m lmtrain.{verb}", add_help=False, allow_abbrev=False)
    add_flags(parser)
    parser.add_argument("--config-name", "-cn", default="config")
    parser.add_argument("--info", "-i", action="store_true")
    parser.add_argument("--why", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--resolve", action="store_true")  # values are shown resolved anyway
    parser.add_argument("--version", action="store_true")
    parser.add_argument("--config")
    if verb == "generate":
        parser.add_argument("--prompt")
    if verb == "chat":
        parser.add_argument("--web", action="store_true")
    args, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        from lmtrain.config import explain as overrides

        raise UserError(overrides.unknown_flags(unknown, argv, verb))
    if (args.package or args.resolve) and (args.multirun or not args.cfg):
        raise UserError("--package and --resolve go with --cfg, of a single run")
    if args.why and args.multirun:
        raise UserError("--why goes with a single run: type one value of each key, without -m")
    if args.config is not None:
        args.overrides.insert(0, args.config)
    if args.trust:
        from lmtrain.config import trust

        args.overrides[:0] = trust.of_files(args.trust)
    if verb == "chat" and args.web:
        args.overrides.append("chat.web=true")
    if verb == "generate" and args.prompt is not None:
        from lmtrain.config.override_text import as_typed

        prompt = sys.stdin.read().removesuffix("\n") if args.prompt == "-" else args.prompt
        args.overrides.append(as_typed("generate.prompt", prompt))
    return args


_MODEL = "MODEL is a run's folder, an exported folder or a name of the hub, OWNER/NAME"
_NEEDS = {  # what a verb takes besides settings, and what that is
    "chat": ("MODEL", _MODEL),
    "evaluate": ("MODEL", _MODEL),
    "generate": ('MODEL "PROMPT"', _MODEL),
    "export": ("RUN", "RUN is a run's folder"),
}
_TAKES = ("[DATA] [CONFIG]", "DATA is files or a folder of text or rows, CONFIG a yaml of settings")


def help_text(verb: str) -> str:
    """Returns the text of `--help`: usage, the groups with their options, the most used keys."""
    folder = conf_dir()
    groups = "\n".join(
        f"  {group.name:<11}{', '.join(options_of(group.name, [folder]))}"
        for group in sorted(folder.iterdir())
        if group.is_dir() and group.name != "pipeline" and any(group.glob("*.yaml"))
    )
    text = (HELP / "verb.txt").read_text(encoding="utf-8").removesuffix("\n")
    usage, verbs = verb_help(verb, folder), ", ".join(VERBS)
    needs, about = _NEEDS.get(verb, _TAKES)
    return text.format(
        verb=verb, what=VERBS[verb], needs=needs, about=about, usage=usage, folder=folder, groups=groups, verbs=verbs
    )


def _no_verb(word: str, rest: list[str]) -> str:
    """Returns the message for a first word that is not a verb, with the command that was probably meant."""
    import difflib

    from lmtrain.config.aliases import VERBS as THEIRS

    if Path(word).exists() or "=" in word or word.startswith("-"):
        return f"which command? to train: lmtrain train {shlex.join([word, *rest])} (lmtrain --help lists the others)"
    if word in THEIRS:
        return f"there is no command {word!r}; here it is: lmtrain {THEIRS[word]} {shlex.join(rest)}".rstrip()
    near = difflib.get_close_matches(word, VERBS | OTHERS, n=1)
    hint = f"; did you mean lmtrain {shlex.join([near[0], *rest])}?" if near else ""
    return f"there is no command {word!r}{hint} ({', '.join(VERBS | OTHERS)})"


def main(argv: list[str] | None = None) -> int:
    """Runs `lmtrain VERB [overrides]` and returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        every = VERBS | OTHERS
        rows = {v: f"  {v:<{max(map(len, every))}}  {every[v]}" for v in every}
        print("usage: lmtrain COMMAND [overrides]\n\nto begin with:\n" + "\n".join(rows[v] for v in FIRST))
        print("\nthe others:\n" + "\n".join(line for v, line in rows.items() if v not in FIRST))
        print("\n`lmtrain COMMAND --help` says more, `lmtrain --version` which version this is.")
        return errors.FINISHED
    if argv[0] == "--version":
        return _print_version()
    verb, rest = argv[0], argv[1:]
    if verb not in VERBS | OTHERS:
        errors.print_error(_no_verb(verb, rest))
        return errors.WRONG_INPUT
    job = _named(f"lmtrain.{verb}:main")
    if verb in ("train", "evaluate") and ranks.started_by() is not None:
        ranks.leave_after(lambda: job(rest))
    return job(rest)
