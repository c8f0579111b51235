"""The cache: a folder is built once and complete or absent, numbers are computed in parts that are kept."""

import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from lmtrain.data.chat.time_limits import TookTooLong, time_limit
from lmtrain.data.store import cache
from lmtrain.errors import UserError


def is_complete(folder: Path) -> bool:
    return (folder / "done").exists()


def test_a_folder_is_built_once_and_anew_if_it_is_not_complete(tmp_path: Path) -> None:
    target, built, said = tmp_path / "cache" / "a", [], []

    def build(folder: Path) -> None:
        assert folder.parent == target.parent
        assert folder != target
        built.append(folder)
        (folder / "done").write_text("yes")

    for _ in range(2):
        cache.build_once(target, is_complete, build, said.append)
    assert len(built) == 1
    assert (target / "done").read_text() == "yes"
    (target / "done").unlink()
    (target / "other").write_text("a part of an earlier one")
    cache.build_once(target, is_complete, build, said.append)
    assert sorted(p.name for p in target.iterdir()) == ["done"]
    assert sorted(p.name for p in target.parent.iterdir()) == [".locks", "a"]
    assert said == []


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt])
def test_one_that_fails_leaves_nothing_and_is_tried_again(raised: type[BaseException], tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise raised

    with pytest.raises(raised):
        cache.build_once(tmp_path / "a", is_complete, fails, print)
    assert [p.name for p in tmp_path.iterdir()] == [".locks"]
    cache.build_once(tmp_path / "a", is_complete, lambda folder: (folder / "done").touch(), print)
    assert is_complete(tmp_path / "a")


def test_a_second_process_waits_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, begun, goes_on, said = tmp_path / "a", threading.Event(), threading.Event(), []

    def build(folder: Path) -> None:
        begun.set()
        assert goes_on.wait(30)
        (folder / "done").touch()

    first = threading.Thread(target=cache.build_once, args=(target, is_complete, build, said.append))
    first.start()
    assert begun.wait(30)

    def say(words: str) -> None:
        said.append(words)
        goes_on.set()

    cache.build_once(target, is_complete, lambda _: pytest.fail("it was built while this one waited"), say)
    first.join()
    assert said == [f"another process is preparing {target}; waiting for it"]


def test_one_that_another_machine_published_first_is_kept(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "done").write_text("late")
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "done").write_text("early")

    cache.build_once(tmp_path / "a", is_complete, build, print)
    assert (tmp_path / "a" / "done").read_text() == "early"
    assert sorted(p.name for p in tmp_path.iterdir()) == [".locks", "a"]


def test_sigterm_ends_the_process_after_it_has_cleaned_up(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

        def build(folder: Path) -> None:
            (folder / "half").touch()
            os.kill(os.getpid(), signal.SIGTERM)

        cache.build_once(tmp_path / "a", is_complete, build, print)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert [p.name for p in tmp_path.iterdir()] == [".locks"]


@pytest.mark.parametrize("count", [0, 1, 128, 129, 300])
def test_numbers_are_computed_part_by_part_and_parts_are_reused(count: int, tmp_path: Path) -> None:
    rows, asked, advanced = np.arange(count) * 3, [], []
    progress = SimpleNamespace(advance=lambda n, _: advanced.append(n), finish=lambda: advanced.append(None))

    def numbers(some: np.ndarray) -> np.ndarray:
        asked.append(some.tolist())
        return np.stack([some, some**2], axis=1)

    parts = cache.parts_of(tmp_path / "x")
    assert parts == tmp_path / "x.parts"
    for rank in range(2):
        cache.compute_share(parts, rows, numbers, rank, 2)
    assert sorted(row for some in asked for row in some) == rows.tolist(), "each row by one rank"
    assert all(len(some) <= cache.PART for some in asked)
    assert len(asked) == -(-count // 128), "parts that an earlier version left are continued"
    before = len(asked)
    if count:
        found = cache.compute_in_parts(parts, rows, numbers, progress)  # type: ignore[arg-type]
        assert found.tolist() == [[row, row**2] for row in rows.tolist()]
        assert (sum(advanced[:-1]), advanced[-1]) == (count, None)
        assert len(asked) == before, "all parts were there"
        sorted(parts.iterdir())[-1].unlink()
        again = cache.compute_in_parts(parts, rows, numbers, progress)  # type: ignore[arg-type]
        assert again.tolist() == found.tolist()
        assert len(asked) == before + 1
        sorted(parts.iterdir())[0].write_bytes(b"damaged")
        with pytest.raises(UserError, match=r"can't be read .*: delete .*x\.parts, and it is computed again"):
            cache.compute_in_parts(parts, rows, numbers, progress)  # type: ignore[arg-type]
    assert not list(parts.glob("*.tmp*"))


def test_a_limit_ends_what_takes_longer_and_nothing_after_it() -> None:
    def endless() -> None:
        while True:
            sum(range(100))

    handler = signal.getsignal(signal.SIGALRM)

    def tried() -> list[str]:
        found = []
        with time_limit(60):
            found.append("within")
        try:
            with time_limit(0.05):
                endless()
        except TookTooLong:
            found.append("ended")
        with time_limit(None):
            found.append("never")
        threading.Event().wait(0.1)  # an interruption that comes late would be raised here
        return found

    assert tried() == ["within", "ended", "never"]
    assert signal.getsignal(signal.SIGALRM) == handler
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.extend(tried()))
    thread.start()
    thread.join(30)
    assert found == ["within", "ended", "never"]
