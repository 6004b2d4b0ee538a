"""The process that plays the cluster: start it, give it jobs, turn replies into runs."""

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from calibrate.processes import usable_cores
from perfmodel.arrays import FloatArray
from perfmodel.documents.testbed import (
    CollectiveRun,
    CollectiveSetting,
    HostUse,
    Job,
    Noise,
    Run,
    StrategyRun,
    StrategySetting,
    TrainingRun,
    TrainingSetting,
)
from perfmodel.errors import MeasurementFailed, NotFeasible
from perfmodel.units import Seconds
from validate.testbed.links import BUSY, STEAL

_TOOLS: Final = ("ip", "tc", "unshare", "setpriv", "mount")
#: Importing torch on a busy machine.
_START_LIMIT_S: Final = 120.0
#: Beyond the time that a job gives its ranks: wiring and tidying up.
_MARGIN_S: Final = 30.0
_REFUSAL: Final = (
    "{command}: network namespaces with shaped links must be allowed here, got {found}; "
    "run as root, or where user namespaces are allowed, on Linux with iproute2 and util-linux"
)
#: A private /run, because iproute2 keeps namespaces there; then the trial or the server.
_PRIVATE_RUN: Final = "mount -t tmpfs tmpfs /run && mkdir /run/netns && "
_TRIAL: Final = (
    "ip netns add trial && ip -n trial link add name trial0 type veth peer name trial1 && "
    "tc -n trial qdisc add dev trial0 root tbf rate 8mbit burst 70000 limit 100000 && "
    "ip netns add other && ip netns del other && ip netns del trial"
)
#: Ranks may take this long, whatever they do: nothing in the plan comes near.
_LIMIT_S: Final = 120.0
#: A run from which other guests of the host took more than this share of the cores is repeated.
STEAL_LIMIT: Final = 0.02
#: So often at most. The hypervisor's counter alone decides: no duration and no prediction is looked at.
_MOST_ATTEMPTS: Final = 3
#: Tail index of slow steps: the variance is barely finite.
_PARETO_SHAPE: Final = 2.5

R = TypeVar("R", TrainingRun, CollectiveRun)


class Cluster(Protocol):
    """Plays jobs."""

    def play(self, job: Job) -> dict[str, Any]:
        """Run one job; return the server's reply."""


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


def refuse_without_rights(command: str) -> None:
    """Refuse a command that cannot run here."""
    found = obstacle()
    if found is not None:
        raise NotFeasible(_REFUSAL.format(command=command, found=found))


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
        server = Server(process, complaints)
        try:
            server.hear(limit_s=_START_LIMIT_S)
            yield server
        finally:
            process.kill()


@dataclass(frozen=True, slots=True)
class Server:
    """A running server."""

    process: subprocess.Popen[str]
    complaints: Any

    def play(self, job: Job) -> dict[str, Any]:
        """Run one job."""
        assert self.process.stdin is not None
        self.process.stdin.write(job.model_dump_json() + "\n")
        self.process.stdin.flush()
        reply = self.hear(limit_s=job.limit_s + _MARGIN_S)
        if "error" in reply:
            raise MeasurementFailed(f"{job.setting.name}: {reply['error']}")
        return reply

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


def draw_factors(noise: Noise, *, num_ranks: int, num_steps: int) -> FloatArray:
    """Pace of each device in each step, shape ``(num_ranks, num_steps)``; the seed decides."""
    rng = np.random.default_rng([noise.seed, num_ranks])
    factors = np.ones((num_ranks, num_steps))
    if noise.kind == "lognormal":
        factors *= np.exp(noise.spread * rng.standard_normal(factors.shape))
    elif noise.kind == "pareto":
        is_slow = rng.random(factors.shape) < noise.slow_share
        # Lomax with scale 1 has mean 1 / (shape - 1).
        excess = noise.spread * (_PARETO_SHAPE - 1) * rng.pareto(_PARETO_SHAPE, factors.shape)
        factors += is_slow * excess
    factors *= np.exp(noise.rank_spread * rng.standard_normal((num_ranks, 1)))
    for rank, factor in noise.slow_ranks:
        factors[rank] *= factor
    return factors


def play(cluster: Cluster, setting: TrainingSetting | CollectiveSetting | StrategySetting) -> Run:
    """Run one setting, again where other guests of the host disturbed it."""
    if isinstance(setting, StrategySetting):
        return play_strategy(cluster, setting)
    if isinstance(setting, CollectiveSetting):
        return play_collectives(cluster, setting)
    return play_training(cluster, setting)


def quietest(play: Callable[[], R]) -> R:
    """The first undisturbed run, or of several disturbed ones that with the least steal time."""
    runs: list[R] = []
    while len(runs) < _MOST_ATTEMPTS:
        runs.append(play())
        if runs[-1].host.steal_share <= STEAL_LIMIT:
            break
    kept = min(runs, key=lambda run: run.host.steal_share)
    return kept.model_copy(update={"attempts": len(runs)})


def play_training(cluster: Cluster, setting: TrainingSetting) -> TrainingRun:
    """Run one training setting."""
    factors = draw_factors(
        setting.noise, num_ranks=setting.fabric.num_ranks, num_steps=setting.num_steps
    )
    table = tuple(tuple(float(factor) for factor in row) for row in factors)

    def train() -> TrainingRun:
        reply = cluster.play(Job(setting=setting, factors=table, limit_s=_LIMIT_S))
        ranks = reply["ranks"]
        late_s = np.concatenate([rank["late_s"] for rank in ranks])
        return TrainingRun(
            setting=setting,
            started_utc=reply["started_utc"],
            step_s=_steps(reply),
            factors=table,
            compute_s=tuple(tuple(rank["compute_s"]) for rank in ranks),
            link_bytes=_link_bytes(reply),
            bucket_bytes=tuple(ranks[0]["bucket_bytes"]),
            host=_host(reply),
            late_mean_s=float(late_s.mean()),
            late_p99_s=float(np.quantile(late_s, 0.99)),
        )

    return quietest(train)


def play_collectives(cluster: Cluster, setting: CollectiveSetting) -> CollectiveRun:
    """Run one setting of collectives."""

    def collect() -> CollectiveRun:
        reply = cluster.play(Job(setting=setting, limit_s=_LIMIT_S))
        sizes = list(zip(*(rank["sizes"] for rank in reply["ranks"]), strict=True))
        copies, first_group = setting.copies, slice(setting.fabric.num_ranks)
        return CollectiveRun(
            setting=setting,
            started_utc=reply["started_utc"],
            durations_s=tuple(_durations(of_ranks[first_group]) for of_ranks in sizes),
            cpu_s=tuple(sum(rank["cpu_s"] for rank in of_ranks) / copies for of_ranks in sizes),
            host=_host(reply),
        )

    return quietest(collect)


def play_strategy(cluster: Cluster, setting: StrategySetting) -> StrategyRun:
    """Run one strategy."""
    reply = cluster.play(Job(setting=setting, limit_s=_LIMIT_S))
    return StrategyRun(
        setting=setting,
        started_utc=reply["started_utc"],
        step_s=_steps(reply),
        link_bytes=_link_bytes(reply),
        host=_host(reply),
    )


def _steps(reply: dict[str, Any]) -> tuple[Seconds, ...]:
    """A step has ended when it has ended on every rank; their clocks are one clock."""
    ends_s = np.max([rank["ends_s"] for rank in reply["ranks"]], axis=0)
    return tuple(float(step_s) for step_s in np.diff(ends_s))


def _durations(of_ranks: tuple[dict[str, Any], ...]) -> tuple[Seconds, ...]:
    """From the last start to the last end: earlier ranks only wait."""
    starts_s = np.max([rank["starts_s"] for rank in of_ranks], axis=0)
    ends_s = np.max([rank["ends_s"] for rank in of_ranks], axis=0)
    return tuple(float(duration_s) for duration_s in ends_s - starts_s)


def _link_bytes(reply: dict[str, Any]) -> dict[str, int]:
    before, after = (reply["ranks"][0][moment]["counters"] for moment in ("before", "after"))
    return {link: int(after[link] - before[link]) for link in before if link not in {BUSY, STEAL}}


def _host(reply: dict[str, Any]) -> HostUse:
    ranks = reply["ranks"]
    first, last = ranks[0]["before"], ranks[0]["after"]
    own_s = sum(rank["after"]["cpu_s"] - rank["before"]["cpu_s"] for rank in ranks)
    busy_s, steal_s = (last["counters"][of] - first["counters"][of] for of in (BUSY, STEAL))
    return HostUse(
        window_s=last["at_s"] - first["at_s"],
        own_cpu_s=own_s,
        foreign_cpu_s=max(0.0, busy_s - own_s),
        steal_cpu_s=max(0.0, steal_s),
        num_cores=usable_cores(),
        is_realtime=reply["is_realtime"],
    )
