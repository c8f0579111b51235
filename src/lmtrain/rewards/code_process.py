"""A process in which rewards/code.py runs an answer, or its tests: its limits, its isolation and what it does.

`python -I -S code_process.py ROLE SETTINGS` reads the program from its standard input. Where Linux permits, it runs in
namespaces of its own: without network and other processes in sight, with a file system that can't be written to but for
folders in memory, and with a parent, the first process of the namespace, at whose end the kernel ends all others.
"""

import ast
import contextlib
import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import sys
import types
from typing import Any

MEGABYTES, PROCESSES = 64, 64  # of each folder that can be written to, and at the same time
FILE_BYTES = 16 * 2**20
UNAVAILABLE = 3  # exit code: the system permits no isolation
_USER, _PIDS, _NETWORK, _MOUNTS, _IPC = 0x10000000, 0x20000000, 0x40000000, 0x00020000, 0x08000000
_FAR = 500  # file descriptors that programs which close "all" seldom reach


def main(role: str, settings: dict[str, Any]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux":
        libc.prctl(1, signal.SIGKILL if settings["isolated"] else signal.SIGTERM)  # PR_SET_PDEATHSIG: as the run ends
        if os.getppid() != settings["parent"]:
            return 1
    holds = {"files": False, "processes": False}
    if settings["isolated"]:
        if not _enter_namespaces(libc, settings["network"]):
            return UNAVAILABLE
        if (first := os.fork()) > 0:
            return os.waitstatus_to_exitcode(os.waitpid(first, 0)[1])
        libc.prctl(1, signal.SIGKILL)
        holds = _change_mounts(libc)
        if not holds:
            return UNAVAILABLE
    else:
        signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    if role == "probe":
        print(json.dumps(holds))
        return 0
    if (program := os.fork()) > 0:
        return _watched(program, holds["processes"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _limit(settings["seconds"], settings["memory"])
    if settings["isolated"]:
        _drop_capabilities(libc)
    _run(role, settings["wire"])
    return 0


def _enter_namespaces(libc: Any, network: bool) -> bool:
    """Enters new namespaces with the same user, who needn't be privileged for it; returns whether that is permitted."""
    user, group = os.geteuid(), os.getegid()
    flags = _PIDS | _MOUNTS | _IPC | (0 if network else _NETWORK)
    if libc.unshare(_USER | flags) != 0:
        return user == 0 and libc.unshare(flags) == 0
    try:
        for name, text in {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}.items():
            with open(f"/proc/self/{name}", "w") as out:
                out.write(text)
    except OSError:
        return False
    return True


def _change_mounts(libc: Any) -> dict[str, bool]:
    """Leaves nothing to write to but folders in memory, the first of which becomes the working directory.

    Also hides the processes of other namespaces. Returns what worked, or nothing if that is too little.
    """
    private, recursive = 1 << 18, 1 << 14
    if libc.mount(None, b"/", None, private | recursive, None) != 0:
        return {}  # the mounts would be everyone's
    attributes = (ctypes.c_uint64 * 4)(1, 0, 0, 0)  # MOUNT_ATTR_RDONLY
    read_only = libc.syscall(442, -100, b"/", 0x8000, attributes, ctypes.sizeof(attributes)) == 0  # mount_setattr
    used = [os.path.realpath(path) for path in (sys.executable, sys.prefix, sys.base_prefix, os.__file__, __file__)]
    folders = ["/dev/shm", *(["/tmp"] if not any(path.startswith("/tmp/") for path in used) else [])]
    options = f"size={MEGABYTES}m,mode=700".encode()
    mounted = [libc.mount(b"memory", name.encode(), b"tmpfs", 6, options) == 0 for name in folders]  # nosuid, nodev
    processes = libc.mount(b"proc", b"/proc", b"proc", 14, None) == 0
    if not mounted[0]:
        return {}
    os.chdir("/dev/shm")
    os.environ.update(HOME="/dev/shm", TMPDIR="/dev/shm")
    return {"files": read_only and all(mounted), "processes": processes}


def _watched(program: int, counts: bool) -> int:
    """Waits for a program and returns its exit code; ends with all processes if they become too many.

    RLIMIT_NPROC, which is set as well, doesn't bind root.
    """
    if not counts:
        return os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == program:
            return os.waitstatus_to_exitcode(status)
        if sum(name.isdigit() for name in os.listdir("/proc")) > PROCESSES + 2:
            return 1
        if ended == 0:
            signal.sigtimedwait({signal.SIGCHLD}, 0.02)


def _limit(seconds: float, memory: int) -> None:
    wanted = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NPROC: PROCESSES,
        resource.RLIMIT_CORE: 0,
    }
    for what, most in wanted.items():
        hard = resource.getrlimit(what)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(what, (most, most))


def _drop_capabilities(libc: Any) -> None:
    """Gives up the rights in the new namespaces, among them to undo the mounts."""
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    libc.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())


def _run(role: str, wire: int) -> None:
    """Runs an answer and serves what it has defined; or runs tests, and at their end writes the word before them."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import code_names  # type: ignore[import-not-found]
    import code_values  # type: ignore[import-not-found]

    del sys.path[0], sys.modules["code_names"], sys.modules["code_values"]
    sys.set_int_max_str_digits(0)
    text = sys.stdin.buffer.read()
    end = _moved(os.dup(1))
    connection = socket.socket(fileno=_moved(wire)).makefile("rwb")
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, mode), number)
    sys.argv = ["answer.py"]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    if role == "answer":
        _answer(code_values.Peer(connection, module.__dict__), code_names.imports_of, module, text.decode())
    word, _, tests = text.partition(b"\n")
    peer = code_values.Peer(connection)
    names = code_names.TestNames(peer, *peer.receive())
    module.__dict__.update(names)
    code_names.run(tests.decode(), names)
    os.write(end, word)


def _answer(peer: Any, imports_of: Any, module: types.ModuleType, text: str) -> None:
    """Runs an answer as the program answer.py, and then does what the tests ask until they end."""
    process, path = os.getpid(), os.path.abspath("answer.py")
    with open(path, "w", encoding="utf-8", newline="") as out:  # multiprocessing and inspect read it
        out.write(text)
    module.__dict__.update(__file__=path, __builtins__=__builtins__)
    exec(compile(text, path, "exec"), module.__dict__)  # noqa: S102
    if os.getpid() != process:
        os._exit(0)
    defined = [name for name in module.__dict__ if not name.startswith("__")]
    peer.send([defined, imports_of(ast.parse(text))])
    with contextlib.suppress(SystemExit):
        while True:
            peer.answer(*peer.receive()[1:])
    os._exit(0)


def _moved(number: int) -> int:
    """Returns a file descriptor in the place of another, where a program that closes those it finds leaves it."""
    with contextlib.suppress(OSError):
        far = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, _FAR)
        os.close(number)
        return far
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
