"""The fork server: imports torch once, then plays one cluster after another.

Started by ``cluster`` in private mount and process namespaces as their first process: when it ends,
the kernel ends every rank and removes every network namespace. Reads one job per line from
standard input, writes one reply per line to standard output.
"""

import functools
import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import torch._dynamo  # noqa: F401 - torch.optim imports it lazily, two CPU seconds in every rank

from perfmodel.documents.testbed import CollectiveSetting, Fabric, Job
from perfmodel.errors import MeasurementFailed
from perfmodel.units import BytesPerSecond, Seconds
from validate.testbed import links, rank

#: A modest real-time priority: before every ordinary process, after the kernel's own threads.
_PRIORITY: Final = 10
_POLL_S: Final = 0.02
#: Of background traffic: fits one frame; Ethernet, IP and UDP headers, which the shaper counts too.
_PAYLOAD_BYTES: Final = 8900
_HEADER_BYTES: Final = 14 + 20 + 8
_PORT: Final = 9999
_PERIOD_S: Final = 0.002
#: ``SO_SNDBUFFORCE``, which Python does not name: beyond the system's limit. With less than the queue of a
#: shaper the stream would yield to TCP, and not be steady.
_SEND_BUFFER_FORCE: Final = 32
_SEND_BUFFER_BYTES: Final = 8_388_608


def main() -> None:
    """Serve jobs until standard input ends."""
    os.environ |= {"GLOO_SOCKET_IFNAME": links.NODE_DEVICE, "OMP_NUM_THREADS": "1"}
    # Run before everything else on the machine, where that is allowed.
    is_realtime = True
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
    except PermissionError:
        is_realtime = False
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


def serve(job: Job) -> dict[str, Any]:
    """Wire the fabric, run all ranks to their end, take everything down."""
    setting = job.setting
    copies, keep_awake = 1, False
    if isinstance(setting, CollectiveSetting):
        copies, keep_awake = setting.copies, setting.keep_awake
    links.remove()
    links.build(setting.fabric)
    counters = links.CounterReader.open(setting.fabric)
    children = Children()
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            started_utc = time.time()
            _start_traffic(setting.fabric, children)
            if keep_awake:
                for _ in os.sched_getaffinity(0):
                    children.fork(_idle)
            numbers = range(setting.fabric.num_ranks * copies)
            ranks = [
                children.fork(functools.partial(_play, job, number, folder, counters))
                for number in numbers
            ]
            children.wait(ranks, folder, limit_s=job.limit_s)
            results = [json.loads((folder / f"{n}.json").read_text("utf-8")) for n in numbers]
        return {"started_utc": started_utc, "ranks": results}
    finally:
        children.end()
        counters.close()
        links.remove()


def _play(job: Job, number: int, folder: Path, counters: links.CounterReader) -> None:
    """The life of one rank, from fork to exit."""
    setting = job.setting
    group, own = divmod(number, setting.fabric.num_ranks)
    try:
        links.enter(links.node_name(setting.fabric.node_of_rank[own]))
        if isinstance(setting, CollectiveSetting) and not setting.is_realtime:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        place = rank.Place(
            rank=own,
            world_size=setting.fabric.num_ranks,
            store=str(folder / f"store-{group}"),
            counters=counters.read,
        )
        rank.join(place)
        if isinstance(setting, CollectiveSetting):
            result = rank.collect(place, setting)
        else:
            result = rank.train(place, setting, list(job.factors[own]))
    except BaseException:
        (folder / f"{number}.error").write_text(traceback.format_exc(), encoding="utf-8")
        raise
    (folder / f"{number}.json").write_text(json.dumps(result), encoding="utf-8")


def _idle() -> None:
    """Keep a core from dozing off, and give way to everything else."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass


def _start_traffic(fabric: Fabric, children: "Children") -> None:
    """Steady streams of datagrams that share links with the collectives."""
    for node in {stream.to_node for stream in fabric.background}:
        children.fork(functools.partial(_swallow, node))
    for stream in fabric.background:
        address = links.node_address(stream.to_node)
        children.fork(functools.partial(_send, stream.from_node, address, stream.bytes_per_s))


def _send(node: int, address: str, rate: BytesPerSecond) -> None:
    """Send for ever at a rate, headers included."""
    links.enter(links.node_name(node))
    payload = bytes(_PAYLOAD_BYTES)
    interval_s = (_PAYLOAD_BYTES + _HEADER_BYTES) / rate
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.SOL_SOCKET, _SEND_BUFFER_FORCE, _SEND_BUFFER_BYTES)
        started_s = time.perf_counter()
        num_sent = 0
        while True:
            due = int((time.perf_counter() - started_s) / interval_s) + 1
            for _ in range(due - num_sent):
                sender.sendto(payload, (address, _PORT))
            num_sent = due
            time.sleep(max(_PERIOD_S, interval_s))


def _swallow(node: int) -> None:
    """Receive and forget for ever."""
    links.enter(links.node_name(node))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("", _PORT))
        while True:
            receiver.recv(2 * _PAYLOAD_BYTES)


@dataclass(slots=True)
class Children:
    """Forked processes; none outlives the job."""

    alive: set[int] = field(default_factory=set)

    def fork(self, life: Callable[[], None]) -> int:
        """Start a child; return its process id."""
        child = os.fork()
        if child == 0:
            _live(life)
        self.alive.add(child)
        return child

    def wait(self, ranks: list[int], folder: Path, *, limit_s: Seconds) -> None:
        """Return when all ranks have ended well."""
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
