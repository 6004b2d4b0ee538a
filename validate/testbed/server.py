"""The processes that play a cluster: a fork server that imports torch once, and its ranks.

Started by ``campaign`` in private mount and process namespaces as their first process: when it ends,
the kernel ends every rank and removes every network namespace. Reads one job per line from
standard input, writes one reply per line to standard output. A rank is real DistributedDataParallel on a
device that is a clock.
"""

import contextlib
import functools
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

import torch
import torch._dynamo  # torch.optim imports it lazily, two CPU seconds in every rank
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

from calibrate.locks import work_folder
from perfmodel.errors import MeasurementFailed
from perfmodel.units import Seconds
from validate.testbed import links
from validate.testbed.records import CollectiveSetting, EmulatedLayer, Job, TrainingSetting

#: The first step has other buckets, the second rebuilds them, the third settles.
WARM_UP_STEPS = 3

#: Collectives whose root is done before the others, so that it would begin the next one early.
_ONE_WAY = frozenset({"broadcast", "send_recv"})
_FEWEST_REPEATS = 3
#: Warming up ends after so long, whatever is left of the links' burst: links that refill as fast have
#: no part in the time.
_WARM_UP_LIMIT_S = 0.3


@dataclass(slots=True)
class DeviceClock:
    """An accelerator that does nothing, in the right time.

    Work ends when the work before it has ended plus its duration, as on a real device, whatever the
    host needs to get there: what the host loses it makes up for while the device is busy.
    """

    end_s: Seconds = 0.0
    late_s: list[Seconds] = field(default_factory=list)

    def synchronize(self) -> None:
        """Nothing is in progress: the next work starts now, at the earliest."""
        self.end_s = max(self.end_s, time.perf_counter())

    def run(self, duration_s: Seconds) -> None:
        """Return when a piece of work has ended."""
        self.end_s += duration_s
        while (left_s := self.end_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        self.late_s.append(time.perf_counter() - self.end_s)


class _Emulated(torch.autograd.Function):
    """A layer whose passes take their time on the clock, and whose gradient is ready-made."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: "Layer") -> torch.Tensor:  # noqa: ARG004 - autograd needs the weight
        """Take the forward time."""
        ctx.layer = layer
        layer.clock.run(layer.spec.forward_s)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        """Take the backward time, and return the gradient."""
        layer: Layer = ctx.layer
        layer.clock.run(layer.spec.backward_s)
        return gradients[0].clone(), layer.gradient, None


class Layer(torch.nn.Module):
    """An emulated layer with one parameter."""

    def __init__(self, spec: EmulatedLayer, clock: DeviceClock) -> None:
        super().__init__()
        self.spec = spec
        self.clock = clock
        self.weight = torch.nn.Parameter(torch.zeros(spec.num_elements))
        self.gradient = torch.ones(spec.num_elements)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take the forward time."""
        result: torch.Tensor = _Emulated.apply(x, self.weight, self)
        return result


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank finds the others, and how it reads the machine's counters."""

    rank: int
    world_size: int
    store: str
    counters: Callable[[], dict[str, float]]
    """Bytes sent by each link; for rank 0 only."""


def join(place: Place) -> None:
    """Enter the group."""
    torch.set_num_threads(1)
    store = FileStore(place.store, place.world_size)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.world_size)


def mark(place: Place) -> dict[str, Any]:
    """Counters and clocks, now."""
    counters = place.counters() if place.rank == 0 else {}
    return {"counters": counters, "cpu_s": time.process_time(), "at_s": time.perf_counter()}


def train(place: Place, setting: TrainingSetting) -> dict[str, Any]:
    """Run the steps of one setting; return clocks and counters."""
    clock = DeviceClock()
    layers = [Layer(spec, clock) for spec in setting.model.layers]
    module = torch.nn.Sequential(*layers)
    ddp = DistributedDataParallel(module, bucket_cap_mb=setting.bucket_cap_mb)
    x = torch.zeros(1, requires_grad=True)
    ends_s: list[Seconds] = []
    before: dict[str, Any] = {}
    dist.barrier()
    for step in range(WARM_UP_STEPS + setting.num_steps):
        if step == WARM_UP_STEPS:
            before = mark(place)
            clock.late_s.clear()
        clock.synchronize()
        for micro_step in range(setting.accumulation):
            is_last = micro_step == setting.accumulation - 1
            with contextlib.nullcontext() if is_last else ddp.no_sync():
                ddp(x).sum().backward()
        clock.synchronize()
        clock.run(setting.model.optimizer_s)
        ddp.zero_grad(set_to_none=True)
        x.grad = None
        ends_s.append(time.perf_counter())
    return {
        "before": before,
        "after": mark(place),
        "ends_s": ends_s[WARM_UP_STEPS - 1 :],
        "late_s": clock.late_s,
        "bucket_bytes": _bucket_bytes(ddp),
    }


def _bucket_bytes(ddp: DistributedDataParallel) -> list[int]:
    data = ddp._get_ddp_logging_data()  # noqa: SLF001 - the only place that knows
    sizes = data.get("rebuilt_bucket_sizes") or data.get("bucket_sizes") or ""
    return [int(size) for size in str(sizes).split(",") if size.strip()]


def collect(place: Place, setting: CollectiveSetting) -> dict[str, Any]:
    """Time collectives of every size, one at a time."""
    before = mark(place)
    sizes = []
    for size_bytes in setting.sizes_bytes:
        act = _act(place, setting.collective, size_bytes)
        repeats = _repeats(setting, size_bytes, act)
        starts_s, ends_s = [], []
        cpu_s = 0.0
        for _ in range(repeats):
            _settle(setting)
            cpu_s -= time.process_time()
            starts_s.append(time.perf_counter())
            act()
            ends_s.append(time.perf_counter())
            cpu_s += time.process_time()
        sizes.append({"starts_s": starts_s, "ends_s": ends_s, "cpu_s": cpu_s / repeats})
    return {"before": before, "after": mark(place), "sizes": sizes}


def _settle(setting: CollectiveSetting) -> None:
    """Wait for the others where somebody could begin early, and for idle links where they are wanted."""
    if setting.pause_s or setting.collective in _ONE_WAY:
        dist.barrier()
        time.sleep(setting.pause_s)


def _repeats(setting: CollectiveSetting, size_bytes: int, act: Callable[[], object]) -> int:
    """Warm the group up and use up the burst of links; say how often to repeat, the same on all ranks."""
    started_s = time.perf_counter()
    act()
    if setting.target_s is None and not setting.warm_up_bytes:
        return setting.repeats
    slowest = torch.tensor([time.perf_counter() - started_s])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    elapsed_s = float(slowest)
    num_warm_ups = math.ceil(setting.warm_up_bytes / size_bytes) - 1
    for _ in range(min(num_warm_ups, math.ceil(_WARM_UP_LIMIT_S / elapsed_s))):
        _settle(setting)
        act()
    if setting.target_s is None:
        return setting.repeats
    return max(_FEWEST_REPEATS, min(setting.repeats, math.ceil(setting.target_s / elapsed_s)))


def _act(place: Place, collective: str, size_bytes: int) -> Callable[[], object]:
    """One collective over the whole array, ready to be called again and again."""
    shard = torch.ones(max(1, size_bytes // 4 // place.world_size))
    whole = torch.ones(shard.numel() * place.world_size)
    exchanged = torch.zeros_like(whole) if collective == "all_to_all" else shard

    def p2p() -> object:
        if place.rank == 0:
            return dist.send(whole, dst=1)
        return dist.recv(whole, src=0) if place.rank == 1 else None

    acts: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, shard),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
        "all_to_all": lambda: dist.all_to_all_single(exchanged, whole),
        "send_recv": p2p,
    }
    return acts[collective]


#: A modest real-time priority: before every ordinary process, after the kernel's own threads.
_PRIORITY: Final = 10
_POLL_S: Final = 0.02


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
        with work_folder("perfmodel-testbed-") as name:
            folder = Path(name)
            started_utc = time.time()
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
        links.enter(links.node_name(own))
        place = Place(
            rank=own,
            world_size=setting.fabric.num_ranks,
            store=str(folder / f"store-{group}"),
            counters=counters.read,
        )
        join(place)
        result = (
            collect(place, setting)
            if isinstance(setting, CollectiveSetting)
            else train(place, setting)
        )
    except BaseException:
        (folder / f"{number}.error").write_text(traceback.format_exc(), encoding="utf-8")
        raise
    (folder / f"{number}.json").write_text(json.dumps(result), encoding="utf-8")


def _idle() -> None:
    """Keep a core from dozing off, and give way to everything else."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    while True:
        pass


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
