"""What is imported when: nothing heavy for help and refusals, extras only when used; and the wheel contains conf/."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import lmtrain
from lmtrain import cli
from support import EXPORT, REPO, SAMPLES, TINY, rows

# pyarrow and datasets (200 MB) are only for columnar files and the hub; benchmarks/gpu_queue.py runs without them.
EXTRAS = ("pyarrow", "torchao", "datasets", "deepspeed", "bitsandbytes", "lm_eval", "matplotlib", "optuna", "submitit",
          "hydra_plugins")  # fmt: skip
HEAVY = ("torch", "lightning", "transformers", "datasets", "wandb", "tensorboard", "pandas")


def python(code: str, *argv: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Returns the last line that `code` prints in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


IMPORT_ALL = '''
import importlib, importlib.metadata, json, pkgutil, sys, traceback

blocked = sys.argv[1].split(",")

class Without:
    """A finder of modules that doesn't find the blocked ones."""
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in blocked else self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
distribution = importlib.metadata.distribution

def without_the_blocked(name):  # libraries look here whether another is installed
    if name.replace("-", "_").lower() in blocked:
        raise importlib.metadata.PackageNotFoundError(name)
    return distribution(name)

importlib.metadata.distribution = without_the_blocked
import lmtrain

names = [m.name for m in pkgutil.walk_packages(lmtrain.__path__, "lmtrain.")]
failed = {}
for name in names:
    for loaded in [m for m in sys.modules if m.split(".")[0] == "lmtrain"]:
        del sys.modules[loaded]  # each comes first once, so that no import is carried by an earlier one
    try:
        importlib.import_module(name)
    except BaseException:
        failed[name] = traceback.format_exc()
print(json.dumps([names, failed]))
'''


@pytest.mark.slow
def test_each_module_imports_without_the_extras() -> None:
    names, failed = json.loads(python(IMPORT_ALL, ",".join(EXTRAS)))
    print(f"{len(names)} modules")
    files = [p for p in (REPO / "src" / "lmtrain").rglob("*.py") if p.name != "__init__.py"]
    assert len([n for n in names if not n.endswith("__init__")]) >= len(files)
    assert failed == {}


RUN_VERBS = """
import contextlib, importlib, io, json, sys
seen = []
for verb, *words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = importlib.import_module(f"lmtrain.{verb}").main(words)
    seen.append([code, len(out.getvalue()), err.getvalue(), sorted({m.split(".")[0] for m in sys.modules})])
print(json.dumps(seen))
"""
LIGHT = [
    *((verb, "--help") for verb in cli.VERBS),
    ("train", "--cfg"),
    ("train", "optimizer.lrr=1"),
    ("train", "data.global_batch_size=7"),
    ("train", "-m", "optimizer.lr=1,fast"),
    ("pipeline", "pipeline=laptop", "sft.trainer.max_stepz=1"),
    *((verb,) for verb in ("chat", "generate", "evaluate", "export")),  # which model?
    ("chat", "nowhere"),
    *((verb, "data=text", "data.path=nowhere.txt") for verb in ("train", "prepare", "inspect", "tune", "verify")),
    ("train", "objective=sft", "model=HuggingFaceTB/SmolLM2-135M", "data=chat_jsonl", "data.path=nowhere.jsonl"),
    ("train", "nowhere.txt"),
    ("train", "checkpoint.monitor=val/los"),
    ("train", "callbacks=early_stopping", "callbacks.early_stopping.monitor=loss"),
    *(((verb, "trainer=gpu") for verb in ("train", "tune", "verify")) if torch.version.cuda is None else ()),
]


def test_help_and_refusals_import_nothing_heavy(tmp_path: Path) -> None:
    """One process runs all, since starting one takes longer; the first command that imports too much fails."""
    for argv, (code, printed, err, modules) in zip(
        LIGHT, json.loads(python(RUN_VERBS, json.dumps(LIGHT), cwd=tmp_path)), strict=True
    ):
        assert [m for m in HEAVY if m in modules] == [], argv
        if argv[-1] in ("--help", "--cfg"):
            assert (code, err) == (0, ""), argv
            assert printed > 200, argv
        else:
            assert (code, printed) == (2, 0), argv
            assert err.startswith("error: "), argv


def test_text_is_prepared_without_torch(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Some text.\n" * 200)
    words = ["prepare", "data=text", "data.path=text.txt", "tokenizer=bytes", "data.cache_dir=cache"]
    ((code, printed, err, modules),) = json.loads(python(RUN_VERBS, json.dumps([words]), cwd=tmp_path))
    assert (code, printed > 0) == (0, True), err
    assert [m for m in ("torch", "lightning", "datasets", "wandb", "pyarrow") if m in modules] == []


def test_every_verb_is_a_module_with_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    for verb in cli.VERBS:
        assert f"  {verb} " in listed
        assert cli.main([verb, "--help"]) == 0
        text = capsys.readouterr().out
        needs = {"chat": "MODEL", "evaluate": "MODEL", "generate": 'MODEL "PROMPT"', "export": "RUN"}
        assert f"\nusage: python -m lmtrain.{verb} {needs.get(verb, '[DATA] [CONFIG]')} [group=option" in text
        for group in (REPO / "conf").iterdir():
            of_runs = group.is_dir() and group.name != "pipeline"
            assert not of_runs or f"\n  {group.name} " in text
        assert "  data       alpaca, bins, " in text
        assert " common," not in text  # what options are based on is no option


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a wheel built from the working tree, as pip would build it for a release."""
    pytest.importorskip("hatchling", reason="building the wheel needs hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(folder), str(REPO)],
        check=True,
        capture_output=True,
    )
    return next(folder.glob("lmtrain-*.whl"))


def test_the_sdist_brings_all_that_its_tests_read(tmp_path: Path) -> None:
    """Docs, benchmarks and workflows among it: the tests of an unpacked sdist are those of a clone."""
    pytest.importorskip("hatchling", reason="building the sdist needs hatchling")
    if not (REPO / ".git").exists():
        pytest.skip("no clone to compare with")
    tracked = subprocess.run(["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True).stdout.split()
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path], cwd=REPO, check=True)
    (file,) = tmp_path.iterdir()
    with tarfile.open(file) as sdist:
        names = {member.name.partition("/")[2] for member in sdist.getmembers() if member.isfile()}
    assert set(tracked) - names == set()
    assert {name.partition("/")[0] for name in names - set(tracked)} <= {
        "PKG-INFO",
        *(n.split("/")[0] for n in tracked),
    }


def test_the_wheel_brings_conf_and_nothing_of_the_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    shipped = {n.removeprefix("lmtrain/conf/") for n in names if n.startswith("lmtrain/conf/")}
    assert shipped == {str(p.relative_to(REPO / "conf")) for p in (REPO / "conf").rglob("*.yaml")}
    assert {n.split("/")[0] for n in names if ".dist-info/" not in n} == {"lmtrain"}
    assert any(n.endswith("entry_points.txt") for n in names)
    assert any(n.endswith("LICENSE") for n in names)


@pytest.mark.slow
def test_the_wheel_trains_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """In processes that see the wheel and what it requires, but not the working tree: -S reads no .pth files."""
    assert wheel.name == f"lmtrain-{lmtrain.__version__}-py3-none-any.whl"
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, capture_output=True)
    packages = [p for p in sys.path if p.endswith("site-packages")]

    def run(*argv: str, see: list[str]) -> subprocess.CompletedProcess[str]:
        env = os.environ | {"PYTHONPATH": os.pathsep.join(see), "LMTRAIN_CACHE": str(tmp_path / "cache")}
        command = [sys.executable, "-S", "-m", "lmtrain.train", *argv]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=elsewhere, env=env)

    assert "No module named" in run("--help", see=packages).stderr
    shown = run("--help", see=[str(site), *packages]).stdout
    assert f"(defaults in {site}/lmtrain/conf)" in shown
    assert list(elsewhere.iterdir()) == []

    words = [*TINY, EXPORT, SAMPLES, "data.num_samples=40", "trainer.max_steps=3", "run.name=first"]
    done = run(*words, see=[str(site), *packages])
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in rows(elsewhere / "outputs/first/metrics.jsonl") if "train/loss" in row] == [1, 2, 3]
    assert (elsewhere / "outputs" / "first" / "export" / "model.safetensors").exists()
