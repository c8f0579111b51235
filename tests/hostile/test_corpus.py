"""Runs every hostile input with the verb that reads it, under a guard: nothing may run, be sent or written elsewhere.

One input of every fourth kind is quick, and every eighth of the kinds that compose no config, which takes 0.25 s; the
others are `slow` and `nightly`.
"""

import contextlib
import importlib
import io
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import hostile_data
import hostile_models
import hostile_runs
import hostile_stages
import hostile_targets
import hostile_yamls
import pytest
from cases import SECRET, Case, Place
from guard import Watch, watching
from pages import unprintable, wrong_in

from inprocess import message, train_tiny
from support import EXPORT, SAMPLES

CASES: list[Case] = [
    case
    for module in (hostile_targets, hostile_yamls, hostile_runs, hostile_models, hostile_data, hostile_stages)
    for case in module.cases()
]
SECONDS, ROOM = 60, 6 << 30  # limits of an input's time and of its additional address space

LIGHT = ("page of a run", "terminal of a run", "files of a run", "state of a sweep")  # a twentieth of a second each


@dataclass
class Shared:
    trained: Path
    chat: Path
    corpus: Path
    bins: Path


@pytest.fixture(scope="module")
def shared(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """Prepares a run of two steps, the export of a chat model, and prepared text."""
    folder = tmp_path_factory.mktemp("trained")
    ended = train_tiny(corpus, EXPORT, SAMPLES, "run.name=run", f"run.root={folder}", "trainer.save_every_n_steps=1")
    assert ended.code == 0, ended.err
    chat = hostile_models.chat_export(folder / "run" / "export", folder / "chat")
    cache = Path(os.environ["LMTRAIN_CACHE"])
    bins = next(p.parent for p in sorted(cache.rglob("meta.json")) if (p.parent / "train_00000.bin").exists())
    return Shared(folder / "run", chat, corpus, bins)


@pytest.fixture
def place(shared: Shared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    found = Place(tmp_path / "area", shared.trained, shared.chat, shared.corpus, shared.bins)
    monkeypatch.chdir(found.work)
    monkeypatch.syspath_prepend(found.work)  # as `python -m` does
    monkeypatch.syspath_prepend(found.stranger)
    monkeypatch.setenv("HOME", str(found.home))
    monkeypatch.setenv("PLANTED_TOKEN", SECRET)
    monkeypatch.setenv("LMTRAIN_CACHE", str(found.area / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(found.area / "tmp"))
    return found


@dataclass
class Result:
    code: int
    out: str
    err: str


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Raises within the block if it takes too long or too much memory."""

    def late(*_: object) -> None:
        raise TimeoutError(f"it took more than {SECONDS} s")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGRTMIN, late)
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, before[1]))
    main = threading.get_ident()
    timer = threading.Timer(SECONDS, lambda: signal.pthread_kill(main, signal.SIGRTMIN))  # SIGALRM is lmtrain's
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGRTMIN, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def _run(verb: str, argv: list[str], stdin: str) -> Result:
    """Runs one command in this process; exceptions propagate instead of printing a traceback."""
    out, err = io.StringIO(), io.StringIO()
    main = importlib.import_module(f"lmtrain.{verb}").main
    before, sys.stdin = sys.stdin, io.StringIO(stdin)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(argv)
    except SystemExit as left:  # raised by argparse
        code = int(left.code or 0)
    finally:
        sys.stdin = before
    return Result(code, out.getvalue(), err.getvalue())


def _files(*folders: Path) -> dict[Path, tuple[int, int]]:
    """Returns all files below the folders, with size and modification time."""
    found = {}
    for folder in folders:
        for file in folder.rglob("*"):
            with contextlib.suppress(OSError):
                if file.is_symlink() or file.is_file():
                    found[file] = (file.lstat().st_size, file.lstat().st_mtime_ns)
    return found


def judge(case: Case, place: Place) -> list[str]:
    """Runs a case and returns everything that is wrong with what it did."""
    argv = case.make(place)
    before, home = _files(place.stranger), _files(place.home, place.trained, place.chat, place.corpus, place.bins)
    watch = Watch(place.writable, [place.work], [] if case.reads else [place.home])
    with bounded(), watching(watch):
        result = _run(argv[0], argv[1:], case.stdin)
    wrong = list(watch.seen)
    if place.marker.exists() or any("PWNED" in p.name for p in place.area.rglob("*PWNED*")):
        wrong.append("the marker was made")
    if _files(place.home, place.trained, place.chat, place.corpus, place.bins) != home:
        wrong.append("files elsewhere have changed")
    left = [p for p in before if not any(p.is_relative_to(w) for w in place.writable)]
    if {p: before[p] for p in left} != {p: s for p, s in _files(place.stranger).items() if p in left}:
        wrong.append("the attacker's files have changed")
    return wrong + _told(case, result) + _written(place, before)


def _told(case: Case, result: Result) -> list[str]:
    """Returns what is wrong with the exit code and the output."""
    wrong = []
    text = result.out + result.err
    if unprintable(text):
        wrong.append(f"printed {sorted(set(unprintable(text)))}")
    if "Traceback" in text:
        wrong.append("a traceback was printed")
    if SECRET in text:
        wrong.append("the secret was printed")
    if result.code not in (0, 1, 2):
        wrong.append(f"exit code {result.code}")
    if (case.must == "refused" and result.code == 0) or (case.must == "harmless" and result.code != 0):
        wrong.append(f"exit code {result.code} where it must be {case.must}: {result.err[-500:]}")
    if result.code in (1, 2):
        said = _message(result.err)
        wrong += [f"the message doesn't say {word!r}: {said[:600]}" for word in case.says if word not in said]
        if len(said) > 4000:
            wrong.append(f"a message of {len(said)} characters")
    return wrong


def _message(err: str) -> str:
    try:
        return message(err)
    except AssertionError:
        return err if err.lstrip().startswith("usage:") else f"(no one message) {err}"


def _written(place: Place, before: dict[Path, tuple[int, int]]) -> list[str]:
    """Returns what is wrong with written pages, and which written files contain the secret."""
    wrong = []
    for file, facts in _files(place.area).items():
        if before.get(file) == facts or file.is_symlink() or file.is_relative_to(place.home):
            continue
        content = file.read_bytes()
        if SECRET.encode() in content:
            wrong.append(f"{file.relative_to(place.area)} holds the secret")
        if file.suffix == ".html" and not file.is_relative_to(place.area / "cache"):
            wrong += [f"{file.name}: {what}" for what in wrong_in(file)]
    return wrong


def _quick(cases: list[Case]) -> Iterator[Case]:
    """Yields one case of every fourth kind, and every eighth case of the kinds that compose no config."""
    for number, kind in enumerate(dict.fromkeys(case.kind for case in cases)):
        found = [case for case in cases if case.kind == kind]
        if kind in LIGHT:
            yield from found[::8]
        elif number % 4 == 0:
            yield found[len(found) // 2]


_CHOSEN = set(map(id, _quick(CASES)))
NIGHTLY = [pytest.mark.slow, pytest.mark.nightly]
_PARAMS = [pytest.param(c, id=c.id, marks=() if id(c) in _CHOSEN else NIGHTLY) for c in CASES]


@pytest.mark.parametrize("case", _PARAMS)
def test_a_hostile_input(case: Case, place: Place) -> None:
    wrong = judge(case, place)
    shutil.rmtree(place.area, ignore_errors=True)
    assert not wrong, "\n".join(wrong)


def test_there_are_enough_of_them() -> None:
    """There are at least 300 inputs of at least 15 kinds, and no two have the same name."""
    kinds = Counter(case.kind for case in CASES)
    print(f"{len(CASES)} hostile inputs of {len(kinds)} kinds: {dict(kinds)}")
    assert len(CASES) >= 300
    assert len(kinds) >= 15
    assert [name for name, count in Counter(case.id for case in CASES).items() if count > 1] == []
