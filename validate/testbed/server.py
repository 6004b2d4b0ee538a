"""The fork server: imports torch once, then plays one cluster after another.

Started by ``client`` in private mount and process namespaces as their first process: when it ends,
the kernel ends every rank and removes every network namespace. Reads one job per line from
standard input, writes one reply per line to standard output.
"""

import functools
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import torch._dynamo  # noqa: F401 - torch.optim imports it lazily, two CPU seconds in every rank

from perfmodel.documents.testbed import CollectiveSetting, Fabric, Job, StrategySetting
from perfmodel.errors import MeasurementFailed
from perfmodel.units import Seconds
from validate.testbed import background, rank, strategy_rank, wiring
from validate.testbed.counters import CounterReader
from validate.testbed.namespace import enter, inside, named

#: A modest real-time priority: before every ordinary process, after the kernel's own threads.
_PRIORITY: Final = 10
_POLL_S: Final = 0.02


def main() -> None:
    """Serve jobs until standard input ends."""
    os.environ |= {"GLOO_SOCKET_IFNAME": wiring.NODE_DEVICE, "OMP_NUM_THREADS": "1"}
    is_realtime = _take_precedence()
    _say({"ready": True})
    for line in sys.stdin:
        try:
            reply = serve(Job.model_validate_json(line)) | {"is_realtime": is_realtime}
        except MeasurementFailed as error:
            reply = {"error": str(error)}
        _say(reply)


def _say(reply: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def _take_precedence() -> bool:
    """Run before everything else on the machine, where that is allowed."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
    except PermissionError:
        return False
    return True


def serve(job: Job) -> dict[str, Any]:
    """Wire the fabric, run all ranks to their end, take everything down.

    Raises
    ------
    MeasurementFailed
        If the network cannot be made, or a rank fails or does not end in time.
    """
    fabric = job.setting.fabric
    wiring.remove()
    wiring.build(fabric)
    _tune(fabric)
    counters = CounterReader.open(wiring.links(fabric))
    brood = Brood()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            started_utc = time.time()
            _start_traffic(fabric, brood)
            if isinstance(job.setting, CollectiveSetting) and job.setting.keep_awake:
                for _ in os.sched_getaffinity(0):
                    brood.fork(_idle)
            ranks = [
                brood.fork(_Player(job, number, folder, counters))
                for number in range(_num_players(job))
            ]
            brood.wait(ranks, folder, limit_s=job.limit_s)
            results = [
                json.loads((folder / f"{number}.json").read_text(encoding="utf-8"))
                for number in range(_num_players(job))
            ]
        return {"started_utc": started_utc, "ranks": results}
    finally:
        brood.end()
        counters.close()
        wiring.remove()


def _num_players(job: Job) -> int:
    setting = job.setting
    copies = setting.copies if isinstance(setting, CollectiveSetting) else 1
    return setting.fabric.num_ranks * copies


def _tune(fabric: Fabric) -> None:
    """Set TCP in every node, and read it back: a refused value would go unnoticed otherwise."""
    for node in range(len(fabric.node_bytes_per_s)):
        with inside(wiring.node_name(node)):
            for name, value in wiring.SYSCTLS.items():
                path = Path("/proc/sys/net/ipv4") / name
                path.write_text(value, encoding="ascii")
                if path.read_text(encoding="ascii").strip() != value:
                    raise MeasurementFailed(f"testbed: {path} could not be set to {value}")


def _start_traffic(fabric: Fabric, brood: "Brood") -> None:
    for node in {stream.to_node for stream in fabric.background}:
        brood.fork(functools.partial(_within, node, background.swallow))
    for stream in fabric.background:
        address = wiring.node_address(stream.to_node)
        send = functools.partial(background.send, address, stream.bytes_per_s)
        brood.fork(functools.partial(_within, stream.from_node, send))


def _idle() -> None:
    """Keep a core from dozing off, and give way to everything else."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass


def _within(node: int, work: Callable[[], None]) -> None:
    enter(named(wiring.node_name(node)))
    work()


@dataclass(frozen=True, slots=True)
class _Player:
    """The life of one rank, from fork to exit."""

    job: Job
    number: int
    folder: Path
    counters: CounterReader

    def __call__(self) -> None:
        try:
            result = self._run()
        except BaseException:
            (self.folder / f"{self.number}.error").write_text(
                traceback.format_exc(), encoding="utf-8"
            )
            raise
        path = self.folder / f"{self.number}.json"
        path.write_text(json.dumps(result), encoding="utf-8")

    def _run(self) -> dict[str, Any]:
        setting = self.job.setting
        group, number = divmod(self.number, setting.fabric.num_ranks)
        enter(named(wiring.node_name(setting.fabric.node_of_rank[number])))
        if isinstance(setting, CollectiveSetting) and not setting.is_realtime:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        place = rank.Place(
            rank=number,
            world_size=setting.fabric.num_ranks,
            store=str(self.folder / f"store-{group}"),
            counters=self.counters.read,
        )
        rank.join(place)
        if isinstance(setting, CollectiveSetting):
            return rank.collect(place, setting)
        if isinstance(setting, StrategySetting):
            return strategy_rank.train(place, setting)
        return rank.train(place, setting, list(self.job.factors[number]))


@dataclass(slots=True)
class Brood:
    """Forked children; none outlives the job."""

    alive: set[int] = field(default_factory=set)

    def fork(self, life: Callable[[], None]) -> int:
        """Start a child; return its process id."""
        child = os.fork()
        if child == 0:
            _live(life)
        self.alive.add(child)
        return child

    def wait(self, ranks: list[int], folder: Path, *, limit_s: Seconds) -> None:
        """Return when all ranks have ended well.

        Raises
        ------
        MeasurementFailed
            If one fails, or the time is up.
        """
        deadline_s = time.monotonic() + limit_s
        pending = set(ranks)
        while pending:
            child, status = os.waitpid(-1, os.WNOHANG)
            if child == 0:
                if time.monotonic() > deadline_s:
                    raise MeasurementFailed(
                        f"testbed: {len(pending)} ranks did not end within {limit_s:.0f} s"
                    )
                time.sleep(_POLL_S)
                continue
            self.alive.discard(child)
            pending.discard(child)
            if status and child in ranks:
                raise MeasurementFailed(f"testbed: {_first_error(folder, ranks.index(child))}")

    def end(self) -> None:
        """End and reap what is left."""
        for child in self.alive:
            os.kill(child, signal.SIGKILL)
        for child in self.alive:
            os.waitpid(child, 0)
        self.alive.clear()


def _live(life: Callable[[], None]) -> NoReturn:
    """Live and exit without the interpreter's farewell, which waits for threads of gloo."""
    status = 1
    try:
        life()
        status = 0
    finally:
        os._exit(status)


def _first_error(folder: Path, number: int) -> str:
    """Words of the rank that failed first, whichever was noticed first.

    A rank writes them before its connections break, which then fails the others.
    """
    written = sorted(folder.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    if not written:
        return f"rank {number} failed: it left no word"
    lines = written[0].read_text(encoding="utf-8").strip().splitlines() or ["it left no word"]
    return f"rank {written[0].stem} failed: {lines[-1][:300]}"


if __name__ == "__main__":
    main()
