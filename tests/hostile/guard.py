"""Watches what a hostile input makes this process do: an audit hook records and stops what lmtrain itself never does.

An audit hook can't be removed, so it is added once and is inactive except within `watching`. It sees Python's own audit
events (PEP 578); what C libraries do without them is checked afterwards: files that appeared, child processes.
"""

import contextlib
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WORD = "PWNED"  # in every payload: the file it would create, the code it would run
MODULE = "pwned"  # prefix of the attacker's modules

_PROCESSES = {
    "subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.spawn", "os.fork", "os.forkpty", "os.startfile",
    "os.startfile/2", "pty.spawn", "os.killpg", "webbrowser.open", "cpython.run_command", "cpython.run_file",
    "cpython.run_module", "cpython.run_stdin", "sys.addaudithook",
}  # fmt: skip
_SOCKETS = {
    "socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr",
    "socket.sendto", "socket.sendmsg", "urllib.Request", "ftplib.connect", "smtplib.connect", "poplib.connect",
    "imaplib.open", "telnetlib.Telnet.open", "nntplib.connect",
}  # fmt: skip
# For each event that changes a file system: positions of its paths, each with that of the folder it is relative to.
_CHANGES = {
    "os.rename": ((0, 2), (1, 3)), "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.mkdir": ((0, 2),),
    "os.symlink": ((1, 2),), "os.link": ((0, 2), (1, 3)), "os.chmod": ((0, 2),), "os.chown": ((0, 3),),
    "os.truncate": ((0, None),), "os.utime": ((0, 3),), "os.setxattr": ((0, None),), "os.removexattr": ((0, None),),
    "sqlite3.connect": ((0, None),), "os.chdir": ((0, None),),
}  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_STEERING = {"LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "PATH", "HF_ENDPOINT"}
# Packages whose objects libraries unpickle themselves; a payload names anything else.
_PICKLED = ("torch", "numpy", "collections", "_codecs", "copyreg", "datetime", "lmtrain", "tokenizers", "transformers")
_TEMPLATE = "<template>"  # name of chat templates' code, which jinja2 sandboxes; what it opens or starts is seen
_DEVICES = ("/dev/null", "/dev/shm", "/dev/tty", "/proc/self")


class Caught(RuntimeError):
    """Raised instead of performing what an attack would have done."""


@dataclass
class Watch:
    """What one input may do, and what else it did.

    Args:
        writable: folders or files at or below which anything may be written.
        hostile: the attacker's folders, from which no code, module or library may be loaded.
        secret: folders from which nothing may be read.
    """

    writable: list[Path]
    hostile: list[Path]
    secret: list[Path] = field(default_factory=list)
    seen: list[str] = field(default_factory=list)

    def note(self, what: str) -> None:
        self.seen.append(what)
        raise Caught(what)


_now: Watch | None = None
_added = False
_caches = tuple(os.path.realpath(p) for p in {sys.prefix, sys.base_prefix, sysconfig.get_path("stdlib")})


@contextlib.contextmanager
def watching(watch: Watch) -> Iterator[Watch]:
    """Watches what this process does within the block; if nested, the inner watch applies."""
    global _now, _added
    if not _added:
        sys.addaudithook(_hook)
        _added = True
    before, children, _now = _now, _children(), watch
    try:
        yield watch
    finally:
        _now = before
        watch.seen += [f"a process was left: {_command(pid)}" for pid in _children() - children]


def _children() -> set[int]:
    found = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has just ended
            found |= {int(pid) for pid in task.read_text().split()}
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return "one that has ended"


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    watch = _now
    if watch is None:
        return
    if event == "open":
        _opened(watch, *arguments)
    elif event in _CHANGES:
        for place, folder in _CHANGES[event]:
            _changed(watch, event, arguments[place], -1 if folder is None else arguments[folder])
    elif event in _PROCESSES and not (event == "subprocess.Popen" and _asks_git(arguments[1])):
        watch.note(f"process: {event} {arguments!r:.200}")
    elif event in _SOCKETS:
        watch.note(f"socket: {event} {arguments!r:.200}")
    elif event in _CODE:
        _CODE[event](watch, *arguments)
    elif event == "os.kill" and arguments[1] != 0:
        watch.note(f"signal: {arguments}")
    elif event == "os.putenv" and os.fsdecode(arguments[0]) in _STEERING:
        watch.note(f"environment: {arguments!r:.200}")


def _asks_git(line: Any) -> bool:
    """Returns whether a command is that of run/repository.py, which shows git nothing of theirs that it would run."""
    return list(line)[:1] == ["git"] and str(list(line)[1]).startswith("--git-dir=")


def _below(path: str, folders: list[Path]) -> bool:
    return any(path == str(folder) or path.startswith(f"{folder}/") for folder in folders)


def _real(path: Any) -> str | None:
    """Returns the file that a path names, with links resolved, or None for a file descriptor."""
    return None if isinstance(path, int) else os.path.realpath(os.fsdecode(path))


def _beside(path: Any) -> str:
    """Returns the path with links resolved in its folder only, so that it may name a link itself."""
    parent, name = os.path.split(os.path.abspath(os.fsdecode(path)))
    return os.path.join(os.path.realpath(parent), name)


def _opened(watch: Watch, path: Any, mode: str | None, flags: int) -> None:
    real = _real(path) if not flags & os.O_NOFOLLOW else _beside(path)
    if real is None:
        return
    writes = bool(flags & _WRITING) or (mode is not None and any(letter in mode for letter in "wax+"))
    if writes and not _may_write(watch, real):
        watch.note(f"write: {real}")
    if not writes and _below(real, watch.secret):
        watch.note(f"read: {real}")


def _may_write(watch: Watch, real: str) -> bool:
    if WORD in real:
        return False
    compiled = "/__pycache__" in real and (real.startswith(_caches) or "/src/lmtrain/" in real or "/tests/" in real)
    return compiled or real.startswith(_DEVICES) or _below(real, watch.writable)


def _changed(watch: Watch, event: str, path: Any, folder: Any) -> None:
    if isinstance(path, int) or path is None:
        return
    text = os.fsdecode(path)
    if isinstance(folder, int) and folder >= 0 and not os.path.isabs(text):
        with contextlib.suppress(OSError):
            text = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), text)
    real = _beside(text)  # the link itself is changed, not its target
    made_already = event == "os.mkdir" and os.path.isdir(real)
    if not made_already and not _may_write(watch, real):
        watch.note(f"{event}: {real}")


def _theirs(watch: Watch, file: str) -> bool:
    """Returns whether a file is the attacker's; names such as <string> are not files."""
    return not file.startswith("<") and _below(os.path.realpath(file), watch.hostile)


def _ran(watch: Watch, code: types.CodeType) -> None:
    if code.co_filename == _TEMPLATE:
        return
    if _theirs(watch, code.co_filename) or _names(code):
        watch.note(f"code: {code.co_filename} {code.co_names!r:.200}")


def _names(code: types.CodeType) -> bool:
    """Returns whether the marker word occurs in the code's constants and names, or in those of a nested function."""
    if "/tests/hostile" in code.co_filename:
        return False
    return any(
        _names(constant) if isinstance(constant, types.CodeType) else isinstance(constant, str) and WORD in constant
        for constant in (*code.co_consts, *code.co_names)
    )


def _compiled(watch: Watch, source: Any, name: Any) -> None:
    if name == _TEMPLATE:
        return
    text = source.decode(errors="replace") if isinstance(source, bytes) else source if isinstance(source, str) else ""
    if WORD in text or (isinstance(name, str | bytes) and _theirs(watch, os.fsdecode(name))):
        watch.note(f"code: {text!r:.200} of {name!r}")


def _imported(watch: Watch, module: str, file: Any, *_: Any) -> None:
    ours = module.partition(".")[0].startswith(MODULE)
    if ours or (isinstance(file, str) and _theirs(watch, file)):
        watch.note(f"import: {module} {file}")


def _linked(watch: Watch, name: Any) -> None:
    if name is not None and _below(os.path.realpath(os.fsdecode(name)), watch.hostile):
        watch.note(f"library: {name!r}")


def _unpickled(watch: Watch, module: str, name: str) -> None:
    if module.partition(".")[0] not in _PICKLED and not _kept_by_tests():
        watch.note(f"pickle: {module}.{name}")


def _kept_by_tests() -> bool:
    """Returns whether tests/helpers/composed_once.py is unpickling what it cached in this process."""
    frame = sys._getframe(1)
    while frame is not None and Path(frame.f_code.co_filename).name != "composed_once.py":
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


_CODE = {"exec": _ran, "compile": _compiled, "import": _imported, "ctypes.dlopen": _linked,
         "pickle.find_class": _unpickled}  # fmt: skip
