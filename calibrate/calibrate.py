"""Use case: measure the machine at hand and fit its profile."""

import datetime
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from calibrate.campaign import Campaign, Progress, measure
from calibrate.environment import describe_environment
from calibrate.experiment import (
    BUDGETS,
    REFERENCE_MODELS,
    DeviceKind,
    Experiment,
    doubling_sizes,
)
from calibrate.facts import Environment
from calibrate.fit.profile import fit_profile
from calibrate.gpus import query_gpus
from calibrate.launch import (
    Launcher,
    LaunchFlags,
    Topology,
    default_ranks,
    resolve_topology,
    usable_cores,
)
from perfmodel.documents.base import Provenance
from perfmodel.documents.profile import ProfileDocument
from perfmodel.errors import UsageError

PROFILE: Final = "profile.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """What the user asked for."""

    folder: Path
    budget: str = "standard"
    device: str = "auto"
    models: tuple[str, ...] = REFERENCE_MODELS
    flags: LaunchFlags = LaunchFlags()
    seed: int = 0
    resume: bool = False


def calibrate(
    request: CalibrationRequest, launcher: Launcher, *, on_progress: Callable[[Progress], None]
) -> ProfileDocument:
    """Measure, fit, and write the profile beside the raw observations."""
    if request.budget not in BUDGETS:
        raise UsageError(f"--budget: must be one of {', '.join(BUDGETS)}, got {request.budget!r}")
    environment = describe_environment()
    topology, device_kind = place(request.device, request.flags, os.environ)
    experiment = Experiment(
        device_kind=device_kind,
        world_sizes=doubling_sizes(topology.world_size),
        models=request.models,
        budget=BUDGETS[request.budget],
        seed=request.seed,
    )
    plan = {
        "stage": "calibrate",
        "budget": request.budget,
        "device": device_kind,
        "models": request.models,
        "seed": request.seed,
        "num_nodes": topology.num_nodes,
        "ranks_per_node": topology.ranks_per_node,
    }
    observations = measure(
        Campaign(
            folder=request.folder,
            plan=json.dumps(plan, indent=1) + "\n",
            rounds=experiment.rounds(),
            device_kind=device_kind,
            topology=topology,
            fingerprint=environment["host"]["fingerprint"],
        ),
        launcher,
        resume=request.resume,
        on_progress=on_progress,
    )
    profile = fit_profile(
        observations,
        provenance=provenance(environment, seed=request.seed),
        num_nodes=topology.num_nodes,
    )
    profile.write(request.folder / PROFILE)
    return profile


def place(
    device: str, flags: LaunchFlags, environ: Mapping[str, str]
) -> tuple[Topology, DeviceKind]:
    """Which ranks run where, on which kind of device.

    Raises
    ------
    UsageError
        If the device does not exist here, torch is missing, or there are more ranks than devices.
    """
    if find_spec("torch") is None:
        raise UsageError(
            "calibrate: torch must be installed, got none; pip install 'perfmodel[calibrate]'"
        )
    num_gpus = _visible_gpus(environ)
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device: must be auto, cpu or cuda, got {device!r}")
    if device == "cuda" and not num_gpus:
        raise UsageError("--device: cuda needs a GPU that nvidia-smi lists, got none; use cpu")
    on_cuda = device == "cuda" or (device == "auto" and num_gpus > 0)
    device_kind: DeviceKind = "cuda" if on_cuda else "cpu"
    num_devices = num_gpus if device_kind == "cuda" else usable_cores()
    topology = resolve_topology(
        environ,
        flags=flags,
        num_local_devices=num_devices,
        default_ranks_per_node=default_ranks(device_kind, num_devices=num_devices),
    )
    return topology, device_kind


def _visible_gpus(environ: Mapping[str, str]) -> int:
    num_gpus = len(query_gpus())
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return num_gpus
    return min(num_gpus, len([entry for entry in visible.split(",") if entry.strip()]))


def provenance(environment: Environment, *, seed: int) -> Provenance:
    """Who made a document, here and now."""
    software = environment["software"]
    versions = {name: str(value) for name, value in software.items() if value is not None}
    return Provenance(
        created_utc=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command_line=tuple(sys.argv),
        git_commit=software["git_commit"],
        seed=seed,
        versions={**versions, "perfmodel": version("perfmodel")},
        host_fingerprint=environment["host"]["fingerprint"],
    )


def refit(folder: Path) -> ProfileDocument:
    """Fit the stored raw observations of a calibration again, with this version of the fits.

    The provenance stays that of the measurement, but for version and command line.
    """
    path = folder / PROFILE
    if path.exists():
        previous = ProfileDocument.read(path)
        source = previous.provenance
        num_nodes = previous.num_nodes
    else:
        source = provenance(describe_environment(), seed=0)
        num_nodes = 1
    versions = {**source.versions, "perfmodel": version("perfmodel")}
    source = source.model_copy(update={"command_line": tuple(sys.argv), "versions": versions})
    profile = fit_profile(folder / "observations.jsonl", provenance=source, num_nodes=num_nodes)
    profile.write(path)
    return profile
