"""TensorBoard, CSV and W&B get the run's numbers, and a resumed run goes on in the same place."""

from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support import TINY, Run, rows


def settings(corpus: Path, steps: int) -> list[str]:
    return [
        *TINY,
        "data=text",
        f"data.path={corpus}",
        "export.enabled=false",
        "run.dir=run",
        "run.resume=auto",
        "trainer.val_check_interval=2",
        "trainer.save_every_n_steps=2",
        f"trainer.max_steps={steps}",
    ]


def test_tensorboard_and_csv_over_a_resume(corpus: Path, tmp_path: Path, lmtrain: Run) -> None:
    loggers = ["logger=tensorboard", "logger.tensorboard.flush_secs=1"]
    for steps in (4, 6):
        done = lmtrain("train", *settings(corpus, steps), *loggers)
        assert done.returncode == 0, done.stderr
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    logged = {r["step"]: r["train/loss"] for r in rows(tmp_path / "run" / "metrics.jsonl") if "train/loss" in r}
    shown = {e.step: e.value for e in events.Scalars("train/loss")}
    assert sorted(shown) == sorted(logged) == [1, 2, 3, 4, 5, 6]
    for step, loss in logged.items():
        assert shown[step] == pytest.approx(loss, rel=1e-6)
    assert {"val/loss", "lr", "grad_norm", "tokens_per_s"} <= set(events.Tags()["scalars"])


@pytest.mark.slow
def test_wandb_keeps_its_id(corpus: Path, tmp_path: Path, lmtrain: Run) -> None:
    loggers = ["logger=wandb", "logger.wandb.mode=offline"]
    ids = []
    for steps in (2, 4):
        done = lmtrain("train", *settings(corpus, steps), *loggers, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        ids.append((tmp_path / "run" / "wandb" / "run_id").read_text())
    assert ids[0] == ids[1]
    folders = [p.name for p in (tmp_path / "run" / "wandb").iterdir() if p.name.startswith("offline-run")]
    assert len(folders) == 2
    assert all(name.endswith(ids[0]) for name in folders)
