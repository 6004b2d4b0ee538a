"""From raw observations to a profile: every fit in one place, repeatable on stored data."""

import datetime as dt
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from calibrate.fit.ddp import fit_bucket_costs, fit_ddp, fit_host, fit_layouts, left_out_errors
from calibrate.fit.operators import fit_operators
from calibrate.fit.steps import fit_workload, rank_spread, single_steps, with_device_streams
from calibrate.replays import event_s, without_events
from calibrate.summary import by_setting, estimate, repeatability, repetition
from perfmodel.documents import Provenance, file_sha256
from perfmodel.documents.observation import (
    DDP_PROBE,
    QUEUE_PROBE,
    CollectiveObservation,
    ComputeObservation,
    EnvironmentObservation,
    FailedObservation,
    LayoutObservation,
    Observation,
    OperatorsObservation,
    OverlapObservation,
    ReplayObservation,
    StepObservation,
    WorkloadObservation,
    failures,
    gpu_faults,
    read_observations,
    refuse_repeated,
    steal_share,
)
from perfmodel.documents.profile import ProfileDocument
from perfmodel.errors import IncomparableRuns, MeasurementFailed
from perfmodel.machine.measured import (
    CollectiveProfile,
    ComputeRate,
    DdpCosts,
    MeasuredMachine,
    OverlapProfile,
    Residual,
)
from perfmodel.step import collector_paused

_T = TypeVar("_T")

_NOTHING_YET = DdpCosts(
    values=(0.0,) * 3 + (1.0,) * 2, draws=((0.0,) * 3 + (1.0,) * 2,), determined=(False,) * 5
)


@collector_paused()
def fit_profile(
    observations_path: Path,
    *,
    provenance: Provenance | Callable[[dict[str, Any]], Provenance],
    num_nodes: int = 1,
) -> ProfileDocument:
    """Fit a profile to a file of raw observations; ``provenance`` may follow from its environment.

    One that follows is as old as the last step, which tells when it began: fitted again, a calibration is no younger.
    ``MeasurementFailed`` if there are no training steps to fit.
    """
    observations = read_observations(observations_path)
    refuse_repeated(observations_path, observations)
    if any(entry.device_streams for entry in _of(observations, StepObservation)):
        each_s = event_s(map(_rate, _of(observations, ComputeObservation)))
        observations = [without_events(entry, each_s) for entry in observations]
    environment = recorded_environment(observations)
    steps = _of(observations, StepObservation)
    traced = _of(observations, WorkloadObservation)
    if not steps or not traced:
        raise MeasurementFailed(
            f"{observations_path}: holds {len(steps)} step observations and {len(traced)} traced "
            "workloads, at least one of each is needed; continue with --resume"
        )
    names = {entry.setting.workload for entry in steps} - {entry.workload.name for entry in traced}
    if names:
        raise MeasurementFailed(
            f"{observations_path}: must hold the trace of every workload with steps, got none of "
            f"{', '.join(sorted(names))}; continue with --resume"
        )
    made = provenance if isinstance(provenance, Provenance) else provenance(environment)
    if made is not provenance:
        made = made.model_copy(update={"created_utc": _measured_utc(steps)})
    draft = _draft(observations, environment)
    draft = replace(
        draft,
        num_nodes=num_nodes,
        ranks_per_node=draft.ranks_per_node // num_nodes,
        undetermined=(
            *_undetermined(draft, num_nodes=num_nodes),
            *gpu_faults(observations),
            *failed_replays(failures(observations)),
        ),
    )
    operators = fit_operators(
        observations,
        workloads=draft.workloads,
        rates=draft.rates,
        run_log_error=draft.repeatability.run_of(1),
        on_gpu=draft.asynchronous,
    )
    replays = _of(observations, ReplayObservation)
    view_s = next((rate.time_s for rate in draft.rates if rate.probe == "view"), None)
    host = (
        fit_host(
            draft.workloads,
            replays,
            _of(observations, OperatorsObservation),
            dispatch_s=draft.dispatch_s,
            view_s=view_s,
        )
        if draft.asynchronous
        else None
    )
    draft = replace(draft, operators=operators, host=host)
    fitted = _with_ddp(draft, observations, seed=made.seed)
    return ProfileDocument(
        provenance=made,
        observations_sha256=file_sha256(observations_path),
        machine=replace(fitted, layouts=fit_layouts(fitted, _of(observations, LayoutObservation))),
    )


def _measured_utc(steps: Iterable[StepObservation]) -> str:
    """When the last step of a campaign began; of a clock that was wrong, now at the latest."""
    last = max(entry.started_utc for entry in steps)
    started = dt.datetime.fromtimestamp(min(max(0.0, last), time.time()), dt.UTC)
    return started.isoformat(timespec="seconds")


def _draft(observations: Sequence[Observation], environment: dict[str, Any]) -> MeasuredMachine:
    """Everything but DDP's own costs, which are fitted on top of it."""
    steps = _of(observations, StepObservation)
    repetitions = [repetition(observation) for observation in steps]
    spread, workloads = rank_spread(repetitions), []
    for traced in _of(observations, WorkloadObservation):
        name = traced.workload.name
        mine = [entry for entry in repetitions if entry.setting.workload == name]
        if mine:
            fitted = fit_workload(traced.workload, mine, spread=spread)
            raw = [entry for entry in steps if entry.setting.workload == name]
            workloads.append(with_device_streams(fitted, raw))
    is_asynchronous = any(entry.device_streams for entry in steps)
    device_kind: Literal["cpu", "cuda", "virtual"] = "cuda" if is_asynchronous else "cpu"
    if "virtual" in environment:
        device_kind = "virtual"
    rates = tuple(map(_rate, _probes(observations, of_ddp=False)))
    collectives, between_nodes = (
        collective_profiles(
            [e for e in _of(observations, CollectiveObservation) if (e.stride > 1) is is_spread],
            back_to_back=is_asynchronous,
        )
        for is_spread in (False, True)
    )
    world_size = max(entry.setting.world_size for entry in steps)
    return MeasuredMachine(
        device_kind=device_kind,
        device_name=_device_name(environment, device_kind),
        backend="nccl" if is_asynchronous else "gloo",
        asynchronous=is_asynchronous,
        ranks_per_node=world_size,
        num_nodes=1,
        num_rounds=1 + max(entry.round for entry in steps),
        environment=environment,
        workloads=tuple(workloads),
        collectives=collectives,
        between_nodes=between_nodes,
        overlaps=_overlaps(_of(observations, OverlapObservation)),
        ddp=_NOTHING_YET,
        residual=Residual(single_log_errors=(), ddp_log_errors=()),
        rates=rates,
        dispatch_s=next((rate.time_s for rate in rates if rate.probe == "dispatch"), 0.0),
        repeatability=repeatability(repetitions),
        steps=single_steps(by_setting(repetitions)),
        undetermined=(),
        steal=steal_share(observations),
    )


def _with_ddp(
    draft: MeasuredMachine, observations: Sequence[Observation], *, seed: int
) -> MeasuredMachine:
    rng = np.random.default_rng(seed)
    buckets = fit_bucket_costs(
        by_setting([repetition(entry) for entry in _of(observations, StepObservation)]),
        {entry.workload.name: entry for entry in draft.workloads},
        _probes(observations, of_ddp=True),
        rng=rng,
    )
    costs, errors = fit_ddp(draft, buckets=buckets, rng=rng)
    residual = Residual(single_log_errors=left_out_errors(draft), ddp_log_errors=errors)
    return replace(draft, ddp=costs, residual=residual)


def _probes(observations: Sequence[Observation], *, of_ddp: bool) -> list[ComputeObservation]:
    """Computation alone, or what DDP adds to it."""
    found = _of(observations, ComputeObservation)
    return [entry for entry in found if (entry.probe == DDP_PROBE) is of_ddp]


def _of(observations: Sequence[Observation], kind: type[_T]) -> list[_T]:
    return [observation for observation in observations if isinstance(observation, kind)]


def recorded_environment(observations: Sequence[Observation]) -> dict[str, Any]:
    """Facts of the machine that measured; ``IncomparableRuns`` unless all launches agree on it."""
    found = _of(observations, EnvironmentObservation)
    if not found:
        raise MeasurementFailed(
            "observations: must name the environment that they were made in, got none; "
            "continue with --resume"
        )
    fingerprints = {entry.fingerprint for entry in found}
    if len(fingerprints) > 1:
        raise IncomparableRuns(
            "observations: must come from one machine, got fingerprints "
            f"{', '.join(sorted(fingerprints))}; use another --out for each machine"
        )
    return dict(found[-1].facts)


def _device_name(environment: dict[str, Any], device_kind: str) -> str:
    if device_kind == "cuda":
        gpus = environment.get("gpus") or []
        return str(gpus[0]["name"]) if gpus else "unknown CUDA device"
    if device_kind == "virtual":
        return str(environment["virtual"]["name"])
    cpu = environment.get("cpu") or {}
    return f"one core of {cpu.get('model') or 'an unknown CPU'}"


def collective_profiles(
    observations: Sequence[CollectiveObservation], *, back_to_back: bool
) -> tuple[CollectiveProfile, ...]:
    """Typical over repetitions: the median of the slowest rank's times.

    ``back_to_back``: On a device with a queue it is the fastest rank's mean: others wait in theirs.
    """
    groups: dict[tuple[str, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for entry in observations:
        times_s = np.array(entry.durations_s)
        time_s = times_s.mean(axis=1).min() if back_to_back else np.median(times_s.max(axis=0))
        groups[entry.collective, entry.world_size][entry.size_bytes].append(float(time_s))
    return tuple(
        CollectiveProfile(
            collective=name,
            world_size=n,
            points=tuple(estimate(values).at(size) for size, values in sorted(sizes.items())),
        )
        for (name, n), sizes in sorted(groups.items())
    )


def _overlaps(observations: Sequence[OverlapObservation]) -> tuple[OverlapProfile, ...]:
    """Speeds beside each other: ratios within a repetition, their typical value over repetitions."""
    groups: dict[tuple[int, int], list[OverlapObservation]] = defaultdict(list)
    for entry in observations:
        groups[entry.world_size, entry.size_bytes].append(entry)
    return tuple(
        OverlapProfile(
            world_size=world_size,
            size_bytes=size_bytes,
            compute_speed=_speed(
                (entry.compute_alone_s, entry.compute_together_s) for entry in entries
            ),
            comm_speed=_speed((entry.comm_alone_s, entry.comm_together_s) for entry in entries),
        )
        for (world_size, size_bytes), entries in sorted(groups.items())
    )


def _speed(repetitions: Iterable[tuple[Sequence[float], Sequence[float]]]) -> float:
    return estimate([float(np.median(a) / np.median(t)) for a, t in repetitions]).value_s


def _rate(entry: ComputeObservation) -> ComputeRate:
    # A host that falls behind lengthens most rows.
    share = 0.1 if entry.probe == QUEUE_PROBE else 0.5
    time_s = float(np.quantile(entry.durations_s, share))
    return ComputeRate(
        probe=entry.probe,
        dtype=entry.dtype,
        shape=entry.shape,
        time_s=time_s,
        flop_per_s=entry.flop / time_s,
        bytes_per_s=entry.moved_bytes / time_s,
    )


def failed_replays(failed: Sequence[FailedObservation]) -> tuple[str, ...]:
    """Steps that could not be repeated operator by operator, counted, with the first reason of each."""
    reasons = {entry.setting: entry.reason for entry in reversed(failed)}
    counts = Counter(entry.setting for entry in failed)
    return tuple(
        f"{setting.workload}, micro-batch {setting.micro_batch}, failed {counts[setting]} times: {reason}"
        for setting, reason in reasons.items()
    )


def _undetermined(draft: MeasuredMachine, *, num_nodes: int) -> tuple[str, ...]:
    """What these machines cannot tell."""
    world_size = draft.ranks_per_node
    found = []
    if world_size == 1 or not any(entry.world_size > 1 for entry in draft.collectives):
        found.append(
            "no second rank was measured: interconnect, overlap and stragglers are unknown"
        )
    elif world_size == 2:
        found.append("only two ranks were measured: growth of collectives is structural")
    if num_nodes == 1:
        found.append("only one node was measured: the network between nodes is unknown")
    has_probe = any(rate.probe == QUEUE_PROBE for rate in draft.rates)
    # Virtual events may take nothing.
    if draft.device_kind == "cuda" and has_probe and event_s(draft.rates) == 0:
        found.append(
            "events of this device were not measured: kernels in a row took no less than one between "
            "two; times of its operators include them"
        )
    return tuple(found)
