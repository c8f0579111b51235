"""MLflow: a store of files in <run>/mlflow, or a server. Its package is optional: pip install "lmtrain[mlflow]"."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import MLFlowLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lmtrain.callbacks.records import Joined
from lmtrain.distributed import process_group as world
from lmtrain.files import write_atomic

ALLOW_FILES = "MLFLOW_ALLOW_FILE_STORE"  # MLflow 3 refuses stores of files without it


class MLflow(Joined, MLFlowLogger):
    """Its run's id is kept in the run's folder: a resumed run goes on in the same one."""

    def __init__(self, folder: Path, tracking_uri: str | None, **options: Any) -> None:
        uri = tracking_uri or f"file:{folder / 'mlflow'}"
        if uri.startswith("file:"):
            os.environ.setdefault(ALLOW_FILES, "true")
        os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        self._id_file = folder / "mlflow_run_id"
        run_id = world.from_first(lambda: self._id_file.read_text() if self._id_file.exists() else None)
        super().__init__(tracking_uri=uri, run_id=run_id, **options)

    def open_run(self) -> None:
        """Opens the run, on rank 0; raises what MLflow raises."""
        client: Any = self.experiment
        if not self._id_file.exists():
            write_atomic(self._id_file, str(self.run_id))
        client.update_run(self.run_id, status="RUNNING")

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any]) -> None:  # type: ignore[override]
        """A parameter of MLflow's can't be changed: those of the run's first start stay."""
        client: Any = self.experiment
        known = client.get_run(self.run_id).data.params
        super().log_hyperparams({name: value for name, value in flat(params).items() if name not in known})

    def read_sent(self) -> dict[str, set[int]]:
        """The steps that the run has of each name."""
        client: Any = self.experiment
        names = client.get_run(self.run_id).data.metrics
        return {name: {m.step for m in client.get_metric_history(self.run_id, name)} for name in names}

    def log_texts(self, columns: list[str], rows: list[list[str]]) -> None:
        """Adds rows to the table samples.json of the run."""
        client: Any = self.experiment
        table = {name: list(values) for name, values in zip(columns, zip(*rows, strict=True), strict=True)}
        client.log_table(self.run_id, table, "samples.json")


def flat(params: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested names joined by '/', as every logger of Lightning writes them."""
    found: dict[str, Any] = {}
    for name, value in params.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}/")
        else:
            found[f"{prefix}{name}"] = value
    return found
