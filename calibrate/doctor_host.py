"""What processor, memory and software say about a measurement; each check is a pure function."""

from collections.abc import Callable
from typing import Final, TypeAlias

from calibrate.facts import Environment
from calibrate.finding import Finding, bad, ok, warn
from perfmodel.documents.calm import CALM
from perfmodel.units import GIB, format_bytes

Check: TypeAlias = Callable[[Environment], Finding | None]

_BUSY_WARN: Final = 0.10
_BUSY_BAD: Final = 0.40
_STOLEN_BAD: Final = 0.20
_MIN_AVAILABLE_BYTES: Final = 2 * GIB
_MIN_AVAILABLE_FRACTION: Final = 0.10
_SWAP_FRACTION: Final = 0.01


def check_busy_cores(environment: Environment) -> Finding | None:
    """Other work takes cores away and makes times scatter."""
    cpu = environment["cpu"]
    busy, cores = cpu["busy_cores"], cpu["logical_cores"] or cpu["usable_cores"]
    if busy is None:
        return None
    what = f"{busy:.1f} of {cores} cores busy before the measurement"
    if busy <= _BUSY_WARN * cores:
        return ok(what)
    report = bad if busy > _BUSY_BAD * cores else warn
    why = "ranks wait for cores, and every step waits for the slowest rank"
    return report(what, why=why, advice="stop other jobs, or ask for the node exclusively")


def check_load(environment: Environment) -> Finding | None:
    """Look for a long run queue: the calm of this moment would not last."""
    cpu = environment["cpu"]
    load, cores = cpu["load_average_1min"], cpu["logical_cores"] or cpu["usable_cores"]
    if load is None or load <= cores:
        return None
    return warn(
        f"load average {load:.1f} on {cores} cores",
        why="more processes want to run than there are cores",
        advice="wait until it is below the number of cores",
    )


def check_governor(environment: Environment) -> Finding | None:
    """Look for a governor that changes the clock during the measurement."""
    governor = environment["cpu"]["governor"]
    if governor is None:
        return None
    if governor == "performance":
        return ok("CPU governor performance")
    return warn(
        f"CPU governor {governor}",
        why="the clock follows the load, so short probes run slower than long steps",
        advice="sudo cpupower frequency-set -g performance",
    )


def check_quota(environment: Environment) -> Finding | None:
    """Look for a quota, which stops all threads for part of each period."""
    cpu = environment["cpu"]
    quota = cpu["quota_cores"]
    if quota is None or quota >= cpu["usable_cores"]:
        return None
    return bad(
        f"control group allows {quota:.1f} of {cpu['usable_cores']} usable cores",
        why="the kernel freezes all ranks together for tens of milliseconds",
        advice=f"use at most {max(1, int(quota))} threads, or lift the container's CPU limit",
    )


def check_smt(environment: Environment) -> Finding | None:
    """Two hardware threads on one core are not two cores."""
    threads = environment["cpu"]["threads_per_core"]
    if threads is None or threads <= 1:
        return None
    return warn(
        f"{threads} hardware threads per core",
        why="ranks that share a core slow each other, so CPU ranks do not scale evenly",
        advice="keep CPU ranks x OMP_NUM_THREADS <= physical cores"
        f" ({environment['cpu']['physical_cores']})",
    )


def check_virtual(environment: Environment) -> Finding | None:
    """Neighbours on the same host are seen only as far as the hypervisor tells."""
    virtual = environment["host"]["is_virtual"]
    if virtual is None:
        return None
    if not virtual:
        return ok("no hypervisor")
    return warn(
        "virtual machine",
        why="the host may give cores to neighbours; steal time looks like a straggler",
        advice="prefer a dedicated host; otherwise measure longer and at two times of day",
    )


def check_stolen(environment: Environment) -> Finding | None:
    """Look for neighbours at work: the kernel counts what they take."""
    stolen = environment["cpu"]["stolen"]
    if stolen is None:
        return None
    share = f"{100 * stolen:.0f} % of the processor time"
    what = f"{share} goes to other guests of the host when all cores work"
    if stolen <= CALM:
        return ok(what)
    report = bad if stolen > _STOLEN_BAD else warn
    why = "steps, collectives and probes stop at any moment for as long as the neighbours want"
    advice = "wait for a calmer hour, calibrate with --patience 30min, or take a dedicated host"
    return report(what, why=why, advice=advice)


def check_memory(environment: Environment) -> Finding | None:
    """Too little memory ends in swapping or a killed rank."""
    memory = environment["memory"]
    total = min(memory["total_bytes"], memory["limit_bytes"] or memory["total_bytes"])
    available = min(memory["available_bytes"], total)
    what = f"{format_bytes(available)} of {format_bytes(total)} memory available"
    if available >= max(_MIN_AVAILABLE_BYTES, _MIN_AVAILABLE_FRACTION * total):
        return ok(what)
    return bad(
        what,
        why="ranks may swap or be killed",
        advice="end what holds memory, or start fewer ranks",
    )


def check_swap(environment: Environment) -> Finding | None:
    """Memory in swap returns slowly, and at any time."""
    memory = environment["memory"]
    used = memory["swap_used_bytes"]
    if used is None or used < _SWAP_FRACTION * memory["total_bytes"]:
        return None
    return warn(
        f"{format_bytes(used)} in swap",
        why="a page that comes back from disk stalls a step",
        advice="sudo swapoff -a && sudo swapon -a once memory is free",
    )


def check_torch(environment: Environment) -> Finding | None:
    """Without torch nothing can be measured."""
    version = environment["software"]["torch"]
    if version is not None:
        return ok(f"torch {version}")
    return bad(
        "torch is not installed",
        why="measuring runs real training",
        advice="pip install 'perfmodel[calibrate]', or use a profile from another machine",
    )


def check_torchvision(environment: Environment) -> Finding | None:
    """Look for torchvision, where some reference models come from."""
    software = environment["software"]
    if software["torch"] is None or software["torchvision"] is not None:
        return None
    return warn(
        "torchvision is not installed",
        why="its reference models (ResNet and others) cannot be measured",
        advice="install the torchvision that belongs to this torch",
    )


def check_gloo(environment: Environment) -> Finding | None:
    """CPU ranks talk through gloo."""
    if environment["software"]["has_gloo"] is not False or environment["gpus"]:
        return None
    return bad(
        "torch was built without gloo",
        why="CPU ranks have no other way to communicate",
        advice="install a torch build with gloo",
    )


HOST_CHECKS: Final[tuple[Check, ...]] = (
    check_busy_cores,
    check_load,
    check_governor,
    check_quota,
    check_smt,
    check_virtual,
    check_stolen,
    check_memory,
    check_swap,
    check_torch,
    check_torchvision,
    check_gloo,
)
