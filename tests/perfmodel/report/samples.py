"""Small but complete documents, made by hand."""

from dataclasses import replace
from typing import Final, Literal

import numpy as np

from perfmodel.documents import Provenance
from perfmodel.documents.prediction import MeasuredPoint, PredictedPoint, PredictionDocument
from perfmodel.documents.profile import ProfileDocument
from perfmodel.documents.verdicts import (
    ComparedSetting,
    ComparedSpeedup,
    ErrorSummary,
    Gate,
    Repeat,
    ValidationDocument,
)
from perfmodel.layout import RunSetting
from perfmodel.machine import Evidence
from perfmodel.machine.measured import DdpCosts, OverlapProfile, Repeatability
from perfmodel.statistics import Interval
from perfmodel.step import Cause, Operation, StepProgram, Stream, Trace
from tests.perfmodel.profiles import Machine, as_file, compute_rate, profile, setting_of

PROVENANCE: Final = Provenance(
    created_utc="2026-01-02T03:04:05+00:00",
    command_line=("perfmodel", "predict", "--workload=resnet18"),
    git_commit="c0ffee1234567890",
    seed=17,
    versions={"perfmodel": "0.1.0", "torch": "2.9.0"},
    host_fingerprint="0123456789abcdef",
)


def plain_profile(
    *, workloads: tuple[str, ...] = ("lenet", "resnet18"), device_name: str = "AMD EPYC 9654"
) -> ProfileDocument:
    """The synthetic machine with something in every table."""
    base = profile(Machine(noise=tuple(np.linspace(0.95, 1.25, 21))))
    heavy = base.workloads[1]
    machine = replace(
        base,
        device_name=device_name,
        num_rounds=6,
        environment={"cpu": {"model": "EPYC", "cores": 16}, "gpus": [], "warning": None},
        repeatability=Repeatability(run={1: 0.05, 2: 0.08}, round=0.02, occasion=0.04),
        workloads=tuple(
            replace(heavy, workload=replace(heavy.workload, name=name)) for name in workloads
        ),
        overlaps=(
            OverlapProfile(world_size=2, size_bytes=2**22, compute_speed=0.61, comm_speed=0.47),
        ),
        ddp=DdpCosts(
            values=(1.2e-4, 3.4e-10, 1.3e-3, 0.87, 0.66),
            draws=tuple((1e-4 + 1e-6 * k, 3e-10, 1.1e-3, 0.85, 0.6) for k in range(40)),
            determined=(True, True, True, True, False),
        ),
        rates=(
            compute_rate(
                "matmul",
                dtype="float32",
                shape=(1024, 1024, 1024),
                time_s=0.0215,
                flop_per_s=99.9e9,
                bytes_per_s=0.58e9,
            ),
        ),
        undetermined=("comm_speed: communication never overlapped enough to tell",),
    )
    return as_file(machine, provenance=PROVENANCE, sha256="ab" * 32)


def around(value: float, *, spread: float = 0.05) -> Interval:
    return Interval(p5=value * (1 - spread), nominal=value, p95=value * (1 + spread))


def plain_point(world_size: int, *, workload: str = "resnet18") -> PredictedPoint:
    """A step of 123 ms that grows by 4 ms with every doubling."""
    exposed_s = 0.004 * np.log2(world_size)
    step_s = 0.123 + exposed_s
    speedup = world_size * 0.123 / step_s
    reach = Evidence.MEASURED if world_size <= 2 else Evidence.EXTRAPOLATED
    return PredictedPoint(
        setting=RunSetting(workload=workload, world_size=world_size, micro_batch=32),
        step_s=around(step_s),
        samples_per_s=around(32 * world_size / step_s),
        speedup=around(speedup),
        scaling_efficiency=around(speedup / world_size),
        exposed_comm_s=around(exposed_s),
        breakdown_s={
            Cause.INPUT: 0.003,
            Cause.FORWARD: 0.04,
            Cause.BACKWARD: 0.07,
            Cause.ALL_REDUCE: exposed_s,
            Cause.OPTIMIZER: 0.01,
        },
        straggler_s=0.0021,
        evidence={"compute": Evidence.MEASURED, "communication": reach},
    )


def plain_prediction(
    *,
    workload: str = "resnet18",
    scaling: Literal["weak", "strong"] = "weak",
    world_sizes: tuple[int, ...] = (1, 2, 4, 8, 64),
) -> PredictionDocument:
    return PredictionDocument(
        schema_version=1,
        provenance=PROVENANCE,
        profile_digest=plain_profile().digest,
        validation_digest=None,
        device_name="AMD EPYC 9654",
        workload=workload,
        scaling=scaling,
        points=tuple(plain_point(world_size, workload=workload) for world_size in world_sizes),
        measured=(
            MeasuredPoint(world_size=1, micro_batch=32, step_s=0.1251, speedup=1.0),
            MeasuredPoint(world_size=2, micro_batch=32, step_s=0.1311, speedup=1.91),
            MeasuredPoint(world_size=2, micro_batch=16, step_s=0.0801, speedup=None),
        ),
        caveats=("4 to 64 devices are beyond the 2 that were measured",),
    )


def compared(setting: RunSetting, *, predicted_s: float, measured_s: float) -> ComparedSetting:
    interval = around(predicted_s)
    return ComparedSetting(
        setting=setting,
        predicted_s=interval,
        measured_s=measured_s,
        num_repetitions=4,
        measured_relative_error=0.008,
        signed_error=predicted_s / measured_s - 1,
        is_covered=interval.holds(measured_s),
        is_extrapolated=False,
    )


def summary(bias: float, *, num_settings: int = 4) -> ErrorSummary:
    return ErrorSummary(
        num_settings=num_settings,
        bias=bias,
        mape=0.0312,
        median_absolute=0.0234,
        worst_absolute=0.0876,
    )


def plain_settings(names: tuple[str, ...]) -> tuple[ComparedSetting, ...]:
    entries = []
    for name in names:
        for accumulation, cap, ratio in ((1, None, 1.01), (2, 5.0, 0.913)):
            setting = setting_of(name, 2, 24, accumulation=accumulation, bucket_cap_mb=cap)
            measured_s = (0.0072 if name == "lenet" else 0.104) * accumulation
            entries.append(compared(setting, predicted_s=measured_s * ratio, measured_s=measured_s))
    return tuple(entries)


def plain_validation(
    *, passed: bool = True, workloads: tuple[str, ...] = ("lenet", "resnet18")
) -> ValidationDocument:
    settings = plain_settings(workloads)
    return ValidationDocument(
        schema_version=1,
        provenance=PROVENANCE,
        profile_digest=plain_profile().digest,
        observations_sha256="cd" * 32,
        settings=settings,
        speedups=(
            ComparedSpeedup(
                workload="resnet18",
                world_size=2,
                micro_batch=24,
                accumulation=1,
                bucket_cap_mb=None,
                predicted=around(1.87),
                measured=1.84,
                signed_error=0.0163,
            ),
        ),
        repeats=(
            Repeat(
                setting=RunSetting(workload="resnet18", world_size=2, micro_batch=32),
                calibrated_s=0.1311,
                measured_s=0.1325,
                signed_error=-0.0106,
            ),
        ),
        summary=summary(-0.0135),
        summary_extrapolated=summary(-0.0612, num_settings=2),
        summary_by_workload={name: summary(0.0042, num_settings=2) for name in workloads},
        speedup_summary=summary(0.0163, num_settings=1),
        speedup_summary_extrapolated=summary(0.0211, num_settings=1),
        noise_floor=summary(-0.0106, num_settings=1),
        coverage=0.5,
        gates=(
            Gate(name="MAPE", unit="fraction", at_most=0.06, value=0.0312, passed=True),
            Gate(
                name="coverage",
                unit="fraction",
                at_least=0.4 if passed else 0.85,
                value=0.5,
                passed=passed,
            ),
        ),
        passed=passed,
    )


def plain_trace(*, num_ranks: int = 2) -> Trace:
    """Forward 2 ms, backward 3 ms, all-reduce 1 ms once all are there; rank 1 is late by 1 ms."""
    program = StepProgram(
        (
            Operation(name="dispatch", stream=Stream.HOST, cause=Cause.DISPATCH),
            Operation(name="forward", stream=Stream.COMPUTE, cause=Cause.FORWARD, after=(0,)),
            Operation(name="backward", stream=Stream.COMPUTE, cause=Cause.BACKWARD),
            Operation(
                name="bucket 0",
                stream=Stream.COMM,
                cause=Cause.ALL_REDUCE,
                after=(2,),
                size_bytes=4096,
            ),
        )
    )
    late_s = 0.001 * np.arange(num_ranks)[:, np.newaxis]
    start_s = np.array([[0.0, 0.0, 0.002, 0.0]]) + late_s
    end_s = np.array([[0.0005, 0.002, 0.005, 0.0]]) + late_s
    start_s[:, 3] = end_s[:, 2].max()
    end_s[:, 3] = start_s[:, 3] + 0.001
    return Trace(program=program, start_s=start_s, end_s=end_s)
