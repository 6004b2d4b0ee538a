"""The processes that play a cluster: a fork server that imports torch once, its ranks, and the links between them.

Started by ``cluster`` in private mount and process namespaces as their first process: when it ends,
the kernel ends every rank and removes every network namespace. Reads one setting per line from
standard input, writes what it took, one line each, to standard output. Nodes are network namespaces on a bridge,
with shaped links, by commands of iproute2.
"""

import contextlib
import ctypes
import functools
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any, Final, TypeAlias

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from perfmodel.errors import MeasurementFailed
from perfmodel.tracing.fork import CrashedError, Fork
from perfmodel.units import Seconds
from validate.testbed.cluster import BURST_BYTES, CollectiveSetting

#: Collectives whose root is done before the others, so that it would begin the next one early.
_ONE_WAY: Final = frozenset({"broadcast", "send_recv"})
_FEWEST_REPEATS: Final = 3
_MOST_REPEATS: Final = 30
#: Warming up ends after so long, whatever is left of the links' burst: links that refill as fast have
#: no part in the time.
_WARM_UP_LIMIT_S: Final = 0.3
#: A modest real-time priority: before every ordinary process, after the kernel's own threads.
_PRIORITY: Final = 10
#: Ranks may take this long, whatever they do.
_LIMIT_S: Final = 120.0
#: Where ranks meet: on the private /run, which ends with the server.
_STORE: Final = Path("/run/store")
SWITCH: Final = "switch"
#: Name of a node's network interface.
NODE_DEVICE: Final = "eth0"
#: Jumbo frames: headers cost 0.7 % instead of 4.6 %.
MTU_BYTES: Final = 9000
_QUEUE_BYTES: Final = 4_194_304
#: Reno is the one algorithm that every kernel allows in a fresh namespace; the other two settings keep
#: runs from remembering each other and links from forgetting their pace when idle.
_SYSCTLS: Final = {
    "tcp_congestion_control": "reno",
    "tcp_no_metrics_save": "1",
    "tcp_slow_start_after_idle": "0",
}
_CLONE_NEWNET: Final = 0x40000000
_LIBC: Final = ctypes.CDLL(None, use_errno=True)

#: Start and end of every repeat, for every size. [s]
Found: TypeAlias = list[list[tuple[Seconds, Seconds]]]


def collect(rank: int, setting: CollectiveSetting) -> Found:
    """Time collectives one at a time."""
    found = []
    for size_bytes in setting.sizes_bytes:
        act = _act(rank, setting, size_bytes)
        times_s = []
        for _ in range(_warm_up(setting, size_bytes, act)):
            _settle(setting)
            start_s = time.perf_counter()
            act()
            times_s.append((start_s, time.perf_counter()))
        found.append(times_s)
    return found


def _settle(setting: CollectiveSetting) -> None:
    """Wait for the others where somebody could begin early."""
    if setting.collective in _ONE_WAY:
        dist.barrier()


def _warm_up(setting: CollectiveSetting, size_bytes: int, act: Callable[[], object]) -> int:
    """Use up the burst of links; return how often to repeat, the same on all ranks."""
    started_s = time.perf_counter()
    act()
    slowest = torch.tensor([time.perf_counter() - started_s])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    elapsed_s = float(slowest)
    num_warm_ups = math.ceil(setting.warm_up_bytes / size_bytes) - 1
    for _ in range(min(num_warm_ups, math.ceil(_WARM_UP_LIMIT_S / elapsed_s))):
        _settle(setting)
        act()
    return max(_FEWEST_REPEATS, min(_MOST_REPEATS, math.ceil(setting.target_s / elapsed_s)))


def _act(rank: int, setting: CollectiveSetting, size_bytes: int) -> Callable[[], object]:
    """One collective over the whole array, ready to be called again and again."""
    shard = torch.ones(max(1, size_bytes // 4 // setting.num_ranks))
    whole = torch.ones(shard.numel() * setting.num_ranks)
    exchanged = torch.zeros_like(whole) if setting.collective == "all_to_all" else shard

    def p2p() -> object:
        if rank == 0:
            return dist.send(whole, dst=1)
        return dist.recv(whole, src=0) if rank == 1 else None

    acts: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, shard),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
        "all_to_all": lambda: dist.all_to_all_single(exchanged, whole),
        "send_recv": p2p,
    }
    return acts[setting.collective]


def main() -> None:
    """Serve settings until standard input ends."""
    os.environ |= {"GLOO_SOCKET_IFNAME": NODE_DEVICE, "OMP_NUM_THREADS": "1"}
    # Run before everything else on the machine, where that is allowed.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_PRIORITY))
    _say({"ready": True})
    for line in sys.stdin:
        try:
            _say(serve(CollectiveSetting.model_validate_json(line)))
        except MeasurementFailed as error:
            _say({"error": str(error)})


def _say(reply: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def serve(setting: CollectiveSetting) -> dict[str, Any]:
    """Wire the links, run all ranks to their end, take everything down; fields of the run."""
    _remove_links()
    _build_links(setting)
    try:
        _STORE.unlink(missing_ok=True)
        started_utc = time.time()
        of_ranks = together(
            functools.partial(_play, rank, setting) for rank in range(setting.num_ranks)
        )
    finally:
        _remove_links()
    # From the last start to the last end: earlier ranks only wait.
    durations_s = [
        [
            max(end for _, end in once) - max(start for start, _ in once)
            for once in zip(*of_size, strict=True)
        ]
        for of_size in zip(*of_ranks, strict=True)
    ]
    return {"started_utc": started_utc, "durations_s": durations_s}


def _play(rank: int, setting: CollectiveSetting) -> Found:
    """The life of one rank."""
    _enter_node(rank)
    torch.set_num_threads(1)
    files = FileStore(str(_STORE), setting.num_ranks)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=setting.num_ranks)
    return collect(rank, setting)


def _node(number: int) -> str:
    return f"node{number}"


def ip_batches(num_ranks: int) -> dict[str, list[str]]:
    """Commands of ``ip -batch`` for each namespace, the switch first."""
    bridge = [f"link add name br0 mtu {MTU_BYTES} type bridge", "link set br0 up"]
    batches = {SWITCH: ["link set lo up", *bridge]}
    for number in range(num_ranks):
        name = _node(number)
        peer = f"peer name {NODE_DEVICE} mtu {MTU_BYTES} netns {name}"
        batches[SWITCH] += [
            f"link add name {name} mtu {MTU_BYTES} type veth {peer}",
            f"link set {name} master br0 up",
        ]
        batches[name] = [
            "link set lo up",
            f"addr add 10.99.0.{number + 1}/24 dev {NODE_DEVICE}",
            f"link set {NODE_DEVICE} up",
        ]
    return batches


def shaper(bytes_per_s: float) -> list[str]:
    """Arguments of ``tc`` in the namespace of each node."""
    rule = f"rate {round(bytes_per_s * 8)}bit burst {BURST_BYTES} limit {_QUEUE_BYTES}"
    return f"qdisc add dev {NODE_DEVICE} root tbf {rule}".split()


def _build_links(setting: CollectiveSetting) -> None:
    """Make all namespaces and links."""
    batches = ip_batches(setting.num_ranks)
    _command(["ip", "-batch", "-"], [f"netns add {name}" for name in batches])
    for name, lines in batches.items():
        _command(["ip", "-n", name, "-batch", "-"], lines)
        if name != SWITCH:
            _command(["tc", "-n", name, *shaper(setting.bytes_per_s)], [])


def _remove_links() -> None:
    """Remove all namespaces, and with them the links."""
    names = [path.name for path in Path("/run/netns").iterdir()]
    _command(["ip", "-batch", "-"], [f"netns del {name}" for name in names])


def _command(command: list[str], lines: list[str]) -> None:
    done = subprocess.run(
        command, input="\n".join(lines) + "\n", text=True, capture_output=True, check=False
    )
    if done.returncode:
        text = " ".join(done.stderr.split())
        raise MeasurementFailed(f"testbed: {' '.join(command)} failed: {text[:300]}")


def _enter_node(number: int) -> None:
    """Move this thread to a node, and set TCP there."""
    file = os.open(f"/run/netns/{_node(number)}", os.O_RDONLY)
    if _LIBC.setns(file, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {_node(number)}")
    os.close(file)
    for setting, value in _SYSCTLS.items():
        # The kernel refuses a wrong value with an error.
        Path("/proc/sys/net/ipv4", setting).write_text(value, encoding="ascii")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """What ended a rank, and when."""

    at_s: Seconds
    words: str

    @classmethod
    def of(cls, error: Exception, *, at_s: Seconds) -> "_Failure":
        """With the first words of an error in one line."""
        words = " ".join(f"{type(error).__name__}: {error}".split())
        return cls(at_s=at_s, words=words[:300])


def _told(play: Callable[[], Found]) -> Found | _Failure:
    """What a rank finds, or why it failed, by the clock that all ranks share."""
    try:
        return play()
    except Exception as error:  # noqa: BLE001 - the server raises that of the first rank that failed
        return _Failure.of(error, at_s=time.monotonic())


def together(plays: Iterable[Callable[[], Found]]) -> list[Found]:
    """Play all ranks at the same time; what each found.

    ``MeasurementFailed`` names the rank that failed first: its end breaks the connections of the others.
    """
    with contextlib.ExitStack() as until:
        ranks = [until.enter_context(Fork(functools.partial(_told, play))) for play in plays]
        waiting = {copy.answer: rank for rank, copy in enumerate(ranks)}
        found: dict[int, Found] = {}
        deadline_s = time.monotonic() + _LIMIT_S
        while waiting:
            ready = connection.wait(list(waiting), max(0.0, deadline_s - time.monotonic()))
            if not ready:
                raise MeasurementFailed(
                    f"testbed: {len(waiting)} ranks did not end in {_LIMIT_S:.0f} s"
                )
            failed: dict[int, _Failure] = {}
            for rank in [waiting.pop(answer) for answer in ready]:  # type: ignore[call-overload]
                answer = _answer(ranks[rank])
                if isinstance(answer, _Failure):
                    failed[rank] = answer
                else:
                    found[rank] = answer
            if failed:
                first = min(failed, key=lambda rank: failed[rank].at_s)
                raise MeasurementFailed(f"testbed: rank {first} failed: {failed[first].words}")
        return [found[rank] for rank in range(len(ranks))]


def _answer(rank: Fork[Found | _Failure]) -> Found | _Failure:
    """What a rank told; one that was ended from outside failed before all that tell."""
    try:
        return rank.result()
    except CrashedError as error:
        return _Failure.of(error, at_s=-math.inf)


if __name__ == "__main__":
    main()
