"""A secret from the environment is in no byte that lmtrain writes or prints, in whatever way the config got it."""

import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import yaml

from inprocess import TWO_STEPS, Ended, run
from lmtrain.config import compose as rules
from support import EXPORT, SAMPLES, TINY, Run

CANARY = "c4n4ry-hunter2-c4n4ry"
WITH_ALL = [*TINY, *TWO_STEPS, EXPORT, SAMPLES, "report.enabled=true", "logger=many", "~logger.wandb"]


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(corpus: Path) -> Iterator[str]:
    """Yields the URL of a corpus file on a local server, which accepts any `?key=`."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(corpus))) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}/{next(corpus.glob('*.txt')).name}"
        http.shutdown()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a folder the working folder and the place of the cache, and puts the canary into the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LMTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BOOK_ACCESS", CANARY)
    return tmp_path


def holders(folder: Path) -> list[str]:
    """Returns the files below a folder whose contents or names contain the canary."""
    found = [p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()]
    return [str(p.relative_to(folder)) for p in found if CANARY in p.name or CANARY.encode() in p.read_bytes()]


def no_leak(folder: Path, *ended: Ended) -> None:
    assert holders(folder) == []
    for one in ended:
        assert CANARY not in one.out
        assert CANARY not in one.err


def test_what_a_config_reads_of_the_environment_is_used_and_not_written(server: str, place: Path) -> None:
    path = f"data.path='{server}?key=${{oc.env:BOOK_ACCESS}}'"
    words = [
        *TINY,
        *TWO_STEPS,
        EXPORT,
        SAMPLES,
        "report.enabled=true",
        "data=text",
        path,
        "logger=[csv,tensorboard]",
        "run.name=one",
    ]
    shown = [run("train", *words, "--cfg"), run("explain", "data.path", path, "data=text")]
    trained = run("train", *words)
    assert trained.code == 0, trained.err
    again = run("train", *words, "trainer.max_steps=3")
    assert again.code == 0
    assert "changed since this run's last start: trainer.max_steps 2 -> 3" in again.out
    assert "data.path" not in again.out.partition("changed since")[2].partition("\n")[0]
    folder = place / "outputs" / "one"
    assert (
        yaml.safe_load((folder / "config.yaml").read_text())["data"]["path"] == f"{server}?key=${{oc.env:BOOK_ACCESS}}"
    )
    after = [
        run("export", f"run_dir={folder}"),
        run("report", f"run_dir={folder}"),
        run("evaluate", f"run_dir={folder}", "data=text", path, "evaluate.limit=1"),
        run("inspect", "data=text", path, *TINY),
        run("estimate", *words[:-1]),
    ]
    assert [one.code for one in after] == [0] * len(after), [one.err for one in after]
    no_leak(place, trained, again, *shown, *after)
    page = (folder / "report.html").read_text().replace("<wbr>", "")  # marks where a long name may be broken
    assert "oc.env:BOOK_ACCESS" in page
    assert "oc.env:BOOK_ACCESS" in (folder / "csv" / "hparams.yaml").read_text()


def test_a_secret_typed_in_full_is_written_as_a_reference(
    server: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BOOK_TOKEN", CANARY)
    monkeypatch.delenv("BOOK_ACCESS")
    words = [*TINY, *TWO_STEPS, EXPORT, SAMPLES, "report.enabled=true", "data=text", f"data.path={server}?key={CANARY}",
             "logger=[csv,tensorboard]"]  # fmt: skip
    trained = run("train", *words, "run.dir=one")
    assert trained.code == 0, trained.err
    no_leak(place, trained)
    plan = " ".join((place / "one" / "plan.txt").read_text().split())
    assert "data.path holds the value of the environment variable BOOK_TOKEN" in plan
    assert rules.read(place / "one" / "config.yaml")["data"]["path"] == f"{server}?key=${{oc.env:BOOK_TOKEN}}"
    # It can be run again if the user vouches for the file.
    again = run("train", "--config-dir", "one", "--trust", "one/config.yaml", "run.dir=two")
    assert again.code == 0, again.err
    no_leak(place, trained, again)
    assert (place / "two" / "metrics.jsonl").read_text().count("train/loss") == 2


@pytest.mark.parametrize(
    ("name", "prompt", "loggers"),
    [
        ("MY_ACCESS", "${oc.env:MY_ACCESS}", "logger=[csv,tensorboard]"),
        ("HF_TOKEN", CANARY, "logger=[csv,tensorboard]"),
        pytest.param("MY_ACCESS", "${oc.env:MY_ACCESS}", "logger=wandb", marks=pytest.mark.slow),
    ],
)
def test_a_secret_in_a_prompt_is_in_no_sample(
    name: str, prompt: str, loggers: str, place: Path, monkeypatch: pytest.MonkeyPatch, corpus: Path
) -> None:
    """Neither in samples.jsonl, the report, the loggers' files nor on the screen; the model does read the value."""
    monkeypatch.setenv(name, CANARY)
    monkeypatch.setenv("WANDB_MODE", "offline")
    prompts = f"callbacks.samples.prompts=['the {prompt} of']"
    words = [*TINY, *TWO_STEPS, f"data.path={corpus}", "callbacks.samples.every_n_validations=1", prompts]
    trained = run("train", *words, "report.enabled=true", EXPORT, "run.dir=one", loggers)
    assert trained.code == 0, trained.err
    hidden = f"the ${{oc.env:{name}}} of"
    assert hidden in trained.out
    assert hidden in (place / "one" / "samples.jsonl").read_text()
    written = run("generate", "run_dir=one", f"generate.prompt='a {prompt}'", "generate.max_new_tokens=2")
    Path("asked.txt").write_text(f"a {CANARY}\n")
    many = ["generate.prompts_file=asked.txt", "generate.out=answers.jsonl", "generate.max_new_tokens=2"]
    answered = run("generate", "run_dir=one", *many)
    assert f"a ${{oc.env:{name}}}" in written.out, written.err
    assert f"a ${{oc.env:{name}}}" in Path("answers.jsonl").read_text(), answered.err
    assert run("generate", "run_dir=one", *many).code == 0, "the same command finds its own lines"
    Path("asked.txt").unlink()
    no_leak(place, trained, written, answered)


def test_a_secret_is_no_token(place: Path) -> None:
    ended = run("train", *TINY, "tokenizer.add_tokens=['<${oc.env:BOOK_ACCESS}>']", "--cfg")
    assert ended.code == 2
    assert "tokenizer.add_tokens has the value of the environment variable BOOK_ACCESS" in ended.err
    no_leak(place, ended)


@pytest.mark.nightly
@pytest.mark.slow
def test_ranks_and_wandb_keep_secrets_too(server: str, place: Path, lmtrain: Run) -> None:
    words = [
        *TINY,
        *TWO_STEPS,
        "report.enabled=true",
        "data=text",
        f"data.path='{server}?key=${{oc.env:BOOK_ACCESS}}'",
        "run.dir=one",
    ]
    typed = f"data.val_path={server}?key={CANARY}"
    loggers = ["logger=wandb", "logger.wandb.mode=offline", typed]
    ranks = ["trainer.accelerator=cpu", "trainer.devices=2", "data.global_batch_size=4"]
    environ = {"BOOK_ACCESS": CANARY, "BOOK_TOKEN": CANARY, "LMTRAIN_CACHE": str(place / "cache")}
    done = lmtrain("train", *words, *loggers, *ranks, env=environ, timeout=900)
    assert done.returncode == 0, done.stderr
    assert CANARY not in done.stdout + done.stderr
    assert holders(place) == []
    (file,) = (place / "one" / "wandb").glob("offline-run*/*.wandb")
    for name in (b"oc.env:BOOK_ACCESS", b"oc.env:BOOK_TOKEN"):
        assert name in file.read_bytes()
    for metadata in file.parent.glob("files/wandb-metadata.json"):  # W&B writes none for a run of seconds
        assert b"oc.env:BOOK_" in metadata.read_bytes()
