"""TensorBoard, CSV and W&B, each in the run's folder. metrics.jsonl is written beside them in any case."""

import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from lmtrain import world
from lmtrain.errors import RunError, UserError, disk_full
from lmtrain.run_dir import RunDir, read_jsonl, write_atomic
from lmtrain.schema import Config


def build_loggers(config: Config, run_dir: RunDir) -> list[Logger]:
    """The loggers of config.logger; nothing is written or asked of a server yet."""
    makers = {"tensorboard": _tensorboard, "csv": _csv, "wandb": _wandb}
    loggers = []
    for name, options in config.logger.items():
        if name not in makers:
            raise UserError(f"logger.{name} is not known (options: {', '.join(makers)})")
        try:
            loggers.append(makers[name](options or {}, run_dir))
        except TypeError as error:
            raise UserError(f"logger.{name}: {error}") from None
    return loggers


def _tensorboard(options: dict[str, Any], run_dir: RunDir) -> Logger:
    return TensorBoardLogger(str(run_dir.path), name="", version="tensorboard", **options)


def _csv(options: dict[str, Any], run_dir: RunDir) -> Logger:
    # Each row at once: Lightning's interval counts steps, and none of the logged ones may fall on it.
    return CSVLogger(str(run_dir.path), name="", version="csv", flush_logs_every_n_steps=1, **options)


def _wandb(options: dict[str, Any], run_dir: RunDir) -> Logger:
    """W&B with an id kept in the run's folder, so that a resumed run continues the same one."""
    folder = run_dir.path / "wandb"
    folder.mkdir(exist_ok=True)
    run_id = world.from_first(lambda: _run_id(folder / "run_id"))
    options = {**options, "name": options.get("name") or run_dir.path.name}
    return WandbLogger(id=run_id, save_dir=str(run_dir.path), resume="allow", **options)


def _run_id(file: Path) -> str:
    if not file.exists():
        write_atomic(file, uuid.uuid4().hex[:12])
    return file.read_text()


def start_loggers(loggers: Iterable[Logger]) -> None:
    """Opens files and connections, which loggers put off until they are needed.

    Raises:
        UserError: an option that the logger doesn't have, no login, no network.
        RunError: the disk is full.
    """
    for logger in loggers:
        try:
            _ = logger.experiment  # type: ignore[attr-defined]
        except Exception as error:  # W&B's errors and its network's share no base class
            name = type(logger).__name__.removesuffix("Logger").lower()
            if disk_full(error):
                raise RunError(f"logger.{name}: the disk is full; free space or set run.dir elsewhere") from error
            advice = "; logger.wandb.mode=offline needs no login and no network" if name == "wandb" else ""
            raise UserError(f"logger.{name} can't start: {str(error).rstrip('.')}{advice}") from error


def write_again(loggers: Iterable[Logger], run_dir: RunDir) -> None:
    """Lightning's CSV file begins anew when a run is resumed: puts the rows of metrics.jsonl back into it."""
    for logger in loggers:
        if isinstance(logger, CSVLogger):
            for row in read_jsonl(run_dir.metrics):
                kept = (k for k, v in row.items() if k not in ("step", "time") and isinstance(v, int | float))
                logger.log_metrics({k: float(row[k]) for k in kept}, step=row["step"])
