"""Settings that open a config to foreign code count only when typed; each attack test checks that nothing was run."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from inprocess import run
from lmtrain import cli
from lmtrain.config import compose as rules
from lmtrain.config import environment, trust
from lmtrain.config.schema import Config
from lmtrain.data.sources.choose import open_own
from lmtrain.errors import UserError
from lmtrain.stages import definition, plan
from lmtrain.stages import definition as command
from lmtrain.sweeps import plan as sweep_plan
from lmtrain.sweeps import run as sweeps
from lmtrain.sweeps.trials import Trials
from started import STARTED

SMALL = ["data=text", "data.path=x", "data.seq_len=8"]
POPEN = {"source": "subprocess.Popen", "source_options": {"args": "true", "shell": True}}


@pytest.fixture(autouse=True)
def nothing_started() -> Iterator[None]:
    STARTED.clear()
    yield
    assert STARTED == []


def experiment(folder: Path, tree: dict[str, Any], name: str = "theirs") -> list[str]:
    """Writes an experiment for a --config-dir and returns the override that chooses it."""
    (folder / "experiment").mkdir(exist_ok=True)
    text = "# @package _global_\n" + yaml.safe_dump(tree)
    (folder / "experiment" / f"{name}.yaml").write_text(text)
    return [f"experiment={name}"]


def opened(*words: str, config_dir: Path) -> Config:
    return rules.check(rules.compose([*SMALL, *words], str(config_dir)))


ASKING = {
    "run.allow_target=[subprocess]": {"run": {"allow_target": ["subprocess"]}},
    "model.trust_remote_code=true": {"model": {"trust_remote_code": True}},
    "tokenizer.trust_remote_code=true": {"tokenizer": {"trust_remote_code": True}},
    'evaluate.task_folder="tasks"': {"evaluate": {"task_folder": "tasks"}},
    "run.allow_target=[os]": {"run": {"allow_target": "${x_list}"}, "x_list": ["os"]},
}


@pytest.mark.parametrize("word", ASKING)
def test_an_experiment_opens_nothing(word: str, tmp_path: Path) -> None:
    chosen = experiment(tmp_path, ASKING[word])
    with pytest.raises(UserError) as refusal:
        opened(*chosen, config_dir=tmp_path)
    said = str(refusal.value)
    assert str(tmp_path / "experiment" / "theirs.yaml") in said
    assert f"add {word}" in said
    assert "--trust FILE" in said


def test_what_is_typed_counts_and_wins(tmp_path: Path) -> None:
    chosen = experiment(tmp_path, {"run": {"allow_target": ["subprocess"]}, "model": {"trust_remote_code": True}})
    with pytest.raises(UserError, match=r"model\.trust_remote_code=true"):
        opened(*chosen, "run.allow_target=[mine]", config_dir=tmp_path)
    config = opened(*chosen, "run.allow_target=[mine]", "model.trust_remote_code=false", config_dir=tmp_path)
    assert trust.granted(config) == {"run.allow_target": ["mine"]}
    config = opened("++run.allow_target=[a.b]", "model.trust_remote_code=true", config_dir=tmp_path)
    assert trust.granted(config) == {"run.allow_target": ["a.b"], "model.trust_remote_code": True}


def test_a_source_that_an_experiment_opens_for_itself_is_not_called(tmp_path: Path) -> None:
    chosen = experiment(tmp_path, {"run": {"allow_target": ["subprocess"]}, "data": POPEN})
    with pytest.raises(UserError, match=r"counts only where you type it"):
        open_own(rules.check(rules.compose([*chosen, "data=text"], str(tmp_path))).data)


def saved(folder: Path, **sections: dict[str, Any]) -> Path:
    """Writes a run's config.yaml with changes that someone else made, and returns it."""
    tree = rules.to_plain(rules.check(rules.compose(SMALL)))
    for name, values in sections.items():
        tree[name] |= values
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    return folder / "config.yaml"


def test_a_runs_own_config_opens_nothing(tmp_path: Path) -> None:
    file = saved(tmp_path, run={"allow_target": ["subprocess"]}, data=POPEN)
    for grants in ({}, {"run.allow_target": ["mine"]}, {"model.trust_remote_code": True}):
        with pytest.raises(UserError, match=r"config.yaml sets run.allow_target=\[subprocess\]"):
            rules.load(file, grants)
    with pytest.raises(
        UserError, match=r"config.yaml sets .*run.allow_target=\[subprocess\]"
    ):  # as with inspect --config-dir=run
        rules.compose([], str(tmp_path))
    assert rules.load(file, {"run.allow_target": ["subprocess"]}).run.allow_target == ["subprocess"]
    file = saved(tmp_path, model={"trust_remote_code": True}, tokenizer={"trust_remote_code": True})
    assert rules.load(file, {"model.trust_remote_code": True}).tokenizer.trust_remote_code


@pytest.mark.parametrize("verb", ["evaluate", "generate", "export"])
def test_a_strangers_run_is_refused_with_the_flag(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    saved(tmp_path, run={"allow_target": ["subprocess"]}, data=POPEN)
    for environ in ({}, {"LMTRAIN_TYPED": "run.allow_target=[subprocess]"}):
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        code = importlib.import_module(f"lmtrain.{verb}").main([f"run_dir={tmp_path}"])
        assert code == 2
        err = capsys.readouterr().err
        assert "add run.allow_target=[subprocess]" in err
        assert f"{tmp_path}/config.yaml" in err


def test_a_file_named_with_trust_opens(tmp_path: Path) -> None:
    mine = tmp_path / "trust.yaml"
    mine.write_text("run: {allow_target: [mine, other]}\nmodel: {trust_remote_code: true}\ndata: {path: y}\n")
    args = cli.parse("train", ["--trust", str(mine), "trainer.max_steps=3"])
    typed = {"run.allow_target=[mine,other]", "model.trust_remote_code=true", "trainer.max_steps=3"}
    assert {*args.overrides} == typed
    chosen = experiment(tmp_path, {"run": {"allow_target": ["mine"]}})
    assert opened(*args.overrides, *chosen, config_dir=tmp_path).run.allow_target == ["mine", "other"]
    assert saved(tmp_path, run={"allow_target": ["mine"]})
    assert cli.parse("evaluate", ["--trust", str(tmp_path / "config.yaml")]).overrides == ["run.allow_target=[mine]"]
    mine.write_text("run: {allow_target: [a]}\nrun: {allow_target: [b]}\n")
    for content, said in {
        mine: "the key run is in line 1 and in line 2",
        tmp_path / "nothing": r"--trust: .*nothing: no such file",
    }.items():
        with pytest.raises(UserError, match=said):
            cli.parse("train", ["--trust", str(content)])
    mine.write_text("data: {path: y}\n")
    assert cli.parse("train", ["--trust", str(mine)]).overrides == []  # it may read the environment, see environment.py


def test_what_was_typed_reaches_a_rank_by_its_command_line(tmp_path: Path) -> None:
    """Ranks get typed permissions on their command line, as run/launch.py starts them; the file alone opens nothing."""
    config = rules.check(rules.compose([*SMALL, "run.allow_target=[mine]", "model.trust_remote_code=true"]))
    (tmp_path / "config.yaml").write_text(rules.dump(config))
    word = trust.as_word(trust.granted(config))
    assert rules.load(tmp_path / "config.yaml", trust.of_words([word])) == config
    with pytest.raises(UserError, match="counts only where you type it"):
        rules.load(tmp_path / "config.yaml", trust.of_words([]))


STAGES = {"stages": {"one": {"overrides": [*SMALL]}}, "evaluations": {"scores": {"of": ["one"], "overrides": []}}}


def planned(tree: dict[str, Any], folder: Path, *typed: str) -> plan.PipelinePlan:
    (folder / "mine.yaml").write_text(yaml.safe_dump(tree))
    pipeline = definition.read(folder / "mine.yaml")
    words = [f"pipeline={folder / 'mine.yaml'}", f"run.dir={folder / 'out'}", *typed]
    return plan.make(pipeline, command.sort(words, pipeline), None)


@pytest.mark.parametrize("part", [("stages", "one"), ("evaluations", "scores")])
def test_a_pipeline_opens_nothing(part: tuple[str, str], tmp_path: Path) -> None:
    tree = json.loads(json.dumps(STAGES))
    tree[part[0]][part[1]]["overrides"].append("run.allow_target=[subprocess]")
    with pytest.raises(UserError, match=rf"{part[1]}: .*mine.yaml sets run.allow_target=\[subprocess\]"):
        planned(tree, tmp_path)
    made = planned(tree, tmp_path, "run.allow_target=[mine]")  # typed for all: it wins
    words = [*made.stages[0].words, *made.evaluations[0].words]
    assert [w for w in words if "allow_target" in w][-1] == "run.allow_target=[mine]"
    assert made.stages[0].config.run.allow_target == ["mine"]
    assert made.evaluations[0].config.run.allow_target == ["mine"]


def test_a_pipeline_gives_no_flags(tmp_path: Path) -> None:
    tree = json.loads(json.dumps(STAGES))
    tree["stages"]["one"]["overrides"].append("--trust=mine.yaml")
    with pytest.raises(UserError, match=r"--trust=mine\.yaml is not an override"):
        planned(tree, tmp_path)


def test_a_sweeps_files_open_nothing(tmp_path: Path) -> None:
    space = {"sweep": {"method": "grid", "name": "s", "root": str(tmp_path), "space": {"run.allow_target": "[a],[b]"}}}
    chosen = experiment(tmp_path, space)
    with pytest.raises(UserError, match=r"theirs.yaml sets run.allow_target=\[a\]"):
        sweep_plan.make("train", [*SMALL, *chosen], str(tmp_path), "config")


def test_rows_of_a_search_that_set_other_keys_are_not_tried(tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    typed = [*SMALL, "sweep=optuna", "sweep.n_trials=1", f"sweep.root={tmp_path}", "sweep.name=s",
             "optimizer.lr=interval(1e-4,1e-3)"]  # fmt: skip
    made = sweep_plan.make("train", typed, None, "config")
    made.folder.mkdir()
    row = {"number": 0, "overrides": ["run.allow_target=[subprocess]", "data.source=subprocess.Popen"],
           "fixed": [*made.fixed, *made.flags]}  # fmt: skip
    (made.folder / "trials.jsonl").write_text(json.dumps(row) + "\n")
    tried = list(sweeps.upcoming(made, Trials(made.folder)))
    assert [[w.partition("=")[0] for w in t.overrides] for t in tried] == [["optimizer.lr"]]


HYDRAS = {
    "callbacks": {"callbacks": {"x": {"_target_": "subprocess.Popen", "args": "true"}}},
    "launcher": {"launcher": {"_target_": "subprocess.Popen"}},
    "job_logging": {"job_logging": {"handlers": {"x": {"()": "subprocess.Popen", "args": "true"}}}},
    "job.env_set": {"job": {"env_set": {"LD_PRELOAD": "x.so"}}},
}


@pytest.mark.parametrize("key", HYDRAS)
def test_hydras_own_keys_count_only_where_typed(key: str, tmp_path: Path) -> None:
    chosen = experiment(tmp_path, {"hydra": HYDRAS[key]})
    typed = [*SMALL, *chosen, "optimizer.lr=1e-3,1e-4", "sweep.name=s", f"sweep.root={tmp_path}"]
    with pytest.raises(UserError, match=rf"hydra\.{key} is set by a file"):
        sweep_plan.make("train", typed, str(tmp_path), "config")


def test_a_trial_process_of_a_tuning_is_told_what_was_typed(tmp_path: Path) -> None:
    """planning/trial.py, which reads a written config in its own process, opens only what its command line allows."""
    config = rules.check(rules.compose([*SMALL, "run.allow_target=[mine]", "data.path=missing.txt"]))
    (tmp_path / "config.yaml").write_text(rules.dump(config))
    line = [sys.executable, "-m", "lmtrain.planning.trial", str(tmp_path / "config.yaml"), "{}"]
    STARTED.clear()
    ended = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path, check=False)
    STARTED.clear()
    assert ended.returncode == 2
    assert "sets run.allow_target=[mine]" in ended.stderr


def test_trust_ends_with_the_command_that_names_the_file(tmp_path: Path) -> None:
    """Trust in a file ends with the command that names it, since a process may run several, as a notebook does."""
    (tmp_path / "mine.yaml").write_text("run: {allow_target: [mine]}\n")
    assert run("train", "--trust", str(tmp_path / "mine.yaml"), "--cfg").code == 0
    assert environment.flags() == ["--trust", str(tmp_path / "mine.yaml")]
    assert run("train", "--cfg").code == 0
    assert environment.flags() == []


def test_an_option_that_executes_is_the_users_to_choose(tmp_path: Path) -> None:
    """Typed it counts beside somebody else's experiment, whose own changes of it do not."""
    theirs: dict[str, Any] = {"defaults": [{"override /objective": "grpo"}, {"override /reward": "code"}, "_self_"]}
    chosen = experiment(tmp_path, theirs)
    with pytest.raises(UserError, match=r" sets reward=code, .*add reward=code"):
        opened(*chosen, "data=prompts_jsonl", config_dir=tmp_path)
    typed = [*chosen, "data=prompts_jsonl", "reward=code"]
    assert opened(*typed, config_dir=tmp_path).reward["network"] is False
    chosen = experiment(tmp_path, {**theirs, "reward": {"network": True}})
    with pytest.raises(UserError, match=r"theirs\.yaml sets reward\.network=true"):
        opened(*typed, config_dir=tmp_path)
    assert opened(*typed, "reward.network=true", config_dir=tmp_path).reward["network"] is True
    environment.trust([tmp_path / "experiment" / "theirs.yaml"])
    assert opened(*typed[:-1], config_dir=tmp_path).reward["network"] is True
    environment.trust([])
