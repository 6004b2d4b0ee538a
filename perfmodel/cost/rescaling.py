"""A profile of a calibrated device as one of a device that is not present, by the law of steps of both."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from perfmodel.cost.jobs import SHEETS, DeviceSheet
from perfmodel.cost.step_curves import by_law, shipped_priors
from perfmodel.cost.step_law import Sheet
from perfmodel.cost.step_work import step_work
from perfmodel.documents.hardware import (
    LINK_SHARE,
    Catalogue,
    DataSheet,
    find_device,
    host_link_bytes_per_s,
    sheet_named,
    shipped_catalogue,
)
from perfmodel.errors import CalibrationUnavailable, NotFeasible, UsageError
from perfmodel.layout import Precision
from perfmodel.machine.measured import (
    CollectiveProfile,
    CurvePoint,
    DeviceCosts,
    MeasuredMachine,
    MeasuredWorkload,
    Rescaling,
)
from perfmodel.workload import Phase
from perfmodel.workload.step import SymbolicStep


def carried_over(
    workload: MeasuredWorkload, trace: SymbolicStep, rescaling: Rescaling
) -> MeasuredWorkload:
    """Curves of a workload on the device that is asked for, where nothing of it was measured.

        T(target) = T(source) * law(target) / law(source)        time of the device

    What the host takes (``dispatch_*``) and copies of the batch stay those of the calibrated machine.
    ``rescaling``: Between two GPUs; a processor tells nothing of a GPU, whose law then stands alone.
    """
    source, target = rescaling.source, rescaling.target
    assert source is not None
    curves = [getattr(each, phase.value) for each in workload.phases for phase in Phase]
    batches = sorted({int(point.at) for curve in curves for point in curve})
    works = [step_work(trace.at(micro_batch=batch)) for batch in batches]
    after_s, before_s = (by_law(costs, works)[0].device_s.sum(axis=1) for costs in (target, source))
    ratio = dict(zip(batches, (after_s / before_s).tolist(), strict=True))

    def scaled(points: Sequence[CurvePoint]) -> tuple[CurvePoint, ...]:
        return tuple(replace(p, time_s=p.time_s * ratio[int(p.at)]) for p in points)

    phases = []
    for each in workload.phases:
        edits: dict[str, Any] = {p.value: scaled(getattr(each, p.value)) for p in Phase}
        phases.append(replace(each, **edits))
    return replace(workload, phases=tuple(phases), trained=(), measured_batches=())


#: Absolute error, in log, that one step in ten exceeds: by the law of a device of which no row is known, 0.55 of
#: 11 devices left out. Carried over: 0.16 between data-centre GPUs, 0.67 between cards of other hosts and versions.
BETWEEN_DEVICES_LOG_ERROR: Final = 0.55
#: The same of another maker, whose kernels nobody compared: assumed.
BETWEEN_MAKERS_LOG_ERROR: Final = 1.2
_NVIDIA: Final = "NVIDIA"
#: Between the names of a device that is asked about and of the one that was calibrated.
SCALED_FROM: Final = " (scaled from "


def rescaled_profile(
    profile: MeasuredMachine, target: DataSheet, catalogue: Catalogue
) -> MeasuredMachine:
    """The profile as it would be on another device; the same profile if that is the calibrated one.

    Steps are carried over by the law of both devices, collectives by the links between devices where
    both data sheets give them, gradient copies by memory bandwidth. Host times, noise, interference and
    stragglers stay those of the calibrated machine.
    """
    sheet = sheet_named(profile.device_name, catalogue)
    if sheet is not None and sheet.id == target.id:
        return profile
    operators = profile.operators
    if profile.device_costs is not None:
        raise UsageError(
            f"--device: excludes a machine inferred from steps, got {target.id} beside "
            f"{profile.device_name}; name the other machine in its place (perfmodel machines), or let "
            "perfmodel diagnose --device go by the data sheet alone"
        )
    if operators is None:
        raise CalibrationUnavailable(
            f"--device: the profile of {profile.device_name} must hold costs of operators, got none; "
            "calibrate again with this version"
        )
    after = _costs_of(target)
    before = _costs_of(sheet) if sheet is not None and profile.device_kind == "cuda" else None
    log_error = BETWEEN_DEVICES_LOG_ERROR
    if {target.vendor, _NVIDIA if sheet is None else sheet.vendor} != {_NVIDIA}:
        log_error = BETWEEN_MAKERS_LOG_ERROR
    link_ratio, note = _links(profile, sheet, target)
    rescaling = Rescaling(
        source=before,
        target=after,
        log_error=log_error,
        notes=_notes(profile, target, log_error, is_carried=before is not None),
        notes_on_groups=(note,),
        device_kind="cuda" if target.kind == "cuda" else profile.memory_kind,
        architecture=target.architecture,
    )
    # Another machine: its draws are not those of the calibrated one.
    digest = hashlib.sha256(f"{profile.digest} {target.model_dump_json()}".encode()).hexdigest()
    memory_ratio = operators.peak_bytes_per_s / after.bytes_per_s
    if before is not None:
        memory_ratio = before.bytes_per_s / after.bytes_per_s

    def linked(entry: CollectiveProfile) -> CollectiveProfile:
        # What goes beyond the smallest message is transfer, and follows the link.
        start_s = min(point.time_s for point in entry.points)
        points = (
            replace(p, time_s=start_s + (p.time_s - start_s) / link_ratio) for p in entry.points
        )
        return replace(entry, points=tuple(points))

    return replace(
        profile.with_links(linked),
        device_name=f"{target.name}{SCALED_FROM}{profile.device_name})",
        origin=replace(profile.origin, digest=digest),
        operators=replace(operators, rescaling=rescaling),
        ddp=profile.ddp.times({"bucket_s_per_byte": memory_ratio}),
        steps=(),
        rates=(),
    )


def sheet_of(device: DataSheet) -> Sheet:
    """Peaks by precision and memory bandwidth; 16 bit is never slower than fp32, whose units it can use.

    Raises ``UsageError`` if the data sheet gives no bandwidth, or no peak in fp32.
    """
    peaks = {str(name): peak.flop_per_s for name, peak in device.peaks.items()}
    if device.bandwidth is None or "fp32" not in peaks:
        raise UsageError(
            f"--device: the data sheet of {device.id} must give a memory bandwidth and an fp32 peak; choose "
            "another device"
        )
    single = peaks["fp32"]
    found = {"fp32": single, "half": max(single, peaks.get("fp16", 0.0), peaks.get("bf16", 0.0))}
    # PyTorch convolves in TF32 by default (torch.backends.cudnn.allow_tf32).
    if device.vendor == _NVIDIA and "tf32" in peaks:
        found["tf32"] = peaks["tf32"]
    return Sheet(found, device.bandwidth.bytes_per_s, device.architecture.partition(" +")[0])


def _costs_of(device: DataSheet) -> DeviceCosts:
    """The law of a device without any step: constants as others of its generation have them, any host's."""
    sheet, known = sheet_of(device), shipped_priors()
    return DeviceCosts(
        flop_per_s=dict(sheet.flop_per_s),
        bytes_per_s=sheet.bytes_per_s,
        constants={name: known[name].median for name in known if name.startswith("host")},
        undetermined=(),
        left_out=(),
        num_rows=0,
        num_models=0,
        source="other devices",
        generation=sheet.generation,
    )


def _links(
    profile: MeasuredMachine, source: DataSheet | None, target: DataSheet
) -> tuple[float, str]:
    """Link of the target over that of the source, and what to say of it; 1 where the profile measures no links."""
    is_measured = profile.backend == "nccl" and profile.num_nodes == 1 < profile.max_world_size
    before, after = (
        None if sheet is None or sheet.link_joins_pairs else sheet.link
        for sheet in (source, target)
    )
    if not is_measured or source is None or before is None or after is None:
        return 1.0, (
            f"communication is that of the calibrated machine ({profile.backend}), not of "
            f"{target.name}: no ratio of links is known"
        )
    ratio = after.bytes_per_s / before.bytes_per_s
    return ratio, (
        f"communication inside the node is scaled by the links: {target.link_name} over "
        f"{source.link_name}, {ratio:.3g} times the rate; between nodes nothing is known"
    )


def _notes(
    profile: MeasuredMachine, target: DataSheet, log_error: float, *, is_carried: bool
) -> tuple[str, ...]:
    within = f"90 % within {math.expm1(log_error):.0%} (perfmodel devices {target.id})"
    nothing = f"nothing was run on {target.name}"
    if not is_carried:
        return (f"{nothing}: steps are what its data sheet and other GPUs say, {within}",)
    carried = f"{nothing}: steps of {profile.device_name} are carried over, {within}"
    return carried, f"host time is that of the calibrated machine ({profile.device_name})"


#: What the short names of calibrations from runs mean in the catalogue.
_SHORT: Final = {
    "A100": "a100-sxm4-80",
    "H100": "h100-sxm5",
    "V100": "v100-sxm2-32",
    "B200": "b200-sxm",
}
_FAST_LINK_BYTES_PER_S: Final = 400e9
#: Network per device by what joins the devices of a node: 400, 200 and 100 Gb/s, assumed, a prior only.
_NODE_BYTES_PER_S: Final = (50e9, 25e9, 12.5e9)


def device_sheet(text: str, *, flag: str = "--device") -> DeviceSheet:
    """What priors need of A100, H100, V100, B200 or any device of the catalogue."""
    if text in SHEETS:
        return SHEETS[text]
    sheet = find_device(text, shipped_catalogue(), flag=flag)
    peak = sheet.peaks.get("bf16") or sheet.peaks.get("fp16")
    if peak is None or sheet.bandwidth is None:
        raise UsageError(
            f"{flag}: must have a 16-bit peak and a memory bandwidth in the catalogue, got {sheet.id}"
        )
    fast, medium, slow = _NODE_BYTES_PER_S
    link_bytes_per_s = host_link_bytes_per_s(sheet, shipped_catalogue()) or slow
    node_bytes_per_s = slow
    if sheet.link is not None:
        link_bytes_per_s = sheet.link.bytes_per_s * LINK_SHARE
        if not sheet.link_joins_pairs:
            is_fast = sheet.link.bytes_per_s >= _FAST_LINK_BYTES_PER_S
            node_bytes_per_s = fast if is_fast else medium
    return DeviceSheet(
        name=sheet.id,
        matmul_flop_per_s=peak.flop_per_s,
        memory_bytes_per_s=sheet.bandwidth.bytes_per_s,
        link_bytes_per_s=link_bytes_per_s,
        node_bytes_per_s=node_bytes_per_s,
    )


def catalogued(device: str) -> DataSheet:
    """The full data sheet of a device that ``device_sheet`` knows."""
    return find_device(_SHORT.get(device, device), shipped_catalogue())


def precision_ratio(precision: Precision, device: str, *, where: str) -> float:
    """Peak of matrix products in a precision over that in 16 bit, by the data sheet."""
    peaks = {str(name): peak.flop_per_s for name, peak in catalogued(device).peaks.items()}
    half = peaks.get("fp16") or peaks.get("bf16")
    if precision is Precision.BF16:
        return 1.0
    if half is None or precision not in peaks:
        known = ", ".join(each for each in Precision if each in {Precision.BF16, *peaks})
        raise NotFeasible(f"{where}: precision must be one of {known} on {device}, got {precision}")
    return peaks[precision] / half
