"""A profile of a calibrated device as one of a device that is not present, by their data sheets."""

import math
from dataclasses import dataclass
from typing import Final

from perfmodel.cost.rescaling import CONVOLUTION_FP32
from perfmodel.documents.catalogue import Catalogue, DataSheet
from perfmodel.documents.profile import (
    CollectiveProfile,
    DdpCosts,
    DeviceRates,
    ProfileDocument,
    Rescaling,
)
from perfmodel.errors import CalibrationUnavailable, UsageError
from perfmodel.hardware.catalogue import sheet_named
from perfmodel.units import format_rate

#: Standard deviation, in log, of training steps scaled between GPUs of NVIDIA by data-sheet ratios: assumed,
#: in view of ten models in two precisions that lambdal/deeplearning-benchmark (2024) ran on A10, A100 (PCIe,
#: SXM) and H100: over 120 pairs the mean of both ratios errs by 0.24 (RMS, bias -0.10), that of memory alone
#: by 0.15, that of arithmetic alone by 0.41.
BETWEEN_GPUS_LOG_ERROR: Final = 0.25
#: Between makers, or from a processor to a GPU, other software runs: a factor 2, assumed.
BETWEEN_KINDS_LOG_ERROR: Final = math.log(2)
#: Columns of DDP's costs that move gradients through the device's memory.
_MEMORY_COSTS: Final = ("bucket_s_per_byte",)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The calibrated device."""

    rates: DeviceRates
    sheet: DataSheet | None
    """``None``: measured rates stand for a data sheet."""


def rescaled_profile(
    profile: ProfileDocument, target: DataSheet, catalogue: Catalogue
) -> ProfileDocument:
    """The profile as it would be on another device; the same profile if that is the calibrated one.

    Operators are scaled by what binds each of them, collectives by the links between devices where
    both data sheets give them, gradient copies by memory bandwidth. Host times, noise, interference and
    stragglers stay those of the calibrated machine. Whole steps are left out: nothing tells what binds
    them.

    Raises
    ------
    CalibrationUnavailable
        If the profile prices no operators.
    UsageError
        If a data sheet has no memory bandwidth.
    """
    source_sheet = sheet_named(profile.device_name, catalogue)
    if source_sheet is not None and source_sheet.id == target.id:
        return profile
    operators = profile.operators
    if operators is None:
        raise CalibrationUnavailable(
            f"--device: the profile of {profile.device_name} must hold prices of operators, got none; "
            "calibrate again with this version"
        )
    source = _source(profile, source_sheet)
    rates = _rates(target)
    link_ratio = _link_ratio(profile, source.sheet, target)
    rescaling = Rescaling(
        source=source.rates,
        target=rates,
        start_s=None if profile.asynchronous else profile.dispatch_s,
        log_error=_log_error(source.sheet, target),
        notes=_notes(profile, source, target),
        notes_on_groups=(_note_on_links(profile, source.sheet, target, link_ratio),),
        device_kind="cuda" if target.kind == "cuda" else profile.device_kind,
    )
    memory_ratio = source.rates.bytes_per_s / rates.bytes_per_s
    return profile.model_copy(
        update={
            "device_name": f"{target.name} (scaled from {profile.device_name})",
            "operators": operators.model_copy(update={"rescaling": rescaling}),
            "collectives": tuple(_collective(c, link_ratio or 1.0) for c in profile.collectives),
            "ddp": _ddp(profile.ddp, memory_ratio),
            "steps": (),
            "rates": (),
        }
    )


def _source(profile: ProfileDocument, sheet: DataSheet | None) -> _Source:
    """Rates of the calibrated device: its data sheet's, or the best that were measured."""
    if sheet is not None:
        return _Source(rates=_rates(sheet), sheet=sheet)
    assert profile.operators is not None
    flop_per_s: dict[str, float] = {}
    for rate in profile.rates:
        if rate.flop_per_s > 0:
            flop_per_s[rate.dtype] = max(flop_per_s.get(rate.dtype, 0.0), rate.flop_per_s)
    flop_per_s["fp32"] = max(flop_per_s.get("fp32", 0.0), profile.operators.peak_flop_per_s)
    # The largest array: smaller ones may stay in a cache, which no data sheet counts.
    streams = [rate for rate in profile.rates if rate.probe == "memory"]
    largest = max(streams, key=lambda rate: math.prod(rate.shape), default=None)
    bytes_per_s = profile.operators.peak_bytes_per_s if largest is None else largest.bytes_per_s
    return _Source(
        rates=DeviceRates(name=profile.device_name, flop_per_s=flop_per_s, bytes_per_s=bytes_per_s),
        sheet=None,
    )


def _rates(sheet: DataSheet) -> DeviceRates:
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


def _log_error(source: DataSheet | None, target: DataSheet) -> float:
    same = source is not None and source.vendor == target.vendor == "NVIDIA"
    return BETWEEN_GPUS_LOG_ERROR if same else BETWEEN_KINDS_LOG_ERROR


def _link_ratio(
    profile: ProfileDocument, source: DataSheet | None, target: DataSheet
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
        point.model_copy(update={"time_s": start_s + (point.time_s - start_s) / ratio})
        for point in entry.points
    )
    return entry.model_copy(update={"points": points})


def _ddp(ddp: DdpCosts, memory_ratio: float) -> DdpCosts:
    factors = [memory_ratio if name in _MEMORY_COSTS else 1.0 for name in ddp.names]

    def scaled(row: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(value * factor for value, factor in zip(row, factors, strict=True))

    return ddp.model_copy(
        update={"values": scaled(ddp.values), "draws": tuple(scaled(row) for row in ddp.draws)}
    )


def _notes(profile: ProfileDocument, source: _Source, target: DataSheet) -> tuple[str, ...]:
    spread = _log_error(source.sheet, target)
    origin = (
        "published trainings of ten models on four GPUs"
        if spread == BETWEEN_GPUS_LOG_ERROR
        else "an assumption, for nobody compared devices of these kinds"
    )
    scaled = (
        f"nothing was run on {target.name}: each operator is scaled from {profile.device_name} by the "
        f"data-sheet ratio of what binds it (perfmodel devices {target.id}), with {spread:.0%} of doubt "
        f"(one standard deviation) from {origin}"
    )
    found = [scaled, f"host time is that of the calibrated machine ({profile.device_name})"]
    if source.sheet is None:
        found.append(
            f"{profile.device_name} is not in the catalogue: its measured peaks stand for a data sheet, "
            f"{format_rate(source.rates.flop_per_s['fp32'], 'FLOP')} in fp32 and "
            f"{format_rate(source.rates.bytes_per_s, 'B')} of memory"
        )
    if not profile.asynchronous and target.kind == "cuda":
        found.append(
            "the calibrated device runs synchronously: host time is added to device time, which a GPU "
            "would hide"
        )
    return tuple(found)


def _note_on_links(
    profile: ProfileDocument, source: DataSheet | None, target: DataSheet, ratio: float | None
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
