"""Use case: measure the machine at hand and fit its profile."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from calibrate.campaign import OBSERVATIONS, Campaign, Progress, measure, read_plan
from calibrate.environment import describe_environment, place, provenance
from calibrate.experiment import BUDGETS, Budget, Experiment, default_models, doubling_sizes
from calibrate.fit.profile import fit_profile
from calibrate.launch import Launcher, LaunchFlags
from calibrate.workloads import with_stored_workloads
from perfmodel.documents.profile import ProfileDocument
from perfmodel.errors import refuse_unknown

PROFILE: Final = "profile.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRequest:
    """What the user asked for."""

    folder: Path
    budget: str = "standard"
    device: str = "auto"
    truth: str | None = None
    """What a virtual device costs."""
    models: tuple[str, ...] | None = None
    """None: those that are usual on the device."""
    flags: LaunchFlags = field(default_factory=LaunchFlags)
    seed: int = 0
    resume: bool = False


def calibrate(
    request: CalibrationRequest, launcher: Launcher, *, on_progress: Callable[[Progress], None]
) -> ProfileDocument:
    """Measure, fit, and write the profile beside the raw observations."""
    refuse_unknown("--budget", request.budget, BUDGETS)
    environment = describe_environment(request.truth)
    here = place(environment, request.device, request.flags)
    topology, virtual = here.topology, environment.get("virtual", {})
    experiment = Experiment(
        device_kind=here.device_kind,
        world_sizes=doubling_sizes(topology.world_size),
        models=default_models(here.device_kind) if request.models is None else request.models,
        budget=Budget.of(request.budget, here.device_kind),
        seed=request.seed,
        ranks_per_node=virtual.get("devices_per_node", topology.ranks_per_node),
    )
    rounds = experiment.rounds()
    if here.device_kind == "virtual":
        # Virtual time knows nothing of processes; one launch saves the seconds that starting ranks takes.
        rounds = (tuple(itertools.chain.from_iterable(rounds)),)
    plan = {
        "stage": "calibrate",
        "budget": request.budget,
        "device": here.device_kind,
        "models": experiment.models,
        **({} if here.truth is None else {"truth": here.truth}),
        "seed": request.seed,
        "num_nodes": topology.num_nodes,
        "ranks_per_node": topology.ranks_per_node,
        "conditions": here.conditions,
    }
    observations = measure(
        Campaign(folder=request.folder, plan=plan, rounds=rounds, placement=here),
        launcher,
        resume=request.resume,
        on_progress=on_progress,
    )
    profile = _fitted(observations, seed=request.seed, num_nodes=topology.num_nodes)
    # Every node fits the same shared observations; one of them writes.
    if topology.node_rank == 0:
        profile.write(request.folder / PROFILE)
    return profile


def refit(folder: Path) -> ProfileDocument:
    """Fit the stored raw observations of a calibration again, with this version of the fits.

    Everything comes from the raw data and the plan beside it: an older profile need not be
    readable.
    """
    observations = folder / OBSERVATIONS
    plan = read_plan(folder)
    profile = _fitted(observations, seed=int(plan["seed"]), num_nodes=int(plan["num_nodes"]))
    profile.write(folder / PROFILE)
    return profile


def _fitted(observations: Path, *, seed: int, num_nodes: int) -> ProfileDocument:
    """A fit, and what commands of their own measured in the folder: it must survive a new fit."""
    made = functools.partial(provenance, seed=seed)
    profile = fit_profile(observations, provenance=made, num_nodes=num_nodes)
    return profile.with_machine(with_stored_workloads(profile.machine, observations.parent))
