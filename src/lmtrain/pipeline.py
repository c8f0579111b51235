"""Runs the stages of a pipeline in order, each with lmtrain.train: `python -m lmtrain.pipeline pipeline=laptop`."""

import argparse
import sys

from lmtrain import cli, errors, terminal
from lmtrain.distributed import ranks
from lmtrain.secrets import hide

HELP = """{what}

usage: python -m lmtrain.pipeline pipeline=NAME [STAGE.key=value ...] [key=value ...] [--config-dir DIR] [--cfg]

  pipeline=laptop             one of conf/pipeline/ ({known}), or a file of yours: pipeline=my_stages.yaml
  sft.optimizer.lr=1e-4       a key of one stage, or of one evaluation
  trainer.accelerator=cpu     a key of all stages
  run.name=first              the folder, outputs/first; run.root and run.dir as of a run
  --trust FILE                a yaml file that you trust: it may set run.allow_target, what is read and where to write
  --cfg                       print the plan and each stage's config; nothing is started

The same command again skips what has finished and goes on with what has not; a stage that changed runs again, and
those that begin with what it exports. More: docs/pipeline.md"""


def run(words: list[str], config_dir: str | None, *, show: bool = False) -> int:
    """Runs the pipeline named in `words`, or only prints it if `show` is set; returns the exit code."""
    terminal.status.say("reading the config")
    from lmtrain.config import compose as config
    from lmtrain.stages import definition, plan
    from lmtrain.stages import run as stages

    pipeline = definition.read(definition.find(definition.pipeline_of(words), config_dir))
    typed = definition.sort(words, pipeline)
    made = plan.make(pipeline, typed, config_dir)
    terminal.status.stop()
    if show:
        for one in made.stages:
            print(
                f"# stage {one.name}, in {one.run}: lmtrain.train {hide(' '.join(one.words))}\n"
                f"{config.dump(one.config)}"
            )
        return errors.FINISHED
    flags = ["--config-dir", config_dir] if config_dir else []
    return stages.run(made, [*words, *flags])


def _run(args: argparse.Namespace) -> int:
    from lmtrain.config import environment, trust

    if args.multirun:
        raise errors.UserError(
            "a pipeline takes one value of each key: start it once for each, under a run.name of its own, or sweep one "
            "stage with `lmtrain train -m`"
        )
    environment.trust(args.trust)
    words = [*trust.of_files(args.trust), *args.overrides]
    return run(words, args.config_dir, show=args.cfg)


def main(argv: list[str] | None = None) -> int:
    ranks.limit_spinning()
    parser = argparse.ArgumentParser(prog="python -m lmtrain.pipeline", add_help=False, allow_abbrev=False)
    parser.add_argument("--help", "-h", action="store_true")
    parser.add_argument("--cfg", "-c", action="store_true")
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--config-dir", "-cd")
    parser.add_argument("--trust", action="append", default=[])
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_intermixed_args(argv)
    if args.help:
        from lmtrain.config.defaults import conf_dir

        known = ", ".join(sorted(path.stem for path in (conf_dir() / "pipeline").glob("*.yaml")))
        print(HELP.format(what=cli.OTHERS["pipeline"], known=known))
        return errors.FINISHED
    try:
        return cli.plain(lambda: _run(args))
    except KeyboardInterrupt:
        errors.print_error("interrupted (Ctrl-C); no stage was running, and the same command continues")
        return 130
    finally:
        terminal.status.stop()


if __name__ == "__main__":
    sys.exit(main())
