"""TensorBoard, CSV and W&B get the run's numbers, and a resumed run continues in the same place."""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from inprocess import message, run, train_tiny
from lmtrain.callbacks.records import Records
from lmtrain.run import loggers
from lmtrain.run_folder.folder import RunDir
from support import SAMPLES, TINY, Run, rows


def settings(corpus: Path, steps: int) -> list[str]:
    return [
        *TINY,
        "data=text",
        f"data.path={corpus}",
        SAMPLES,
        "run.dir=run",
        "run.resume=auto",
        "trainer.val_check_interval=2",
        "trainer.save_every_n_steps=2",
        f"trainer.max_steps={steps}",
    ]


def test_tensorboard_and_csv_over_a_resume(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loggers = ["logger=tensorboard", "logger.tensorboard.flush_secs=1"]
    for steps in (4, 6):
        done = run("train", *settings(corpus, steps), *loggers)
        assert done.code == 0, done.err
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    logged = {r["step"]: r["train/loss"] for r in rows(tmp_path / "run" / "metrics.jsonl") if "train/loss" in r}
    shown = {e.step: e.value for e in events.Scalars("train/loss")}
    assert sorted(shown) == sorted(logged) == [1, 2, 3, 4, 5, 6]
    for step, loss in logged.items():
        assert shown[step] == pytest.approx(loss, rel=1e-6)
    assert {"val/loss", "lr", "grad_norm", "tokens_per_s", "samples_per_s", "host_memory_gib"} <= set(
        events.Tags()["scalars"]
    )
    last = [r["val/loss"] for r in rows(tmp_path / "run" / "metrics.jsonl") if "val/loss" in r][-1]
    assert [(e.step, e.value) for e in events.Scalars("final/val/loss")] == [(6, pytest.approx(last, rel=1e-6))]
    hparams = yaml.safe_load((tmp_path / "run" / "tensorboard" / "hparams.yaml").read_text())
    assert hparams["trainer"]["max_steps"] == 4  # from the first start
    shown = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"trainer/max_steps" in shown


def log_records(content: bytes) -> Iterator[bytes]:
    """Yields the records of a *.wandb file, up to where it is cut off.

    It is a log in LevelDB's format (its log_format.md: blocks of 32 KiB; a record is stored in one part, or in a first,
    middle and last one) after 7 bytes of W&B's own.
    """
    at, parts = 7, b""
    while at + 7 <= len(content):
        left = 2**15 - at % 2**15
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])  # after a checksum of 4 bytes
        part = content[at + 7 : at + 7 + length]
        if kind == 0 or len(part) < length:
            return
        parts += part
        at += 7 + length
        if kind in (1, 4):  # a whole record, the last part
            yield parts
            parts = b""


def sent(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns config and history of an offline W&B run."""
    config: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    for data in log_records(next(folder.glob("*.wandb")).read_bytes()):
        record = Record()
        record.ParseFromString(data)
        for item in (*record.run.config.update, *record.config.update):
            config[item.key] = json.loads(item.value_json)
        if record.HasField("history"):
            history.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
    return config, history


class FakeRun:
    """Stands for an open W&B run; `resumed`: whether a server knew it."""

    def __init__(self, resumed: bool) -> None:
        self.resumed, self.rows = resumed, list[tuple[dict[str, Any], int | None]]()

    def log(self, row: dict[str, Any], step: int | None = None) -> None:
        self.rows.append((row, step))


@pytest.mark.parametrize("resumed", [False, True])
def test_wandb_gets_again_what_no_server_has(resumed: bool, tmp_path: Path) -> None:
    """A folder that is written offline is complete, with each record at its step; a server gets only what is new."""
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "train/loss": 5.0, "time": 1}\n{"step": 2, "train/loss": 4.0, "time": 2}\n'
        '{"step": 2, "val/loss": 4.5, "time": 3}\n'
    )
    folder, records = RunDir(tmp_path), Records(tmp_path / "metrics.jsonl")
    logger = loggers.build_loggers({"wandb": {"mode": "offline"}}, folder, records)[0]
    logger._experiment = fake = FakeRun(resumed)  # type: ignore[attr-defined]
    loggers.note_sent([logger], folder, 2)  # type: ignore[list-item]
    loggers.write_again([logger], folder, 2)  # type: ignore[list-item]
    earlier = [({"train/loss": 5.0}, 1), ({"train/loss": 4.0}, 2), ({"val/loss": 4.5}, 2)]
    expected = [] if resumed else [({**row, "trainer/global_step": step}, step) for row, step in earlier]
    assert fake.rows == expected
    logger.write_record({"step": 3, "train/loss": 3.0}, False)  # type: ignore[attr-defined]
    assert fake.rows[-1] == ({"train/loss": 3.0, "trainer/global_step": 3}, None if resumed else 3)


DIES = """
import os, signal
import lightning
class Dies(lightning.Callback):
    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_wandb_gets_config_and_no_step_twice_over_a_kill(corpus: Path, tmp_path: Path, lmtrain: Run) -> None:
    wandb = ["logger=wandb", "logger.wandb.mode=offline", "logger.wandb.group=tests", "logger.wandb.notes=a note"]
    extra = ["callbacks.extra=[{_target_: dies.Dies}]", "run.allow_target=[dies]"]
    keep = ["trainer.save_every_n_steps=4"]
    (tmp_path / "dies.py").write_text(DIES)
    killed = lmtrain("train", *settings(corpus, 6), *wandb, *keep, *extra, timeout=600)
    assert killed.returncode == -9
    done = lmtrain("train", *settings(corpus, 6), *wandb, *keep, timeout=600)
    assert done.returncode == 0, done.stderr
    folders = sorted(p for p in (tmp_path / "run" / "wandb").iterdir() if p.name.startswith("offline-run"))
    (config, first), (again, second) = map(sent, folders)
    print(f"{len(first)} points were in W&B's file when the run was killed")
    assert (config | again)["trainer"]["max_steps"] == 6
    for name in ("train/loss", "val/loss"):
        before, after = ([(h["trainer/global_step"], h[name]) for h in part if name in h] for part in (first, second))
        logged = [(r["step"], r[name]) for r in rows(tmp_path / "run" / "metrics.jsonl") if name in r]
        assert before == logged[: len(before)]  # what its own process had written when the run was killed
        assert after == logged  # of folders with one id, `wandb sync` keeps the last
    assert all(row["_step"] == row["trainer/global_step"] for row in [*first, *second])


NO_LOGIN = {"WANDB_API_KEY": ""}
NO_NETWORK = {"WANDB_API_KEY": "0" * 40, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "3"}


@pytest.mark.slow
@pytest.mark.parametrize("without", [NO_LOGIN, NO_NETWORK], ids=["login", "network"])
def test_wandb_without_login_or_network_is_kept_here(
    without: dict[str, str], corpus: Path, tmp_path: Path, lmtrain: Run
) -> None:
    nobody = {"WANDB_MODE": "online", "HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), **without}
    done = lmtrain("train", *settings(corpus, 2), "logger=wandb", env=nobody, timeout=600)
    assert done.returncode == 0, done.stderr
    assert " ".join((tmp_path / "run" / "plan.txt").read_text().split()).count("`wandb sync` sends it") == 1
    (folder,) = (p for p in (tmp_path / "run" / "wandb").iterdir() if p.name.startswith("offline-run"))
    assert [h["trainer/global_step"] for h in sent(folder)[1] if "train/loss" in h] == [1, 2]


@pytest.mark.slow
def test_wandb_keeps_its_id(corpus: Path, tmp_path: Path, lmtrain: Run) -> None:
    wandb = ["logger=wandb", "logger.wandb.mode=offline"]
    ids = []
    gone = {"WANDB_SERVICE": "3-1-unix-/nowhere"}  # the service of the parent process, which has ended
    for steps in (2, 4):
        done = lmtrain("train", *settings(corpus, steps), *wandb, env=gone, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        ids.append((tmp_path / "run" / "wandb" / "run_id").read_text())
    assert ids[0] == ids[1]
    folders = [p.name for p in (tmp_path / "run" / "wandb").iterdir() if p.name.startswith("offline-run")]
    assert len(folders) == 2
    assert all(name.endswith(ids[0]) for name in folders)


def six(tracker: str) -> list[str]:
    return [
        *("run.dir=run", "run.resume=auto", SAMPLES, "run.allow_target=[inprocess,users_callbacks]"),
        *("trainer.max_steps=6", "trainer.val_check_interval=3", "trainer.save_every_n_steps=4", f"logger={tracker}"),
    ]


def test_mlflow_files_over_a_resume(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason='pip install "lmtrain[mlflow]"')
    monkeypatch.chdir(tmp_path)
    six_steps = [*six("mlflow"), "logger.mlflow.tags={size: tiny}"]
    with pytest.raises(ZeroDivisionError):
        train_tiny(corpus, *six_steps, "callbacks.extra=[{_target_: inprocess.Breaks, at: 5}]")
    done = train_tiny(corpus, *six_steps)
    assert done.code == 0, done.err
    run_id = (tmp_path / "run" / "mlflow_run_id").read_text()
    (folder,) = (tmp_path / "run" / "mlflow").glob(f"*/{run_id}")
    for name in ("train/loss", "val/loss", "lr"):
        lines = [line.split() for line in (folder / "metrics" / name).read_text().splitlines()]
        logged = [(r["step"], r[name]) for r in rows(tmp_path / "run" / "metrics.jsonl") if name in r]
        assert [(int(step), float(value)) for _, value, step in lines] == logged
    assert (folder / "params" / "trainer" / "max_steps").read_text() == "6"
    assert (folder / "tags" / "size").read_text() == "tiny"
    table = json.loads((folder / "artifacts" / "samples.json").read_text())
    assert table["columns"] == ["step", "prompt", "text", "reference"]
    assert [int(row[0]) for row in table["data"]] == [3, 6]


def test_a_missing_package_is_answered_with_what_to_install(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("lightning.pytorch.loggers.mlflow._MLFLOW_AVAILABLE", False)
    ended = train_tiny(corpus, *six("mlflow"))
    assert ended.code == 2
    assert message(ended.err) == 'logger=mlflow needs a package: pip install "lmtrain[mlflow]"'
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("tracker", ["tensorboard", "csv", "wandb"])
def test_a_folder_that_cannot_be_written(
    tracker: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train_tiny(corpus, *six("none"), "trainer.max_steps=1").code == 0
    (tmp_path / "run" / tracker).write_text("in its place")
    ended = train_tiny(corpus, *six(tracker))
    assert ended.code == 2
    assert f"logger.{tracker}" in message(ended.err)


def test_a_tracker_that_fails_leaves_the_run(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = train_tiny(corpus, *six("csv"), "callbacks.extra=[{_target_: users_callbacks.TakesAway, folder: run/csv}]")
    assert ended.code == 0, ended.err
    assert ended.out.count("logger.csv failed") == 1
    assert [r["step"] for r in rows(tmp_path / "run" / "metrics.jsonl") if "train/loss" in r] == [1, 2, 3, 4, 5, 6]
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
