"""A SLURM cluster of two nodes on this machine, run by its user: munged, slurmctld and two slurmd, in one folder.

Needs Debian's packages slurm-wlm and munge, and the nodes' names in /etc/hosts:

    apt-get install slurm-wlm munge
    echo "127.0.0.1 n1 n2" >> /etc/hosts
"""

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import processes
from ports import free_port

NODES = ("n1", "n2")
PATH = f"{os.environ['PATH']}{os.pathsep}/usr/sbin"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
# Beyond ports and paths. A credential's life delays what is requeued, two minutes by default; a node is taken for dead
# SlurmdTimeout seconds after its last answer, and is used again when its slurmd is back; MinJobAge keeps ended jobs.
CONF = """
ClusterName=lmtrain
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdTimeout=20
MinJobAge=100000
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4 RealMemory=16000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4 RealMemory=16000
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE
"""


def what_is_missing() -> str:
    """Returns why no cluster can be started here, or an empty text."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install slurm-wlm munge"
    for node in NODES:
        try:
            socket.gethostbyname(node)
        except OSError:
            return f'the name {node} is unknown: echo "127.0.0.1 {" ".join(NODES)}" >> /etc/hosts'
    return ""


class Cluster:
    """Two nodes that run jobs of this user; `close` ends everything that was started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        self.munged: subprocess.Popen[bytes] | None = None
        for name in ("state", *NODES):
            (folder / name).mkdir(parents=True)
        ports = [free_port() for _ in range(3)]
        host = socket.gethostname().partition(".")[0]
        conf = CONF.format(folder=folder, host=host, user=getpass.getuser(), ports=ports)
        (folder / "slurm.conf").write_text(conf)

    def start(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        files = {"key-file": key, "socket": "munge.sock", "pid-file": "munge.pid", "log-file": "munge.log",
                 "seed-file": "munge.seed"}  # fmt: skip
        options = [f"--{name}={self.folder / path}" for name, path in files.items()]
        # --force: the folder that holds it may be writable by others, as /tmp is.
        with open(self.folder / "munged.out", "wb") as out:
            self.munged = subprocess.Popen(
                ["munged", "--foreground", "--force", *options], env=self.env, stdout=out, stderr=out
            )
        self.wait(lambda: (self.folder / "munge.sock").exists(), 30, "munged's socket")
        subprocess.run(["slurmctld"], env=self.env, check=True)
        for node in NODES:
            self.start_node(node)
        self.wait(lambda: self.idle_nodes() == set(NODES), 60, "two idle nodes")

    def start_node(self, node: str) -> None:
        subprocess.run(["slurmd", "-N", node], env=self.env, check=True)

    def idle_nodes(self) -> set[str]:
        return set(self.ask("sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split())

    def kill_node(self, node: str) -> None:
        """Kills a node's slurmd, then the daemons of its steps and their processes: nothing says that they ended."""
        tasks = self.tasks(node)
        daemons = [p.parent for p in tasks if (of := processes.read(p.parent)) and of.name.startswith("slurmstepd")]
        for pid in (int((self.folder / f"{node}.pid").read_text()), *daemons, *(p.pid for p in tasks)):
            _kill(pid)

    def tasks(self, node: str) -> list[processes.Process]:
        """Returns the processes of this user's jobs on a node."""
        found = [p for p in processes.everything() if processes.variable(p.pid, "SLURMD_NODENAME") == node]
        return [p for p in found if processes.variable(p.pid, "SLURM_CONF") == self.env["SLURM_CONF"]]

    def ask(self, *command: str) -> str:
        """Returns what a command of SLURM prints."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *words: str) -> str:
        """Returns the id of a job that is in the queue from now on."""
        return self.ask("sbatch", "--parsable", *words).strip()

    def job(self, number: str) -> dict[str, str]:
        """Returns what scontrol knows of a job, such as JobState, Restarts and ExitCode."""
        return dict(word.split("=", 1) for word in self.ask("scontrol", "show", "job", number).split() if "=" in word)

    def ended(self, number: str, seconds: float = 300) -> dict[str, str]:
        """Waits until a job has ended, however often it was requeued, and returns what scontrol knows of it."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        self.wait(lambda: self.job(number)["JobState"] in ends, seconds, f"the end of job {number}")
        return self.job(number)

    def wait(self, until: Callable[[], bool], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, f"no {what} after {seconds} s; logs are in {self.folder}"
            time.sleep(0.2)

    def close(self) -> None:
        subprocess.run(["scancel", "--user", getpass.getuser()], env=self.env, check=False)
        for node in NODES:
            self.kill_node(node)
        _kill(int((self.folder / "slurmctld.pid").read_text()))
        for pid in _working_in(self.folder):  # step daemons whose tasks have ended
            _kill(pid)
        if self.munged is not None:
            self.munged.kill()
            self.munged.wait()


def _working_in(folder: Path) -> list[int]:
    """Returns the processes whose working directory is `folder`."""
    found = []
    for process in processes.everything():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{process.pid}/cwd").readlink() == folder:
                found.append(process.pid)
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
