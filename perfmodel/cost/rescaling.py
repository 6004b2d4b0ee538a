"""A profile of a calibrated device as one of a device that is not present, by their data sheets."""

import hashlib
import math
from dataclasses import replace
from typing import Final

from perfmodel.cost.parameters import SHEETS, DeviceSheet
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
    DdpCosts,
    DeviceRates,
    MeasuredMachine,
    Rescaling,
)
from perfmodel.units import Flop, Seconds, format_rate
from perfmodel.workload import Operator

#: Names of element types as data sheets have them.
_PRECISIONS = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}
#: What PyTorch computes in TF32 by default where the device can (torch.backends.cudnn.allow_tf32).
CONVOLUTION_FP32 = "convolution fp32"


def rescaled_s(
    time_s: Seconds, operator: Operator, rescaling: Rescaling, *, shortest_s: Seconds
) -> Seconds:
    """Time of one call on the target, never above the target's peak, from that on the source. [s]

        start = min(time, shortest call of the family, or start_s of the host)
        T     = start + (time - start) * bound(target) / bound(source)

    Raises ``UsageError`` if a data sheet has no rate for the type of the operator.
    """
    before_s = bound_s(operator, rescaling.source)
    after_s = bound_s(operator, rescaling.target)
    if before_s <= 0:
        return time_s
    ratio = after_s / before_s
    start_s = min(time_s, shortest_s if rescaling.start_s is None else rescaling.start_s)
    return max(
        start_s + (time_s - start_s) * ratio,
        min(time_s, before_s) * ratio,  # a start that stays must not beat a slower device's bound
        _products_s(operator, rescaling.target),
    )


def rescaled_stream_s(time_s: Seconds, rescaling: Rescaling, *, num_tensors: int) -> Seconds:
    """Time of an optimizer, which streams memory and starts at least once per tensor. [s]"""
    ratio = rescaling.source.bytes_per_s / rescaling.target.bytes_per_s
    start_s = min(time_s, (rescaling.start_s or 0.0) * num_tensors)
    return start_s + (time_s - start_s) * ratio


def whole_steps_refused(workload: str, device: str) -> UsageError:
    """What to say where a workload was not traced: nothing tells what binds a whole step."""
    return UsageError(
        f"--workload: must be a traced workload file on {device}, got {workload!r}: whole steps of another "
        f"device cannot be scaled; perfmodel trace {workload}, then give its file"
    )


def bound_s(operator: Operator, rates: DeviceRates) -> Seconds:
    """What an operator takes at least on a device: its products or its bytes. [s]"""
    moved_bytes = float(operator.read_bytes + operator.written_bytes)
    return max(_products_s(operator, rates), moved_bytes / rates.bytes_per_s)


def _products_s(operator: Operator, rates: DeviceRates) -> Seconds:
    flop: Flop = operator.flop
    return flop / _flop_per_s(operator, rates) if flop > 0 else 0.0


def _flop_per_s(operator: Operator, rates: DeviceRates) -> float:
    dtype = next((spec.dtype for spec in operator.inputs if spec.dtype in _PRECISIONS), "float32")
    precision = _PRECISIONS[dtype]
    if precision == "fp32" and "convolution" in operator.name:
        rate = rates.flop_per_s.get(CONVOLUTION_FP32)
        if rate is not None:
            return rate
    rate = rates.flop_per_s.get(precision)
    if rate is None:
        known = ", ".join(name for name in rates.flop_per_s if name != CONVOLUTION_FP32)
        raise UsageError(
            f"--device: {rates.name} must have a rate for {precision} ({operator.name}), got {known}; "
            "trace the model with another --precision"
        )
    return rate


#: Standard deviation, in log, of training steps scaled between GPUs of NVIDIA by data-sheet ratios: assumed,
#: in view of ten models in two precisions that lambdal/deeplearning-benchmark (2024) ran on A10, A100 (PCIe,
#: SXM) and H100: over 120 pairs the mean of both ratios errs by 0.24 (RMS, bias -0.10), that of memory alone
#: by 0.15, that of arithmetic alone by 0.41.
BETWEEN_GPUS_LOG_ERROR: Final = 0.25
#: Between makers, or from a processor to a GPU, other software runs: a factor 2, assumed.
BETWEEN_KINDS_LOG_ERROR: Final = math.log(2)
#: Columns of DDP's costs that move gradients through the device's memory.
_MEMORY_COSTS: Final = ("bucket_s_per_byte",)


def rescaled_profile(
    profile: MeasuredMachine, target: DataSheet, catalogue: Catalogue
) -> MeasuredMachine:
    """The profile as it would be on another device; the same profile if that is the calibrated one.

    Operators are scaled by what binds each of them, collectives by the links between devices where
    both data sheets give them, gradient copies by memory bandwidth. Host times, noise, interference and
    stragglers stay those of the calibrated machine. Whole steps are left out: nothing tells what binds
    them.
    """
    source_sheet = sheet_named(profile.device_name, catalogue)
    if source_sheet is not None and source_sheet.id == target.id:
        return profile
    operators = profile.operators
    if profile.device_costs is not None:
        raise UsageError(
            f"--device: excludes a machine inferred from steps, got {target.id} beside "
            f"{profile.device_name}; perfmodel diagnose --device goes by the data sheet alone"
        )
    if operators is None:
        raise CalibrationUnavailable(
            f"--device: the profile of {profile.device_name} must hold costs of operators, got none; "
            "calibrate again with this version"
        )
    before, after = _measured_rates(profile, source_sheet), device_rates(target)
    link_ratio = _link_ratio(profile, source_sheet, target)
    same = source_sheet is not None and source_sheet.vendor == target.vendor == "NVIDIA"
    log_error = BETWEEN_GPUS_LOG_ERROR if same else BETWEEN_KINDS_LOG_ERROR
    notes = _notes(profile, target, log_error)
    if source_sheet is None:
        notes.append(
            f"{profile.device_name} is not in the catalogue: its measured peaks stand for a data sheet, "
            f"{format_rate(before.flop_per_s['fp32'], 'FLOP')} in fp32 and "
            f"{format_rate(before.bytes_per_s, 'B')} of memory"
        )
    if not profile.asynchronous and target.kind == "cuda":
        notes.append(
            "the calibrated device runs synchronously: host time is added to device time, which a GPU "
            "would hide"
        )
    rescaling = Rescaling(
        source=before,
        target=after,
        start_s=None if profile.asynchronous else profile.dispatch_s,
        log_error=log_error,
        notes=tuple(notes),
        notes_on_groups=(_note_on_links(profile, source_sheet, target, link_ratio),),
        device_kind="cuda" if target.kind == "cuda" else profile.memory_kind,
        architecture=target.architecture,
    )
    # Another machine: its draws are not those of the calibrated one.
    digest = hashlib.sha256(f"{profile.digest} {target.model_dump_json()}".encode()).hexdigest()
    return replace(
        profile.with_links(lambda entry: _collective(entry, link_ratio or 1.0)),
        device_name=f"{target.name} (scaled from {profile.device_name})",
        origin=replace(profile.origin, digest=digest),
        operators=replace(operators, rescaling=rescaling),
        ddp=_ddp(profile.ddp, before.bytes_per_s / after.bytes_per_s),
        steps=(),
        rates=(),
    )


def _measured_rates(profile: MeasuredMachine, sheet: DataSheet | None) -> DeviceRates:
    """Rates of the calibrated device: its data sheet's, or the best that were measured."""
    if sheet is not None:
        return device_rates(sheet)
    assert profile.operators is not None
    flop_per_s: dict[str, float] = {}
    for rate in profile.rates:
        if rate.flop_per_s > 0:
            flop_per_s[rate.dtype] = max(flop_per_s.get(rate.dtype, 0.0), rate.flop_per_s)
    single = flop_per_s.get("fp32", 0.0)
    if profile.asynchronous and single:
        # The peak of a GPU's operators is that of 16 bit, and what it multiplies in fp32 may be rounded to TF32.
        for name, operator in ((CONVOLUTION_FP32, "convolution"), ("fp32", "mm")):
            flop_per_s[name] = flop_per_s.get(profile.precision_of_fp32(operator), single)
    else:
        flop_per_s["fp32"] = max(single, profile.operators.peak_flop_per_s)
    # The largest array: smaller ones may stay in a cache, which no data sheet counts.
    streams = [rate for rate in profile.rates if rate.probe == "memory"]
    largest = max(streams, key=lambda rate: math.prod(rate.shape), default=None)
    bytes_per_s = profile.operators.peak_bytes_per_s if largest is None else largest.bytes_per_s
    return DeviceRates(name=profile.device_name, flop_per_s=flop_per_s, bytes_per_s=bytes_per_s)


def device_rates(sheet: DataSheet) -> DeviceRates:
    """What a data sheet says of arithmetic and memory; ``UsageError`` if it gives no bandwidth."""
    if sheet.bandwidth is None:
        raise UsageError(
            f"--device: the data sheet of {sheet.id} must give a memory bandwidth, got none; choose "
            "another device"
        )
    flop_per_s: dict[str, float] = {name: peak.flop_per_s for name, peak in sheet.peaks.items()}
    if sheet.vendor == "NVIDIA" and "tf32" in flop_per_s:
        flop_per_s[CONVOLUTION_FP32] = flop_per_s["tf32"]
    return DeviceRates(
        name=sheet.name, flop_per_s=flop_per_s, bytes_per_s=sheet.bandwidth.bytes_per_s
    )


def _link_ratio(
    profile: MeasuredMachine, source: DataSheet | None, target: DataSheet
) -> float | None:
    """Link of the target over that of the source; ``None`` where the profile does not measure links."""
    if profile.backend != "nccl" or profile.num_nodes > 1 or profile.max_world_size == 1:
        return None
    if source is None or source.link is None or target.link is None:
        return None
    if source.link_joins_pairs or target.link_joins_pairs:
        return None
    return target.link.bytes_per_s / source.link.bytes_per_s


def _collective(entry: CollectiveProfile, ratio: float) -> CollectiveProfile:
    """What goes beyond the smallest message is transfer, and follows the link."""
    start_s = min(point.time_s for point in entry.points)
    points = tuple(
        replace(point, time_s=start_s + (point.time_s - start_s) / ratio) for point in entry.points
    )
    return replace(entry, points=points)


def _ddp(ddp: DdpCosts, memory_ratio: float) -> DdpCosts:
    factors = [memory_ratio if name in _MEMORY_COSTS else 1.0 for name in ddp.names]

    def scaled(row: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value * factor for value, factor in zip(row, factors, strict=True))

    return replace(ddp, values=scaled(ddp.values), draws=tuple(scaled(row) for row in ddp.draws))


def _notes(profile: MeasuredMachine, target: DataSheet, log_error: float) -> list[str]:
    origin = (
        "published trainings of ten models on four GPUs"
        if log_error == BETWEEN_GPUS_LOG_ERROR
        else "an assumption, for nobody compared devices of these kinds"
    )
    scaled = (
        f"nothing was run on {target.name}: each operator is scaled from {profile.device_name} by the "
        f"data-sheet ratio of what binds it (perfmodel devices {target.id}), with {log_error:.0%} of "
        f"uncertainty (one standard deviation) from {origin}"
    )
    return [scaled, f"host time is that of the calibrated machine ({profile.device_name})"]


def _note_on_links(
    profile: MeasuredMachine, source: DataSheet | None, target: DataSheet, ratio: float | None
) -> str:
    if ratio is None:
        return (
            f"communication is that of the calibrated machine ({profile.backend}), not of "
            f"{target.name}: no ratio of links is known"
        )
    assert source is not None
    return (
        f"communication inside the node is scaled by the links: {target.link_name} over "
        f"{source.link_name}, {ratio:.3g} times the rate; between nodes nothing is known"
    )


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
