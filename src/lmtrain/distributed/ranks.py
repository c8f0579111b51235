"""This process's rank and world size, as set by torchrun or SLURM; how ranks wait and exit. Imports no torch."""

import atexit
import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lmtrain import errors
from lmtrain.errors import RunError, UserError

# Environment variable for ranks: when the command of a run with a budget was given, a time.time().
BEGAN = "LMTRAIN_BEGAN"
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # those that torchrun sets
# What a launcher of ranks sets; a child process that inherited these variables would act as one of those ranks.
_OF_RANKS = re.compile(
    r"(MASTER_(ADDR|PORT)|(LOCAL_|GROUP_|ROLE_)?RANK|(LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|NODE_RANK|TORCHELASTIC_.*|LMTRAIN_.*PID"
    r"|SLURM_(NTASKS|NPROCS|PROCID|LOCALID|NODEID|NTASKS_PER_NODE|TASKS_PER_NODE|STEP_.*))"
)
_UNSET = "start this process by torchrun or SLURM, or unset these variables to train in one process"
began: float | None = None  # when this process started, a time.time(), if `lmtrain train` is its program
_OLDEST_S = 60.0  # a process that has only begun; a greater age comes from a clock that counts otherwise


@dataclass(frozen=True)
class RankLayout:
    """The arrangement of the ranks on the nodes."""

    nodes: int
    per_node: int
    by: str  # torchrun or SLURM


def started_by(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Returns "torchrun" or "SLURM" if this process may be one of several with the same command line, else None."""
    if "RANK" in environ:
        return "torchrun"
    return "SLURM" if environ.get("SLURM_STEP_NUM_TASKS", "1") not in ("0", "1") else None  # srun's, not sbatch's


def find(environ: MutableMapping[str, str] = os.environ) -> RankLayout | None:
    """Returns the layout of this process's ranks, or None if it was started by itself.

    Sets torchrun's variables under SLURM.

    Raises:
        UserError: the nodes don't all have the same number of ranks.
        RunError: the environment variables contradict each other, or some are missing.
    """
    by = started_by(environ)
    if by == "SLURM":
        _translate_slurm(environ)
    absent = [name for name in TORCH if name not in environ]
    if absent:
        _refuse_stray(environ, absent)
        return None
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    per_node = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else world
    if not 0 <= rank < world or not 0 < per_node <= world:
        raise RunError(f"the environment says RANK={rank}, WORLD_SIZE={world}, LOCAL_WORLD_SIZE={per_node}: {_UNSET}")
    if world % per_node != 0:
        raise UserError(f"{world} ranks with {per_node} on this node: start the same number on every node")
    return RankLayout(world // per_node, per_node, by or "torchrun")


def _number(environ: MutableMapping[str, str], name: str) -> int:
    """Returns a rank variable as a number. Raises RunError if it is none; each process prints its own error."""
    if not environ.get(name, "").isdecimal():
        raise RunError(f"the environment says {name}={environ.get(name, '')!r}, which is not a number: {_UNSET}")
    return int(environ[name])


def _refuse_stray(environ: MutableMapping[str, str], absent: list[str]) -> None:
    """Raises RunError if only some of torchrun's variables are set: the process would wait for other ranks for ever."""
    stray = {name: environ[name] for name in ("RANK", "WORLD_SIZE") if name in environ}
    if all(value == {"RANK": "0", "WORLD_SIZE": "1"}[name] for name, value in stray.items()):
        return
    set_ = ", ".join(f"{name}={value}" for name, value in stray.items())
    raise RunError(f"the environment has {set_}, but no {', '.join(absent)}: {_UNSET}")


def _translate_slurm(environ: MutableMapping[str, str]) -> None:
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    for name in ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"):
        _number(environ, name)
    tasks, nodes = int(environ["SLURM_STEP_NUM_TASKS"]), int(environ.get("SLURM_STEP_NUM_NODES", "1"))
    if tasks % nodes != 0:
        raise UserError(f"SLURM runs {tasks} tasks on {nodes} nodes: ask for as many on each with --ntasks-per-node")
    node_list = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "127.0.0.1")
    found = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(tasks // nodes),
        "GROUP_RANK": environ.get("SLURM_NODEID", "0"),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or SLURMEnvironment.resolve_root_node_address(node_list),
        # Jobs that share a node must not share a port, and every rank has to find the same one.
        "MASTER_PORT": environ.get("MASTER_PORT") or str(15000 + int(environ.get("SLURM_JOB_ID", "0")) % 10000),
    }
    environ.update(found)


def without_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns `environ` without the variables that would make a child process act as a rank."""
    return {k: v for k, v in environ.items() if not _OF_RANKS.fullmatch(k)}


def was_restarted() -> bool:
    """Returns whether the launcher restarted these ranks after a failure; they then use the newest checkpoint."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def process_began() -> float:
    """Returns the time.time() at which this process started; now, where the system doesn't say."""
    now = time.time()
    try:
        since_boot = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - age if 0 <= age < _OLDEST_S else now


def leave(code: int) -> NoReturn:
    """Ends this process without finalizing the Python interpreter, which takes seconds with torch's modules loaded.

    In a rank it could abort: a process-group thread that requests Python's lock during finalization, to release a
    tensor, is terminated in the middle of C++ code ("terminate called without an active exception").
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons, as Python does
    atexit._run_exitfuncs()  # those of W&B and multiprocessing
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # closed by its reader, or by this process
            stream.flush()
    os._exit(code)


def leave_after(job: Callable[[], int]) -> NoReturn:
    """Runs `job` and ends this process with its exit code; after an exception, prints the traceback and ends it."""
    try:
        code = job()
    except Exception:
        sys.excepthook(*sys.exc_info())  # torch's hook names the rank
        code = errors.FAILED
    leave(code)


def print_from_rank(error: UserError | RunError) -> bool:
    """Prints an error once, whether one rank raised it or all did; returns whether this process printed it."""
    only_here = isinstance(error, RunError) and not error.shared  # a UserError is raised by all ranks
    if only_here or is_first():
        errors.print_error(str(error))
        return True
    return False


FIRST_SECONDS = 10.0  # how long other ranks wait for rank 0 to meet and print the error that they have met


def print_in_turn(error: UserError | RunError) -> None:
    """Prints an error of all ranks once: rank 0 at once, another only if it is still there after FIRST_SECONDS.

    Launchers end the other ranks when one has left (torchrun, srun --kill-on-bad-exit=1): a rank that left before rank
    0 has printed would silence it. One that is left alone can't know whether rank 0 has met the error.
    """
    if print_from_rank(error):
        return
    time.sleep(FIRST_SECONDS + (os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0"))
    if not error.shared:
        errors.print_error(str(error))


_PR_SET_PDEATHSIG = 1  # prctl(2)


def is_first() -> bool:
    """Returns whether this process prints messages, as rank 0 or as a single process."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def end_after_parent(parent: int, seconds: float) -> None:
    """Lets a thread end this process `seconds` after its parent: one that hangs in C code heeds no signal but SIGKILL.

    parent: its process id, as in `end_with_parent`.
    """

    def end() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end, name="parent", daemon=True).start()


def end_with_parent(parent: int, by: signal.Signals) -> None:
    """Asks the kernel to send this process the signal `by` when its parent dies; sends it now if the parent is gone.

    `parent` should be the parent's process id as the parent itself read it: read here, it could be that of the process
    that adopted this one after the parent's death. On systems other than Linux, only a parent that is already gone is
    noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), by)
