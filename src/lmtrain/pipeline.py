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


def run(args: argparse.Namespace) -> int:
    """Runs the pipeline that the arguments name, or only prints it with --cfg; returns the exit code."""
    if args.multirun:
        raise errors.UserError(
            "a pipeline takes one value of each key: start it once for each, under a run.name of its own, or sweep one "
            "stage with `lmtrain train -m`"
        )
    terminal.status.say("reading the config")
    from lmtrain.config import compose as config
    from lmtrain.config import environment, trust
    from lmtrain.stages import definition, plan
    from lmtrain.stages import run as stages

    environment.trust(args.trust)
    words = [*trust.of_files(args.trust), *args.overrides]
    pipeline = definition.read(definition.find(definition.pipeline_of(words), args.config_dir))
    made = plan.make(pipeline, definition.sort(words, pipeline), args.config_dir)
    terminal.status.stop()
    if args.cfg:
        for one in made.stages:
            print(
                f"# stage {one.name}, in {one.run}: lmtrain.train {hide(' '.join(one.words))}\n"
                f"{config.dump(one.config)}"
            )
        return errors.FINISHED
    flags = ["--config-dir", args.config_dir] if args.config_dir else []
    return stages.run(made, [*words, *flags])


def main(argv: list[str] | None = None) -> int:
    ranks.limit_spinning()
    parser = argparse.ArgumentParser(prog="python -m lmtrain.pipeline", add_help=False, allow_abbrev=False)
    cli.add_flags(parser)
    args = parser.parse_intermixed_args(argv)
    if args.help:
        from lmtrain.config.defaults import conf_dir

        known = ", ".join(sorted(path.stem for path in (conf_dir() / "pipeline").glob("*.yaml")))
        print(HELP.format(what=cli.OTHERS["pipeline"], known=known))
        return errors.FINISHED
    try:
        return cli.plain(lambda: run(args))
    except KeyboardInterrupt:
        errors.print_error("interrupted (Ctrl-C); no stage was running, and the same command continues")
        return 130
    finally:
        terminal.status.stop()


if __name__ == "__main__":
    sys.exit(main())
