"""The processes in which rewards/code.py runs an answer and its tests: their limits, isolation and what they do.

A first process starts one for the answer and one for the tests. Where Linux permits, each runs in namespaces of its
own: without network and other processes in sight, with a file system that can't be written to but for folders in
memory, and with a parent, the first process of the namespace, at whose end the kernel ends all others.
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

if __name__.partition(".")[0] == "lmtrain":
    from lmtrain.rewards.code_names import TestNames, imports_of, run_tests
    from lmtrain.rewards.code_values import Peer
else:  # in the first process, by its folder
    from code_names import TestNames, imports_of, run_tests  # type: ignore[import-not-found,no-redef]
    from code_values import Peer  # type: ignore[import-not-found,no-redef]

MEGABYTES, PROCESSES = 64, 64  # of each folder that can be written to, and at the same time
FILE_BYTES = 16 * 2**20
UNAVAILABLE = 3  # exit code: the system permits no isolation
_USER, _PIDS, _NETWORK, _MOUNTS, _IPC = 0x10000000, 0x20000000, 0x40000000, 0x00020000, 0x08000000
_FAR = 500  # file descriptors that programs which close "all" seldom reach


def main(settings: dict[str, Any]) -> int:
    """Starts both programs, waits for the tests, and returns an exit code."""
    libc = ctypes.CDLL(None, use_errno=True)
    _end_with_parent(libc, settings)
    if settings["role"] == "probe":
        return _separate(libc, settings, 0, 0)
    ends, processes = [end.detach() for end in socket.socketpair()], []
    for place, role in enumerate(("answer", "tests")):
        settings.update(role=role, parent=os.getpid())
        processes.append(os.fork())
        if processes[-1] == 0:  # which has nothing of the other one's
            os.close(ends[1 - place])
            os.close(settings["texts"][1 - place])
            os.chdir(settings["folders"][place])
            os.environ.update(dict.fromkeys(("HOME", "TMPDIR"), settings["folders"][place]))
            _end_with_parent(libc, settings)
            return _separate(libc, settings, settings["texts"][place], ends[place])
    for number in (*ends, *settings["texts"]):
        os.close(number)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    return os.waitstatus_to_exitcode(os.waitpid(processes[1], 0)[1])


def _end_with_parent(libc: Any, settings: dict[str, Any]) -> None:
    """Has this process end, without namespaces with its group, when its parent ends."""
    if not settings["isolated"]:
        signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    if sys.platform == "linux":
        libc.prctl(1, signal.SIGKILL if settings["isolated"] else signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != settings["parent"]:
            os._exit(1)


def _separate(libc: Any, settings: dict[str, Any], text: int, wire: int) -> int:
    """Runs a program in namespaces and with limits, or prints which of them hold; returns its exit code."""
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
    if settings["role"] == "probe":
        os.write(1, json.dumps(holds).encode())
        return 0
    if (program := os.fork()) > 0:
        return _watched(program, holds["processes"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _limit(settings["seconds"], settings["memory"])
    if settings["isolated"]:
        _drop_capabilities(libc)
    _run(settings["role"], text, wire)
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


def _run(role: str, program: int, wire: int) -> None:
    """Runs an answer and serves what it has defined; or runs tests, and at their end writes the word before them."""
    sys.set_int_max_str_digits(0)
    with os.fdopen(program, "rb") as file:
        text = file.read()
    end = _moved(os.dup(1))
    connection = socket.socket(fileno=_moved(wire)).makefile("rwb")
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        os.dup2(os.open(os.devnull, mode), number)
    sys.argv = ["answer.py"]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    if role == "answer":
        _answer(Peer(connection, module.__dict__), module, text.decode())
    word, _, tests = text.partition(b"\n")
    peer = Peer(connection)
    names = TestNames(peer, *peer.receive())
    module.__dict__.update(names)
    run_tests(tests.decode(), names)
    os.write(end, word)


def _answer(peer: Peer, module: types.ModuleType, text: str) -> None:
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
