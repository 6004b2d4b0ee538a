"""Profiles of machines whose every parameter is known."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, Final

from perfmodel.documents import Provenance
from perfmodel.documents.profile import ProfileDocument
from perfmodel.layout import RunSetting
from perfmodel.machine.measured import (
    PHASE_CURVES,
    CollectiveProfile,
    ComputeRate,
    CurvePoint,
    DdpCosts,
    HostCosts,
    MeasuredCollective,
    MeasuredMachine,
    MeasuredWorkload,
    PhaseCurves,
    Repeatability,
    Residual,
    SingleStep,
    StepNoise,
)
from perfmodel.workload import Parameter, Workload

PROVENANCE: Final = Provenance(
    created_utc="2126-01-02T03:04:05+00:00",  # never old
    command_line=(),
    git_commit=None,
    seed=0,
    versions={},
    host_fingerprint="synthetic",
)
MICRO_BATCHES: Final = (4, 16, 64)
SIZES_BYTES: Final = tuple(4**power for power in range(4, 14))

#: Little work, much of it the same for any batch; 4 gradients of 64 KiB fill one bucket.
LIGHT: Final = Workload(
    name="light",
    sample="1x28x28 image",
    parameters=tuple(
        Parameter(name=f"p{i}", num_elements=2**14, ready_fraction=(i + 1) / 4) for i in range(4)
    ),
    forward_flop=1e6,
    backward_flop=2e6,
    num_operators=30,
)
#: Much work per sample; 8 gradients of 1 MiB, and buffers.
HEAVY: Final = Workload(
    name="heavy",
    sample="3x224x224 image",
    parameters=tuple(
        Parameter(name=f"p{i}", num_elements=2**18, ready_fraction=(i + 1) / 8) for i in range(8)
    ),
    buffer_bytes=(4096,),
    forward_flop=1e9,
    backward_flop=2e9,
    num_operators=60,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """Seconds of a phase: a constant, and a cost per sample."""

    constant_s: float
    per_sample_s: float = 0.0

    def at(self, micro_batch: float) -> float:
        return self.constant_s + self.per_sample_s * micro_batch


PHASES: Final[dict[str, dict[str, Affine]]] = {
    "light": {
        "input": Affine(constant_s=0.0002),
        "forward": Affine(constant_s=0.001, per_sample_s=1e-6),
        "backward": Affine(constant_s=0.002, per_sample_s=2e-6),
        "optimizer": Affine(constant_s=0.0005),
    },
    "heavy": {
        "input": Affine(constant_s=0.0002),
        "forward": Affine(constant_s=0.001, per_sample_s=0.005),
        "backward": Affine(constant_s=0.002, per_sample_s=0.010),
        "optimizer": Affine(constant_s=0.004),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine where a message of s bytes takes ``latency_s + s * s_per_byte``."""

    latency_s: float = 1e-4
    s_per_byte: float = 1e-9
    sharing: float = 1.0
    """Compute times of two ranks on the node over those of one alone."""
    bucket_s: float = 0.0
    bucket_s_per_byte: float = 0.0
    all_reduce_start_s: float = 0.0
    compute_speed: float = 1.0
    comm_speed: float = 1.0
    noise: tuple[float, ...] = ()
    rank_spread: float = 0.0
    world_size: int = 2
    relative_error: float = 0.0
    residual: float = 0.0
    dispatch_s: float = 0.0
    time_scale: float = 1.0
    """On every time of the machine."""
    message_scale: float = 1.0
    """On collectives alone."""
    asynchronous: bool = False
    """Then the host issues each phase ..."""
    issued: float = 0.5
    """... in this multiple of the time that the device takes for it."""


def profile(machine: Machine) -> MeasuredMachine:
    scale = machine.time_scale
    ddp = (
        machine.bucket_s * scale,
        machine.bucket_s_per_byte * scale,
        machine.all_reduce_start_s * scale,
        machine.compute_speed,
        machine.comm_speed,
    )
    found = MeasuredMachine(
        device_kind="cuda" if machine.asynchronous else "cpu",
        device_name="synthetic",
        backend="gloo",
        asynchronous=machine.asynchronous,
        ranks_per_node=machine.world_size,
        num_nodes=1,
        num_rounds=1,
        environment={},
        repeatability=Repeatability(run={1: 0.0, 2: 0.0}, round=0.0, occasion=0.0),
        workloads=(_workload(LIGHT, machine), _workload(HEAVY, machine)),
        collectives=_collectives(machine) if machine.world_size > 1 else (),
        ddp=DdpCosts(values=ddp, draws=(ddp,), determined=(True,) * 5),
        residual=Residual(
            single_log_errors=(machine.residual,), ddp_log_errors=(machine.residual,)
        ),
        rates=(),
        dispatch_s=machine.dispatch_s * scale,
        steps=(
            SingleStep(
                workload="heavy",
                world_size=1,
                micro_batch=16,
                synchronisation="none",
                bucket_cap_mb=None,
                step_s=0.25,
                relative_error=0.01,
            ),
        ),
        undetermined=(),
    )
    return as_file(found).machine


def as_file(
    machine: MeasuredMachine, *, provenance: Provenance = PROVENANCE, sha256: str = ""
) -> ProfileDocument:
    return ProfileDocument(provenance=provenance, observations_sha256=sha256, machine=machine)


def _workload(workload: Workload, machine: Machine) -> MeasuredWorkload:
    return MeasuredWorkload(
        workload=workload,
        phases=tuple(
            _phases(workload.name, machine, world_size=n) for n in range(1, machine.world_size + 1)
        ),
        noise=(StepNoise(micro_batch=16, ratios=machine.noise),) if machine.noise else (),
        rank_spread=machine.rank_spread,
    )


def _phases(name: str, machine: Machine, *, world_size: int) -> PhaseCurves:
    shared = 1.0 if world_size == 1 else machine.sharing
    curve = functools.partial(_curve, name, machine)
    issued = {
        f"dispatch_{phase}": curve(phase, factor=machine.issued)
        for phase in ("forward", "backward", "optimizer")
        if machine.asynchronous
    }
    return PhaseCurves(
        world_size=world_size,
        input=curve("input", factor=shared),
        forward=curve("forward", factor=shared),
        backward=curve("backward", factor=shared),
        optimizer=curve("optimizer", factor=shared),
        **issued,
    )


def _curve(name: str, machine: Machine, phase: str, *, factor: float) -> tuple[CurvePoint, ...]:
    return tuple(
        CurvePoint(
            at=micro_batch,
            time_s=PHASES[name][phase].at(micro_batch) * factor * machine.time_scale,
            relative_error=machine.relative_error,
        )
        for micro_batch in MICRO_BATCHES
    )


def _collectives(machine: Machine) -> tuple[CollectiveProfile, ...]:
    """Between two ranks: a ring all-reduce is two messages of half the size, a broadcast one."""
    return (
        _collective("all_reduce", machine, num_messages=2, share=0.5),
        _collective("broadcast", machine, num_messages=1, share=1.0),
    )


def _collective(
    name: str, machine: Machine, *, num_messages: int, share: float
) -> CollectiveProfile:
    scale = machine.time_scale * machine.message_scale
    return CollectiveProfile(
        collective=name,
        world_size=2,
        points=tuple(
            CurvePoint(
                at=size,
                time_s=num_messages * message_time(machine, size * share) * scale,
                relative_error=machine.relative_error,
            )
            for size in SIZES_BYTES
        ),
    )


def message_time(machine: Machine, size_bytes: float) -> float:
    """Time of one message between two ranks. [s]"""
    return machine.latency_s + size_bytes * machine.s_per_byte


def timed_group(
    ranks: int,
    time_s: Callable[[float], float],
    sizes: Iterable[float],
    *,
    collective: str = "all_reduce",
    nodes: int = 1,
    error: float = 0.0,
) -> MeasuredCollective:
    """A collective whose arrays of these sizes [B] take so long in a group of ranks."""
    points = (CurvePoint(at=size, time_s=time_s(size), relative_error=error) for size in sizes)
    return MeasuredCollective(
        collective=collective, world_size=ranks, num_nodes=nodes, points=tuple(points)
    )


def stretched(curves: PhaseCurves, factors: Callable[[str], Iterable[float]]) -> PhaseCurves:
    """Each point of a curve takes the next of that curve's factors times as long."""
    changed: dict[str, Any] = {
        name: tuple(
            replace(point, time_s=factor * point.time_s)
            for point, factor in zip(getattr(curves, name), factors(name), strict=False)
        )
        for name in PHASE_CURVES
    }
    return replace(curves, **changed)


def slowed(curves: PhaseCurves, world_size: int, factor: float) -> PhaseCurves:
    """Curves of ``world_size`` ranks that compute at once: each phase ``factor`` times as long."""
    return replace(stretched(curves, lambda _: repeat(factor)), world_size=world_size)


def compute_rate(probe: str, **known: Any) -> ComputeRate:
    """In fp32, of one number in a second, and of no rate unless it is said."""
    usual: dict[str, Any] = {
        "dtype": "fp32",
        "shape": (1,),
        "time_s": 1.0,
        "flop_per_s": 0.0,
        "bytes_per_s": 0.0,
    }
    return ComputeRate(probe=probe, **usual | known)


def setting_of(workload: str, world_size: int, micro_batch: int, **others: Any) -> RunSetting:
    return RunSetting(workload=workload, world_size=world_size, micro_batch=micro_batch, **others)


def host_costs(**seconds: float) -> HostCosts:
    """What is not said costs nothing; no addition was timed."""
    costs = dict.fromkeys(HostCosts.__dataclass_fields__, 0.0) | seconds
    return replace(HostCosts(**costs), addition_s=seconds.get("addition_s"))
