"""The command line: composes the config once with Hydra and turns every mistake into one clear message.

Imports neither torch nor lightning, so `--help` and a misspelt key answer at once.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from lmtrain import errors
from lmtrain.errors import UserError
from lmtrain.orphans import is_first

if TYPE_CHECKING:
    from lmtrain.schema import Config

TYPED = "LMTRAIN_TYPED"  # the environment variable that tells ranks the command line their parent was given
VERBS = {
    "train": "train a model: compose, check, train, export",
    "prepare": "source text to tokenizer and bins, without training",
    "inspect": "the data as the model sees it: samples with their mask, lengths, what was cut or dropped",
    "export": "a run's checkpoint to a Hugging Face folder",
    "generate": "text from a run, an export or a hub name",
    "verify": "proves exact resume on this very config and machine",
}


OTHERS = {"sweep_report": "a table and a picture of a sweep's trials"}  # commands that read no config


def conf_dir() -> Path:
    """The folder of default configs: inside the package once installed, at the top of a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parents[1] / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise UserError(f"lmtrain's conf/ is missing (looked beside {package}): reinstall the package.")


def run(verb: str, action: Callable[["Config"], int], argv: list[str] | None = None) -> int:
    """Runs one verb: parses `argv`, composes and checks the config, calls `action`; returns the exit code."""
    try:
        args = _parse(verb, sys.argv[1:] if argv is None else argv)
        if args.help:
            print(help_text(verb))
            return errors.FINISHED
        if args.cfg and args.overrides[:1] == ["job"]:
            args.overrides = args.overrides[1:]  # Hydra's spelling: --cfg job
        if args.multirun:
            from lmtrain import sweep

            return sweep.run(verb, args.overrides, args.config_dir, args.config_name)
        from lmtrain import config

        composed = config.compose(args.overrides, args.config_dir, args.config_name)
        if args.cfg:
            print(config.to_yaml(composed), end="")
            return errors.FINISHED
        return action(config.check(composed))
    except (UserError, errors.RunError) as error:
        if isinstance(error, errors.RunError) or is_first():  # all ranks find the same mistake
            print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        print_error("interrupted (Ctrl-C); what was complete is kept, the same command starts again")
        return 130


def print_error(message: str) -> None:
    """Writes `message` to stderr, its first word in red on a terminal."""
    red, off = ("\033[1;31m", "\033[0m") if sys.stderr.isatty() and not os.environ.get("NO_COLOR") else ("", "")
    print(f"{red}error:{off} {message}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help says how)")


def _parse(verb: str, argv: list[str]) -> argparse.Namespace:
    """Flags and overrides, in any order."""
    parser = _Parser(prog=f"python -m lmtrain.{verb}", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--cfg", "-c", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--config-name", "-cn", default="config")
    parser.add_argument("overrides", nargs="*")
    args, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        from lmtrain import overrides

        raise UserError(overrides.unknown_flag(unknown[0]))
    return args


def help_text(verb: str) -> str:
    """What `--help` prints: usage, the groups with their options, the keys used most."""
    folder = conf_dir()
    groups = "\n".join(
        f"  {group.name:<11}{', '.join(sorted(o.stem for o in group.glob('*.yaml') if o.stem != 'base'))}"
        for group in sorted(folder.iterdir())
        if group.is_dir() and any(group.glob("*.yaml"))
    )
    return f"""{VERBS[verb]}

usage: python -m lmtrain.{verb} [group=option ...] [key=value ...] [--config-dir DIR] [--cfg] [-m]

groups and their options (defaults in {folder}):
{groups}

keys used most:
  run.name=my_run            a named run: the same command again continues it
  trainer.max_steps=2000     optimizer steps (or trainer.max_epochs)
  data.path=my.txt           your own text, with data=text | jsonl | parquet | bins
  data.seq_len=1024          tokens per row
  data.global_batch_size=64  rows per optimizer step, whatever the number of devices
  data.micro_batch_size=8    rows per device per forward
  optimizer.lr=6e-4          peak learning rate

  --cfg                      print the composed config with every key and its default
  --config-dir DIR           a folder of your own configs, laid out like conf/
  -m key=a,b                 a sweep: one run per combination

verbs: {", ".join(VERBS)}"""


def main(argv: list[str] | None = None) -> int:
    """`lmtrain VERB [overrides]`."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        width = max(map(len, [*VERBS, *OTHERS]))
        print("usage: lmtrain VERB [overrides]\n")
        print("\n".join(f"  {verb:<{width}}  {what}" for verb, what in (VERBS | OTHERS).items()))
        print("\n`lmtrain VERB --help` says more.")
        return errors.FINISHED
    verb, rest = argv[0], argv[1:]
    if verb not in VERBS | OTHERS:
        import difflib

        near = difflib.get_close_matches(verb, VERBS | OTHERS, n=1)
        print_error(f"there is no verb {verb!r}{f'; did you mean {near[0]!r}?' if near else ''} ({', '.join(VERBS)})")
        return errors.WRONG_INPUT
    return importlib.import_module(f"lmtrain.{verb}").main(rest)
