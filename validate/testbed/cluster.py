"""The process that plays the cluster, as it is seen from outside: started, asked, taken down."""

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
from typing import Any, Final

from perfmodel.errors import MeasurementFailed, NotFeasible
from perfmodel.units import Seconds
from validate.testbed.records import CollectiveRun, CollectiveSetting

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
