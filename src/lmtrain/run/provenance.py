"""What a run was made with and where: its command, the commit of the folder it was started in, the host. No torch."""

import shlex
import socket
import subprocess
from typing import Any

from lmtrain.distributed.ranks import typed
from lmtrain.secrets import hide


def provenance() -> dict[str, Any]:
    """For summary.json: command, host, and the git commit of the working folder (null outside a repository)."""
    return {"command": command("train", typed()), "host": socket.gethostname(), "git": git_state()}


def command(verb: str, words: list[str]) -> str:
    """The command as it is typed into a shell; secrets in it are read from the environment."""
    return shlex.join(["python", "-m", f"lmtrain.{verb}", *map(hide, words)])


def git_state() -> dict[str, Any] | None:
    """{commit, dirty} of the repository that the working folder is in; dirty: tracked files differ from the commit."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit.strip(), "dirty": bool(_git("status", "--porcelain", "--untracked-files=no").strip())}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    # Without the repository's own file-system monitor, a program that its config names.
    line = ["git", "-c", "core.fsmonitor=false", *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout
