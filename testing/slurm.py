"""A real Slurm on the loopback interface: munged, slurmctld and a few slurmd of one user, with toy GPUs.

No systemd, no control groups, no accounting; every socket, key and state lies in one folder, so that it touches no
Slurm that is installed here. Its GPUs are /dev/null and /dev/zero: Slurm hands them out and nobody opens them.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from testing.workbench import until

COMMANDS = ("sbatch", "squeue", "scancel", "sinfo", "munged", "slurmctld", "slurmd")
PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"))
#: Why the tests of it are skipped; empty where all of it is here.
MISSING = ", ".join(name for name in COMMANDS if shutil.which(name, path=PATH) is None)
REASON = f"no Slurm here ({MISSING} missing); apt-get install slurm-wlm munge"
CARDS = ("/dev/null", "/dev/zero")
#: GPUs by node, and what they are called where not h200: five of those, and one other.
NODES = {"toy1": 2, "toy2": 2, "toy3": 1, "toy4": 1}
KINDS = {"toy4": "a100"}
#: How many h200 there are.
H200 = sum(count for name, count in NODES.items() if name not in KINDS)
#: Seconds without an answer after which Slurm takes a node for lost, and after which its credentials expire: together
#: what a requeue takes.
LOST, EXPIRED = 6, 5

CONFIGURATION = """
ClusterName=toys
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={expired}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout={lost}
KillWait=3
MessageTimeout=5
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1,default_queue_depth=1000
"""


def _port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@dataclass
class Cluster:
    """A Slurm that runs."""

    folder: Path  # of everything that it writes
    daemons: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)  # its processes, by name

    @property
    def variables(self) -> dict[str, str]:
        """What its commands need in their environment."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": PATH}

    def ask(self, *command: str) -> str:
        """Run one of its commands and return what it printed."""
        environment = os.environ | self.variables
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False).stdout

    def jobs(self) -> dict[str, str]:
        """Return the state of every task that Slurm knows, by its number as squeue writes it."""
        lines = self.ask("squeue", "--noheader", "--states=all", "--array", "--format=%i %T").splitlines()
        return dict(line.split() for line in lines)

    def spans(self, number: str) -> list[tuple[float, float]]:
        """Return when each task of an array began and ended, in seconds, which Slurm keeps whole."""
        lines = self.ask("squeue", "--noheader", "--states=all", f"--jobs={number}", "--array", "--format=%S %e")
        return [
            (dt.datetime.fromisoformat(begin).timestamp(), dt.datetime.fromisoformat(end).timestamp())
            for begin, end in map(str.split, lines.splitlines())
        ]

    def node_of(self, job: str) -> str:
        """Return the node that a task runs on."""
        return self.ask("squeue", "--noheader", f"--jobs={job}", "--format=%N").strip()

    def start(self, name: str, *command: str) -> None:
        """Start a daemon, with its output in a file of its name."""
        with (self.folder / f"{name}.out").open("ab") as stream:
            self.daemons[name] = subprocess.Popen(
                command, env=os.environ | self.variables, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream
            )

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        self.start(name, "slurmd", "-D", "-N", name)

    def kill(self, name: str) -> None:
        """Kill a daemon as kill -9 does: a slurmd's jobs run on."""
        self.daemons[name].kill()
        self.daemons.pop(name).wait()

    def kill_node(self, name: str) -> None:
        """Lose a node: its slurmd and everything that runs on it, at once."""
        self.kill(name)
        self.end_jobs(name)

    def end_jobs(self, node: str) -> None:
        """Kill what runs on a node, each process with the step daemon that would tell of its end."""
        for process in self.processes(f"SLURMD_NODENAME={node}"):
            with contextlib.suppress(psutil.Error):
                for one in (process.parent(), process):
                    if one is not None and (one == process or one.name() == "slurmstepd"):
                        one.kill()

    def _steps(self) -> Iterator[psutil.Process]:
        """Yield the step daemons: their names hide their environment, and their sockets lie in a node's folder."""
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.name() == "slurmstepd" and any(
                    str(one.laddr).startswith(f"{self.folder}/") for one in process.net_connections("unix")
                ):
                    yield process

    def processes(self, variable: str = "") -> list[psutil.Process]:
        """List the living processes of this Slurm and its jobs; only those with that in their environment."""
        found = []
        wanted = {f"SLURM_CONF={self.folder / 'slurm.conf'}", variable} - {""}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                said = {f"{name}={value}" for name, value in process.environ().items()}
                if wanted <= said and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def until(self, state: str) -> None:
        """Wait until every node is in that state."""
        end = time.monotonic() + 120
        while self.ask("sinfo", "--noheader", "--Node", "--format=%T").split().count(state) < len(NODES):
            assert time.monotonic() < end, self.ask("sinfo") + self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        """Return the ends of what the daemons said."""
        return "\n".join(path.read_text(errors="replace")[-500:] for path in sorted(self.folder.glob("*.out")))

    def stop(self) -> None:
        """Cancel every job and end every daemon."""
        self.ask("scancel", f"--user={getpass.getuser()}")
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
        for daemon in self.daemons.values():
            try:
                daemon.wait(5)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for process in (*self._steps(), *self.processes()):  # of nodes whose slurmd was killed
            if process.pid != os.getpid():
                with contextlib.suppress(psutil.Error):
                    process.kill()


def _configure(folder: Path) -> None:
    (folder / "state").mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    text = CONFIGURATION.format(
        host=socket.gethostname(),
        port=_port(),
        user=getpass.getuser(),
        folder=folder,
        expired=EXPIRED,
        lost=LOST,
    )
    for name, cards in NODES.items():
        kind = KINDS.get(name, "h200")
        text += f"NodeName={name} NodeAddr=127.0.0.1 Port={_port()} CPUs=64 Gres=gpu:{kind}:{cards}\n"
    text += "PartitionName=toys Nodes=ALL Default=YES State=UP MaxTime=INFINITE\n"
    text += "PartitionName=short Nodes=ALL State=UP MaxTime=1\n"
    (folder / "slurm.conf").write_text(text)
    lines = [
        f"NodeName={name} Name=gpu Type={KINDS.get(name, 'h200')} File={card}\n"
        for name, count in NODES.items()
        for card in CARDS[:count]
    ]
    (folder / "gres.conf").write_text("".join(lines))


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """Yield a Slurm whose nodes are idle; it is gone behind the block."""
    _configure(folder)
    cluster = Cluster(folder)
    places = (
        f"--{what}={folder}/munge.{what.partition('-')[0]}" for what in ("socket", "pid-file", "log-file", "seed-file")
    )
    try:
        cluster.start("munged", "munged", "--foreground", "--force", f"--key-file={folder}/munge.key", *places)
        until((folder / "munge.socket").exists, 120)
        cluster.start("slurmctld", "slurmctld", "-D")
        for name in NODES:
            cluster.start_node(name)
        cluster.until("idle")
        yield cluster
    finally:
        cluster.stop()
