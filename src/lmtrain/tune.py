"""Which rate and which micro-batch: `python -m lmtrain.tune [overrides]`; `tune.apply=true` trains with them."""

import copy
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from lmtrain import cli, errors
from lmtrain.config.schema import Config
from lmtrain.distributed import ranks
from lmtrain.errors import UserError
from lmtrain.files import temporary_beside

if TYPE_CHECKING:
    from lmtrain.planning.tuning import Found


def tune(config: Config) -> int:
    """Looks for both in trials of their own, prints the overrides to type, and with tune.apply trains with them."""
    from lmtrain.planning import tuning
    from lmtrain.run.provenance import command
    from lmtrain.run_folder import folder as run_dir

    if ranks.started_by() is not None or config.trainer.num_nodes > 1:
        raise UserError("lmtrain.tune starts the ranks of one node itself: start it without torchrun and srun")
    if config.tune.apply and (run_dir.locate(config) / "config.yaml").exists():
        raise UserError(
            f"{run_dir.locate(config)} holds a run already, whose rate and micro-batch stay: go on with it by "
            f"python -m lmtrain.train, or choose another run.name"
        )
    found = look(config)
    for line in found.tried:
        print(line)
    for path in tuning.write(found, results(config)):
        print(f"written: {path}")
    overrides = found.overrides()
    words = [w for w in ranks.typed() if not w.lstrip("+").startswith("tune.")]
    print(f"to type: {command('train', [*words, *overrides])}" if overrides else "nothing to change")
    if not config.tune.apply:
        return errors.FINISHED
    found.put_into(config)
    config.tune.apply = False  # the run is the one that the line above starts
    ranks.note_typed([*words, *overrides])
    from lmtrain.run.start import start

    return start(config)


def look(config: Config) -> "Found":
    """What is found in trials, whose folder is removed."""
    from lmtrain.distributed import devices
    from lmtrain.planning import tuning

    root = Path(config.run.root).expanduser().absolute()
    try:
        root.mkdir(parents=True, exist_ok=True)
        folder = temporary_beside(root / "tune")
        folder.mkdir()
    except OSError as error:
        raise UserError(f"cannot write {root}: {error.strerror}; set run.root to a folder you can") from None
    found, tried = tuning.Found(), copy.deepcopy(config)
    try:
        devices.resolve_auto(tried)
        if config.tune.micro_batch_size:
            tuning.largest_micro_batch(tried, folder, found, lambda text: print(f"trying {text}", flush=True))
            found.put_into(tried)
        if config.tune.lr:
            tuning.range_test(tried, folder / "lr", found, lambda text: print(text, flush=True))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found


def results(config: Config) -> Path:
    """The folder for tune.json and lr.png."""
    if config.tune.dir is not None:
        return Path(config.tune.dir).expanduser().absolute()
    name = config.run.name or datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    return Path(config.run.root).expanduser().absolute() / "tune" / name


def main(argv: list[str] | None = None) -> int:
    return cli.run("tune", tune, argv)


if __name__ == "__main__":
    sys.exit(main())
