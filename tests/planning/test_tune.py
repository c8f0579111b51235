"""lmtrain.tune: its suggestions, how it finds them, and that the run that follows isn't affected."""

import contextlib
import io
import json
import math
import shlex
import sys
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import yaml

from inprocess import TWO_STEPS, message, run, train_tiny
from lmtrain.callbacks.metrics import without_times
from lmtrain.config import compose, trust
from lmtrain.errors import RunError, UserError
from lmtrain.optim.schedules import Smoothed, suggest
from lmtrain.planning import trial, tuning
from support import TINY, rows


@pytest.fixture
def trials_here(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Runs trials in this process, which is faster, and returns the list of their folders."""
    folders: list[Path] = []

    def here(words: list[str], log: IO[str]) -> int:
        folders.append(Path(words[0]).parent)
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            code = trial.main(words)
        log.write(out.getvalue())
        return code

    monkeypatch.setattr(trial, "_in_process", here)
    return folders


COOLDOWN = ["schedule=wsd", "run.cooldown_from=outputs/long/checkpoints/step_00000100", "trainer.max_steps=200"]


def tune(corpus: Path, *argv: str) -> Any:
    settings = [*TINY, *TWO_STEPS, "data=text", f"data.path={corpus}", "tune.steps=20", "optimizer.lr=0.001"]
    return run("tune", *settings, *argv)


def test_the_suggestion_lies_between_the_steepest_and_the_lowest() -> None:
    rates = np.logspace(-6, 0, 200)
    # The loss falls from 4 to 2 around 1e-3, and rises steeply from 0.1 on.
    losses = [4 - 2 / (1 + (1e-3 / r) ** 2) + max(0.0, 50 * (r - 0.1)) for r in rates]
    found = suggest(rates.tolist(), losses, smoothing=0.0)
    assert found is not None
    assert found.steepest == pytest.approx(1e-3, rel=0.2)
    assert found.lowest == pytest.approx(0.1, rel=0.2)
    assert found.lr == pytest.approx(math.sqrt(1e-3 * 0.1), rel=0.2)
    cut = suggest(rates.tolist(), [*losses[:150], math.nan, *losses[151:]], smoothing=0.0)
    assert cut is not None
    assert len(cut.smoothed) == 150
    assert suggest(rates.tolist(), [2.0 + r for r in rates], smoothing=0.8) is None


def test_smoothing_is_torch_emas_with_bias_correction() -> None:
    values, average = [3.0, 1.0, 2.0, 5.0], Smoothed(0.9)
    got = [average.add(v) for v in values]
    weights = [[0.9 ** (i - j) for j in range(i + 1)] for i in range(4)]
    assert got == pytest.approx([np.average(values[: i + 1], weights=w) for i, w in enumerate(weights)])


def test_groups_without_a_rate_are_those_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group may only set a weight decay or, as base does beside an adapter, say what is trained."""
    asked = compose.check(compose.compose([*TINY, "optimizer.groups=[{pattern: wpe, weight_decay: 0}]"]))
    tried: list[Any] = []
    curve = [{"lr": 10 ** (-6 + i / 4), "loss": 4.0 - 0.1 * i} for i in range(20)]
    monkeypatch.setattr(trial, "run", lambda config, _: tried.append(config) or curve)
    tuning.range_test(asked, tmp_path, tuning.Found())
    assert tried[0].optimizer.groups == [{"pattern": "wpe", "weight_decay": 0}]


def test_tuning_then_training_equals_training_with_the_overrides(
    corpus: Path, tmp_path: Path, trials_here: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    groups = "optimizer.groups=[{pattern: wte, lr: 0.002}, {pattern: wpe, weight_decay: 0}]"
    ended = tune(corpus, "run.name=tuned", "tune.apply=true", groups)
    assert ended.code == 0, ended.err
    written = json.loads((tmp_path / "outputs/tune/tuned/tune.json").read_text())
    assert (tmp_path / "outputs/tune/tuned/lr.png").stat().st_size > 5000
    rates = [row["lr"] for row in written["curve"]]
    assert rates[0] == pytest.approx(1e-6)
    assert np.diff(np.log(rates)) == pytest.approx(np.full(len(rates) - 1, np.log(rates[1] / rates[0])))
    assert written["micro_batch_size"] == 6  # all rows of a step fit into this machine's memory
    assert written["groups"][0]["lr"] == pytest.approx(2 * written["lr"], rel=0.01)
    assert "lr" not in written["groups"][1]

    assert not any(folder.exists() for folder in trials_here)
    assert sorted(p.name for p in (tmp_path / "outputs").iterdir()) == ["tune", "tuned"]
    line = next(text for text in ended.out.splitlines() if text.startswith("to type: "))
    typed = shlex.split(line)[5:]
    plain = run("train", *(w for w in typed if not w.startswith("run.name=")), "run.name=plain")
    assert plain.code == 0, plain.err
    runs = [tmp_path / "outputs" / name for name in ("tuned", "plain")]
    ours, theirs = ([without_times(r) for r in rows(folder / "metrics.jsonl")] for folder in runs)
    assert ours == theirs
    assert ours[0]["train/loss"] == written["curve"][0]["loss"]  # the same first step, before any update
    configs = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in runs]
    assert {k for k in configs[0] if configs[0][k] != configs[1][k]} == {"run", "tune"}
    assert {k for k in configs[0]["run"] if configs[0]["run"][k] != configs[1]["run"][k]} == {"name", "dir"}
    again = tune(corpus, "run.name=tuned", "tune.apply=true")
    assert again.code == 2
    assert "holds a run already" in message(again.err)


def test_it_halves_until_a_trial_fits(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trials_here: list[Path]
) -> None:
    """The trials made for a GPU, here on a CPU whose simulated memory fits no more than two rows."""
    monkeypatch.setattr(tuning, "_estimated", tuning._tried)
    real = trial.run

    def small(config: Any, folder: Path, longest_rows: bool = False) -> Any:
        if config.data.micro_batch_size > limit:
            raise trial.OutOfMemory
        return real(config, folder, longest_rows)

    monkeypatch.setattr(trial, "run", small)
    limit = 2
    words = ["tune.lr=false", f"run.root={tmp_path}", "data.micro_batch_size=2"]
    ended = tune(corpus, *words)
    assert ended.code == 0, ended.err
    assert "data.micro_batch_size=3: out of memory" in ended.out
    assert "data.micro_batch_size=1: fits the longest rows" in ended.out  # 6, 3, 1: sizes have to divide 6
    limit = 0
    with pytest.raises(RunError, match="one row does not fit"):
        _raise(tune(corpus, *words))


def _raise(ended: Any) -> None:
    if ended.code == 1:
        raise RunError(message("\n".join(ended.err.splitlines()[-1:])))


@pytest.mark.parametrize(("argv", "words"), [
    (["optimizer.lr=0"], "set tune.min_lr and tune.max_lr"),
    (["tune.min_lr=1", "tune.max_lr=0.1"], "the second has to be the larger"),
    (["trainer.num_nodes=2"], "without torchrun"),
    ([*COOLDOWN], "set tune.lr=false"),
    (["tune.steps=3"], "at least 20"),
    (["run_dir=x"], "run_dir has no effect"),
])  # fmt: skip
def test_what_cannot_be_tuned_is_refused(argv: list[str], words: str, corpus: Path, tmp_path: Path) -> None:
    ended = tune(corpus, f"run.root={tmp_path}", "tune.micro_batch_size=false", *argv)
    assert ended.code == 2
    assert words in message(ended.err)


def test_a_trial_of_a_cooldown_begins_anew(corpus: Path, tmp_path: Path, trials_here: list[Path]) -> None:
    words = [*TINY, "data=text", f"data.path={corpus}", *COOLDOWN, f"run.root={tmp_path}"]
    config = compose.check(compose.compose(words))
    assert [row["step"] for row in trial.run(trial.config_of(config, tmp_path / "trial", 2), tmp_path / "trial")] == [
        1,
        2,
    ]
    assert config.run.cooldown_from is not None


def test_a_failing_trial_says_what_the_run_would(corpus: Path, tmp_path: Path, trials_here: list[Path]) -> None:
    words = ["callbacks.extra=[{_target_: torch.nn.Linear}]", "tune.micro_batch_size=false"]
    ended = tune(corpus, f"run.root={tmp_path}", *words)
    assert ended.code == 2
    assert "torch.nn.Linear" in message(ended.err)


def test_the_pattern_of_a_group_is_typed_as_it_is_read() -> None:
    groups = [{"pattern": r"\.bias$", "lr": 0.002}, {"pattern": 'é "${a}"', "weight_decay": 0}]
    (override,) = tuning.Found(groups=groups).overrides()
    assert [dict(group) for group in compose.compose([override]).optimizer.groups] == groups


def test_without_matplotlib_it_says_why_there_is_no_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    rates = np.logspace(-6, 0, 50).tolist()
    found = tuning.Found(suggestion=suggest(rates, np.linspace(4, 2, 50).tolist(), smoothing=0.0))
    assert tuning.write(found, tmp_path) == [tmp_path / "tune.json"]
    assert capsys.readouterr().out == 'no picture: it needs matplotlib: pip install "lmtrain[plots]"\n'


@pytest.mark.slow
def test_two_ranks_in_processes_of_their_own(corpus: Path, tmp_path: Path) -> None:
    ended = tune(corpus, f"run.root={tmp_path}", "trainer.devices=2", "trainer.accelerator=cpu", "run.name=two",
                 "data.micro_batch_size=1")  # fmt: skip
    assert ended.code == 0, ended.err
    written = json.loads((tmp_path / "tune/two/tune.json").read_text())
    assert written["micro_batch_size"] == 3
    assert len(written["curve"]) >= 10
    assert train_tiny(corpus, "optimizer.lr=1e-6", f"run.dir={tmp_path / 'one'}").code == 0
    assert written["curve"][0]["loss"] == pytest.approx(rows(tmp_path / "one/metrics.jsonl")[0]["train/loss"], rel=1e-5)


def test_a_trial_is_the_run_or_the_run_on_its_longest_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, called = tmp_path / "config.yaml", []
    file.write_text(compose.dump(compose.check(compose.compose(TINY))))
    monkeypatch.setattr(trial, "_with_longest_rows", lambda config: called.append("longest") or 0)
    monkeypatch.setattr(trial, "start", lambda config: called.append("start") or 0)
    granted = trust.as_word(trust.granted(compose.check(compose.compose(TINY))))
    assert (trial.main([str(file), granted]), trial.main([str(file), granted, "longest"])) == (0, 0)
    assert called == ["start", "longest"]

    def fails(config: Any) -> int:
        raise RunError("a mistake")

    monkeypatch.setattr(trial, "start", fails)
    assert trial.main([str(file), granted]) == RunError.exit_code


@pytest.mark.parametrize(("code", "text", "raised", "words"), [
    (0, "", None, ""),
    (-9, "", trial.OutOfMemory, ""),
    (1, "torch.OutOfMemoryError: CUDA out of memory", trial.OutOfMemory, ""),
    (1, "error: first\nerror: the loss\nmore", RunError, "a trial of 5 steps: the loss"),
    (2, "error: a key", UserError, "a trial of 5 steps: a key"),
    (7, "a traceback", RunError, "exit code 7:\na traceback"),
])  # fmt: skip
def test_how_a_trial_ends(
    code: int, text: str, raised: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ends(argv: list[str], log: IO[str]) -> int:
        log.write(text)
        assert (argv[0], argv[2:]) == (str(tmp_path / "trial" / "config.yaml"), ["longest"])
        (tmp_path / "trial" / "curve.jsonl").write_text('{"step": 1, "lr": 0.5}\n')
        return code

    monkeypatch.setattr(trial, "_in_process", ends)
    asked = trial.config_of(compose.check(compose.compose(TINY)), tmp_path / "trial", 4)
    if raised is None:
        assert trial.run(asked, tmp_path / "trial", longest_rows=True) == [{"step": 1, "lr": 0.5}]
        return
    with pytest.raises(raised) as error:
        trial.run(asked, tmp_path / "trial", longest_rows=True)
    assert words in str(error.value)
