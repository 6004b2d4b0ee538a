"""A small but complete profile, made by hand."""

from typing import Final

import numpy as np

from perfmodel.documents.base import Provenance
from perfmodel.documents.profile import ProfileDocument
from perfmodel.machine.measured import (
    CollectiveProfile,
    ComputeRate,
    Curve,
    CurvePoint,
    DdpCosts,
    MeasuredMachine,
    MeasuredWorkload,
    OverlapProfile,
    PhaseCurves,
    Repeatability,
    Residual,
    SingleStep,
    StepNoise,
)
from perfmodel.workload.workload import Parameter, Workload
from tests.perfmodel.profiles import as_file

PROVENANCE: Final = Provenance(
    created_utc="2026-01-02T03:04:05+00:00",
    command_line=("perfmodel", "predict", "--workload=resnet18"),
    git_commit="c0ffee1234567890",
    seed=17,
    versions={"perfmodel": "0.1.0", "torch": "2.9.0"},
    host_fingerprint="0123456789abcdef",
)


def curve(*points: tuple[float, float]) -> Curve:
    return tuple(CurvePoint(at=at, time_s=time_s, relative_error=0.01) for at, time_s in points)


def plain_workload(name: str) -> Workload:
    return Workload(
        name=name,
        sample="3x32x32 image",
        parameters=(
            Parameter(name="fc", num_elements=11_000),
            Parameter(name="c", num_elements=689),
        ),
        forward_flop=1.5e9,
        backward_flop=3.0e9,
        num_operators=187,
    )


def plain_workload_profile(name: str) -> MeasuredWorkload:
    phases = tuple(
        PhaseCurves(
            world_size=world_size,
            input=curve((8, 0.0002), (16, 0.0003), (32, 0.0005)),
            forward=curve((8, 0.011 * world_size), (16, 0.021), (32, 0.04)),
            backward=curve((8, 0.02 * world_size), (16, 0.038), (32, 0.07)),
            optimizer=curve((8, 0.004), (16, 0.004), (32, 0.0041)),
            dispatch_forward=curve((8, 0.0015), (16, 0.0015), (32, 0.0016)),
        )
        for world_size in (1, 2)
    )
    return MeasuredWorkload(
        workload=plain_workload(name),
        phases=phases,
        noise=(StepNoise(micro_batch=32, ratios=tuple(np.linspace(0.95, 1.25, 21))),),
        rank_spread=0.013,
    )


def plain_collective(name: str, *, world_size: int = 2) -> CollectiveProfile:
    sizes = (2.0**10, 2.0**15, 2.0**20, 2.0**25)
    return CollectiveProfile(
        collective=name,
        world_size=world_size,
        points=curve(*((size, 2e-5 * world_size + size / 2e9) for size in sizes)),
    )


def plain_profile(
    *, workloads: tuple[str, ...] = ("lenet", "resnet18"), device_name: str = "AMD EPYC 9654"
) -> ProfileDocument:
    machine = MeasuredMachine(
        device_kind="cpu",
        device_name=device_name,
        backend="gloo",
        asynchronous=False,
        ranks_per_node=2,
        num_nodes=1,
        num_rounds=6,
        environment={"cpu": {"model": "EPYC", "cores": 16}, "gpus": [], "warning": None},
        repeatability=Repeatability(run={1: 0.05, 2: 0.08}, round=0.02),
        workloads=tuple(plain_workload_profile(name) for name in workloads),
        collectives=(
            plain_collective("all_reduce"),
            plain_collective("all_gather"),
            plain_collective("broadcast"),
            plain_collective("all_reduce", world_size=4),
        ),
        overlaps=(
            OverlapProfile(world_size=2, size_bytes=2**22, compute_speed=0.61, comm_speed=0.47),
        ),
        ddp=DdpCosts(
            values=(1.2e-4, 3.4e-10, 1.13, 0.87, 0.66),
            draws=tuple((1e-4 + 1e-6 * k, 3e-10, 1.1, 0.85, 0.6) for k in range(40)),
            determined=(True, True, True, True, False),
        ),
        residual=Residual(single_log_errors=(0.01, -0.02), ddp_log_errors=(0.03, -0.04, 0.05)),
        rates=(
            ComputeRate(
                probe="matmul",
                dtype="float32",
                shape=(1024, 1024, 1024),
                time_s=0.0215,
                flop_per_s=99.9e9,
                bytes_per_s=0.58e9,
            ),
        ),
        dispatch_s=4.5e-6,
        steps=(
            SingleStep(
                workload="resnet18",
                world_size=2,
                micro_batch=32,
                synchronisation="ddp",
                bucket_cap_mb=5.0,
                step_s=0.1311,
                relative_error=0.006,
            ),
        ),
        undetermined=("comm_speed: communication never overlapped enough to tell",),
    )
    return as_file(machine, provenance=PROVENANCE, sha256="ab" * 32)
