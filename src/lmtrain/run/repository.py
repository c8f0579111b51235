"""The git commit of the working folder, found without running what the repository's own files ask git to run."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

_FILES, _FOLDERS = ("HEAD", "packed-refs", "index"), ("refs", "objects")  # what git needs to know the commit


def git_state(folder: Path | None = None) -> dict[str, Any] | None:
    """Returns {commit, dirty} of the repository around `folder` (the working folder), or None; dirty: tracked files
    changed.

    A repository that somebody else has packed may name programs for git to run: hooks, filters, a file system monitor,
    programs for diffs, includes of other settings. All are named in its configuration or its folder `hooks`. So git is
    shown a repository without either, made of the few parts that it has to read. It reads no configuration of
    the user or the system either, takes no lock, and doesn't look into submodules, which have a configuration too.
    """
    start = (folder or Path.cwd()).resolve()
    root = next((place for place in (start, *start.parents) if (place / ".git").exists()), None)
    try:
        return None if root is None else _state_of(root, _holding(root / ".git"))
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def _holding(found: Path) -> list[Path]:
    """Returns the folders that hold the repository of a `.git`: two for a linked worktree, whose `.git` is a file."""
    if found.is_file():
        found = found.parent / found.read_text(encoding="utf-8").removeprefix("gitdir:").strip()
    shared = found / "commondir"
    return [found, *([found / shared.read_text(encoding="utf-8").strip()] if shared.is_file() else [])]


def _state_of(root: Path, holding: list[Path]) -> dict[str, Any] | None:
    with tempfile.TemporaryDirectory(prefix="lmtrain-git-") as bare:
        for folder in reversed(holding):  # a linked worktree has its own HEAD and index
            for name in filter(lambda name: (folder / name).is_file(), _FILES):
                shutil.copyfile(folder / name, Path(bare) / name)
        for name in _FOLDERS:
            (Path(bare) / name).symlink_to((holding[-1] / name).resolve())
        settings = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_OPTIONAL_LOCKS": "0"}
        settings |= {"PATH": os.environ.get("PATH", os.defpath), "GIT_ATTR_NOSYSTEM": "1", "LC_ALL": "C"}
        line = ["git", f"--git-dir={bare}", f"--work-tree={root}", "status", "--porcelain=v2", "--branch",
                "--untracked-files=no", "--ignore-submodules=all"]  # fmt: skip
        ended = subprocess.run(line, cwd=bare, env=settings, capture_output=True, text=True, timeout=10, check=True)
    said = ended.stdout.splitlines()
    commit = said[0].removeprefix("# branch.oid ")
    return None if commit == "(initial)" else {"commit": commit, "dirty": not said[-1].startswith("#")}
