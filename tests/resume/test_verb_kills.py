"""Verbs other than train, killed (SIGKILL) before each of their file operations in turn, or at any moment.

The same command then continues; its results equal, byte for byte, those of an undisturbed command, and no process that
it had started still runs. LMTRAIN_TEST_KILLS sets how often each verb is killed at least (default: 3).
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mortal
import pytest
import yaml

from inprocess import train_tiny
from lmtrain.callbacks.metrics import without_times
from lmtrain.files import read_jsonl
from support import EXPORT, TINY

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
KILLS = int(os.environ.get("LMTRAIN_TEST_KILLS", "3"))
IN_A_ROW = 3  # kills in one folder before its command may end
SHORT = [
    "trainer.max_steps=3",
    "trainer.val_check_interval=2",
    "trainer.limit_val_batches=1",
    "trainer.save_every_n_steps=1",
]


@dataclass(frozen=True)
class Case:
    """A command's verb and words, and the results by name that must be equal in the folder `work` where it ran."""

    verb: str
    words: Callable[[Path], list[str]]
    leaves: Callable[[Path], dict[str, Any]]
    forked: bool = True


def contents(folder: Path, *but: str) -> dict[str, Any]:
    """Returns all files below the folder with their contents, except those whose names begin with `but`."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
    assert found, f"nothing is left in {folder}"
    return {name: data for name, data in found.items() if not name.startswith(but)} if but else found


def of_run(folder: Path) -> dict[str, Any]:
    return {
        "rows": [without_times(row) for row in read_jsonl(folder / "metrics.jsonl")],
        "weights": (folder / "export" / "model.safetensors").read_bytes(),
    }


def prepared(work: Path) -> dict[str, Any]:
    return contents(work / "cache", "files.json", ".locks")


def exported(work: Path) -> dict[str, Any]:
    return contents(work / "run" / "export", "README.md")  # the README contains the date


def evaluated(work: Path) -> dict[str, Any]:
    return contents(work / "run" / "evaluations")


def answered(work: Path) -> dict[str, Any]:
    return {"answers": (work / "answers.jsonl").read_bytes()}


def reported(work: Path) -> dict[str, Any]:
    return {"page": (work / "run" / "report.html").read_bytes()}


def tuned(work: Path) -> dict[str, Any]:
    found = json.loads((work / "tuned" / "tune.json").read_text())
    assert sorted(p.name for p in work.glob("outputs/*")) == []  # the trials' folder was removed
    return {"lr": found["lr"]}


def swept(work: Path) -> dict[str, Any]:
    return {name: of_run(work / "sweep" / name) for name in ("0", "1")}


def staged(work: Path) -> dict[str, Any]:
    return {name: of_run(work / "pipe" / name) for name in ("first", "second")} | contents(
        work / "pipe" / "evaluations", "nothing"
    )


def text(corpus: Path, work: Path) -> list[str]:
    return ["data=text", f"data.path={corpus}", f"data.cache_dir={work}/cache"]


def sweep_words(corpus: Path, work: Path) -> list[str]:
    return [
        "-m",
        *TINY,
        *SHORT,
        EXPORT,
        *text(corpus, work),
        "optimizer.lr=1e-3,3e-4",
        f"sweep.root={work}",
        "sweep.name=sweep",
    ]


def tune_words(corpus: Path, work: Path) -> list[str]:
    places = [f"tune.dir={work}/tuned", f"run.root={work}/outputs"]
    return [*TINY, *SHORT, *text(corpus, work), "tune.steps=20", "tune.micro_batch_size=false", *places]


def pipeline_words(corpus: Path, work: Path) -> list[str]:
    settings = [w for w in TINY if not w.startswith("model.")]
    shape = [w for w in TINY if w.startswith("model.")]
    tree = {
        "stages": {
            "first": {"overrides": [*settings, *shape, *SHORT, EXPORT, *text(corpus, work)]},
            "second": {"overrides": [*settings, *SHORT, EXPORT, *text(corpus, work), "model=pretrained",
                                     "model.name_or_path=${stage.first.export}"]},
        },
        "evaluations": {
            "loss": {"of": ["second"],
                     "overrides": ["data=text", f"data.path={corpus}", f"data.val_path={corpus}/file_00.txt"]},
        },
    }  # fmt: skip
    file = work.parent.parent / "two.yaml"  # outside the folder that `fresh` empties
    file.write_text(yaml.safe_dump(tree))
    return [f"pipeline={file}", f"run.dir={work}/pipe", "--trust", str(file)]


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a finished run without export, evaluations and report."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    ended = train_tiny(corpus, f"run.dir={folder}", "export.enabled=false", "report.enabled=false")
    assert ended.code == 0, ended.err
    return folder


def cases(corpus: Path) -> dict[str, Case]:
    prompts = ["generate.prompts_file=prompts.txt", "generate.num_samples=3", "generate.batch_size=2",
               "generate.max_new_tokens=4"]  # fmt: skip
    evaluation = ["data=text", f"data.val_path={corpus}", "evaluate.resamples=20", "evaluate.name=mine"]
    small = "tokenizer.train_characters=20000 tokenizer.vocab_size=300"
    return {
        "prepare": Case("prepare", lambda w: [*TINY, *text(corpus, w), "tokenizer=bpe", *small.split()], prepared),
        "export": Case("export", lambda w: [f"run_dir={w}/run"], exported),
        "evaluate": Case("evaluate", lambda w: [f"run_dir={w}/run", *evaluation], evaluated),
        "generate": Case(
            "generate", lambda w: [f"run_dir={w}/run", *prompts, f"generate.out={w}/answers.jsonl"], answered
        ),
        "report": Case("report", lambda w: [f"{w}/run"], reported),
        "tune": Case("tune", lambda w: tune_words(corpus, w), tuned, forked=False),
        "sweep": Case("train", lambda w: sweep_words(corpus, w), swept, forked=False),
        "pipeline": Case("pipeline", lambda w: pipeline_words(corpus, w), staged, forked=False),
    }  # fmt: skip


def fresh(here: Path, trained: Path) -> Path:
    """Empties `here`, copies the trained run to `work` in it, and returns `work`."""
    shutil.rmtree(here, ignore_errors=True)
    work = here / "work"
    shutil.copytree(trained, work / "run", symlinks=True)
    (here / "prompts.txt").write_text("".join(f"line {n} of\n" for n in range(5)))
    return work


@pytest.mark.parametrize("name", ["prepare", "export", "evaluate", "generate", "report", "tune", "sweep", "pipeline"])
def test_killed_again_and_again_it_leaves_the_same(name: str, corpus: Path, trained: Path, tmp_path: Path) -> None:
    case, chance, here = cases(corpus)[name], random.Random(name), tmp_path / "here"
    work = fresh(here, trained)
    command = mortal.Command(case.verb, tuple(case.words(work)), here, case.forked)
    whole = mortal.run(command)
    assert whole.code == 0, whole.output
    expected, operations = case.leaves(work), whole.operations
    assert operations

    deaths = 0
    while deaths < KILLS:
        work = fresh(here, trained)
        for _ in range(IN_A_ROW):
            # Of every three kills two come before a file operation, spread over all of them, and one at any time.
            at = 1 + (deaths * operations // KILLS + chance.randrange(operations)) % operations
            fatal, after = (None, chance.uniform(0.05, 3.0)) if deaths % 3 == 2 else (at, None)
            end = mortal.run(command, fatal, after)
            assert end.left_over == []
            if end.code == 0:  # little was left to do
                break
            assert end.code == -9, end.output
            deaths += 1
        end = mortal.run(command)
        assert end.code == 0, end.output
        assert case.leaves(work) == expected
        assert [str(p) for p in work.rglob("*") if ".tmp" in p.name] == []
    print(f"{name}: {deaths} kills, {operations} file operations")
