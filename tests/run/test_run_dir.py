"""A run's folder: resumed by name, left alone when finished, typed without quotes, enough to repeat the run."""

import json
import os
import re
import shlex
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

import lmtrain
from inprocess import run, snapshot, train_tiny
from lmtrain.callbacks.metrics import without_times
from lmtrain.checkpoints import store
from lmtrain.config import compose as rules
from lmtrain.run import failures
from lmtrain.run_folder import folder as run_dir
from lmtrain.run_folder import trained
from lmtrain.run_folder.folder import RunDir, locate
from lmtrain.sweeps.trials import placed
from support import EXPORT, SAMPLES, TINY, rows


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stable(run_dir: Path) -> list[dict]:
    """Returns the rows of metrics.jsonl without fields that depend on the machine's speed."""
    return [without_times(row) for row in rows(run_dir / "metrics.jsonl")]


def trained_steps(run_dir: Path) -> list[int]:
    return [row["step"] for row in rows(run_dir / "metrics.jsonl") if "train/loss" in row]


def test_best_where_the_file_system_has_no_links(corpus: Path, here: Path) -> None:
    words = ["run.name=first", "checkpoint.min_val_rows=0", "trainer.save_every_n_steps=1"]
    assert train_tiny(corpus, *words).code == 0
    run_ = RunDir(here / "outputs" / "first")
    for link in ("best", "last"):
        (run_.checkpoints / link).unlink()
    summary = run_.read_summary()
    assert summary is not None
    assert trained.find_checkpoint(run_, "best").name == "step_00000002"
    run_.summary.write_text(json.dumps({**summary, "best": "checkpoints/step_00000001"}))
    assert trained.find_checkpoint(run_, "best").name == "step_00000001"
    assert trained.find_checkpoint(run_, "last").name == "step_00000002"


def test_advice_after_out_of_memory_can_be_followed(corpus: Path, here: Path) -> None:
    """What a resume would refuse is named for a new run; the words are quoted for the shell and for Hydra."""
    words = [*TINY, "data=text", f"data.path={corpus}", "trainer.max_steps=2", "run.dir=my runs/(1)", "data.seq_len=32"]
    built = lmtrain.build(lmtrain.compose(words))
    built.fit()
    said = str(failures.out_of_memory(MemoryError("no room"), built._run))
    now, later = said.split("In a new run, less is needed with ")
    assert later == "data.seq_len=16, or optimizer=adafactor"
    assert "trainer.activation_checkpointing=true; the last checkpoint is untouched (step_00000002); go on with" in now
    goes_on = shlex.split(now.rpartition("go on with ")[2].removesuffix(". "))
    assert rules.compose([*words, *goes_on]).run.dir == str(here / "my runs" / "(1)")


def test_what_is_in_it(corpus: Path, here: Path) -> None:
    assert train_tiny(corpus, EXPORT, SAMPLES, "run.name=first", "logger=tensorboard", "report.enabled=true").code == 0
    run_dir = here / "outputs" / "first"
    assert {p.name for p in run_dir.iterdir()} == {
        "config.yaml", "metrics.jsonl", "samples.jsonl", "summary.json", "checkpoints", "export", "tokenizer",
        "tensorboard", "report.html", "starts.jsonl", "plan.txt", ".lock",
    }  # fmt: skip
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["step"], summary["tokens"]) == ("finished", 2, 2 * 6 * 32)
    assert (run_dir / summary["last"]).resolve() == (run_dir / "checkpoints" / "last").resolve()
    assert (run_dir / summary["best"]).resolve() == (run_dir / "checkpoints" / "best").resolve()
    best = min(row["val/loss"] for row in rows(run_dir / "metrics.jsonl") if "val/loss" in row)
    assert summary["best_metric"] == {"val/loss": best}
    assert {"python", "torch", "lightning", "transformers", "lmtrain"} <= set(summary["versions"])


def test_a_finished_run_says_so_and_changes_nothing(corpus: Path, here: Path) -> None:
    assert train_tiny(corpus, EXPORT, SAMPLES, "run.name=first").code == 0
    before = snapshot(here)
    again = train_tiny(corpus, EXPORT, SAMPLES, "run.name=first")
    assert (again.code, again.err) == (0, "")
    assert f"{here}/outputs/first is finished: nothing to do" in again.out
    assert "trainer.max_steps" in again.out
    assert snapshot(here) == before


@pytest.mark.parametrize("length", ["trainer.max_steps=1", "trainer.max_epochs=100", "trainer.max_steps=2 seed=1337"])
def test_a_finished_run_that_is_asked_for_no_more_steps_is_left_as_it_is(length: str, corpus: Path, here: Path) -> None:
    assert train_tiny(corpus, "run.name=first", "logger=tensorboard").code == 0
    before = {name: content for name, (_, content) in snapshot(here).items()}
    again = train_tiny(corpus, "run.name=first", "logger=tensorboard", *length.split())
    assert (again.code, again.err) == (0, "")
    assert "is finished: nothing to do after 2 steps" in again.out
    assert "trainer.max_steps=4" in again.out
    assert {name: content for name, (_, content) in snapshot(here).items()} == before


def test_a_finished_run_is_not_taken_for_one_that_trains_differently(here: Path) -> None:
    """It is refused as a longer run would be; what only computes or shows the same elsewhere is no difference."""
    Path("book.txt").write_text("".join(f"line {i} of a book\n" for i in range(400)))
    assert train_tiny(Path("book.txt"), "run.name=first").code == 0
    before = {name: content for name, (_, content) in snapshot(here / "outputs").items()}
    for word, said in {
        "seed=6": "seed (then 1337, now 6)",
        "model.hidden_size=16": "model.hidden_size (then 32, now 16)",
        "optimizer.lr=5e-4": "is finished, with other settings: optimizer.lr 0.002 -> 0.0005. Put them back",
        "callbacks.early_stopping.patience=9": "callbacks.early_stopping.enabled False -> True",
    }.items():
        other = train_tiny(Path("book.txt"), "run.name=first", word)
        assert (other.code, "nothing to do" in other.out) == (2, False), word
        assert said in other.err
    for word in ("trainer.num_threads=2", "callbacks.samples.top_k=3", "trainer.precision=32-true"):
        assert "is finished: nothing to do" in train_tiny(Path("book.txt"), "run.name=first", word).out
    with Path("book.txt").open("a") as file:
        file.write("one more line, which this run has not learned\n")
    other = train_tiny(Path("book.txt"), "run.name=first")
    assert (other.code, "data (then " in other.err) == (2, True)
    assert {name: content for name, (_, content) in snapshot(here / "outputs").items()} == before


def in_place(book: Path, text: str) -> None:
    before = book.stat()
    book.write_text(text)
    os.utime(book, ns=(before.st_atime_ns, before.st_mtime_ns))  # as rsync -t and tar do


def by_mv(book: Path, text: str) -> None:
    other = book.with_name("other.txt")
    other.write_text(text)
    os.utime(other, (1e9, 1e9))
    os.replace(other, book)


@pytest.mark.parametrize("replace", [in_place, by_mv])
@pytest.mark.parametrize("when", ["afterwards", "meanwhile"])
def test_other_data_of_an_older_date_is_not_finished(
    when: str, replace: Callable[[Path, str], None], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the content that counts, whatever its date, and whether it came after the run or while it trained."""
    book = Path("book.txt")
    book.write_text("".join(f"line {i} of a book\n" for i in range(400)))
    words = ["run.name=first", "trainer.max_steps=1"]
    assert train_tiny(book, *words).code == 0
    other = book.read_text().replace("book", "tale")
    replace(book, other)
    if when == "meanwhile":  # the run ended after it
        late = (here / "outputs" / "first" / "summary.json").stat().st_mtime + 100
        os.utime(here / "outputs" / "first" / "summary.json", (late, late))
    again = train_tiny(book, *words)
    assert (again.code, "data (then " in again.err) == (2, True)
    replace(book, other.replace("tale", "book"))
    assert "is finished: nothing to do" in train_tiny(book, *words).out


def test_a_run_that_stopped_early_says_what_trains_it_further(corpus: Path, here: Path) -> None:
    """More patience does; the steps it has taken may be fewer than it was asked for before."""
    stop = [f"callbacks.early_stopping.{key}" for key in ("enabled=true", "patience=1", "threshold=100")]
    words = ["run.name=first", "trainer.max_steps=4", "export.enabled=false", *stop]
    assert train_tiny(corpus, *words).code == 0
    again = train_tiny(corpus, *words)
    assert "stopped early: nothing to do after 2 steps" in again.out
    told = re.search(r"the same command with (\S+);", again.out)
    assert told is not None
    assert train_tiny(corpus, *words, told[1]).code == 0
    assert trained_steps(here / "outputs" / "first")[-1] == 3, "one more validation without a better score"
    assert train_tiny(corpus, *words, "callbacks.early_stopping.enabled=false").code == 0
    assert trained_steps(here / "outputs" / "first")[-1] == 4


@pytest.mark.parametrize("resume", ["/long/checkpoints/step_00000006", "none", "auto"])
@pytest.mark.parametrize("saved", [False, True])
def test_what_was_killed_begins_again_where_it_began(resume: str, saved: bool, here: Path) -> None:
    """At another run's checkpoint, and not at random weights: ranks started again, and a trial of a sweep."""
    run = RunDir(here / "outputs" / "a")
    run.checkpoints.mkdir(parents=True)
    run.config.touch()
    if saved:
        (run.checkpoints / "step_00000008").mkdir()
    wanted = resume if resume.startswith("/") and not saved else "auto"
    config = rules.check(rules.compose([*TINY, "run.name=a", f"run.resume={resume}"]))
    run_dir.continue_after_restart(config, run)
    assert config.run.resume == wanted
    words = placed(["seed=2", f"run.resume={resume}"], run.path)
    assert sorted(words) == sorted(["seed=2", f"run.dir={run.path}", f"run.resume={wanted}"])


def test_a_named_run_continues(corpus: Path, here: Path) -> None:
    """With more steps, the same command keeps what exists, and each step is recorded once."""
    assert train_tiny(corpus, "run.name=first", "schedule=constant").code == 0
    run_dir = here / "outputs" / "first"
    earlier = stable(run_dir)
    more = train_tiny(corpus, "run.name=first", "schedule=constant", "trainer.max_steps=4")
    assert more.code == 0, more.err
    assert "continues after step 2" in more.out
    assert stable(run_dir)[: len(earlier)] == earlier
    assert trained_steps(run_dir) == [1, 2, 3, 4]
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["trainer"]["max_steps"] == 4
    assert yaml.safe_load((run_dir / "config.1.yaml").read_text())["trainer"]["max_steps"] == 2
    assert train_tiny(corpus, "schedule=constant", "trainer.max_steps=4", "run.name=at_once").code == 0
    assert trained_steps(here / "outputs" / "at_once") == [1, 2, 3, 4]


def test_rows_after_the_checkpoint_are_cut_and_written_again(corpus: Path, here: Path) -> None:
    """A run that died after step 3 had logged more than its checkpoint of step 2 knows; one line is even incomplete."""
    settings = [
        "run.name=first",
        "trainer.max_steps=4",
        "trainer.save_every_n_steps=2",
        "checkpoint.keep_best=0",
        SAMPLES,
    ]
    assert train_tiny(corpus, *settings).code == 0
    run_dir = here / "outputs" / "first"
    whole = stable(run_dir)
    samples = (run_dir / "samples.jsonl").read_text()
    (run_dir / "summary.json").unlink()
    (newest,) = [p for p in store.scan(run_dir / "checkpoints") if p.name == "step_00000004"]
    newest.rename(run_dir / "checkpoints" / "step_00000004.tmp99")
    text = (run_dir / "metrics.jsonl").read_text()
    (run_dir / "metrics.jsonl").write_text(text[:-20])

    ended = train_tiny(corpus, *settings)
    assert ended.code == 0, ended.err
    assert "continues after step 2" in ended.out
    assert stable(run_dir) == whole
    assert (run_dir / "samples.jsonl").read_text() == samples
    assert not list(run_dir.rglob("*.tmp*"))


def test_the_table_of_csv_has_the_same_rows_after_a_resume(corpus: Path, here: Path) -> None:
    assert train_tiny(corpus, "run.name=first", "logger=csv").code == 0
    assert train_tiny(corpus, "run.name=first", "logger=csv", "trainer.max_steps=3").code == 0
    header, *lines = (here / "outputs" / "first" / "csv" / "metrics.csv").read_text().splitlines()
    step, loss = header.split(",").index("step"), header.split(",").index("train/loss")
    table = [(int(cells[step]), float(cells[loss])) for cells in (r.split(",") for r in lines) if cells[loss]]
    logged = [(r["step"], r["train/loss"]) for r in rows(here / "outputs/first/metrics.jsonl") if "train/loss" in r]
    assert table == logged


def test_unnamed_runs_get_folders_of_their_own(corpus: Path, here: Path) -> None:
    for _ in range(3):
        assert train_tiny(corpus).code == 0
    names = sorted(p.name for p in (here / "outputs").iterdir())
    assert len(names) == 3
    for name in names:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d(_\d+)?", name)
        assert abs((datetime.now() - datetime.strptime(name[:19], "%Y-%m-%d_%H-%M-%S")).total_seconds()) < 600


def test_runs_that_begin_in_the_same_second_share_no_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have looked for a free name before either creates its folder."""
    config = rules.check(rules.compose([]))
    taken, free = here / "2030-01-01_00-00-00", here / "2030-01-01_00-00-00_1"
    taken.mkdir()
    found = iter([taken, free])
    monkeypatch.setattr(run_dir, "locate", lambda _: next(found))
    assert run_dir.open_run(config).path == free
    assert config.run.dir == str(free)


def test_where_a_run_lives(here: Path) -> None:
    def located(*argv: str) -> str:
        return str(locate(rules.check(rules.compose(list(argv)))).relative_to(here))

    assert located("run.name=a") == "outputs/a"
    assert located("run.name=study/a-1.5+b") == "outputs/study/a-1.5+b"
    assert located("run.name=a", "run.root=elsewhere") == "elsewhere/a"
    assert located("run.name=a", "run.dir=mine/b") == "mine/b"


def test_no_name_needs_quotes_on_the_command_line(corpus: Path, here: Path) -> None:
    """Each path that a run creates can be typed as the value of an override, and stands for itself."""
    assert train_tiny(corpus, "logger=tensorboard").code == 0
    parser = OverridesParser.create()
    paths = [p.relative_to(here) for p in (here / "outputs").rglob("*")]
    assert len(paths) > 15
    for path in paths:
        override = parser.parse_override(f"run.resume={path}")
        assert not override.is_sweep_override()
        assert override.value() == str(path)


def test_resuming_from_a_path_in_another_run(corpus: Path, here: Path) -> None:
    """A second run continues from the first one's checkpoint, which stays unchanged."""
    assert train_tiny(corpus, "run.name=first").code == 0
    before = snapshot(here / "outputs" / "first")
    last = "outputs/first/checkpoints/last"
    ended = train_tiny(corpus, "run.name=second", f"run.resume={last}", "trainer.max_steps=3")
    assert ended.code == 0, ended.err
    assert trained_steps(here / "outputs" / "second") == [3]
    assert snapshot(here / "outputs" / "first") == before


def test_a_runs_config_is_enough_to_run_it_again(corpus: Path, here: Path) -> None:
    """The numbers are the same, from the run's folder alone; single keys can be changed."""
    assert train_tiny(corpus, "run.name=first", "schedule=linear", "model.dropout=0.1", "seed=7").code == 0
    again = run("train", "--config-dir", "outputs/first", "run.dir=outputs/again")
    assert again.code == 0, again.err
    assert stable(here / "outputs" / "again") == stable(here / "outputs" / "first")
    first, second = (yaml.safe_load((here / f"outputs/{n}/config.yaml").read_text()) for n in ("first", "again"))
    assert (first["run"].pop("dir"), second["run"].pop("dir")) == (f"{here}/outputs/first", f"{here}/outputs/again")
    assert first == second

    other = run("train", "--config-dir", "outputs/first", "run.dir=outputs/other", "seed=8")
    assert other.code == 0, other.err
    assert stable(here / "outputs" / "other") != stable(here / "outputs" / "first")
    refused = run("train", "--config-dir", "outputs/first", "run.dir=outputs/third", "optimizer=lion")
    assert refused.code == 2
    assert "optimizer: this config is a run's own" in refused.err
    assert not (here / "outputs" / "third").exists()


def test_its_config_says_what_ran(corpus: Path, here: Path) -> None:
    """Every decision is written out: no auto for hardware, no interpolation, and it loads as the same config."""
    assert train_tiny(corpus, "run.name=first", "trainer.precision=auto").code == 0
    text = (here / "outputs" / "first" / "config.yaml").read_text()
    assert "${" not in text
    loaded = rules.load(here / "outputs" / "first" / "config.yaml", {})
    for key in ("accelerator", "devices", "precision", "compile", "activation_checkpointing"):
        assert getattr(loaded.trainer, key) != "auto"
    assert rules.dump(loaded) == text


def test_only_a_new_and_unused_folder_is_discarded(here: Path) -> None:
    """A folder in which training has begun stays; of a path, only the new part is removed."""
    used = RunDir(here / "used")
    used.path.mkdir()
    used.metrics.write_text('{"step": 1}\n')
    used.existed = here
    used.discard_if_unused()
    assert used.metrics.exists()
    new = RunDir(here / "mine" / "deep" / "run")
    (here / "mine").mkdir()
    new.existed = here / "mine"
    (new.path / "checkpoints").mkdir(parents=True)
    new.discard_if_unused()
    assert list((here / "mine").iterdir()) == []
    (new.path / "checkpoints").mkdir(parents=True)
    (here / "mine" / "deep" / "beside").mkdir()
    new.discard_if_unused()
    assert [p.name for p in (here / "mine" / "deep").iterdir()] == ["beside"]


def test_the_same_numbers_with_the_folder_elsewhere(corpus: Path, here: Path) -> None:
    """Neither the folder's name nor the logging frequency changes the numbers."""
    assert train_tiny(corpus, "run.name=first", "trainer.max_steps=4").code == 0
    argv = [o for o in TINY if "log_every" not in o]
    ended = run("train", *argv, "data=text", f"data.path={corpus}", "run.dir=b", "trainer.max_steps=4",
                "trainer.val_check_interval=1", "trainer.limit_val_batches=1", "trainer.log_every_n_steps=3",
                "logger=tensorboard", "callbacks.samples.every_n_validations=0", "export.enabled=false")  # fmt: skip
    assert ended.code == 0, ended.err
    first = {r["step"]: r["train/loss"] for r in rows(here / "outputs/first/metrics.jsonl") if "train/loss" in r}
    second = {r["step"]: r["train/loss"] for r in rows(here / "b/metrics.jsonl") if "train/loss" in r}
    assert sorted(second) == [1, 3, 4]
    assert {step: first[step] for step in second} == second
