"""budget.minutes: the number of steps it chooses, how the clock changes it, keys that override it, and resuming."""

import json
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from rich.console import Console

import lmtrain
from chats import write_rows
from inprocess import run
from lmtrain import cli, train
from lmtrain.callbacks.length import Length
from lmtrain.callbacks.samples import Samples
from lmtrain.callbacks.time_budget import TimeBudget
from lmtrain.config import compose as rules
from lmtrain.config.batch import row_lengths, step_sizes
from lmtrain.config.override_text import Command
from lmtrain.config.schema import Config
from lmtrain.data.corpus import build_corpus
from lmtrain.data.loaders import rows_of_step
from lmtrain.distributed import devices, ranks
from lmtrain.errors import UserError
from lmtrain.generation.sampling import Continuation
from lmtrain.objectives.base import Objective
from lmtrain.planning import budget
from lmtrain.planning.budget import Measured, settle, steps_within
from lmtrain.run import build, resume
from lmtrain.run.data import rows_to_train
from lmtrain.run.start import start
from support import EXPORT, SAMPLES, TINY, ends_within, rows


@pytest.fixture(autouse=True)
def _no_command_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the time at which an earlier test's command was given, which `settle` leaves for ranks."""
    monkeypatch.setenv(ranks.BEGAN, "0")  # so that it is removed again afterwards
    monkeypatch.delenv(ranks.BEGAN)


def again(chosen: list[str]) -> Config:
    raise AssertionError(f"no budget of these tests chooses {chosen}")


WORDS = ["data=text", "trainer.accelerator=cpu", "trainer.val_check_interval=50", "run.name=timed"]


def config(*words: str):
    return rules.check(rules.compose([*TINY, "trainer.val_check_interval=50", *words]))


def test_the_steps_fill_what_starting_validations_and_the_end_leave() -> None:
    took = Measured(starting=12.0, step=0.5, validation=5.0)
    steps = steps_within(600.0, took, config("budget.minutes=10"))
    used = 12 + 0.5 * steps + 5 * (steps / 50 + 1) + 4  # a validation every 50 steps and after the last one
    assert used <= 600 < used + 0.5 + 5 / 50


def test_rows_to_memorize_are_trained_on_for_the_whole_time(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "measure", lambda *_: Measured(starting=1.0, step=0.5, validation=0.1))
    asked = config("data=text", f"data.path={corpus}", "budget.minutes=1", "trainer.accelerator=cpu",
                   "trainer.overfit_batches=1")  # fmt: skip
    settle(asked, time.time(), again)
    assert asked.trainer.max_steps == pytest.approx(50 / 0.5, rel=0.2)


@pytest.mark.parametrize("data", [["data=prompts_jsonl"], []])
def test_prompts_are_sampled_from_for_the_whole_time(
    data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "measure", lambda *_: Measured(starting=1.0, step=0.5, validation=0.1))
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "say {i}"}}\n' for i in range(20)))
    asked = config("objective=grpo", *data, f"data.path={path}", "tokenizer=bytes", "data.seq_len=64",
                   "budget.minutes=1", "reward=regex", "reward.pattern=a", "data.global_batch_size=4",
                   "data.micro_batch_size=4", "trainer.accelerator=cpu")  # fmt: skip
    settle(asked, time.time(), again)
    assert asked.trainer.max_epochs is None
    assert asked.trainer.max_steps == pytest.approx(50 / 0.5, rel=0.2)


def test_small_steps_of_a_batch_warmup_take_less_of_the_time() -> None:
    """Steps of 1, 2 and 3 rows, of which those of 6 rows take half a second each."""
    warmup = ["data.batch_warmup.start_size=1", "data.batch_warmup.steps=100", "data.micro_batch_size=1"]
    asked = config("budget.minutes=1", "trainer.val_check_interval=null", *warmup)
    steps, sizes = steps_within(60.0, Measured(starting=5.0, step=0.5, validation=1.0), asked), step_sizes(asked.data)
    assert sum(sizes.at(step) for step in range(steps)) <= 6 * 100 < sum(sizes.at(step) for step in range(steps + 1))
    clock = TimeBudget(asked, Length(1000, 10_000, 0), Console(quiet=True), [])
    clock.spent, clock.validation, clock._since = -4.0, 0.0, time.perf_counter() - 12 * 0.5 / 6
    clock._said, clock.began = steps, time.time()
    chosen = clock._look(12, first=True)  # 64 - 4 s, of which 4 are kept for the end, for rows of a twelfth of a second
    assert chosen is not None
    assert sum(sizes.at(step) for step in range(12, chosen)) == pytest.approx(12 * 60, abs=12)


def test_full_steps_are_measured_before_a_batch_warmup(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config("data=text", f"data.path={corpus}", "budget.minutes=1", "trainer.accelerator=cpu", *GROWING)
    asked.trainer.devices, seen = 1, []
    monkeypatch.setattr(
        build, "build_datamodule", lambda c, *_: seen.append((step_sizes(c.data), row_lengths(c.data))) or 1 / 0
    )
    with pytest.raises(ZeroDivisionError):
        budget.measure(asked, build_corpus(asked))
    assert seen == [(step_sizes(config().data), None)]
    assert asked.data.batch_warmup.start_size == 2


def test_full_steps_of_a_mixture_are_measured_before_a_batch_warmup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of a step are those of the trial, although the mixture was built for growing steps."""
    (tmp_path / "a.txt").write_text("Hello world, this is some text.\n" * 200)
    mixture = f"data.mixture=[{{path: {tmp_path}/a.txt}}]"
    asked = config(*TINY, "data=mixture", mixture, "budget.minutes=1", "trainer.accelerator=cpu", *GROWING)
    asked.trainer.devices, seen, corpus = 1, [], build_corpus(asked)
    made = build.build_datamodule
    monkeypatch.setattr(build, "build_datamodule", lambda *these: seen.append(made(*these)) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        budget.measure(asked, corpus)
    measured = rows_of_step(seen[0].train_rows, 0, sizes=seen[0].sizes, seed=0)
    assert len(measured) == asked.data.global_batch_size
    assert len(rows_of_step(corpus.train, 0, sizes=step_sizes(asked.data), seed=0)) == 2


def test_a_budget_without_time_for_training_says_how_much_is_needed() -> None:
    took = Measured(starting=50.0, step=2.0, validation=20.0)
    with pytest.raises(UserError, match=r"budget.minutes=1: .* 0 steps of 2.00 s: give it 1.6 minutes or more"):
        steps_within(60.0, took, config("budget.minutes=1"))
    assert steps_within(60 * 1.7, took, config("budget.minutes=1.7")) == 11


@pytest.mark.slow
def test_a_machine_that_slows_down_gets_fewer_steps_and_a_whole_schedule(lmtrain, corpus: Path, tmp_path: Path) -> None:
    sleeps = ["callbacks.extra=[{_target_: slow.SlowsDown, step: 60, seconds: 0.5}]", "run.allow_target=[slow]"]
    words = [*TINY, *WORDS, EXPORT, SAMPLES, f"data.path={corpus}", "budget.minutes=1", f"run.root={tmp_path}", *sleeps]
    began = time.monotonic()
    path = os.pathsep.join([str(Path(__file__).parents[1] / "resume"), os.environ.get("PYTHONPATH", "")])
    done = lmtrain("train", *words, env={"PYTHONPATH": path})
    took = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    run = tmp_path / "timed"
    chose = re.search(r"budget.minutes=1 chose ([\d,]+) steps", " ".join((run / "plan.txt").read_text().split()))
    assert chose is not None
    planned = int(chose[1].replace(",", ""))
    assert not list(tmp_path.glob("budget*"))  # folders of the measurement
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert 60 < summary["step"] < planned
    assert "to end in time" in done.stdout
    assert 40 < took < 90  # without the clock it would have taken planned x 0.5 s
    rates = [row["lr"] for row in rows(run / "metrics.jsonl") if "lr" in row]
    assert rates[-1] < 0.2 * max(rates)
    assert [row["step"] for row in rows(run / "metrics.jsonl") if "val/loss" in row][-1] == summary["step"]


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_the_time_it_has_left(lmtrain, corpus: Path, tmp_path: Path) -> None:
    run = tmp_path / "timed"
    words = [*TINY, *WORDS, f"data.path={corpus}", "budget.minutes=1.25", f"run.root={tmp_path}"]
    words.append("trainer.max_epochs=null")  # on a fast machine, 15 epochs end before the time does
    stopped = lmtrain("train", *words, "run.time_limit=00:00:10")
    assert stopped.returncode == 75, stopped.stdout + stopped.stderr
    before = rows(run / "metrics.jsonl")
    began = time.monotonic()
    done = lmtrain("train", *words)
    assert done.returncode == 0, done.stderr
    assert "measuring" not in done.stderr
    assert time.monotonic() - began < 70  # of 75 s, of which more than 10 were used
    said = re.search(r"(\S+) of 1.25 minutes of the budget were used up to step (\S+)", done.stdout)
    assert said is not None
    assert 0.1 < float(said[1]) < 1.2
    assert int(said[2].replace(",", "")) == before[-1]["step"]
    assert rows(run / "metrics.jsonl")[: len(before)] == before
    again = lmtrain("train", *words)
    assert again.returncode == 0
    assert "the same command with budget.minutes=2.5" in again.stdout


def test_an_early_sample_is_written_and_changes_nothing(corpus: Path, tmp_path: Path) -> None:
    weights = []
    for early in (None, 2):
        words = [*TINY, "data=text", f"data.path={corpus}", f"run.dir={tmp_path / str(early)}", "trainer.max_steps=4",
                 "trainer.val_check_interval=4", "model.dropout=0.1", "trainer.accelerator=cpu",
                 SAMPLES]  # fmt: skip
        run = lmtrain.build(lmtrain.compose(words))
        (samples,) = (callback for callback in run.trainer.callbacks if isinstance(callback, Samples))
        samples.early = early
        run.fit()
        steps = {row["step"] for row in rows(tmp_path / str(early) / "samples.jsonl")}
        assert steps == ({4} if early is None else {2, 4})
        weights.append([p.detach().clone() for p in run.objective.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_an_early_sample_is_no_part_of_the_time_of_steps(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Samples, "_continue", lambda *_: time.sleep(2) or Continuation("", False))
    words = [*TINY, SAMPLES, "data=text", f"data.path={corpus}", f"run.dir={tmp_path}/run", "trainer.max_steps=3",
             "trainer.val_check_interval=null", "trainer.accelerator=cpu"]  # fmt: skip
    run = lmtrain.build(lmtrain.compose(words))
    next(callback for callback in run.trainer.callbacks if isinstance(callback, Samples)).early = 2
    run.fit()
    steps = [row for row in rows(tmp_path / "run" / "metrics.jsonl") if "step_ms" in row]
    assert len(steps) == 3
    assert max(row["data_wait_ms"] for row in steps) < 1000
    assert max(row["step_ms"] for row in steps[1:]) < 2000


def test_the_clock_counts_an_early_sample_as_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a second and a sample of 30 s in between: 100 s fit as many steps as without it."""
    now = [0.0]
    monkeypatch.setattr(time, "time", lambda: now[0])
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    module, chosen = mock.Mock(spec=Objective, total_steps=1000), []
    trainer = mock.Mock(global_step=0, world_size=1)
    samples = mock.Mock(early=9, early_seconds=30.0)
    asked = config("budget.minutes=10", "trainer.val_check_interval=null")
    clock = TimeBudget(asked, Length(1000, 10_000, 0), Console(quiet=True), [], samples)
    monkeypatch.setattr(clock, "set_length", lambda _trainer, _module, steps: chosen.append(steps))
    clock.on_train_start(trainer, module)
    for step in range(1, 13):
        trainer.global_step, now[0] = step, now[0] + (31 if step == samples.early else 1)
        clock.on_train_batch_end(trainer, module)
    assert chosen == [12 + (600 - 42 - 4)]


def test_the_learning_rate_does_not_rise_while_it_decays(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that finds more and fewer steps in turn: after the warmup the rate only falls, to the schedule's end."""
    monkeypatch.setattr(TimeBudget, "_look", lambda _, step, first: max(40 + step * 7 % 11, step + 1))
    ended = run("train", *TINY, "data=text", f"data.path={corpus}", "budget.minutes=10", "schedule=cosine",
                "schedule.warmup_steps=5", "trainer.val_check_interval=1000", "trainer.limit_val_batches=1",
                "trainer.log_every_n_steps=1", f"run.dir={tmp_path}/run")  # fmt: skip
    assert ended.code == 0, ended.err
    rates = [row["lr"] for row in rows(tmp_path / "run" / "metrics.jsonl") if "lr" in row]
    assert len(rates) >= 40
    falling = rates[5:]
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] < 0.11 * falling[0]  # schedule.min_lr_ratio is 0.1


@pytest.mark.parametrize(
    ("minutes", "step", "saved", "steps"),
    [
        (1, 95, {"used": 57, "seconds": 60}, 100),  # the same budget: continued as it was
        (2, 95, {"used": 57, "seconds": 60}, 200),  # 95 steps took 57 s
        (2, 10, {"used": 50, "seconds": 60}, 100),  # most of which was the start: not fewer steps than before
        (2, 95, {"used": 57}, 100),  # of an earlier version: it can't be told whether the budget is larger
        (2, 95, {"used": 115, "seconds": 60}, 100),  # nothing of it is left
    ],
)
def test_a_larger_budget_is_used_by_a_run_about_to_end(minutes: int, step: int, saved: dict, steps: int) -> None:
    """In the last steps the clock is not looked at again, so the run would end with the time of its earlier budget."""
    asked = config(f"budget.minutes={minutes}")
    clock = TimeBudget(asked, Length(100, 10_000, 0), Console(quiet=True), [])
    run = mock.Mock(config=asked, total_steps=100)
    run.trainer.callbacks = [clock]
    state = {"global_step": step, "schedule_steps": 100, "callbacks": {"TimeBudget": saved}}
    resume.fit_schedule(run, state, lambda _: None)
    assert run.objective.total_steps == steps
    assert clock.state_dict()["seconds"] == 60 * minutes


def test_two_commands_of_one_process_have_a_budget_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each counts from its own start, and is composed again with the overrides that its budget has chosen."""
    began = []

    def chooses(config: Config, at: float, again: budget.Again) -> Config:
        began.append(at)
        return again(["model.depth=2"])

    started = list[Config]()
    monkeypatch.setattr(budget, "settle", chooses)
    monkeypatch.setattr("lmtrain.run.start.start", lambda config: started.append(config) or 0)
    for _ in range(2):
        before = time.time()
        assert run("train", "experiment=dial", "budget.minutes=1").code == 0
        assert before <= began[-1] <= time.time()
        assert (started[-1].model.num_hidden_layers, started[-1].command.words[-1]) == (2, "model.depth=2")


def test_a_budget_counts_from_the_start_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float | None] = []
    monkeypatch.setattr(cli, "main", lambda words: train.main(words[1:]))
    monkeypatch.setattr(cli, "run", lambda verb, action, argv: action(None, None))
    monkeypatch.setattr(train, "train", lambda config, again, began: seen.append(began) or 0)
    monkeypatch.setattr(ranks, "leave", seen.append)
    monkeypatch.setattr(ranks, "process_began", lambda: 7.0)
    monkeypatch.setattr(ranks, "began", None)
    cli.program(["train", "model=gpt_nano"])
    assert seen == [7.0, 0]


def test_a_budget_of_a_stream_is_measured_on_its_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Hello world, this is some text.\n" * 20_000)
    stream = ["data.streaming=true", "data.ring_bytes=1_000_000", "data.ring_shard_tokens=10_000", "data.ring_window=2",
              "data.ring_val_tokens=2_000", "tokenizer=bytes"]  # fmt: skip
    asked = config("data=text", f"data.path={tmp_path}/a.txt", "budget.minutes=1", "trainer.accelerator=cpu", *stream)
    asked.trainer.devices = 1
    took = budget.measure(asked, build_corpus(asked))
    assert 0 < took.step < took.starting < 30
    assert not list(tmp_path.glob("**/ring"))


def test_a_budget_ends_with_the_epochs_of_a_mixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock would allow more steps, for which there are no rows: the run was refused, or trained on empty steps."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text("Hello world, this is some text.\n" * 100)
    mixture = ", ".join(f"{{path: {tmp_path}/{name}.txt, max_epochs: 2}}" for name in ("a", "b"))
    words = [*TINY, "data=mixture", f"data.mixture=[{mixture}]", "budget.minutes=9", "trainer.accelerator=cpu",
             "callbacks.samples.every_n_validations=0", "export.enabled=false", f"run.dir={tmp_path}/run"]  # fmt: skip
    monkeypatch.setattr(budget, "measure", lambda *_: Measured(starting=1.0, step=0.5, validation=0.1))
    with ends_within(120):
        done = run("train", *words)
    assert done.code == 0, done.err
    trained = rows_to_train(config(*words), build_corpus(config(*words)))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["ended_by"]) == ("finished", "data.mixture")
    assert 6 * summary["step"] <= 2 * len(trained) < 6 * (summary["step"] + 1)
    assert "every source of data.mixture was seen its max_epochs times" in " ".join(done.out.replace("│", " ").split())
    again = run("train", *words, "run.resume=auto", "budget.minutes=18")
    assert "where its mixture's epochs end it: more minutes add no step" in " ".join(again.out.split()), again.err


@pytest.mark.slow
def test_a_larger_budget_trains_a_finished_run_further(lmtrain, corpus: Path, tmp_path: Path) -> None:
    words = [*TINY, *WORDS, f"data.path={corpus}", f"run.root={tmp_path}"]
    assert lmtrain("train", *words, "trainer.max_steps=4").returncode == 0
    done = lmtrain("train", *words, "budget.minutes=0.25")
    assert done.returncode == 0, done.stderr
    assert "0.0 of 0.25 minutes of the budget were used up to step 4" in done.stdout
    assert json.loads((tmp_path / "timed" / "summary.json").read_text())["step"] > 4


def test_more_minutes_train_no_further_than_the_epochs(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beyond them there are no rows: the run would wait for the next one for ever."""
    words = [*TINY, "data=text", f"data.path={corpus}/file_00.txt", f"run.dir={tmp_path}/run", "run.resume=auto",
             "trainer.max_epochs=1", "trainer.accelerator=cpu", "callbacks.samples.every_n_validations=0",
             "export.enabled=false"]  # fmt: skip
    assert start(lmtrain.compose([*words, "budget.minutes=1"])) == 0
    done = (tmp_path / "run" / "summary.json").read_text()
    assert json.loads(done)["status"] == "finished"
    assert "budget.minutes=2" not in capsys.readouterr().out  # not among the commands to type next
    with ends_within(120):
        assert start(lmtrain.compose([*words, "budget.minutes=2"])) == 0
    assert (tmp_path / "run" / "summary.json").read_text() == done
    assert "where trainer.max_epochs=1 ends it: more minutes add no step" in " ".join(capsys.readouterr().out.split())


def test_a_typed_length_wins(corpus: Path, tmp_path: Path) -> None:
    words = [*TINY, *WORDS, f"data.path={corpus}", "budget.minutes=0.6", f"run.root={tmp_path}", "trainer.max_steps=3"]
    done = run("train", *words)
    assert done.code == 0, done.err
    assert "trainer.max_steps=3 was typed and decides the length: budget.minutes is left out" in done.out
    assert "measuring" not in done.err


def test_what_a_named_file_sets_is_not_chosen_by_a_budget(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a length in it yields to a budget that is typed."""
    started = list[Config]()
    monkeypatch.setattr(budget, "measure", lambda *_: Measured(starting=1.0, step=60.0, validation=0.1))
    monkeypatch.setattr("lmtrain.run.start.start", lambda c: started.append(c) or 0)
    (tmp_path / "mine.yaml").write_text("trainer: {max_steps: 7, val_check_interval: 33}")
    for file in ([str(tmp_path / "mine.yaml")], []):
        done = run("train", *file, *TINY, "data=text", f"data.path={corpus}", "budget.minutes=100",
                   "trainer.accelerator=cpu", "trainer.max_epochs=null")  # fmt: skip
        assert done.code == 0, done.err
    assert [found.trainer.val_check_interval for found in started] == [33, pytest.approx(10, abs=1)]
    assert all(found.trainer.max_steps == pytest.approx(100, rel=0.1) for found in started)


@pytest.mark.parametrize("model", ["gpt_nano", "dial"])
def test_a_length_that_lmtrain_proposes_is_not_typed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file named alone is trained on for at most three epochs, which a budget outranks, also where the command is
    composed again for the depth of a dial, and where the stopped run is continued."""
    started = list[Config]()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(budget, "measure", lambda *_: Measured(starting=1.0, step=60.0, validation=0.1))
    monkeypatch.setattr("lmtrain.run.start.start", lambda c: started.append(c) or 0)
    write_rows(Path("qa.jsonl"), "chat_jsonl", 2000)
    words = ["qa.jsonl", f"model={model}", "tokenizer=bytes", "budget.minutes=100", "trainer.accelerator=cpu"]
    done = run("train", *words, "data.seq_len=256", "data.chat_template=alpaca", "data.global_batch_size=8")
    assert done.code == 0, done.err
    assert "was typed and decides the length" not in done.out
    (found,) = started
    assert (found.objective.name, found.budget.minutes, found.trainer.max_epochs) == ("sft", 100, 3)
    if model == "gpt_nano":
        assert found.trainer.max_steps == pytest.approx(100, rel=0.1)
    assert found.command.words[:4] == tuple(words[:4])  # what a stopped run is continued with


@pytest.mark.parametrize(
    ("word", "decides"),
    [("trainer.fast_dev_run=true", True), ("debug=fast", True), ("trainer.max_epochs=3", True),
     ("trainer.fast_dev_run=false", False), ("trainer.fast_dev_run=False", False), ("trainer.max_epochs=null", False)],
)  # fmt: skip
def test_what_else_decides_the_length(
    word: str, decides: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quick look at a command with a budget is quick; a limit that is turned off decides nothing."""
    monkeypatch.setattr(budget, "_settle_minutes", lambda *_: None)
    words = ["budget.minutes=1", word]
    asked = rules.check(rules.compose([*TINY, *words]), Command(tuple(words)))
    assert settle(asked, time.time(), again) is asked
    assert asked.budget.minutes == (None if decides else 1)
    assert (f"{word} was typed and decides the length" in capsys.readouterr().out) is decides


@pytest.mark.slow
def test_rank_0_measures_for_the_ranks_of_torchrun(corpus: Path, tmp_path: Path) -> None:
    """A trial of both ranks, in processes of its own; the run ends with the epochs of this small text."""
    ranks_of = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lmtrain.train"]
    words = [*TINY, "data=text", f"data.path={corpus}/file_00.txt", "trainer.accelerator=cpu", "budget.minutes=30",
             "data.global_batch_size=8", "data.micro_batch_size=2", "callbacks.samples.every_n_validations=0",
             "logger=none", "export.enabled=false", f"run.root={tmp_path}", "run.name=run"]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *ranks_of, *words], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("tokenized train") == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    saved = rules.read(tmp_path / "run" / "config.yaml")
    assert (summary["status"], saved["trainer"]["devices"]) == ("finished", 2)
    assert 0 < summary["step"] <= saved["trainer"]["max_steps"]
    assert "budget.minutes=30 chose" in " ".join((tmp_path / "run" / "plan.txt").read_text().split())
    assert not list(tmp_path.glob("budget*"))


def test_blocks_are_compiled_on_a_cpu_where_the_run_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(*words: str) -> bool | str:
        found = config("trainer.accelerator=cpu", "model=llama_nano", *words)
        devices.resolve_auto(found)
        return found.trainer.compile

    monkeypatch.setenv("CXX", "true")  # a program that exists
    assert compiled("budget.minutes=3") is True
    assert compiled("budget.minutes=2.9") is False
    assert compiled() is False
    assert compiled("budget.minutes=30", "trainer.compile=false") is False
    assert compiled("budget.minutes=30", "model=gpt_nano") is False  # measured: compiling gains nothing
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiled("budget.minutes=30") is False
    with pytest.raises(UserError, match=r"trainer.compile=true: there is no C\+\+ compiler \(no-such-compiler\)"):
        compiled("trainer.compile=true")


GROWING = ["data.curriculum.by=length", "data.curriculum.start_length=8", "data.curriculum.steps=40",
           "data.batch_warmup.start_size=2", "data.batch_warmup.steps=30"]  # fmt: skip


@pytest.mark.parametrize("growing", [[], GROWING], ids=["rows as they are", "rows and steps that grow"])
def test_a_budget_of_tokens_is_used_up_by_the_last_step(growing: list[str], corpus: Path, tmp_path: Path) -> None:
    words = [
        *TINY,
        "data=text",
        f"data.path={corpus}",
        "trainer.accelerator=cpu",
        *growing,
        "trainer.limit_val_batches=1",
        "callbacks.samples.every_n_validations=0",
        "trainer.log_every_n_steps=1",
        "export.enabled=false",
    ]
    done = run("train", *words, "budget.tokens=8e3", f"run.dir={tmp_path}/run", "run.resume=auto")
    assert done.code == 0, done.err
    seen = [row["tokens_seen"] for row in rows(tmp_path / "run" / "metrics.jsonl") if "train/loss" in row]
    assert seen[-2] < 8_000 <= seen[-1]  # trained tokens, as the run counts them
    assert f"budget.tokens=8000 chose {len(seen)} steps" in " ".join(
        (tmp_path / "run" / "plan.txt").read_text().split()
    )
    again = run("train", *words, "budget.tokens=8e3", f"run.dir={tmp_path}/run", "run.resume=auto")
    assert "the same command with budget.tokens=16000" in again.out


def test_a_budget_of_flops_gives_a_larger_model_fewer_tokens(corpus: Path, tmp_path: Path) -> None:
    words = [*TINY, EXPORT, "data=text", f"data.path={corpus}", "trainer.accelerator=cpu", "budget.flops=5e8"]
    for width in (32, 64):
        done = run("train", *words, f"model.hidden_size={width}", f"run.dir={tmp_path}/{width}")
        assert done.code == 0, done.err
        vocabulary = json.loads((tmp_path / str(width) / "export" / "config.json").read_text())["vocab_size"]
        # GPT-2 by hand: 2 layers of 12 width^2 + 13 width, the last norm, the tied head; 12 L width T for attention.
        multiplied = 2 * (12 * width**2 + 13 * width) + 2 * width + vocabulary * width
        a_token = 6 * multiplied + 12 * 2 * width * 32
        steps = json.loads((tmp_path / str(width) / "summary.json").read_text())["step"]
        assert steps == math.ceil(5e8 / a_token / (6 * 32))


@pytest.mark.slow
def test_the_ranks_of_torchrun_use_up_flops_as_one_process_does(corpus: Path, tmp_path: Path) -> None:
    words = [*TINY, "data=text", f"data.path={corpus}", "trainer.accelerator=cpu", "budget.flops=2e8",
             "data.global_batch_size=8", "callbacks.samples.every_n_validations=0", "logger=none",
             "export.enabled=false"]  # fmt: skip
    ranks_of = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "lmtrain.train"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *ranks_of, *words, f"run.dir={tmp_path}/two"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert run("train", *words, f"run.dir={tmp_path}/one").code == 0
    one, two = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("one", "two"))
    assert (two["status"], two["step"]) == ("finished", one["step"])
    assert rules.read(tmp_path / "two" / "config.yaml")["trainer"]["devices"] == 2


def test_a_budget_of_tokens_lifts_the_epochs_of_a_recipe(tmp_path: Path) -> None:
    """A recipe may end after four epochs: fewer tokens than asked for, while the plan says that the budget chose."""
    recipe = tmp_path / "experiment" / "mine.yaml"
    recipe.parent.mkdir()
    recipe.write_text("# @package _global_\ntrainer: {max_steps: null, max_epochs: 4}\n")
    asked = rules.check(rules.compose(["experiment=mine", "budget.tokens=1e9"], str(tmp_path)))
    assert asked.trainer.max_epochs == 4
    settle(asked, time.time(), again)
    assert asked.trainer.max_epochs is None
    rows_of_run = asked.trainer.max_steps * asked.data.global_batch_size
    assert 0 <= rows_of_run * asked.data.seq_len - 1e9 < asked.data.global_batch_size * asked.data.seq_len


@pytest.mark.parametrize("word", ["budget.minutes=5", "budget.tokens=1e6", "budget.flops=1e12"])
def test_a_cooldown_ends_at_a_step(word: str) -> None:
    """The steps of a budget would be counted from 0, and the time of the run that it continues as its own."""
    cooldown = ["schedule=wsd", "run.cooldown_from=outputs/long/checkpoints/step_00000100", word]
    with pytest.raises(UserError, match=r"run.cooldown_from=\S+ continues another run to trainer.max_steps: set that"):
        settle(config(*cooldown), time.time(), again)


def test_budgets_that_count_tokens_need_rows_of_a_length_and_stand_alone() -> None:
    with pytest.raises(UserError, match=r"budget.flops=2.0 does not go with budget.minutes=1.0"):
        config("budget.minutes=1", "budget.flops=2")
    chat = rules.compose([*TINY, "objective=sft", "data=chat_jsonl", "data.path=x.jsonl", "budget.tokens=1e6"])
    padded = rules.compose([*TINY, "data=text", "data.packing=greedy", "budget.tokens=1e6"])
    for tree in (chat, padded):
        with pytest.raises(UserError, match=r"budget.tokens counts rows of data.seq_len=32 tokens.*trainer.max_epochs"):
            settle(rules.check(tree), time.time(), again)


def test_a_step_is_measured_by_the_later_half(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first steps allocate memory and compile; one that something else held up counts for nothing."""
    ends = [0.0, 9.0, 14.0, 15.0, 16.0, 16.5, 17.0, 17.5, 47.5, 48.0, 48.5]
    monkeypatch.setattr(budget, "_alone", lambda *_: (4.0, ends))
    monkeypatch.setattr(budget, "_validation", lambda _config, _corpus, step: 3 * step)
    found = budget.measure(config("trainer.compile=false", "trainer.devices=1"), mock.Mock())
    assert (found.starting, found.step, found.validation) == (4.0, 0.5, 1.5)


def test_ranks_of_this_node_are_measured_on_their_share_of_the_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What starting takes includes starting the ranks; a node of several has its part of the batch."""
    asked, tried = config("budget.minutes=5", "trainer.num_nodes=3", "data.global_batch_size=12"), []
    asked.run.root = str(tmp_path)
    monkeypatch.setattr(time, "time", lambda: 100.0)
    rows = [{"time": 107.5}, {"time": 108.0}, {"time": 109.5}]
    monkeypatch.setattr(budget.trial, "run", lambda trial, folder: tried.append((trial, folder)) or rows)
    assert budget._on_ranks(asked) == (7.5, [107.5, 108.0, 109.5])
    ((trial, folder),) = tried
    assert (trial.data.global_batch_size, trial.trainer.num_nodes, trial.budget.minutes) == (4, 1, None)
    assert (asked.data.global_batch_size, asked.trainer.num_nodes) == (12, 3), "the run's own config stays"
    assert not folder.exists()
    rows[0]["time"] = 99.0  # another machine's clock
    assert budget._on_ranks(asked)[0] == 0.0
