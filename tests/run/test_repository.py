"""The commit of the working folder is found without running anything that a foreign repository asks git to run."""

import os
import subprocess
from pathlib import Path

import pytest

from lmtrain.run.repository import git_state


def git(folder: Path, *words: str, check: bool = True) -> str:
    line = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *words]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, check=check).stdout.strip()


def repository(folder: Path) -> Path:
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "data.txt").write_text("1\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "x")
    return folder


def program(path: Path, marker: Path) -> str:
    """Writes a program that leaves a marker with its own name and passes its input through."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ntouch {marker}_{path.name}\ncat\n")
    path.chmod(0o755)
    return str(path)


HOOKS = ("post-index-change", "pre-commit", "post-checkout", "reference-transaction", "fsmonitor-watchman")
COMMANDS = (
    "filter.evil.clean", "filter.evil.smudge", "filter.evil.process", "diff.external", "diff.evil.textconv",
    "diff.evil.command", "core.fsmonitor", "core.pager", "pager.status", "core.sshCommand", "core.editor",
    "core.askPass", "core.alternateRefsCommand", "gpg.program", "credential.helper", "merge.evil.driver",
    "interactive.diffFilter", "uploadpack.packObjectsHook",
)  # fmt: skip


@pytest.fixture
def hostile(tmp_path: Path) -> tuple[Path, Path]:
    """Returns a repository in which git runs programs at every occasion, and the prefix of their markers."""
    folder, marker, theirs = repository(tmp_path / "theirs"), tmp_path / "RAN", tmp_path / "programs"
    sub = repository(tmp_path / "sub")
    git(folder, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(sub), "inner")
    (folder / ".gitattributes").write_text("* filter=evil diff=evil merge=evil\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "y")
    for hook in HOOKS:
        program(folder / ".git" / "hooks" / hook, marker)
        program(theirs / "hooks" / hook, marker)
    for key in COMMANDS:
        git(folder, "config", key, program(theirs / key, marker))
    for inner in (folder / ".git" / "modules" / "inner",):
        git(inner, "config", "core.fsmonitor", program(theirs / "inner", marker))
    more = tmp_path / "more.config"
    git(folder, "config", "-f", str(more), "core.hooksPath", str(theirs / "hooks"))
    git(folder, "config", "-f", str(more), "alias.status", f"!{program(theirs / 'alias', marker)}")
    git(folder, "config", "include.path", str(more))
    git(folder, "config", "diff.ignoreSubmodules", "none")
    (folder / ".git" / "info" / "attributes").write_text("* filter=evil\n")
    os.utime(folder / "data.txt", (1, 1))  # as unpacking an archive does: git has to read the file
    return folder, marker


def test_nothing_of_a_foreign_repository_runs(hostile: tuple[Path, Path]) -> None:
    folder, marker = hostile
    state = git_state(folder)
    assert list(marker.parent.glob("RAN*")) == []
    assert state is not None
    assert len(state["commit"]) == 40
    git(folder, "status", check=False)
    ran = {file.name for file in marker.parent.glob("RAN*")}
    assert {"RAN_core.fsmonitor", "RAN_inner"} <= ran, "git itself runs them, so the test would have noticed"
    assert ran & {"RAN_filter.evil.clean", "RAN_filter.evil.process"}


def test_the_commit_and_whether_files_have_changed(tmp_path: Path) -> None:
    folder = repository(tmp_path / "mine")
    (folder / "inner").mkdir()
    commit = git(folder, "rev-parse", "HEAD")
    assert git_state(folder / "inner") == {"commit": commit, "dirty": False}
    os.utime(folder / "data.txt", (1, 1))
    (folder / "new.txt").write_text("not tracked")
    assert git_state(folder) == {"commit": commit, "dirty": False}
    (folder / "data.txt").write_text("2\n")
    assert git_state(folder) == {"commit": commit, "dirty": True}
    git(folder, "commit", "-qam", "y")
    git(folder, "gc", "-q")
    git(folder, "worktree", "add", "-q", str(tmp_path / "linked"), "HEAD~1")
    assert git_state(tmp_path / "linked") == {"commit": commit, "dirty": False}
    assert git_state(folder) == {"commit": git(folder, "rev-parse", "HEAD"), "dirty": False}


@pytest.mark.parametrize("content", ["", "gitdir: /nowhere", "gitdir: " + "a" * 5000, "\x00\xff", None])
def test_what_is_no_repository_has_no_commit(content: str | None, tmp_path: Path) -> None:
    """`.git` may be any file, or an empty folder."""
    (tmp_path / ".git").mkdir() if content is None else (tmp_path / ".git").write_text(content)
    assert git_state(tmp_path) is None
