"""Loggers for TensorBoard, CSV, W&B and MLflow, each in the run's folder; metrics.jsonl is always written.

All of them get the same records at the same steps (callbacks/records.py).
"""

import contextlib
import os
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from transformers.utils import flatten_dict

from lmtrain import secrets
from lmtrain.callbacks.records import Joined, Records, Row
from lmtrain.distributed import process_group as world
from lmtrain.errors import RunError, UserError, disk_full, first_line, reason
from lmtrain.files import write_atomic
from lmtrain.run_folder.cut_back import of_validation, rows_from
from lmtrain.run_folder.folder import RunDir
from lmtrain.strategies import lightning_private


class TensorBoard(Joined, TensorBoardLogger):
    """TensorBoard event files in <run>/tensorboard."""

    params: dict[str, Any]  # the run's config, for the hparams page
    _validated: Row | None = None

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(str(folder), name="", version="tensorboard", default_hp_metric=False, **options)

    def write_record(self, row: Row, validation: bool) -> None:
        super().write_record(row, validation)
        if validation:
            self._validated = row

    def finalize(self, status: str = "success") -> None:
        """Logs the config with the last validation's metrics (hparams page) if the run succeeded; closes the logger."""
        if status == "success" and self._validated is not None and self in self.records.joined:
            final = {f"final/{k}": v for k, v in self._validated.items() if k.startswith("val/")}
            with self.records.outliving(self):
                self.log_metrics = super(Joined, self).log_metrics  # type: ignore[method-assign]  # these join no record
                self.log_hyperparams(self.params, final, step=self._validated["step"])
            self._validated = None
        super().finalize(status)

    def open_run(self, after: int, tell: Callable[[str], None]) -> None:
        """Opens the run and hides what earlier processes logged from step `after` on, which is logged again."""
        lightning_private.purge_from(self, after)
        super().open_run(after, tell)


class CSV(Joined, CSVLogger):
    """The CSV logger, which writes <run>/csv/metrics.csv."""

    def __init__(self, folder: Path, **options: Any) -> None:
        # Flush every row: Lightning flushes at steps that are multiples of its interval, and no logged step may be one.
        super().__init__(str(folder), name="", version="csv", flush_logs_every_n_steps=1, **options)


class WandB(Joined, WandbLogger):
    """The W&B logger, with an id stored in the run's folder, so that a resumed run continues the same W&B run.

    Rows that a server has can't be withdrawn, so a resumed run, with the same records, doesn't resend them. Offline,
    each process writes a folder of its own, and of those with one id `wandb sync` keeps the last that it sends: a
    resumed run writes all earlier records into its folder again, at their steps.
    """

    _latest = 0  # the last step given to W&B, which drops rows of earlier ones

    def __init__(self, folder: Path, name: str | None = None, **options: Any) -> None:
        (folder / "wandb").mkdir(exist_ok=True)
        run_id = world.from_first(lambda: _run_id(folder / "wandb" / "run_id"))
        super().__init__(name or folder.name, str(folder), id=run_id, resume="allow", **options)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Adds plain values to the record; sends what only W&B accepts (tables, images) to W&B directly."""
        plain = {k: v for k, v in metrics.items() if isinstance(v, Real | str | torch.Tensor)}
        super().log_metrics(plain, step)
        media = {k: v for k, v in metrics.items() if k not in plain}
        if media:
            self.send(media, self.records.step or 0)

    def send(self, row: Mapping[str, Any], step: int) -> None:
        """Sends a row of a step; a run that a server has continues to count rows, as it may have later ones."""
        self._latest = max(step, self._latest)
        at = {} if self.is_known else {"step": self._latest}
        self.experiment.log({**row, "trainer/global_step": step}, **at)

    @property
    def is_known(self) -> bool:
        """Whether a server has rows of this run."""
        return bool(getattr(self.experiment, "resumed", False))

    def note_sent(self, rows: Iterable[Row]) -> None:
        """Marks all of `rows` as sent, even those that W&B's own process had not written yet when a run was killed."""
        sent: dict[str, set[int]] = {}
        for row in rows:
            for name in row if self.is_known else ():
                sent.setdefault(name, set()).add(row["step"])
        self.sent = sent

    def log_texts(self, columns: list[str], rows: list[list[str]]) -> None:
        self.log_text("samples", columns=columns, data=rows)

    def open_run(self, after: int, tell: Callable[[str], None]) -> None:
        """Opens the run on rank 0; without a login or network, an offline run that can be uploaded later."""
        import wandb

        _leave_inherited_service()
        # To record the commit, W&B runs git, which runs what the repository's files name (run/repository.py).
        os.environ.setdefault("WANDB_DISABLE_GIT", "true")
        try:
            with _hidden_command():
                _ = self.experiment
        except Exception as error:
            if self._offline or lightning_private.wandb_options(self).get("mode") in ("offline", "disabled"):
                raise
            wandb.teardown()  # its service process believes that the run has begun
            lightning_private.wandb_options(self)["mode"] = "offline"
            with _hidden_command():
                _ = self.experiment
            here = f"this run is logged to {self.save_dir}/wandb, and `wandb sync` sends it"
            tell(f"logger.wandb: {first_line(error).rstrip('.')}; {here} (logger.wandb.mode=offline)")


def _leave_inherited_service() -> None:
    """Makes W&B start its own service for this process if WANDB_SERVICE names that of a parent process.

    The parent's service may still hold the ID of a killed run, end before this run does, or write its rows after this
    process has exited. The variable's value is VERSION-PID-KIND-ADDRESS.
    """
    token = os.environ.get("WANDB_SERVICE", "")
    if token and token.split("-")[1:2] != [str(os.getpid())]:
        del os.environ["WANDB_SERVICE"]


@contextlib.contextmanager
def _hidden_command() -> Iterator[None]:
    """Removes secrets from sys.argv within the context, since W&B stores the command line with the config."""
    typed, sys.argv = sys.argv, [*map(secrets.shown, sys.argv)]
    try:
        yield
    finally:
        sys.argv = typed


ALLOW_FILES = "MLFLOW_ALLOW_FILE_STORE"  # MLflow 3 refuses file stores unless this is set


class MLflow(Joined, MLFlowLogger):
    """The MLflow logger, to files in <run>/mlflow or to a server; a resumed run continues the MLflow run of its id."""

    def __init__(self, folder: Path, tracking_uri: str | None, run_name: str | None = None, **options: Any) -> None:
        uri = tracking_uri or f"file:{folder / 'mlflow'}"
        if uri.startswith("file:"):
            os.environ.setdefault(ALLOW_FILES, "true")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        self._id_file = folder / "mlflow_run_id"
        run_id = world.from_first(lambda: self._id_file.read_text() if self._id_file.exists() else None)
        super().__init__(run_name=run_name or folder.name, tracking_uri=uri, run_id=run_id, **options)

    def open_run(self, after: int, tell: Callable[[str], None]) -> None:
        """Opens the run on rank 0; raises whatever MLflow raises."""
        if world.rank() > 0:
            return
        client: Any = self.experiment
        if not self._id_file.exists():
            write_atomic(self._id_file, str(self.run_id))
        client.update_run(self.run_id, status="RUNNING")

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any]) -> None:  # type: ignore[override]
        """Logs the parameters that are new: MLflow can't change parameters, so those of the run's first start stay."""
        client: Any = self.experiment
        known = client.get_run(self.run_id).data.params
        named = flatten_dict(params, delimiter="/")  # as all of Lightning's loggers name them
        super().log_hyperparams({name: value for name, value in named.items() if name not in known})

    def note_sent(self, rows: Iterable[Row]) -> None:
        """Marks as sent what the MLflow run holds, which may be less than `rows`."""
        client: Any = self.experiment
        names = client.get_run(self.run_id).data.metrics
        self.sent = {name: {m.step for m in client.get_metric_history(self.run_id, name)} for name in names}

    def log_texts(self, columns: list[str], rows: list[list[str]]) -> None:
        """Adds rows to the table samples.json of the run."""
        client: Any = self.experiment
        table = {name: list(values) for name, values in zip(columns, zip(*rows, strict=True), strict=True)}
        client.log_table(self.run_id, table, "samples.json")


def build_loggers(wanted: dict[str, Any], run_dir: RunDir, records: Records) -> list[Logger]:
    """Builds the loggers in `wanted` (options by name), followed by `records`; contacts no server yet."""
    makers: dict[str, Any] = {"tensorboard": TensorBoard, "csv": CSV, "wandb": WandB, "mlflow": MLflow}
    loggers: list[Any] = []
    for name, options in wanted.items():
        if name not in makers:
            raise UserError(f"logger.{name} is not known (options: {', '.join(makers)})")
        try:
            loggers.append(makers[name](run_dir.path, **(options or {})))
        except TypeError as error:
            raise UserError(f"logger.{name}: {error}") from None
        except ModuleNotFoundError as error:
            raise UserError(f'logger={name} needs a package: pip install "lmtrain[{name}]"') from error
        except OSError as error:
            raise UserError(f"logger.{name}: cannot write {error.filename}: {reason(error)}") from error
    for logger in loggers:
        logger.records = records
    records.joined = loggers
    return [*loggers, records]


def _run_id(file: Path) -> str:
    if not file.exists():
        write_atomic(file, uuid.uuid4().hex[:12])
    return file.read_text()


def start_loggers(loggers: Iterable[Joined], step: int, tell: Callable[[str], None]) -> None:
    """Opens files and connections, which loggers otherwise open lazily; the run continues after `step` steps.

    `tell` is called with notes for the user.

    Raises:
        UserError: a logger doesn't have an option, or a server doesn't answer.
        RunError: the disk is full.
    """
    for logger in loggers:
        try:
            logger.open_run(step, tell)
        except Exception as error:  # W&B's errors, MLflow's and the network's share no base class
            name = type(logger).__name__.lower()
            if disk_full(error):
                raise RunError(f"logger.{name}: the disk is full; free space or set run.dir elsewhere") from error
            raise UserError(f"logger.{name} can't start: {str(error).rstrip('.')}") from error


def log_config(loggers: Iterable[Logger], config: dict[str, Any]) -> None:
    """Logs the resolved config: as W&B's config, hparams.yaml of TensorBoard and CSV, and MLflow's params."""
    for logger in loggers:
        if isinstance(logger, TensorBoard):
            logger.params = config
        logger.log_hyperparams(config)


def note_sent(loggers: Iterable[Joined], run_dir: RunDir, step: int) -> None:
    """Tells W&B and MLflow which rows of `step` and later, which will be logged again, earlier processes have sent.

    Must be called before metrics.jsonl is truncated.
    """
    for logger in loggers if run_dir.metrics.exists() else ():
        logger.note_sent(rows_from(run_dir.metrics, step))


def write_again(loggers: Iterable[Joined], run_dir: RunDir, step: int) -> None:
    """Writes again the records that a logger lost when the run was resumed after `step`, or had not yet sent.

    Lightning starts its CSV file anew, as W&B does offline, and MLflow may have lost any, so they get all records;
    TensorBoard, which drops what it had from `step` on, gets those of that step. Trackers skip what they have been sent
    before.
    """
    for logger in loggers:
        first = 0 if isinstance(logger, CSV | MLflow) or (isinstance(logger, WandB) and not logger.is_known) else step
        for row in rows_from(run_dir.metrics, first):
            logger.write_record({k: v for k, v in row.items() if k != "time"}, of_validation(row))
