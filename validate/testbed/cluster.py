"""The process that plays the cluster, as it is seen from outside: what it is asked, started, taken down."""

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, TypeAdapter

from perfmodel.documents import Record
from perfmodel.documents.observation import read_lines
from perfmodel.errors import MeasurementFailed, NotFeasible
from perfmodel.units import MBIT, Seconds

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send_recv"
]
#: What an idle shaped link lets through at once. Below 64 KiB the shaper splits segmented packets in
#: software, which costs twenty times the CPU time.
BURST_BYTES: Final = 70_000


class CollectiveSetting(Record):
    """Collectives of one kind and several sizes, one at a time, between nodes of one rank on one switch."""

    name: str
    collective: CollectiveKind
    num_ranks: PositiveInt
    mbit: PositiveFloat
    """Rate at which each node may send. [Mbit/s]"""
    sizes_bytes: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """Of the whole array, as nccl-tests counts it."""
    target_s: PositiveFloat = 0.05
    """Repeat each size for about so long, 3 to 30 times. [s]"""
    warm_up_bytes: NonNegativeInt = 4 * BURST_BYTES
    """Of each size, unrecorded, before it is timed. Without it the median of some sizes is a time with the
    burst of idle links, of others one without."""

    @property
    def bytes_per_s(self) -> float:
        """Rate of the links. [B/s]"""
        return self.mbit * MBIT


class CollectiveRun(Record):
    """What the collectives took."""

    setting: CollectiveSetting
    started_utc: float
    durations_s: tuple[tuple[PositiveFloat, ...], ...]
    """For each size all repeats: from the last rank's start to the last rank's end. [s]"""


_RUN: Final[TypeAdapter[CollectiveRun]] = TypeAdapter(CollectiveRun)


def read_runs(path: Path) -> list[CollectiveRun]:
    """All complete lines of a file of runs; ``InvalidDocument`` if one breaks the schema."""
    return read_lines(path, _RUN, what="runs") if path.exists() else []


_TOOLS: Final = ("ip", "tc", "unshare", "setpriv", "mount")
#: Importing torch on a busy machine.
_START_LIMIT_S: Final = 120.0
#: Nothing in the plan comes near.
_RUN_LIMIT_S: Final = 150.0
_REFUSAL: Final = (
    "validate network: network namespaces with shaped links must be allowed here, got {found}; "
    "run as root, or where user namespaces are allowed, on Linux with iproute2 and util-linux"
)
#: A private /run, because iproute2 keeps namespaces there; then the trial or the server.
_PRIVATE_RUN: Final = "mount -t tmpfs tmpfs /run && mkdir /run/netns && "
_TRIAL: Final = (
    "ip netns add trial && ip -n trial link add name trial0 type veth peer name trial1 && "
    "tc -n trial qdisc add dev trial0 root tbf rate 8mbit burst 70000 limit 100000 && "
    "ip netns add other && ip netns del other && ip netns del trial"
)


def _isolation() -> tuple[str, ...]:
    """Command that runs another in private namespaces, and takes it down with this process.

    The other becomes the first process of a process namespace: with it all its children end, and
    with the last of them their network namespaces.
    """
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    return (
        *("setpriv", "--pdeathsig", "KILL"),
        *("unshare", *user, "--mount", "--net", "--pid", "--fork"),
        *("--kill-child=SIGKILL", "--mount-proc"),
    )


def obstacle() -> str | None:
    """Why the testbed cannot run here, or None: tried in namespaces that vanish again."""
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if sys.platform != "linux" or missing:
        return f"no {', '.join(missing) or 'Linux'}"
    command = (*_isolation(), "sh", "-c", _PRIVATE_RUN + _TRIAL)
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode == 0:
        return None
    words = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    return words[:200]


def refuse_without_rights() -> None:
    """Raise ``NotFeasible`` where the testbed cannot run."""
    found = obstacle()
    if found is not None:
        raise NotFeasible(_REFUSAL.format(found=found))


@dataclass(frozen=True, slots=True)
class Cluster:
    """Plays settings."""

    process: subprocess.Popen[str]
    complaints: Any

    def play(self, setting: CollectiveSetting) -> CollectiveRun:
        """Run one setting."""
        assert self.process.stdin is not None
        self.process.stdin.write(setting.model_dump_json() + "\n")
        self.process.stdin.flush()
        reply = self.hear(limit_s=_RUN_LIMIT_S)
        if "error" in reply:
            raise MeasurementFailed(f"{setting.name}: {reply['error']}")
        return CollectiveRun(setting=setting, **reply)

    def hear(self, *, limit_s: Seconds) -> dict[str, Any]:
        """Wait for one line of the server."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], limit_s)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.complaints.seek(0)
            lines = self.complaints.read().strip().splitlines() or ["it left no word"]
            raise MeasurementFailed(f"testbed: the server fell silent: {lines[-1][:300]}")
        reply: dict[str, Any] = json.loads(line)
        return reply


@contextmanager
def running_server() -> Iterator[Cluster]:
    """A server that has imported torch; whatever happens, nothing of it is left afterwards."""
    serve = f"{_PRIVATE_RUN} exec {sys.executable} -m validate.testbed.server"
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8") as complaints,
        subprocess.Popen(
            (*_isolation(), "sh", "-c", serve),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            text=True,
            bufsize=1,
            # Ctrl-C is for this process; the server ends because this one takes it down.
            start_new_session=True,
        ) as process,
    ):
        cluster = Cluster(process, complaints)
        try:
            cluster.hear(limit_s=_START_LIMIT_S)
            yield cluster
        finally:
            process.kill()
