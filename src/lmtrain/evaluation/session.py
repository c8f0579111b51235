"""One evaluation, from its config to its table and files: in this process, or on ranks that each hold a whole model.

Every rank reads all data and scores every n-th of the batches that a single device would form, so the scores do not
depend on the number of ranks.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

from lmtrain import errors, terminal
from lmtrain.config import compose as rules
from lmtrain.config import trust
from lmtrain.config.effect import names_data
from lmtrain.config.schema import Config
from lmtrain.distributed import devices, ranks
from lmtrain.distributed import process_group as world
from lmtrain.errors import RunError, UserError
from lmtrain.evaluation import data, harness, results, scoring, subject
from lmtrain.run import launch
from lmtrain.run.start import place


def start(config: Config) -> int:
    """Evaluates on one device, on ranks that it starts, or as a rank of an external launcher; returns the exit code.

    Raises:
        UserError: the requested evaluation is not possible.
    """
    _refuse_addresses(config)
    layout, t = ranks.find(), config.trainer
    if t.strategy not in ("auto", "ddp"):
        raise UserError(f"trainer.strategy={t.strategy}: lmtrain.evaluate holds a whole model on each device (ddp)")
    if layout is not None:
        place(config, layout)
        return _as_rank(config)
    if t.num_nodes > 1:
        raise UserError(f"trainer.num_nodes={t.num_nodes}: start one command per node, with torchrun or srun")
    if t.devices == "auto":
        t.devices = 1
    if int(t.devices) == 1:
        return evaluate(config)
    devices.resolve_auto(config)
    with tempfile.TemporaryDirectory(prefix="lmtrain_") as folder:
        code = launch.launch_ranks("lmtrain.evaluation.session", config, Path(folder), int(t.devices))
    if code == -signal.SIGINT:
        raise KeyboardInterrupt
    if code < 0:
        errors.print_error(f"stopped by {signal.Signals(-code).name}; nothing was written")
        return errors.FAILED
    return code


def _refuse_addresses(config: Config) -> None:
    """Raises UserError if the run's own data, as named in its config.yaml, is at a URL and the file isn't trusted."""
    if config.evaluate.tasks or names_data(config):
        return
    for name in ("config.yaml", "lmtrain_config.yaml"):
        file = Path(str(config.run_dir)).expanduser() / name
        if file.is_file():
            trust.refuse_addresses(rules.load(file, trust.granted(config)).data, file)


def evaluate(config: Config) -> int:
    """Scores the model and, if set, evaluate.against; rank 0 prints the table and writes the files."""
    terminal.quiet_libraries()
    e, name = config.evaluate, str(config.run_dir)
    manager = harness.find(config) if e.tasks else None
    who = world.together(lambda: subject.load(name, e.checkpoint, config))
    if manager is not None:
        words, score = f"tasks {', '.join(e.tasks)}", lambda model: harness.evaluate(model, config, manager)
    else:
        chosen, words = world.together(lambda: data.chosen(config, who.own))
        score = lambda model: scoring.evaluate(model, config, chosen)  # noqa: E731
    report = results.Results(config, words, [(who, score(who))])
    if e.against is not None:
        try:
            other = world.together(lambda: subject.load(str(e.against), e.checkpoint, config))
            report.models.append((other, score(other)))
            report.check_same_rows()
        except (UserError, RunError) as error:
            report.models = report.models[:1]
            error.args = (f"{error}; the scores of {who.name} alone are kept: {world.from_first(report.write)}",)
            raise
    path = world.from_first(report.write)
    if world.rank() == 0:
        terminal.console().print(report.table())
        print(terminal.visible(f"written: {path}"))
    return errors.FINISHED


def _as_rank(config: Config) -> int:
    if config.trainer.accelerator == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    world.connect(config.trainer.accelerator, config.trainer.rank_timeout)
    return evaluate(config)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C also reaches the parent, which reports it
    ranks.leave_after(lambda: launch.as_rank(sys.argv[1:], _as_rank))
