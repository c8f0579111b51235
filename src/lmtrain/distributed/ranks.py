"""Which rank of how many this process is, as torchrun or SLURM told it; how ranks wait and end. Imports no torch."""

import atexit
import ctypes
import os
import shlex
import signal
import sys
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import NoReturn

from lmtrain import errors
from lmtrain.errors import RunError, UserError

TYPED = "LMTRAIN_TYPED"  # the environment variable that tells ranks the command line their parent was given
BEGAN = "LMTRAIN_BEGAN"  # the one that tells when the command of a run with a budget was given, a time.time()
PROPOSED = "LMTRAIN_PROPOSED"  # and the one that tells them what was made of a file's name
TORCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")  # what torchrun sets


_UNSET = "this is not a rank of torchrun's or SLURM's; unset them to train in one process, or start it with those"
_here: list[str] | None = None  # what the command line of this process was given


def note_typed(argv: list[str], says: str = "") -> None:
    """Keeps the words that a verb was given, for messages that repeat them; and what was made of a file's name."""
    global _here
    _here = list(argv)
    os.environ.pop(PROPOSED, None)
    if says:
        os.environ[PROPOSED] = says


def proposed() -> str:
    """What a file that was named alone is trained as, in a line; '' where none was."""
    return os.environ.get(PROPOSED, "")


def typed() -> list[str]:
    """The words of the command line; of a rank, those that its parent was given."""
    if TYPED in os.environ:
        return shlex.split(os.environ[TYPED])
    return sys.argv[1:] if _here is None else list(_here)


@dataclass(frozen=True)
class RankLayout:
    """How the ranks lie on the nodes."""

    rank: int
    nodes: int
    per_node: int
    by: str  # torchrun or SLURM


def started_by(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """torchrun or SLURM, where this process may be one of several that were given the same command line."""
    if "RANK" in environ:
        return "torchrun"
    return "SLURM" if environ.get("SLURM_STEP_NUM_TASKS", "1") not in ("0", "1") else None  # of srun, not of sbatch


def find(environ: MutableMapping[str, str] = os.environ) -> RankLayout | None:
    """The ranks this process is one of, None where it was started by itself. SLURM's are given torchrun's variables.

    Raises:
        UserError: the nodes don't have the same number of ranks each.
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
    return RankLayout(rank, world // per_node, per_node, by or "torchrun")


def _number(environ: MutableMapping[str, str], name: str) -> int:
    """RunError where a variable that says which rank this is holds no number; each process prints its own."""
    if not environ.get(name, "").isdecimal():
        raise RunError(f"the environment says {name}={environ.get(name, '')!r}, which is not a number: {_UNSET}")
    return int(environ[name])


def _refuse_stray(environ: MutableMapping[str, str], absent: list[str]) -> None:
    """RunError where some variables of torchrun's are left over: half a rank would wait for others for ever."""
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
    per_node = tasks // nodes
    node_list = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST", "127.0.0.1")
    found = {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": str(tasks),
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(per_node),
        "GROUP_RANK": environ.get("SLURM_NODEID", "0"),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or SLURMEnvironment.resolve_root_node_address(node_list),
        # Jobs that share a node must not share a port, and every rank has to find the same one.
        "MASTER_PORT": environ.get("MASTER_PORT") or str(15000 + int(environ.get("SLURM_JOB_ID", "0")) % 10000),
    }
    environ.update(found)


def was_restarted() -> bool:
    """Whether the launcher has started these ranks again after one failed: they go on from the newest checkpoint."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def leave(code: int) -> NoReturn:
    """Ends this process, one rank of many, without taking Python apart.

    A thread of the process group that asks for Python meanwhile, to let go of a tensor, is ended by it in the middle of
    C++, which then aborts the process: "terminate called without an active exception".
    """
    atexit._run_exitfuncs()  # W&B's, multiprocessing's
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def leave_after(job: Callable[[], int]) -> NoReturn:
    """Leaves with the exit code that `job` gives, or after its traceback."""
    try:
        code = job()
    except Exception:
        sys.excepthook(*sys.exc_info())  # torch's names the rank
        code = errors.FAILED
    leave(code)


def print_from_rank(error: UserError | RunError) -> bool:
    """Prints the error of one rank of many, or of all of them, once; whether it was printed here."""
    only_here = isinstance(error, RunError) and not error.shared  # all ranks find the same wrong input
    if only_here or is_first():
        errors.print_error(str(error))
        return True
    return False


_PR_SET_PDEATHSIG = 1  # prctl(2)


def is_first() -> bool:
    """Whether this process prints messages: rank 0, or a process on its own."""
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def end_with_parent(parent: int, by: signal.Signals) -> None:
    """Asks the kernel to send this process `by` when its parent dies; ends it now where `parent` is gone already.

    `parent` is the process id of the one that started this process, read there: asked for here, a parent that died in
    between could not be told from a living one. Off Linux only a parent that is gone already is noticed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), by)


# How long OpenMP threads spin at a barrier; read once by its runtime, when torch is loaded. The default of libgomp,
# 300,000 rounds (milliseconds), burns what other programs, and the thread that is waited for, need: beside one busy
# process on two cores a step took 17 times as long.
SPIN_ROUNDS = "1000"  # tens of microseconds; what libgomp takes itself where it knows of more threads than cores
_OF_THE_USER = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning(environ: MutableMapping[str, str] = os.environ) -> None:
    """Before torch is imported: for this process and those it starts, unless the user has chosen for himself."""
    if not any(name in environ for name in _OF_THE_USER):
        environ["GOMP_SPINCOUNT"] = SPIN_ROUNDS
