"""The guard detects every kind of act that it is meant for, so that a corpus without findings is meaningful."""

import ctypes
import io
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from guard import Caught, Watch, watching
from pages import unprintable, wrong_in


def _watch(folder: Path) -> Watch:
    for name in ("allowed", "hostile", "secret", "outside"):
        (folder / name).mkdir()
    (folder / "outside" / "kept").write_text("mine")
    (folder / "secret" / "key").write_text("mine")
    (folder / "hostile" / "pwned_module.py").write_text("x = 1\n")
    (folder / "hostile" / "library.so").write_bytes(b"\x7fELF")
    return Watch([folder / "allowed"], [folder / "hostile"], [folder / "secret"])


def _execute(folder: Path) -> None:
    exec(compile("PWNED = 1", "<string>", "exec"))


def _import(folder: Path) -> None:
    sys.path.insert(0, str(folder / "hostile"))
    try:
        import pwned_module  # type: ignore[import-not-found]  # noqa: F401
    finally:
        sys.path.pop(0)


def _ran(folder: Path) -> None:
    import runpy

    runpy.run_path(str(folder / "hostile" / "pwned_module.py"))


def _through_a_link(folder: Path) -> None:
    (folder / "allowed" / "link").write_text("a")


def _unpickled(folder: Path) -> None:
    pickle.loads(b"cposix\nsystem\n(Vtrue\ntR.")


def _spawned(folder: Path) -> None:
    """Starts a process without an audit event, through the function below subprocess.Popen."""
    from multiprocessing import util

    pid = util.spawnv_passfds(b"/bin/sleep", [b"sleep", b"5"], ())
    folder.joinpath("allowed", "pid").write_text(str(pid))


ACTS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "subprocess": ("process: subprocess.Popen", lambda f: subprocess.run(["true"], check=False)),
    "system": ("process: os.system", lambda f: os.system("true")),
    "fork": ("process: os.fork", lambda f: os.fork()),
    "exec": ("process: os.exec", lambda f: os.execv("/bin/true", ["true"])),
    "spawn": ("process: os.posix_spawn", lambda f: os.posix_spawn("/bin/true", ["true"], {})),
    "popen": ("process: subprocess.Popen", lambda f: os.popen("true")),
    "left": ("a process was left", _spawned),
    "open": ("write:", lambda f: (f / "outside" / "new").write_text("a")),
    "append": ("write:", lambda f: open(f / "outside" / "kept", "a")),
    "descriptor": ("write:", lambda f: os.open(f / "outside" / "new", os.O_CREAT | os.O_WRONLY)),
    "relative": ("write:", lambda f: Path("new").write_text("a")),
    "link": ("write:", _through_a_link),
    "marker": ("write:", lambda f: (f / "allowed" / "PWNED").write_text("a")),
    "mkdir": ("os.mkdir:", lambda f: (f / "outside" / "new").mkdir()),
    "remove": ("os.remove:", lambda f: (f / "outside" / "kept").unlink()),
    "rmtree": ("os.remove:", lambda f: shutil.rmtree(f / "outside")),
    "rmdir": ("os.rmdir:", lambda f: (f / "secret").rmdir()),
    "rename out": ("os.rename:", lambda f: (f / "allowed").rename(f / "outside" / "new")),
    "rename in": ("os.rename:", lambda f: (f / "outside" / "kept").rename(f / "allowed" / "new")),
    "symlink": ("os.symlink:", lambda f: (f / "outside" / "new").symlink_to("/etc")),
    "hard link": ("os.link:", lambda f: (f / "outside" / "new").hardlink_to(f / "outside" / "kept")),
    "chmod": ("os.chmod:", lambda f: (f / "outside" / "kept").chmod(0o777)),
    "copy": ("write:", lambda f: shutil.copy(f / "outside" / "kept", f / "outside" / "new")),
    "move": ("os.rename:", lambda f: shutil.move(f / "outside" / "kept", f / "outside" / "new")),
    "read": ("read:", lambda f: (f / "secret" / "key").read_text()),
    "connect": ("socket: socket.connect", lambda f: socket.socket().connect(("127.0.0.1", 9))),
    "bind": ("socket: socket.bind", lambda f: socket.socket().bind(("127.0.0.1", 0))),
    "look up": ("socket: socket.getaddrinfo", lambda f: socket.create_connection(("pwned.invalid", 80))),
    "fetch": ("socket:", lambda f: urllib.request.urlopen("http://127.0.0.1:9/")),
    "send": ("socket:", lambda f: socket.socket(type=socket.SOCK_DGRAM).sendto(b"a", ("127.0.0.1", 9))),
    "text as code": ("code:", _execute),
    "module": ("import: pwned_module", _import),
    "script": ("code:", _ran),
    "library": ("library:", lambda f: ctypes.CDLL(str(f / "hostile" / "library.so"))),
    "pickle": ("pickle: posix.system", _unpickled),
    "signal": ("signal:", lambda f: os.kill(os.getppid(), signal.SIGTERM)),
    "search path": ("environment:", lambda f: os.environ.__setitem__("LD_PRELOAD", "a")),
}


@pytest.mark.parametrize("name", ACTS)
def test_an_act_is_noted_and_stopped(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, (said, act) = _watch(tmp_path), ACTS[name]
    (tmp_path / "allowed" / "link").symlink_to(tmp_path / "outside" / "kept")
    monkeypatch.chdir(tmp_path / "outside")
    before = sorted(tmp_path.glob("outside/*")), (tmp_path / "outside" / "kept").read_text()
    try:
        with watching(watch):
            act(tmp_path)
    except Caught as caught:
        assert str(caught) in watch.seen
    else:
        assert name == "left"
        os.kill(int((tmp_path / "allowed" / "pid").read_text()), signal.SIGKILL)
        os.waitpid(int((tmp_path / "allowed" / "pid").read_text()), 0)
    assert watch.seen
    assert watch.seen[0].startswith(said), watch.seen
    assert before == (sorted(tmp_path.glob("outside/*")), (tmp_path / "outside" / "kept").read_text())


def test_an_act_that_is_swallowed_is_noted_all_the_same(tmp_path: Path) -> None:
    watch = _watch(tmp_path)
    with watching(watch):
        try:
            os.system("true")
        except Exception:
            pass
    assert watch.seen == ["process: os.system (b'true',)"]


def test_what_a_verb_does_is_let_through(tmp_path: Path) -> None:
    watch = _watch(tmp_path)
    with watching(watch):
        (tmp_path / "allowed" / "new").mkdir()
        (tmp_path / "allowed" / "new" / "file").write_text("a")
        shutil.rmtree(tmp_path / "allowed" / "new")
        (tmp_path / "outside" / "kept").read_text()
        pickle.loads(pickle.dumps({"a": [1]}))
        exec(compile("a = 1", "<string>", "exec"))
        os.kill(os.getpid(), 0)
        io.BytesIO(b"").read()
    assert watch.seen == []
    (tmp_path / "outside" / "new").write_text("nothing is watched by now")


@pytest.mark.parametrize(
    "text",
    ["<script>pwnedjs()</script>", "<img src=x onerror=pwnedjs()>", "<b onclick=pwnedjs()>", "<a href='javascript:pwnedjs()'>a</a>",
     "<iframe>", "<style>pwnedjs()</style>", "<base href=//pwned.example/>", '<b title="a" onmouseover="pwnedjs()">'],
)  # fmt: skip
def test_a_page_with_script_is_seen(text: str, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(f"<!DOCTYPE html><html><body><p>{text}</p></body></html>")
    assert wrong_in(page)
    page.write_text(f"<!DOCTYPE html><html><body><p>{text.replace('<', '&lt;')}</p></body></html>")
    assert not wrong_in(page)


def test_what_steers_a_terminal_is_seen() -> None:
    assert unprintable("a\x1b[2Jb\rc\u202ed\n") == ["\x1b", "\r", "\u202e"]
