"""How good a model is: `python -m lmtrain.evaluate run_dir=outputs/my_run data=text data.val_path=a.txt`."""

import sys

from lmtrain import cli, errors, terminal
from lmtrain.config.schema import Config
from lmtrain.errors import RunError, UserError


def evaluate(config: Config) -> int:
    """Prints a table of scores, of a second model beside them, and writes evaluations/<name>.json."""
    from lmtrain.outputs import evaluation_data
    from lmtrain.run import evaluation, evaluation_file, harness, subject
    from lmtrain.run.build import quiet_libraries

    quiet_libraries()
    if config.run_dir is None:
        raise UserError("which model? set run_dir=outputs/<name>, an exported folder or a hub name")
    if config.trainer.devices not in ("auto", 1, "1"):
        raise UserError(f"trainer.devices={config.trainer.devices}: lmtrain.evaluate uses one device")
    e = config.evaluate
    tasks = harness.find(config) if e.tasks else None
    who = subject.load(config.run_dir, e.checkpoint, config)
    if tasks is not None:
        words, score = tasks.words, lambda model: harness.evaluate(model, config, tasks)
    else:
        chosen, words = evaluation_data.chosen(config, who.own)
        score = lambda model: evaluation.evaluate(model, config, chosen)  # noqa: E731
    report = evaluation_file.Results(config, words, [(who, score(who))])
    if e.against is not None:
        try:
            other = subject.load(e.against, e.checkpoint, config)
            report.models.append((other, score(other)))
            report.check_same_rows()
        except (UserError, RunError) as error:
            report.models = report.models[:1]
            kept = f"{error}; the scores of {who.name} alone are kept: {report.write()}"
            raise type(error)(kept) from error
    terminal.console().print(report.table())
    print(f"written: {report.write()}")
    return errors.FINISHED


def main(argv: list[str] | None = None) -> int:
    # The model is run_dir: the sizes of the one that would be trained bound nothing here.
    unbounded = "model.max_position_embeddings=1000000"
    return cli.run("evaluate", evaluate, [unbounded, *(sys.argv[1:] if argv is None else argv)])


if __name__ == "__main__":
    sys.exit(main())
