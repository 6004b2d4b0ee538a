"""Priors of runs on a device: data-sheet values from the short table of latents, or from the catalogue."""

from typing import Final

from perfmodel.cost.latents import SHEETS, DeviceSheet
from perfmodel.documents.catalogue import DataSheet
from perfmodel.errors import NotFeasible, UsageError
from perfmodel.hardware.catalogue import (
    LINK_SHARE,
    find_device,
    host_link_bytes_per_s,
    shipped_catalogue,
)
from perfmodel.parallelism.layout import Precision

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


def device_sheet(text: str, *, flag: str = "--device-type") -> DeviceSheet:
    """What priors need of a device, under the identifier that documents keep.

    Parameters
    ----------
    text
        A100, H100, V100, B200, or any name of the catalogue.
    flag
        Who asks, for the message.

    Raises
    ------
    UsageError
        If there is no such device, or nobody published what it computes in 16 bit or reads per second.
    """
    if text in SHEETS:
        return SHEETS[text]
    sheet = find_device(text, shipped_catalogue(), flag=flag)
    peak = sheet.peaks.get("bf16") or sheet.peaks.get("fp16")
    if peak is None or sheet.bandwidth is None:
        raise UsageError(
            f"{flag}: must have a 16-bit peak and a memory bandwidth in the catalogue, got {sheet.id}"
        )
    return DeviceSheet(
        name=sheet.id,
        matmul_flop_per_s=peak.flop_per_s,
        memory_bytes_per_s=sheet.bandwidth.bytes_per_s,
        link_bytes_per_s=_link_bytes_per_s(sheet),
        node_bytes_per_s=_node_bytes_per_s(sheet),
    )


def catalogued(device: str) -> DataSheet:
    """The full data sheet of a device that ``device_sheet`` knows."""
    return find_device(_SHORT.get(device, device), shipped_catalogue())


def precision_ratio(precision: Precision, device: str, *, where: str) -> float:
    """Peak of matrix products in a precision over that in 16 bit, by the data sheet.

    Raises
    ------
    NotFeasible
        If the device has no such products.
    """
    peaks = {str(name): peak.flop_per_s for name, peak in catalogued(device).peaks.items()}
    half = peaks.get("fp16") or peaks.get("bf16")
    if precision is Precision.BF16:
        return 1.0
    if half is None or precision not in peaks:
        known = ", ".join(each for each in Precision if each in {Precision.BF16, *peaks})
        raise NotFeasible(f"{where}: precision must be one of {known} on {device}, got {precision}")
    return peaks[precision] / half


def _link_bytes_per_s(sheet: DataSheet) -> float:
    """Between devices of a node: their own link, or the one to the host. [B/s]"""
    if sheet.link is not None:
        return sheet.link.bytes_per_s * LINK_SHARE
    host = host_link_bytes_per_s(sheet, shipped_catalogue())
    return _NODE_BYTES_PER_S[2] if host is None else host


def _node_bytes_per_s(sheet: DataSheet) -> float:
    if sheet.link is None or sheet.link_joins_pairs:
        return _NODE_BYTES_PER_S[2]
    return _NODE_BYTES_PER_S[0 if sheet.link.bytes_per_s >= _FAST_LINK_BYTES_PER_S else 1]
