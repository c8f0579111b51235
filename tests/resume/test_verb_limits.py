"""Verbs other than train without enough disk space, files, memory or write access, and two of one kind at once.

Each succeeds or ends with one message, never with a traceback; once it has what it needs, the same command leaves what
an undisturbed one leaves.
"""

import resource
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import mortal
import pytest
from test_verb_kills import Case, cases, fresh, trained

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
VERBS = ["prepare", "export", "evaluate", "generate", "report", "tune", "sweep", "pipeline"]
__all__ = ["trained"]


def mount(folder: Path, options: str) -> None:
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        pytest.skip(f"a small file system can't be mounted here: {done.stderr.strip()}")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Yields disk(options), which remounts the tests' folder with these mount options and returns it."""
    folder = tmp_path / "here" / "work"
    folder.mkdir(parents=True)
    mount(folder, "size=64m")

    def remount(options: str) -> Path:
        subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)
        return folder

    yield remount
    subprocess.run(["umount", "--lazy", str(folder)], capture_output=True, check=False)


def used_kib(disk: Path) -> int:
    done = subprocess.run(["df", "-k", "--output=used", str(disk)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[1])


def undisturbed(case: Case, here: Path, trained: Path) -> tuple[mortal.Command, dict]:
    """Returns the command and what it leaves in a fresh folder; the folder is fresh again afterwards."""
    work = fresh(here, trained)
    command = mortal.Command(case.verb, tuple(case.words(work)), here, case.forked)
    end = mortal.run(command)
    assert end.code == 0, end.output
    leaves = case.leaves(work)
    fresh(here, trained)
    return command, leaves


def assert_one_message(end: mortal.End, *words: str) -> None:
    assert end.code in (1, 2), end.output
    assert "Traceback" not in end.output, end.output
    errors = [line for line in end.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, end.output
    assert any(word in errors[0] for word in words), errors[0]
    assert end.left_over == []


def assert_goes_on(command: mortal.Command, case: Case, expected: dict) -> None:
    end = mortal.run(command)
    assert end.code == 0, end.output
    assert case.leaves(command.here / "work") == expected


@pytest.mark.parametrize("name", VERBS)
def test_a_disk_that_is_full(
    name: str, disk: Callable[[str], Path], corpus: Path, trained: Path, tmp_path: Path
) -> None:
    case, here = cases(corpus)[name], tmp_path / "here"
    command, expected = undisturbed(case, here, trained)
    work = here / "work"
    disk(f"size={used_kib(work)}k")
    end = mortal.run(command)
    assert_one_message(end, "the disk is full", "disk")
    disk("size=64m")
    assert_goes_on(command, case, expected)
    disk("ro")
    end = mortal.run(command)
    if end.code != 0:  # what is prepared already needs no writing
        assert_one_message(end, "Read-only")


@pytest.mark.parametrize("name", VERBS)
def test_few_files_may_be_open(name: str, corpus: Path, trained: Path, tmp_path: Path) -> None:
    case, here = cases(corpus)[name], tmp_path / "here"
    command, expected = undisturbed(case, here, trained)
    end = mortal.run(command, limits=((resource.RLIMIT_NOFILE, 64),))
    if end.code != 0:
        assert_one_message(end, "Too many open files")
    assert_goes_on(command, case, expected)


@pytest.mark.parametrize("name", ["prepare", "export", "evaluate", "generate", "report"])
def test_memory_runs_out(name: str, corpus: Path, trained: Path, tmp_path: Path) -> None:
    case, here = cases(corpus)[name], tmp_path / "here"
    command, expected = undisturbed(case, here, trained)
    end = mortal.run(command, limits=((resource.RLIMIT_AS, 1 << 28),))  # less than the process uses already
    if end.code != 0:
        assert_one_message(end, "memory")
    assert_goes_on(command, case, expected)


@pytest.mark.parametrize("name", VERBS)
def test_two_at_once(name: str, corpus: Path, trained: Path, tmp_path: Path) -> None:
    """Both succeed, or one says that the other is running; the results are complete."""
    case, here = cases(corpus)[name], tmp_path / "here"
    command, expected = undisturbed(case, here, trained)
    ends: list[mortal.End] = []
    second = threading.Thread(target=lambda: ends.append(mortal.run(command)))
    second.start()
    ends.append(mortal.run(command))
    second.join()
    for end in ends:
        if end.code != 0:
            assert_one_message(end, "running", "in use", "another")
    assert any(end.code == 0 for end in ends), [end.output for end in ends]
    assert_goes_on(command, case, expected)
