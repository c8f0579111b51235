"""What users know from Hydra: flags, +key, ~key, their own folders; and hints otherwise."""

import dataclasses
import os
import shlex
import subprocess
import sys
from pathlib import Path

import hydra
import pytest
import torch
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.version import VersionBase
from omegaconf import DictConfig, OmegaConf

import lmtrain
from inprocess import message, run
from lmtrain.config.compose import check, compose
from lmtrain.config.defaults import conf_dir
from lmtrain.config.explain import ADD_UP
from lmtrain.config.keys import at
from lmtrain.data.sources.files import find_files
from lmtrain.errors import UserError
from lmtrain.optim.optimizers import build_optimizer

BINARY = f"{shlex.quote(sys.executable)} -m lmtrain.train"


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """Returns a folder of configs: an experiment, an option of a group, and a root config."""
    folder = tmp_path / "my_conf"
    (folder / "experiment").mkdir(parents=True)
    (folder / "model").mkdir()
    (folder / "experiment" / "tiny.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: narrow\n  - _self_\noptimizer:\n  lr: 0.5\n"
    )
    (folder / "model" / "narrow.yaml").write_text("defaults: [gpt_nano, _self_]\nname: narrow\nhidden_size: 48\n")
    (folder / "other.yaml").write_text("defaults: [config, _self_]\nseed: 7\n")
    return folder


def shown(*argv: str) -> dict:
    ended = run("train", *argv, "--cfg", "job")
    assert ended.code == 0, ended.err
    return yaml.safe_load(ended.out)


@pytest.mark.parametrize("flag", ["-cd", "--config-dir"])
def test_groups_and_recipes_of_a_users_folder(flag: str, mine: Path) -> None:
    config = shown(flag, str(mine), "experiment=tiny")
    assert (config["model"]["name"], config["model"]["hidden_size"], config["optimizer"]["lr"]) == ("narrow", 48, 0.5)
    assert shown(flag, str(mine), "model=narrow")["optimizer"]["lr"] != 0.5
    wrong = run("train", flag, str(mine), "experiment=tinyy")
    assert wrong.code == 2
    assert "did you mean experiment=tiny?" in message(wrong.err)


@pytest.mark.parametrize("flag", ["-cn", "--config-name"])
def test_a_root_of_ones_own(flag: str, mine: Path) -> None:
    assert shown("-cd", str(mine), flag, "other")["seed"] == 7


def test_a_recipe_sets_keys_of_no_group(tmp_path: Path) -> None:
    """An experiment's `seed`, a key of config.yaml itself, replaces the default, and a typed value replaces both."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "seeded.yaml").write_text("# @package _global_\nseed: 7\n")
    assert compose(["experiment=seeded"], str(tmp_path)).seed == 7
    assert compose(["experiment=seeded", "seed=8"], str(tmp_path)).seed == 8


def test_what_a_run_would_refuse_is_shown_and_refused() -> None:
    ended = run("train", "data.micro_batch_size=3", "--cfg")
    assert ended.code == 2
    assert yaml.safe_load(ended.out)["data"]["micro_batch_size"] == 3
    assert message(ended.err) == message(run("train", "data.micro_batch_size=3").err)
    assert "data.micro_batch_size" in message(ended.err)


def test_an_optimizer_yaml_of_a_class_and_its_arguments(tmp_path: Path) -> None:
    """An optimizer yaml of a class and its arguments has the usual other values: learning rate, decay, no groups."""
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("_target_: torch.optim.RAdam\nbetas: [0.8, 0.9]\n")
    config = check(compose(["optimizer=mine"], str(tmp_path)))
    usual = check(compose(["optimizer=adamw"]))
    assert (config.optimizer.name, config.optimizer.lr) == ("custom", usual.optimizer.lr)
    assert (config.optimizer.weight_decay, config.optimizer.groups) == (0.1, [])
    built = build_optimizer(torch.nn.Linear(2, 2).named_parameters(), config.optimizer, [])
    assert isinstance(built, torch.optim.RAdam)
    assert list(built.defaults["betas"]) == [0.8, 0.9]


def test_plus_and_tilde() -> None:
    assert shown("++optimizer.lr=0.25")["optimizer"]["lr"] == 0.25
    assert shown("+model.extra.attn_pdrop=0.1")["model"]["extra"] == {"attn_pdrop": 0.1}
    assert shown("~logger.tensorboard")["logger"] == {}
    assert shown("~logger")["logger"] == {}
    assert shown("+experiment=shakespeare_char") == shown("experiment=shakespeare_char")
    assert shown("+debug=fast", "+trainer=cpu")["trainer"]["accelerator"] == "cpu"


@pytest.mark.parametrize("section", ["", "data"])
@pytest.mark.parametrize("path", ["a\x85b", "a\x85\x9b\x1b\u2028b"])
def test_control_characters_are_read_back(path: str, section: str) -> None:
    """PyYAML escapes a NEL, which ends a line, only beside other control characters."""
    found = shown("data=text", f'data.path="{path}"', *(["-p", section] if section else []))
    assert (found if section else found["data"])["path"] == path


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
def as_hydra_runs_it(config: DictConfig) -> None:
    """An application of Hydra's over the same folder of configs."""


@pytest.mark.parametrize("section", ["trainer", "callbacks.ema"])
def test_one_section_as_hydra_shows_it(
    section: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["trainer=fsdp", "--cfg", "job", "--resolve", "-p", section]
    monkeypatch.setattr(sys, "argv", ["app.py", *words])
    as_hydra_runs_it()
    hydras = capsys.readouterr().out
    ended = run("train", *words)
    assert ended.code == 0, ended.err
    assert ended.out.strip() == hydras.strip()
    assert hydras.startswith(f"# @package {section}")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["hydra.run.dir=x"], "here it is run.dir"),
        (["+experiment=shakespear_char"], "did you mean experiment=shakespeare_char"),
        (["+optimizer.lrr=1"], "did you mean optimizer.lr"),
        (["++optimizer.lrr=1"], "did you mean optimizer.lr"),
        (["~optimizer.lr"], "set optimizer.lr=..."),
        (["~logger=csv"], "~logger or logger=none turns it off"),
        (["~callbacks"], "the group callbacks can't be left out; options: default, early_stopping, ema"),
        (["--cfg", "hydra"], "--info"),
        (["--package", "model"], "go with --cfg"),
        (["--resolve"], "go with --cfg"),
        (["--cfg", "--package", "modl"], "--package modl: choose objective, "),
        (["hparams_search=mnist_optuna"], "here it is sweep=optuna (with -m)"),
        (["train=False"], "python -m lmtrain.train"),
        (["test=True"], "python -m lmtrain.evaluate RUN"),
        (["paths.output_dir=x"], "here it is run.dir=x"),
        (["paths.log_dir=x"], "here it is run.root=x"),
        (["paths.data_dir=x"], "here it is data.path=x"),
        (["tags=[a]"], "here it is logger.wandb.tags (with logger=wandb)"),
        (["extras.print_config=False"], "leave it out"),
        (["trainer=mps"], "did you mean trainer=cpu (losses are summed in fp64"),
        (["trainer=ddp_sim"], "did you mean trainer=ddp trainer.accelerator=cpu trainer.devices=2?"),
        (["debug=limit"], "did you mean debug=fast?"),
        (["callbacks=model_checkpoint"], "did you mean callbacks=default?"),
        (["--config-path", "conf"], "--config-dir"),
        (["hydra.verbose=true"], "a sweep, -m, reads it"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_what_is_not_there_says_what_to_type(argv: list[str], says: str, tmp_path: Path) -> None:
    ended = run("train", *argv)
    assert ended.code == 2
    assert says in message(ended.err)
    assert not list(tmp_path.iterdir())


def test_multirun_is_shown(mine: Path) -> None:
    ended = run("train", "--multirun", "optimizer.lr=1e-3,3e-4", "--cfg")
    assert ended.code == 0
    assert ended.out.startswith("# a sweep of 2 trials")


def test_hydras_own_account(mine: Path) -> None:
    """`--info searchpath` prints Hydra's report; it runs in a subprocess, since Hydra then sets up logging."""
    words = ["--info", "searchpath", "-cd", str(mine), "model=narrow"]
    done = subprocess.run([sys.executable, "-m", "lmtrain.train", *words], capture_output=True, text=True,
                          env={**os.environ, "COLUMNS": "200"}, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"file://{mine}" in done.stdout
    assert "my_conf" in done.stdout


def test_another_schedule_or_optimizer_than_an_experiments_takes_its_keys_along() -> None:
    words = ["experiment=shakespeare_char", "schedule=cosine", "optimizer=adamw"]
    config = check(compose(words))
    assert (config.schedule.name, config.optimizer.name) == ("cosine", "adamw")
    assert not hasattr(config.schedule, "decay_ratio")
    with pytest.raises(UserError, match=r"schedule.decay_ratio has no meaning with the schedule chosen here"):
        check(compose([*words, "schedule.decay_ratio=0.5"]))


@pytest.mark.parametrize("version", ["1.2", None])
def test_inside_an_application_of_hydras(
    version: str | None, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`@hydra.main` holds Hydra while it runs; the application finds its own again, with its version and config."""
    (tmp_path / "app.yaml").write_text("seed: 7\n")
    seen = []

    @hydra.main(version_base=version, config_path=str(tmp_path), config_name="app")
    def main(config: DictConfig) -> None:
        before, base = GlobalHydra.instance().hydra, VersionBase.instance().getbase()
        composed = lmtrain.compose(["model=gpt_nano", f"seed={config.seed}"])
        data = lmtrain.TextDataModule("text", path=str(corpus), tokenizer="bytes", seq_len=32, batch_size=2)
        with pytest.raises(UserError, match="no_such_key"):
            lmtrain.compose(["no_such_key=1"])
        assert (GlobalHydra.instance().hydra, VersionBase.instance().getbase()) == (before, base)
        assert hydra.compose("app").seed == 7
        assert HydraConfig.get().job.name
        seen.append((composed.seed, composed.model.name, data.config.data.seq_len))

    off = ["hydra/job_logging=none", "hydra/hydra_logging=none", "hydra.output_subdir=null"]
    monkeypatch.setattr(sys, "argv", ["app.py", f"hydra.run.dir={tmp_path}", *off])
    main()
    assert seen == [(7, "gpt_nano", 32)]
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.parametrize("order", ["ddp,cpu", "cpu,ddp", "default,ddp,cpu"])
def test_options_of_trainer_add_up(order: str) -> None:
    trainer = lmtrain.compose([f"trainer=[{order}]", "trainer.devices=2"]).trainer
    assert (trainer.strategy, trainer.accelerator, trainer.max_steps) == ("ddp", "cpu", 1000)


@pytest.mark.parametrize("order", ["ema,early_stopping", "early_stopping,ema"])
def test_options_of_callbacks_add_up(order: str) -> None:
    callbacks = lmtrain.compose([f"callbacks=[{order}]"]).callbacks
    assert (callbacks.ema.enabled, callbacks.early_stopping.enabled, callbacks.samples.rows) == (True, True, 2)


def test_every_option_that_adds_up_sets_only_its_own_keys() -> None:
    """An option that repeated the defaults of its group would undo the options before it."""
    for group in ADD_UP:
        for file in sorted((conf_dir() / group).glob("*.yaml")):
            of_group = (yaml.safe_load(file.read_text()) or {}).get("defaults", [])
            assert "default" not in of_group, file


@pytest.mark.parametrize("words", ["optimizer=[adamw,muon]", "peft=[lora,memory]", "reward=[exact_number,format]"])
def test_alternatives_do_not_add_up(words: str) -> None:
    with pytest.raises(UserError, match="they are alternatives: choose one"):
        compose([words])


@pytest.mark.parametrize(
    ("removed", "typed"),
    [
        ("trainer.gradient_clip_val", "trainer.gradient_clip_val=null"),
        ("trainer.save_every_n_steps", "trainer.save_every_n_steps=null"),
        ("callbacks.samples", "callbacks.samples.every_n_validations=..."),
        ("callbacks.ema", "callbacks.ema.enabled=..."),
        ("seed", "seed=..."),
    ],
)
def test_a_key_that_would_come_back_is_not_removed(removed: str, typed: str) -> None:
    with pytest.raises(UserError) as refused:
        compose([f"~{removed}"])
    assert str(refused.value).endswith(f"it can't be left out: set {typed}")


def test_every_removal_is_a_removal_or_refused() -> None:
    """Whatever key of the composed config is removed, no default takes its place."""
    plain = OmegaConf.to_container(compose([]))
    for key in ("trainer.max_steps", "logger.tensorboard.flush_secs", "schedule.warmup_steps", "data.val_path", "run"):
        try:
            left = dataclasses.asdict(check(compose([f"~{key}"])))
        except UserError:
            continue
        assert at(left, key.split(".")) is None, key
        assert at(plain, key.split(".")) is not None, key


def test_an_argument_of_ones_own_class_is_removed() -> None:
    mine = [
        "optimizer=custom",
        "optimizer._target_=torch.optim.RAdam",
        "+optimizer.eps=1e-9",
        "+optimizer.foreach=true",
    ]
    assert "eps" in compose(mine).optimizer
    left = check(compose([*mine, "~optimizer.eps"])).optimizer
    assert (hasattr(left, "eps"), hasattr(left, "foreach")) == (False, True)


@pytest.mark.parametrize(
    "key", ["run.name", "trainer.max_steps", "callbacks.samples.prompts", "logger.tensorboard.flush_secs"]
)
def test_a_mandatory_value_is_asked_for(key: str) -> None:
    with pytest.raises(UserError, match=rf"^{key} has no value: set {key}="):
        check(compose([f"{key}=???"]))


@pytest.mark.parametrize(
    ("typed", "path"),
    [
        ("~/x.txt", "~/x.txt"),
        ("tëxt.txt", "tëxt.txt"),
        ("x (1).txt", "x (1).txt"),
        ("[~/x.txt, 字.txt,b.txt]", ["~/x.txt", "字.txt", "b.txt"]),
        ("['~/x y.txt',ä.txt]", ["~/x y.txt", "ä.txt"]),
        ("s3://a-b/ä.txt", "s3://a-b/ä.txt"),
    ],
)
def test_paths_are_read_as_typed(typed: str, path: str | list[str]) -> None:
    assert compose(["data=text", f"data.path={typed}"]).data.path == path


def test_words_inside_mappings_and_of_added_keys_are_read_as_typed() -> None:
    mixed = compose(["data=text_mixture", "data.mixture=[{path: ~/ä.txt, weight: 2},{name: o/ü}]"]).data.mixture
    assert mixed == [{"path": "~/ä.txt", "weight": 2}, {"name": "o/ü"}]
    assert compose(["+model.extra.note=ümlaut"]).model.extra.note == "ümlaut"
    with pytest.raises(UserError, match="there is no model=gpt_nanö; did you mean model=gpt_nano"):
        compose(["model=gpt_nanö"])
    with pytest.raises(UserError, match=r"several values are a sweep.*'data.path=\[a,ü\]'"):
        compose(["data=text", "data.path=a,ü"])


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "x.txt").write_text("some words\n" * 100)
    config = lmtrain.compose(["data.path=~/x.txt"])
    assert (config.data.format, [str(f) for f, _ in find_files(config.data.path, "auto")[0]]) == (
        "text", [str(tmp_path / "x.txt")],
    )  # fmt: skip
