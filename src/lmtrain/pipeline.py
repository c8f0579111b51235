"""Runs the stages of a pipeline in order, each with lmtrain.train: `python -m lmtrain.pipeline pipeline=laptop`."""

import argparse

from lmtrain import cli, errors
from lmtrain.secrets import hide


def run(args: argparse.Namespace) -> int:
    """Runs the pipeline that the arguments name, or only prints it with --cfg; returns the exit code."""
    if args.multirun:
        raise errors.UserError("a pipeline takes one value of each key: start it once for each, under its own run.name")
    cli.say_first("pipeline", "reading the configs of all stages")
    from lmtrain.config import compose as config
    from lmtrain.config import environment, trust
    from lmtrain.stages import definition, plan
    from lmtrain.stages import run as stages

    named = next((word for word in args.overrides if "=" not in word and word[:1] != "~"), None)
    if named is not None and not any(word.startswith("pipeline=") for word in args.overrides):
        args.overrides[args.overrides.index(named)] = f"pipeline={named}"  # `pipeline laptop`
    environment.trust(args.trust)
    words = [*trust.of_files(args.trust), *args.overrides]
    pipeline = definition.read(definition.find(definition.pipeline_of(words), args.config_dir))
    made = plan.make(pipeline, definition.sort(words, pipeline), args.config_dir)
    if args.cfg:
        for one in made.stages:
            print(f"# stage {one.name}, in {one.run}: lmtrain.train {hide(' '.join(one.words))}")
            print(config.dump(one.config))
        return errors.FINISHED
    flags = ["--config-dir", args.config_dir] if args.config_dir else []
    return stages.run(made, [*words, *flags])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lmtrain.pipeline", add_help=False, allow_abbrev=False)
    cli.add_flags(parser)
    args = parser.parse_intermixed_args(argv)
    if args.help:
        from lmtrain.config.defaults import conf_dir

        known = ", ".join(sorted(path.stem for path in (conf_dir() / "pipeline").glob("*.yaml")))
        text = (cli.HELP / "pipeline.txt").read_text(encoding="utf-8").removesuffix("\n")
        print(text.format(what=cli.OTHERS["pipeline"], known=known))
        return errors.FINISHED
    return cli.plain(lambda: run(args), goes_on=True)


cli.run_as_program(__name__, main)
