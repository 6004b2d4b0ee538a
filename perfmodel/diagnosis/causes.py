"""Causes of a slow step, and what could be measured to tell them apart.

A cause changes the model's own terms, by an amount that is drawn; a measurement has an outcome under every cause.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from perfmodel.cost.jobs import FittedParameters
from perfmodel.diagnosis.cases import NUM_DRAWS, Run, Trained
from perfmodel.statistics import FloatArray

#: Memory from which on an allocator frees and asks again.
_CROWDED: Final = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """What a cause does to the terms; factors are 1 and times 0 where it does nothing."""

    inside: FloatArray | float = 1.0
    """Slower links inside a node."""
    between: FloatArray | float = 1.0
    host: FloatArray | float = 1.0
    loader_s: FloatArray | float = 0.0
    """Per sample of one device. [s]"""
    shared_loader: bool = False
    """Whether the devices of a node share it."""
    straggler: FloatArray | float = 1.0
    slow_beyond: FloatArray | float = 1.0
    """Devices from the first on that are as they should be: the slow one is among the others."""
    thrash: FloatArray | float = 1.0
    size: FloatArray | float = 1.0
    """Model that is really trained, over the one that was named."""
    hardware: FloatArray | float = 1.0
    """Speed of the device, over the one that was named."""
    unit: FloatArray | float = 1.0
    """Logged over real time of a step."""
    unit_power: FloatArray | float = 0.0
    """The same, as a power of the number of devices."""
    code: FloatArray | float = 1.0
    """Slower arithmetic and launches in all runs alike, beside the cause."""
    elsewhere: FloatArray | None = None
    """Speed of the devices of each logged run over the named one, shape ``(num_runs, num_draws)``."""


def step_s(trained: Trained, run: Run, terms: FittedParameters, changed: Changes) -> FloatArray:
    """What a step really takes under a cause, in every draw. [s]"""
    # Slow code computes slowly; links carry its bytes as fast as ever.
    speed = np.asarray(changed.hardware) / changed.size / changed.code
    now = {name: np.asarray(values) for name, values in terms.items()}
    for name, factor in (
        ("matmul_flop_per_s", speed),
        ("memory_bytes_per_s", speed),
        ("data_bytes_per_s", 1 / (np.asarray(changed.inside) * changed.size)),
        ("tensor_bytes_per_s", 1 / np.asarray(changed.inside)),
        ("node_bytes_per_s", 1 / (np.asarray(changed.between) * changed.size)),
        ("layer_host_s", np.asarray(changed.host) * changed.code),
    ):
        now[name] = now[name] * factor
    samples = run.layout.global_batch / run.devices
    share = min(run.devices, run.devices_per_node) if changed.shared_loader else 1
    loaded_s = np.asarray(changed.loader_s) * samples * share
    found = np.maximum(trained.step_s(run, now), loaded_s) * changed.thrash
    is_slow = run.devices > np.asarray(changed.slow_beyond)
    return np.asarray(np.where(is_slow, found * changed.straggler, found))


class Context(NamedTuple):
    """What priors of causes look at."""

    trained: Trained
    runs: Sequence[Run]
    terms: FittedParameters
    capacity_bytes: float
    own_links: bool
    """Whether devices of a node have links of their own (NVLink), which fail less often than PCIe: on consumer
    cards the driver switches peer-to-peer off."""

    is_open: bool
    """Whether runs cross nodes by a network that nobody named."""

    def needed_bytes(self, run: Run) -> float:
        """Tensors of a rank; 0 if unknown. [B]"""
        return sum(self.trained.memory_bytes(run).values())


Draw = Callable[[np.random.Generator, Context], Changes]


def _factor(rng: np.random.Generator, median: float, log_sigma: float) -> FloatArray:
    """At least 1.2: less is normal."""
    found: FloatArray = np.maximum(1.2, median * np.exp(log_sigma * rng.standard_normal(NUM_DRAWS)))
    return found


def _loader(rng: np.random.Generator, context: Context, *, shared: bool) -> Changes:
    """1.2 to 30 times as long as the device needs for a sample, on a node as first logged."""
    run = context.runs[0]
    each_s = float(np.median(context.trained.step_s(run, context.terms)))
    samples = run.layout.global_batch / run.devices
    share = min(run.devices, run.devices_per_node) if shared else 1
    loader_s = each_s / samples / share * _factor(rng, 4.0, 1.0)
    return Changes(loader_s=loader_s, shared_loader=shared)


#: In this share of the draws a second cause slows all runs alike, by a factor of this spread. [log]
_SECOND_CAUSE: Final = 0.25
_SECOND_SPREAD: Final = 1.0


def with_second_cause(changed: Changes, rng: np.random.Generator) -> Changes:
    """The cause, now and then beside slow code: troubles seldom come alone."""
    slower = np.exp(_SECOND_SPREAD * np.abs(rng.standard_normal(NUM_DRAWS)))
    is_second = rng.random(NUM_DRAWS) < _SECOND_CAUSE
    return replace(changed, code=np.where(is_second, slower, 1.0))


def _straggler(rng: np.random.Generator, context: Context) -> Changes:
    """A slow device among the first two, or among those that the larger runs add."""
    fewest = float(min(run.devices for run in context.runs))
    beyond = np.where(rng.random(NUM_DRAWS) < 1 / 2, 1.0, fewest)
    return Changes(straggler=_factor(rng, 1.6, 0.4), slow_beyond=beyond)


def _wrong_units(rng: np.random.Generator, context: Context) -> Changes:
    """Devices counted or not, micro-steps for steps, sparse peaks, milliseconds."""
    accumulation = max(run.layout.accumulation for run in context.runs)
    powers = np.array([1.0, -1.0, 0.0, 0.0, 0.0, 0.0])
    units = np.array([1.0, 1.0, 1 / max(accumulation, 2), 2.0, 1000.0, 1 / 1000])
    chosen = rng.integers(0, len(powers), NUM_DRAWS)
    return Changes(unit=units[chosen], unit_power=powers[chosen])


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One row of the table."""

    name: str
    prior: Callable[[Context], float]
    """Weight before any number; 0 where it cannot be."""
    draw: Draw
    means: str
    shown: str = ""
    """The field of ``Changes`` whose size is worth telling."""
    may_be_faster: bool = False
    """Whether a step can look shorter than a normal one for it."""


def _several(context: Context) -> bool:
    return any(run.devices > 1 for run in context.runs)


def _compared(context: Context) -> float:
    """Runs of other numbers of nodes are seldom on the same ones; those of one node may be."""
    if len({run.nodes for run in context.runs}) > 1:
        return 0.04
    return 0.01 * (len(context.runs) > 1)


def _loading(context: Context) -> float:
    """Images wait for decoding; tokens are read ready."""
    return 0.1 if context.trained.tokens is None else 0.03


#: Of what is normal, the share of open networks below half the usual rate (0.28): they count as slow.
_OPEN_NETWORK: Final = 0.13
SLOW_NETWORK: Final = "slow network between nodes"
CAUSES: Final = (
    Cause(
        name="normal",
        prior=lambda c: 0.45 - _OPEN_NETWORK * c.is_open,
        draw=lambda _rng, _context: Changes(),
        means="nothing is wrong: this is what such a machine does",
    ),
    Cause(
        name=SLOW_NETWORK,
        prior=lambda c: (0.12 + _OPEN_NETWORK * c.is_open) * any(run.nodes > 1 for run in c.runs),
        draw=lambda rng, _: Changes(between=_factor(rng, 6.0, 1.2)),
        means="TCP instead of RDMA, one adapter of several, no GPUDirect",
        shown="between",
    ),
    Cause(
        name="slow links inside the node",
        prior=lambda c: (0.04 if c.own_links else 0.12) * _several(c),
        draw=lambda rng, _: Changes(inside=_factor(rng, 6.0, 1.2)),
        means="peer-to-peer off, NVLink unused, fewer PCIe lanes",
        shown="inside",
    ),
    Cause(
        name="host-bound",
        prior=lambda c: 0.08 * bool(np.any(c.terms["layer_host_s"])),
        draw=lambda rng, _: Changes(host=_factor(rng, 12.0, 1.2)),
        means="Python and launches: small kernels, .item() in the loop, a slow processor",
        shown="host",
    ),
    Cause(
        name="loader",
        prior=_loading,
        draw=lambda rng, context: _loader(rng, context, shared=False),
        means="each process waits for its samples: too few workers, slow storage",
    ),
    Cause(
        name="loader shared by a node",
        prior=lambda c: _loading(c) * _several(c),
        draw=lambda rng, context: _loader(rng, context, shared=True),
        means="processors or storage of a node feed all its devices",
    ),
    Cause(
        name="straggler",
        prior=lambda c: 0.05 * _several(c),
        draw=_straggler,
        means="everybody waits for one slow device, link or node",
        shown="straggler",
    ),
    Cause(
        name="memory thrash",
        prior=lambda c: (
            0.2 if max(map(c.needed_bytes, c.runs)) > _CROWDED * c.capacity_bytes else 0.02
        ),
        draw=lambda rng, _: Changes(thrash=_factor(rng, 2.5, 0.7)),
        means="the allocator frees and asks again in every step, or pages to the host",
        shown="thrash",
    ),
    Cause(
        name="wrong model size",
        prior=lambda _: 0.04,
        draw=lambda rng, _: Changes(size=np.exp(1.5 * rng.standard_normal(NUM_DRAWS))),
        means="another model than named is trained",
        shown="size",
        may_be_faster=True,
    ),
    Cause(
        name="wrong units",
        prior=lambda _: 0.06,
        draw=_wrong_units,
        means="per device or all, micro-step or step, tokens or samples, sparse peak",
        may_be_faster=True,
    ),
    Cause(
        name="other hardware",
        prior=lambda _: 0.05,
        draw=lambda rng, _: Changes(hardware=np.exp(0.8 * rng.standard_normal(NUM_DRAWS))),
        means="another device or power limit than named",
        shown="hardware",
        may_be_faster=True,
    ),
    Cause(
        name="other hardware in some runs",
        prior=_compared,
        draw=lambda rng, context: Changes(
            elsewhere=np.exp(0.8 * rng.standard_normal((len(context.runs), NUM_DRAWS)))
        ),
        means="the runs that are compared ran on different devices",
        may_be_faster=True,
    ),
)


#: What a measurement finds in every draw: log of a ratio or of seconds.
Outcome = Callable[[Trained, Run, FittedParameters, Changes], FloatArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Something to measure, and its outcome under a cause."""

    name: str
    command: str
    minutes: float
    outcome: Outcome
    applies: Callable[[Context], bool] = lambda _: True
    calibrated: str = ""
    """Command on a machine that was calibrated, if it is another."""

    def typed(self, run: Run, device: str | None) -> str:
        """The command for a run on a device of a data sheet; None: on a calibrated machine."""
        command = self.command if device is not None else self.calibrated or self.command
        per_node = min(run.devices, run.devices_per_node)
        return command.format(per_node=per_node, devices=run.devices, device=device)


def at_devices(run: Run, devices: int) -> Run:
    """The setting on fewer devices, each with the same batch."""
    layout = run.layout
    fewer = replace(layout, dp=devices, zero=layout.zero if devices > 1 else 0)
    return replace(run, layout=fewer)


def _fewer_run(context: Context, devices: int) -> bool:
    """Whether fewer devices than any logged run had can run the same batch each: memory holds its states."""
    run = context.runs[-1]
    if run.layout.dp != run.devices or any(each.devices <= devices for each in context.runs):
        return False
    # Where a logged run is above it, the estimate is too high.
    most = max(context.capacity_bytes, *map(context.needed_bytes, context.runs))
    return context.needed_bytes(at_devices(run, devices)) <= most


def _log_step(run_of: Callable[[Run], Run]) -> Outcome:
    return lambda trained, run, terms, changed: np.log(step_s(trained, run_of(run), terms, changed))


def _log_without_loader(
    trained: Trained, run: Run, terms: FittedParameters, changed: Changes
) -> FloatArray:
    """Over the step that was logged: how long it takes is no news."""
    without = replace(changed, loader_s=0.0)
    with_s = step_s(trained, run, terms, changed)
    return np.log(step_s(trained, run, terms, without) / with_s)


def _log_of(name: str) -> Outcome:
    def outcome(
        _trained: Trained, run: Run, _terms: FittedParameters, changed: Changes
    ) -> FloatArray:
        size = np.asarray(getattr(changed, name), np.float64)
        if name == "unit":
            size = size * np.power(float(run.devices), changed.unit_power)
        if name == "hardware" and changed.elsewhere is not None:
            size = changed.elsewhere[-1]
        result: FloatArray = np.log(size)
        return result

    return outcome


_COLLECTIVES: Final = (
    "all_reduce_perf -b 1M -e 1G -f 2 -g {per_node} > nccl.log; perfmodel network check nccl.log"
)
SIZE: Final = Measurement(
    name="parameters of the model that runs",
    command="print(sum(p.numel() for p in model.parameters()))  # before sharding",
    minutes=1,
    outcome=_log_of("size"),
)
BETWEEN: Final = Measurement(
    name="all-reduces alone, between nodes",
    command="mpirun -np {devices} -N {per_node} all_reduce_perf -b 8 -e 1G -f 2 > log; "
    "perfmodel network check log --device {device} --nic-bandwidth RATE --nics N",
    minutes=5,
    outcome=_log_of("between"),
    calibrated=_COLLECTIVES,
    applies=lambda context: any(run.nodes > 1 for run in context.runs),
)
CLOCK: Final = Measurement(
    name="a step by the clock",
    command="torch.cuda.synchronize(); time.perf_counter()  # around 20 optimizer steps",
    minutes=3,
    outcome=_log_of("unit"),
)
#: Where memory was logged and no step.
ALLOCATED: Final = Measurement(
    name="what tensors need of the reserved memory, on a device of each run",
    command="torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()  # after 20 steps",
    minutes=3,
    outcome=_log_of("size"),
)
MEASUREMENTS: Final = (
    Measurement(
        name="one device, the same batch of each device",
        command="torchrun --nproc-per-node 1 train.py ...  # time 20 steps after 5 of warm-up",
        minutes=5,
        outcome=_log_step(lambda run: at_devices(run, 1)),
        applies=lambda context: _fewer_run(context, 1),
    ),
    Measurement(
        name="one node, the same batch of each device",
        command="torchrun --nproc-per-node {per_node} train.py ...  # time 20 steps after 5",
        minutes=5,
        outcome=_log_step(lambda run: at_devices(run, run.devices_per_node)),
        applies=lambda context: (
            (devices := context.runs[-1].devices_per_node) > 1 and _fewer_run(context, devices)
        ),
    ),
    Measurement(
        name="one batch kept in memory, without the loader",
        command="batch = next(iter(loader))  # then time 20 steps on it",
        minutes=5,
        outcome=_log_without_loader,
    ),
    Measurement(
        name="all-reduces alone, inside a node",
        command="all_reduce_perf -b 8 -e 1G -f 2 -g {per_node} > log; "
        "perfmodel network check log --device {device}",
        minutes=3,
        outcome=_log_of("inside"),
        calibrated=_COLLECTIVES,
        applies=lambda context: any(
            min(run.devices, run.devices_per_node) > 1 for run in context.runs
        ),
    ),
    BETWEEN,
    SIZE,
    Measurement(
        name="devices, clocks and power limits while it trains, on every node",
        command="nvidia-smi --query-gpu=name,clocks.sm,power.draw,power.limit --format=csv",
        minutes=1,
        outcome=_log_of("hardware"),
    ),
    CLOCK,
    Measurement(
        name="retries of the allocator over 20 steps",
        command="torch.cuda.memory_stats()['num_alloc_retries']  # at begin and end",
        minutes=3,
        outcome=_log_of("thrash"),
    ),
    Measurement(
        name="every rank up to its first all-reduce",
        command="time forward inside model.no_sync() on each rank  # the slowest over the median",
        minutes=5,
        outcome=_log_of("straggler"),
        applies=_several,
    ),
    Measurement(
        name="the profile of 3 steps on one rank: share of time with a kernel running",
        command="torch.profiler.profile(activities=[CPU, CUDA])  # gaps between kernels: host",
        minutes=10,
        outcome=_log_of("host"),
    ),
)
