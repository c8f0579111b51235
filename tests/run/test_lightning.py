"""Lightning's own Trainer arguments and callbacks: each does what docs/lightning.md says."""

import dataclasses
import inspect
import json
import re
from pathlib import Path

import lightning.pytorch as pl
import pytest

import lmtrain
from inprocess import TWO_STEPS, message, train_tiny
from lmtrain.callbacks import extra
from lmtrain.config.aliases import absent, used_here
from lmtrain.config.keys import flat
from lmtrain.config.targets import build_target
from lmtrain.errors import UserError
from support import REPO, TINY, Run, rows

PAGE = (REPO / "docs" / "lightning.md").read_text()
QUIET = ["export.enabled=false", "callbacks.samples.every_n_validations=0", "run.dir=run", "run.resume=auto"]


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def table(heading: str) -> dict[str, str]:
    """Returns the rows of the table under a heading, as a dict from the first cell to the rest."""
    part = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", part, flags=re.MULTILINE))


def test_the_table_has_lightnings_whole_signature() -> None:
    arguments = set(inspect.signature(pl.Trainer.__init__).parameters) - {"self"}
    alike = re.search(r"^Keys of `trainer` with the same names.*?\. The others", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert alike is not None
    same = {name: f"`trainer.{name}`" for name in re.findall("`(\\w+)`", alike[0]) if name != "trainer"}
    listed = table("The Trainer's arguments") | same
    refused = PAGE.split("\nNot taken, and answered")[1]
    assert {*listed, *re.findall(r"`(\w+)`", refused)} == arguments
    keys = set(dict(flat(dataclasses.asdict(lmtrain.compose()))))
    offered = {name for name in listed if f"trainer.{name}" in keys}
    assert offered == {name for name, words in listed.items() if words.startswith(f"`trainer.{name}`")}
    unanswered = {n for n in arguments - offered if not used_here(f"trainer.{n}", keys) and not absent(f"trainer.{n}")}
    assert not unanswered
    named = re.findall(r"`((?:trainer|run|data|callbacks)\.[a-z_.]+)`", " ".join(listed.values()))
    assert set(named) <= keys


@pytest.mark.parametrize(
    ("name", "answer"),
    [("max_time", "; here it is run.time_limit (HH:MM:SS"), ("logger", "; here it is logger (tensorboard, wandb"),
     ("enable_checkpointing", "; here it is checkpoint.keep_last (a run always saves"),
     ("limit_train_batches", "; here it is trainer.max_steps (a batch is a step"),
     ("callbacks", "; here it is callbacks.extra"), ("sync_batchnorm", ": leave it out (docs/lightning.md"),
     ("min_epochs", "; here it is callbacks.early_stopping.patience")],
)  # fmt: skip
def test_an_argument_that_is_not_taken_is_answered(name: str, answer: str, corpus: Path) -> None:
    ended = train_tiny(corpus, f"trainer.{name}=1")
    assert ended.code == 2
    assert message(ended.err).startswith(f"there is no key 'trainer.{name}'{answer}")


@pytest.mark.parametrize("profiler", ["simple", "advanced"])
def test_profiler(profiler: str, corpus: Path, tmp_path: Path) -> None:
    ended = train_tiny(corpus, *QUIET, f"trainer.profiler={profiler}")
    assert ended.code == 0, ended.err
    assert "run_training_batch" in next((tmp_path / "run").glob("*profile.txt")).read_text()


@pytest.mark.slow
def test_torchs_profiler(corpus: Path, tmp_path: Path, lmtrain: Run) -> None:
    """It runs in a process of its own, as torch's profiler is global to a process."""
    settings = [*TINY, *TWO_STEPS, "data=text", f"data.path={corpus}", *QUIET, "trainer.profiler=pytorch"]
    done = lmtrain("train", *settings)
    assert done.returncode == 0, done.stderr
    assert "ProfilerStep" in next((tmp_path / "run").glob("*profile.txt")).read_text()
    trace = json.loads(next((tmp_path / "run").glob("*.pt.trace.json")).read_text())
    assert any("aten::" in event.get("name", "") for event in trace["traceEvents"])


def test_fast_dev_run(corpus: Path, tmp_path: Path) -> None:
    ended = train_tiny(corpus, "run.dir=run", "trainer.fast_dev_run=3", "trainer.max_steps=100", "logger=csv")
    assert ended.code == 0, ended.err
    found = rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in found] == [1, 2, 3, 3]
    assert not (tmp_path / "run" / "csv").exists()
    assert not (tmp_path / "run" / "export").exists()


def test_overfit_batches_learns_few_rows(corpus: Path, tmp_path: Path) -> None:
    steps = ["trainer.max_steps=9", "trainer.val_check_interval=9", "optimizer.lr=3e-3", "schedule.warmup_steps=0"]
    losses = {}
    for name, few in (("few", 1), ("all", 0)):
        ended = train_tiny(corpus, *QUIET, *steps, f"run.dir={name}", f"trainer.overfit_batches={few}")
        assert ended.code == 0, ended.err
        found = [row for row in rows(tmp_path / name / "metrics.jsonl") if "train/loss" in row]
        losses[name] = [row["train/loss"] for row in found]
    assert all(a > b for a, b in zip(losses["few"], losses["few"][1:], strict=False))  # the same rows in each step
    assert losses["few"][-1] < losses["all"][-1]


def test_detect_anomaly_names_the_operation(corpus: Path) -> None:
    ended = train_tiny(
        corpus, *QUIET, "trainer.detect_anomaly=true", "trainer.benchmark=true", "trainer.inference_mode=false"
    )
    assert ended.code == 0, ended.err


LIGHTNINGS = "lightning.pytorch.callbacks"
SIX = ["trainer.max_steps=6", "trainer.log_every_n_steps=2", "trainer.val_check_interval=3"]


def with_callback(name: str, **options: object) -> str:
    settings = "".join(f", {key}: {value}" for key, value in options.items())
    return f"callbacks.extra=[{{_target_: {LIGHTNINGS}.{name}{settings}}}]"


def records(name: str) -> dict[int, dict[str, float]]:
    """Returns the records of training steps, by step."""
    return {row["step"]: row for row in rows(Path(name) / "metrics.jsonl") if "val/loss" not in row}


REFUSED = sorted({cls.__name__ for cls in extra.REFUSED} | {"EMAWeightAveraging"})


def test_the_table_says_which_callbacks_are_refused() -> None:
    refused = PAGE.split("\nRefused, by a message")[1].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", refused)) == set(REFUSED)
    assert set(table("Callbacks")) == {
        *("LearningRateMonitor", "DeviceStatsMonitor", "ThroughputMonitor", "ModelSummary", "RichModelSummary"),
        *("Timer", "ModelCheckpoint", "EarlyStopping"),
    }


@pytest.mark.parametrize("name", REFUSED)
def test_a_callback_that_cannot_work_is_refused(name: str) -> None:
    entry = {"_target_": f"{LIGHTNINGS}.{name}"}
    with pytest.raises(UserError, match=f"callbacks.extra: {name} can't be used here: "):
        build_target(entry, "callbacks.extra", pl.Callback, refused=extra.REFUSED)


def test_a_refusal_leaves_no_run(corpus: Path, tmp_path: Path) -> None:
    ended = train_tiny(corpus, *QUIET, with_callback("GradientAccumulationScheduler", scheduling="{0: 2}"))
    assert ended.code == 2
    assert "data.global_batch_size says how many rows it has" in message(ended.err)
    assert not (tmp_path / "run").exists()


def test_learning_rate_monitor(corpus: Path) -> None:
    ended = train_tiny(corpus, *QUIET, *SIX, "schedule.warmup_steps=3", with_callback("LearningRateMonitor"))
    assert ended.code == 0, ended.err
    found = records("run")
    for step in (2, 4, 6):
        rates = [value for name, value in found[step].items() if name.startswith("lr-AdamW")]
        assert rates == [found[step]["lr"]] * 2  # of both parameter groups
    assert found[2]["lr"] != found[4]["lr"]


def test_device_stats_monitor(corpus: Path) -> None:
    ended = train_tiny(corpus, *QUIET, *SIX, with_callback("DeviceStatsMonitor", cpu_stats="true"))
    assert ended.code == 0, ended.err
    for step in (2, 4, 6):
        names = [name for name in records("run")[step] if name.startswith("DeviceStatsMonitor.on_train_batch_end/cpu_")]
        assert names, records("run")[step]


def test_throughput_monitor(corpus: Path) -> None:
    ended = train_tiny(
        corpus, *QUIET, *SIX, "trainer.val_before_training=true", with_callback("ThroughputMonitor", window_size=2)
    )
    assert ended.code == 0, ended.err
    found = records("run")
    for step in (2, 4, 6):
        assert found[step]["train/samples"] == 6 * step  # rows
        assert found[step]["train/device/items_per_sec"] > 0 if step > 2 else True
    assert len([row for row in rows(Path("run") / "metrics.jsonl") if "val/loss" in row]) == 3


@pytest.mark.parametrize("name", ["ModelSummary", "RichModelSummary"])
def test_model_summary(name: str, corpus: Path) -> None:
    ended = train_tiny(corpus, *QUIET, with_callback(name))
    assert ended.code == 0, ended.err


def test_timer_stops_the_run(corpus: Path) -> None:
    ended = train_tiny(corpus, *QUIET, *SIX, with_callback("Timer", duration="{milliseconds: 1}", interval="step"))
    assert ended.code == 0, ended.err
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["status"] == "stopped_early"
    assert summary["step"] < 6


def test_model_checkpoint_beside_ours(corpus: Path) -> None:
    own = with_callback("ModelCheckpoint", dirpath="mine", monitor="val/loss", save_top_k=1)
    ended = train_tiny(corpus, *QUIET, *SIX, own)
    assert ended.code == 0, ended.err
    assert len(list(Path("mine").iterdir())) == 1
    again = train_tiny(corpus, *QUIET, *SIX, own, "trainer.max_steps=8")
    assert again.code == 0, again.err
    assert sorted(records("run")) == [1, 2, 4, 6, 8]


def test_early_stopping_on_what_is_logged(corpus: Path) -> None:
    stops = f"{{_target_: {LIGHTNINGS}.EarlyStopping, monitor: val/mine, mode: max, patience: 1}}"
    logs = "{_target_: users_callbacks.LogsAll}"
    ended = train_tiny(corpus, *QUIET, *SIX, "trainer.val_check_interval=1", f"callbacks.extra=[{logs},{stops}]",
                       "run.allow_target=[users_callbacks]")  # fmt: skip
    assert ended.code == 0, ended.err
    assert json.loads(Path("run/summary.json").read_text())["step"] == 2  # val/mine falls from the first validation on
