"""Sweeps as users start them: processes that fail, are killed, interrupted and restarted, and what is searched."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from inprocess import Ended, message, run
from lmtrain.distributed import ranks
from lmtrain.errors import UserError
from lmtrain.sweeps import launch, report, search
from lmtrain.sweeps import plan as plans
from lmtrain.sweeps import trials as trial_rows
from lmtrain.sweeps.launch import share_of_gpus
from lmtrain.sweeps.plan import SweepPlan
from lmtrain.sweeps.trials import Trial
from support import REPO, TINY, rows

FOUR_STEPS = [
    "trainer.max_steps=4", "trainer.val_check_interval=2", "trainer.limit_val_batches=1", "export.enabled=false",
    "run.allow_target=[sweep_trial]", "data=text",
]  # fmt: skip
STATES = "callbacks.extra=choice([],[{_target_: sweep_trial.Raises}],[{_target_: sweep_trial.IsKilled}])"


def sweep(here: Path, corpus: Path, *words: str) -> "subprocess.Popen[str]":
    """Starts a sweep in a folder, with its output in files there."""
    out, err = (open(here / name, "w") for name in ("stdout", "stderr"))  # noqa: SIM115
    command = [sys.executable, "-m", "lmtrain.train", "-m", *TINY, *FOUR_STEPS, f"data.path={corpus}", *words]
    environ = {**os.environ, "PYTHONPATH": str(REPO / "tests" / "helpers")}
    return subprocess.Popen(command, cwd=here, env=environ, stdout=out, stderr=err, text=True)


def sweep_here(here: Path, patch: pytest.MonkeyPatch, corpus: Path, *words: str) -> Ended:
    """Runs the same sweep from this process; its trials are separate processes."""
    patch.chdir(here)
    patch.setenv("PYTHONPATH", str(REPO / "tests" / "helpers"))
    return run("train", "-m", *TINY, *FOUR_STEPS, f"data.path={corpus}", *words)


def table(folder: Path) -> list[Trial]:
    return [Trial(**row) for row in rows(folder / "trials.jsonl")]


@pytest.mark.slow
def test_failed_trials_are_recorded_and_tried_again(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "outputs" / "sweeps" / "mine"
    # A launcher's variables, as a notebook or an earlier job may leave them, must not reach the trials.
    leaked = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": "3", "RANK": "3", "WORLD_SIZE": "1"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in leaked.items():
            patch.setenv(name, value)
        first = sweep_here(tmp_path, patch, corpus, STATES, "sweep.name=mine", "sweep.jobs=2")
    assert first.code == 1
    good, raised, killed = table(folder)
    assert (good.status, good.exit_code, good.error) == ("finished", 0, None)
    assert good.score == min(row["val/loss"] for row in rows(folder / "0" / "metrics.jsonl") if "val/loss" in row)
    assert (raised.status, raised.exit_code, raised.score) == ("failed", 1, None)
    assert raised.error is not None
    assert raised.error.startswith("Traceback ")
    assert raised.error.endswith("ZeroDivisionError: a mistake [of the user's]")
    assert (killed.status, killed.exit_code) == ("failed", -9)
    assert killed.error is not None
    assert killed.error.endswith("ended by SIGKILL: the machine ran out of memory, most likely")
    assert first.err.count("error: trial ") == 2
    before = (folder / "0" / "summary.json").stat().st_mtime_ns

    (tmp_path / "repaired").touch()
    assert sweep_here(tmp_path, monkeypatch, corpus, STATES, "sweep.name=mine", "sweep.jobs=2").code == 0
    assert [(t.number, t.status, t.exit_code, t.error) for t in table(folder)] == [
        (n, "finished", 0, None) for n in range(3)
    ]
    assert len({t.score for t in table(folder)}) == 1  # the callbacks changed nothing else
    assert (folder / "0" / "summary.json").stat().st_mtime_ns == before
    assert [row["step"] for row in rows(folder / "1" / "metrics.jsonl") if "train/loss" in row] == [1, 2, 3, 4]

    ended = run("sweep_report", str(folder))
    assert ended.code == 0, ended.err
    assert "ZeroDivision" not in ended.out
    assert (folder / "sweep.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["callbacks.extra=[{_target_: sweep_trial.Waits}]", "optimizer.lr=1e-3,3e-4", "sweep.name=mine"]
    folder = tmp_path / "outputs" / "sweeps" / "mine"
    process = sweep(tmp_path, corpus, *words)
    deadline = time.monotonic() + 100
    while not (tmp_path / "waiting").exists():
        assert process.poll() is None, (tmp_path / "stderr").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    second = sweep_here(tmp_path, monkeypatch, corpus, *words)
    assert second.code == 2
    assert "is running already" in message(second.err)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 75
    assert [(t.status, t.exit_code) for t in table(folder)] == [("preempted", 75)]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "waiting").read_text()), 0)
    out = (tmp_path / "stdout").read_text()
    assert out.count("Continue with:") == 1
    assert "sweep.name=mine" in out.splitlines()[-1]

    (tmp_path / "repaired").touch()
    assert sweep_here(tmp_path, monkeypatch, corpus, *words).code == 0
    assert [t.status for t in table(folder)] == ["finished", "finished"]
    assert "continues after step " in (folder / "0.log").read_text()
    assert [row["step"] for row in rows(folder / "0" / "metrics.jsonl") if "train/loss" in row] == [1, 2, 3, 4]


def test_a_value_written_twice_is_one_trial() -> None:
    """Two trials of the same settings would train in the same folder at the same time."""
    tried = search.combinations(search.parse(["optimizer.lr=1e-3,3e-4,1e-3", "seed=1,1"]))
    assert tried == [["optimizer.lr=0.001", "seed=1"], ["optimizer.lr=0.0003", "seed=1"]]


REFUSED = {
    ("-m", "optimizer.lr=interval(1e-4,1e-3)"): "add sweep=optuna",
    ("-m", "sweep=optuna", "optimizer.lr=tag(log,interval(0,1e-3))"): "optimizer.lr=tag(log,interval(0,1e-3)): ",
    ("-m", "sweep=optuna", "sweep.sampler=magic", "seed=1,2"): "options: tpe, random",
    ("-m", "optimizer.lr=1e-3,1e-4", "sweep.n_trials=3"): "sweep.n_trials has no meaning with the sweep chosen here",
    ("-m", "optimizer.lr=1e-3,1e-4", "sweep.jobs=0"): "sweep.jobs=0: at least 1 is needed",
    ("-m", "optimizer.lr=1e-3,1e-4", "run.name=one"): "name the sweep: sweep.name=",
    ("-m", "optimizer.lr=1e-3,1e-4", "hydra/sweeper=optuna"): "sweep=grid or sweep=optuna",
    ("-m", "optimizer.lr=1e-3,1e-4", "hydra/launcher=ray_cluster"): 'pip install "lmtrain[ray]"',
    ("-m", "optimizer.lr=1e-3,1e-4", "hydra/launcher=ray"): 'pip install "lmtrain[ray]"',
    ("-m", "optimizer.lr=1e-3,1e-4", "hydra.sweep.dir=mine"): "holds files that are not a sweep's",
    ("sweep=optuna",): "sweep has no effect on a single run",
    ("hydra/launcher=submitit_slurm",): "hydra/launcher has no effect on a single run",
}


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
def test_refused(words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    ended = run("train", *words)
    assert ended.code == 2
    assert REFUSED[words] in message(ended.err)
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


RANKS = {
    "torchrun": ({"RANK": "0", "WORLD_SIZE": "2"}, "start it without torchrun."),
    "srun": ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "start it without srun, or with srun --ntasks=1."),
}


@pytest.mark.parametrize("by", RANKS)
def test_ranks_start_no_sweep(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank would run the whole sweep; the others leave after the first, as one that is left alone can't know."""
    waited: list[float] = []
    monkeypatch.setattr(ranks.time, "sleep", waited.append)
    monkeypatch.chdir(tmp_path)
    environ, said = RANKS[by]
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    ended = run("train", "-m", "optimizer.lr=1e-3,1e-4")
    assert ended.code == 2
    assert said in message(ended.err)
    monkeypatch.setenv("RANK" if by == "torchrun" else "SLURM_PROCID", "1")
    ended = run("train", "-m", "optimizer.lr=1e-3,1e-4")
    assert (ended.code, waited) == (2, [ranks.FIRST_SECONDS])
    assert said in message(ended.err)
    assert not list(tmp_path.iterdir())


def made(*words: str) -> SweepPlan:
    return plans.make("train", list(words), None, "config")


def test_a_search_without_keys() -> None:
    with pytest.raises(UserError, match="sweep=optuna: type the keys to search"):
        made("sweep=optuna", "objective=kto", "data=unpaired_jsonl", "data.path=x")


def test_the_command_line_goes_before_the_space() -> None:
    space = 'sweep.space={optimizer.lr: "interval(1e-7,1e-5)", schedule.warmup_ratio: "choice(0.03,0.1)"}'
    for typed, searched in (([], ["optimizer.lr", "schedule.warmup_ratio"]),
                            (["optimizer.lr=1e-5"], ["schedule.warmup_ratio"]),
                            (["model.dropout=interval(0,0.2)"], ["model.dropout"])):  # fmt: skip
        assert [o.key_or_group for o in made("sweep=optuna", space, *typed).swept] == searched


def test_a_grid_has_every_combination() -> None:
    plan = made("optimizer.lr=1e-3,3e-4", "optimizer=glob(adamw*)", "data.num_workers=range(2)", "seed=7")
    assert plan.fixed == ["seed=7"]
    found = search.combinations(plan.swept)
    assert len(found) == 2 * 2 * 2
    assert ["optimizer.lr=0.0003", "optimizer=adamw_8bit", "data.num_workers=1"] in found


SPACE = ["optimizer.lr=tag(log,interval(1e-4,1e-2))", "model.num_hidden_layers=int(interval(1,8))", "seed=choice(1,2)"]


def searched(plan: SweepPlan, trials: list[Trial], until: int) -> list[Trial]:
    """Continues a search with a known score: it is best at a rate of 1e-3, and every fifth trial fails."""
    space = search.distributions(plan.swept)
    while len(trials) < until:
        chosen = search.propose(space, plan.config.sweep, "min", trials)
        rate = float(chosen[0].partition("=")[2])
        score = None if len(trials) % 5 == 4 else math.log10(rate / 1e-3) ** 2
        trials.append(Trial(len(trials), chosen, [], "failed" if score is None else "finished", 0, score))
    return trials


def test_a_search_learns_and_goes_on_where_it_was() -> None:
    pytest.importorskip("optuna")
    plan = made("sweep=optuna", *SPACE)
    whole = searched(plan, [], 40)
    kept = [Trial(**json.loads(json.dumps(vars(t)))) for t in whole[:17]]
    assert searched(plan, kept, 40) == whole
    assert searched(made("sweep=optuna", "sweep.seed=1", *SPACE), [], 3) != whole[:3]
    layers = {t.overrides[1] for t in whole}
    assert layers <= {f"model.num_hidden_layers={n}" for n in range(1, 9)}
    assert len(layers) > 3
    off = [abs(math.log10(float(t.overrides[0].partition("=")[2]) / 1e-3)) for t in whole]
    print(f"distance to the best rate, in decades: first 8 {sum(off[:8]) / 8:.2f}, last 16 {sum(off[-16:]) / 16:.2f}")
    assert sum(off[-16:]) / 16 < 0.35  # 0.5 if rates are drawn at random
    # A space that was narrowed in the meantime excludes what is outside it.
    narrow = made("sweep=optuna", SPACE[0].replace("1e-4", "9e-4"), *SPACE[1:])
    assert 9e-4 <= float(searched(narrow, whole[:10], 11)[-1].overrides[0].partition("=")[2]) <= 1e-2


@pytest.mark.parametrize(("best", "status"), [(math.nan, "failed"), (math.inf, "failed"), (2.5, "finished")])
def test_a_score_that_is_not_finite_fails_the_trial(best: float, status: str, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "summary.json").write_text(json.dumps({"status": "finished", "best_metric": {"val/loss": best}}))
    trial = Trial(0, [], [])
    trial_rows.judge(trial, tmp_path, 0, stopped=False)
    assert (trial.status, trial.score) == (status, best if status == "finished" else None)
    worst = Trial(1, [], [], "finished", 0, 1e9)
    assert trial_rows.ranked([trial, worst], "min")[-1] is (trial if status == "failed" else worst)
    json.loads((json.dumps(vars(trial))), parse_constant=pytest.fail)


def test_a_trial_without_a_result_is_judged_by_its_folder(tmp_path: Path) -> None:
    """This is the case if a launcher's job died without an exit code."""
    trial = Trial(0, [], [])
    trial_rows.judge(trial, tmp_path, None, stopped=False)
    assert (trial.status, trial.error) == ("failed", "the launcher gave no result for this trial")
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "summary.json").write_text('{"status": "preempted"}')
    trial_rows.judge(trial, tmp_path, None, stopped=False)
    assert (trial.status, trial.exit_code) == ("preempted", 75)


def test_report_sorts_and_shows_what_varies(tmp_path: Path) -> None:
    lines = [
        {"number": 0, "overrides": ["optimizer.lr=0.001", "model=gpt_nano"], "status": "failed", "error": "x\n[bold]E"},
        {"number": 1, "overrides": ["optimizer.lr=0.0003", "model=gpt_nano"], "status": "finished", "score": 3.0},
        {"number": 2, "overrides": ["optimizer.lr=0.01", "model=llama_nano"], "status": "finished", "score": 2.0},
    ]
    written = [json.dumps({"fixed": ["seed=7"], **line}) + "\n" for line in lines]
    (tmp_path / "trials.jsonl").write_text("".join(written))
    ended = run("sweep_report", str(tmp_path))
    assert ended.code == 0, ended.err
    shown = ended.out.splitlines()
    assert [line.split()[0] for line in shown[:4]] == ["trial", "2", "1", "0"]
    assert "optimizer.lr" in shown[0]
    assert "seed" not in shown[0]
    assert shown[3].rstrip().endswith("[bold]E")
    ended = run("sweep_report", str(tmp_path / "nowhere"))
    assert ended.code == 2
    assert "has no trials.jsonl" in message(ended.err)


def test_scores_that_measure_different_things_are_not_ranked_together(tmp_path: Path) -> None:
    """DPO's 0.69 is no better than a text's 5.4; highest is best where checkpoint.mode says so."""
    kinds = [
        ("causal_lm", "val/loss", "min", 5.4),
        ("dpo", "val/loss", "min", 0.69),
        ("causal_lm", "val/loss", "min", 5.1),
    ]
    kinds += [("grpo", "val/reward", "max", 0.2), ("grpo", "val/reward", "max", 0.4)]
    rows = []
    for number, (objective, monitor, mode, score) in enumerate(kinds):
        (tmp_path / str(number)).mkdir()
        config = {"objective": {"name": objective}, "checkpoint": {"monitor": monitor, "mode": mode}}
        (tmp_path / str(number) / "config.yaml").write_text(json.dumps(config))
        rows.append({"number": number, "overrides": [f"objective={objective}"], "fixed": [], "score": score})
    (tmp_path / "trials.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = run("sweep_report", str(tmp_path))
    assert [line.split()[0] for line in ended.out.splitlines() if line.strip()[:1].isdigit()] == [
        "2",
        "0",
        "1",
        "4",
        "3",
    ]
    assert "val/reward, highest first: grpo" in ended.out
    assert not (tmp_path / "sweep.png").exists()


def test_gpus_are_dealt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,4,5,7")
    assert [share_of_gpus(slot, 2) for slot in range(2)] == [{"CUDA_VISIBLE_DEVICES": gpus} for gpus in ("0,1", "4,5")]
    assert share_of_gpus(0, 1) == {}
    assert share_of_gpus(0, 6) == {}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert share_of_gpus(0, 2) == {}


@pytest.mark.slow
def test_optuna_on_two_ranks_a_trial(corpus: Path, tmp_path: Path) -> None:
    """Trials that are groups of processes have one folder each and leave nothing running; trials can be added later."""
    pytest.importorskip("optuna")
    words = ["sweep=optuna", "sweep.name=mine", "trainer.devices=2",
             "data.global_batch_size=8", "optimizer.lr=tag(log,interval(1e-4,1e30))"]  # fmt: skip
    folder = tmp_path / "outputs" / "sweeps" / "mine"
    assert sweep(tmp_path, corpus, *words, "sweep.n_trials=2", "sweep.allow_failures=true").wait(600) == 0
    first = table(folder)
    assert sweep(tmp_path, corpus, *words, "sweep.n_trials=3", "sweep.allow_failures=true").wait(600) == 0
    assert table(folder)[:2] == first or any(t.status == "failed" for t in first)
    assert [t.number for t in table(folder)] == [0, 1, 2]
    assert all((folder / str(n) / "config.yaml").exists() for n in range(3))
    deadline = time.monotonic() + 60  # a rank that was killed is listed until it is scheduled once more
    while str(folder) in (listed := subprocess.check_output(["ps", "-eo", "args"], text=True)):
        assert time.monotonic() < deadline, listed
        time.sleep(0.2)


@pytest.mark.slow
def test_trials_end_with_a_sweep_that_was_killed(corpus: Path, tmp_path: Path) -> None:
    process = sweep(tmp_path, corpus, "callbacks.extra=[{_target_: sweep_trial.Waits}]", "sweep.name=mine")
    while not (tmp_path / "waiting").exists():
        assert process.poll() is None, (tmp_path / "stderr").read_text()
        time.sleep(0.1)
    process.kill()
    process.wait()
    folder = tmp_path / "outputs" / "sweeps" / "mine"
    assert table(folder)[0].status == "running"
    deadline = time.monotonic() + 120
    while not (folder / "0" / "summary.json").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert json.loads((folder / "0" / "summary.json").read_text())["status"] == "preempted"


@pytest.mark.slow
def test_hydras_launcher(corpus: Path, tmp_path: Path) -> None:
    """submitit on this machine takes the same path as to SLURM, except for the queue."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    (tmp_path / "repaired").touch()
    words = [STATES, "sweep.name=mine", "hydra/launcher=submitit_local"]
    assert sweep(tmp_path, corpus, *words).wait(600) == 0
    assert [t.status for t in table(tmp_path / "outputs" / "sweeps" / "mine")] == ["finished"] * 3


def test_a_launchers_trials_write_their_output_beside_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a folder with a blank in its name is quoted on a trial's command line."""
    logs: list[Path] = []

    def start(verb: str, words: list[str], log: Path) -> "subprocess.Popen[bytes]":
        logs.append(log)
        return subprocess.Popen([sys.executable, "-c", ""])

    monkeypatch.setattr(launch, "start", start)
    plan = made(
        "optimizer.lr=1e-3,1e-4", f'sweep.root="{tmp_path}/my sweeps"', "sweep.name=mine", "hydra/launcher=basic"
    )
    words = [trial_rows.command(Trial(n, [f"seed={n}"], []), plan.folder) for n in range(2)]
    assert launch._launch(plan, words, 0) == [0, 0]
    assert logs == [tmp_path / "my sweeps" / "mine" / f"{n}.log" for n in range(2)]


def test_seeds_can_be_told_apart() -> None:
    values = {"20241": "20241", "20242": "20242", "0.00123456": "0.001235", "1e-3": "0.001", "adamw": "adamw"}
    assert {text: report.shown(text) for text in values} == values
