"""Where a measurement runs, and who made it: shared by calibration and validation."""

import datetime as dt
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from calibrate.environment import DeviceKind, Facts, describe_environment
from calibrate.gpus import query_gpus, unfit, usable_gpus
from calibrate.processes import usable_cores
from calibrate.topology import (
    LaunchFlags,
    Topology,
    default_ranks,
    resolve_topology,
    without_torchrun,
)
from perfmodel.documents.base import Provenance, command_line, installed_version
from perfmodel.errors import CalibrationUnavailable, UsageError
from perfmodel.machine.measured import MeasuredMachine

_THREADS: Final = "OMP_NUM_THREADS"
#: Ranks that may share a core if the user asks for so many: they show what a layout of more ranks costs.
_RANKS_PER_CORE: Final = 2
#: Variables that change what is measured: a validation sets those of its calibration.
_GOVERNING: Final = (_THREADS, "MALLOC_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What the ranks of a campaign run on, and under."""

    topology: Topology
    device_kind: DeviceKind
    conditions: Mapping[str, str]
    """Variables of the environment of every rank."""
    fingerprint: str
    """Of this machine."""
    truth: str | None = None
    """What a virtual device costs."""
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs of the ranks on this node, as far as torch tells."""


def chosen_conditions(environ: Mapping[str, str], *, topology: Topology) -> dict[str, str]:
    """What the ranks of a calibration run under: the user's environment, and a thread per own core."""
    own = _governing(environ)
    threads = max(1, usable_cores() // topology.ranks_per_node)
    return {**own, _THREADS: own.get(_THREADS) or str(threads)}


def recorded_conditions(profile: MeasuredMachine) -> dict[str, str]:
    """What the ranks of a calibration ran under, whatever is set now."""
    return _governing(profile.variables)


def under(environ: Mapping[str, str], conditions: Mapping[str, str]) -> dict[str, str]:
    """An environment for ranks: these conditions, and the rest of it."""
    inherited = without_torchrun(environ)
    governing = _governing(inherited)
    return {n: v for n, v in inherited.items() if n not in governing} | dict(conditions)


def _governing(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_GOVERNING)}


def place(
    environment: Facts,
    device: str,
    flags: LaunchFlags,
    *,
    may_share_cores: bool = False,
    conditions: Mapping[str, str] | None = None,
) -> Placement:
    """Which ranks run where, on which kind of device.

    Parameters
    ----------
    environment
        This machine, described.
    may_share_cores
        Let more ranks run than there are cores: for collectives alone, which then show how the
        processors limit them.
    conditions
        Those of a calibration; default: chosen here.

    Raises
    ------
    UsageError
        If the device does not exist here or is unfit, torch is missing, or there are more ranks than devices.
    """
    if find_spec("torch") is None:
        raise UsageError(
            "calibrate: torch must be installed, got none; pip install 'perfmodel[calibrate]'"
        )
    if device not in ("auto", "cpu", "cuda", "virtual"):
        raise UsageError(f"--device-kind: must be auto, cpu, cuda or virtual, got {device!r}")
    if device == "virtual":
        return _virtual(environment, flags, conditions)
    gpus = () if device == "cpu" else usable_gpus(device)
    device_kind: DeviceKind = "cuda" if gpus else "cpu"
    num_devices = len(gpus) if device_kind == "cuda" else usable_cores()
    topology = resolve_topology(
        os.environ,
        flags=flags,
        num_local_devices=num_devices,
        default_ranks_per_node=default_ranks(device_kind, num_devices=num_devices),
        allow_oversubscription=device_kind == "cpu"
        and (may_share_cores or (flags.nproc_per_node or 0) <= _RANKS_PER_CORE * num_devices),
    )
    own = gpus[: topology.ranks_per_node]
    if problem := unfit(own, query_gpus()) if own else "":
        raise UsageError(problem)
    if conditions is None:
        conditions = chosen_conditions(os.environ, topology=topology)
    return Placement(
        topology=topology,
        device_kind=device_kind,
        conditions=conditions,
        fingerprint=environment["host"]["fingerprint"],
        gpus=tuple(gpu["uuid"] for gpu in own if gpu["uuid"] is not None),
    )


def _virtual(
    environment: Facts, flags: LaunchFlags, conditions: Mapping[str, str] | None
) -> Placement:
    """Ranks of a virtual device: one thread each, since nothing is computed."""
    virtual = environment["virtual"]
    topology = resolve_topology(
        os.environ,
        flags=flags,
        num_local_devices=virtual["devices"],
        default_ranks_per_node=1,
    )
    return Placement(
        topology=topology,
        device_kind="virtual",
        conditions={_THREADS: "1"} if conditions is None else conditions,
        fingerprint=environment["host"]["fingerprint"],
        truth=virtual["truth"],
    )


def placement_of(
    profile: MeasuredMachine, *, num_ranks: int | None = None, where: str = "--profile"
) -> Placement:
    """Where the ranks of a calibration ran, for what is judged by it or added to it.

    ``num_ranks`` are those on this node, by default all that were calibrated; ``where`` named the profile.
    """
    environment = described(profile.truth)
    refuse_other_machine(profile, environment["host"]["fingerprint"], where=where)
    return place(
        environment,
        profile.device_kind,
        LaunchFlags(nproc_per_node=num_ranks or profile.ranks_per_node),
        conditions=recorded_conditions(profile),
    )


def described(truth: str | None) -> Facts:
    """The machine at hand; with a virtual device as a truth file says."""
    environment = describe_environment()
    if truth is None:
        return environment
    from calibrate.virtual.truth import with_truth  # noqa: PLC0415 - few need it

    return with_truth(environment, truth)


def refuse_other_machine(
    profile: MeasuredMachine, fingerprint: str, *, where: str = "--profile"
) -> None:
    """Raise ``CalibrationUnavailable`` unless the profile has the fingerprint of this machine."""
    found = profile.origin.fingerprint
    if found != fingerprint:
        raise CalibrationUnavailable(
            f"{where}: must describe this machine (fingerprint {fingerprint[:12]}), got "
            f"{found[:12]} ({profile.device_name}); run perfmodel calibrate here"
        )


def provenance(environment: Facts, *, seed: int) -> Provenance:
    """Who made a document, here and now."""
    software = environment["software"]
    versions = {name: str(value) for name, value in software.items() if value is not None}
    return Provenance(
        created_utc=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        command_line=command_line(sys.argv),
        git_commit=software["git_commit"],
        seed=seed,
        versions={**versions, "perfmodel": installed_version("perfmodel") or "unknown"},
        host_fingerprint=environment["host"]["fingerprint"],
    )
