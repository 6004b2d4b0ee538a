"""What end-to-end step times are made of, as a few numbers with physical priors.

A latent is positive and known before any run within a factor: its prior is log-normal. Data sheets
give the scale; the runs move it as far as they can.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from perfmodel import checks

Latents: TypeAlias = Mapping[str, float | NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSheet:
    """Data-sheet values of a device and its links; they only centre the priors."""

    name: str
    matmul_flop_per_s: float
    """Dense peak in the precision of the runs."""
    memory_bytes_per_s: float
    link_bytes_per_s: float
    """Bus bandwidth of a collective inside the node."""
    node_bytes_per_s: float
    """Network bandwidth of one device's share of the node's adapters."""

    def __post_init__(self) -> None:
        """Refuse values that no device has."""
        for name in (
            "matmul_flop_per_s",
            "memory_bytes_per_s",
            "link_bytes_per_s",
            "node_bytes_per_s",
        ):
            checks.positive(name, getattr(self, name))


#: Dense bf16/fp16 peak (fp32 for those without) and memory bandwidth of the vendors' data sheets;
#: measured all-reduce bus bandwidth in the node, and 200 or 400 Gb/s per device between nodes.
SHEETS: Final[Mapping[str, DeviceSheet]] = MappingProxyType(
    {
        sheet.name: sheet
        for sheet in (
            DeviceSheet(
                name="A100",
                matmul_flop_per_s=312e12,
                memory_bytes_per_s=2.0e12,
                link_bytes_per_s=235e9,
                node_bytes_per_s=25e9,
            ),
            DeviceSheet(
                name="H100",
                matmul_flop_per_s=989e12,
                memory_bytes_per_s=3.35e12,
                link_bytes_per_s=350e9,
                node_bytes_per_s=50e9,
            ),
            DeviceSheet(
                name="V100",
                matmul_flop_per_s=125e12,
                memory_bytes_per_s=0.9e12,
                link_bytes_per_s=130e9,
                node_bytes_per_s=12.5e9,
            ),
            DeviceSheet(
                name="B200",
                matmul_flop_per_s=2250e12,
                memory_bytes_per_s=8.0e12,
                link_bytes_per_s=682e9,
                node_bytes_per_s=50e9,
            ),
        )
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prior:
    """What is believed of one latent before any run."""

    median: float
    log_sigma: float
    """Standard deviation of its natural logarithm."""
    meaning: str


def step_time_priors(sheet: DeviceSheet) -> dict[str, Prior]:
    """Priors of the latents of ``step_parts``, in the order in which they are fitted."""
    return _device_priors(sheet) | _communication_priors(sheet)


def _device_priors(sheet: DeviceSheet) -> dict[str, Prior]:
    return {
        "matmul_flop_per_s": Prior(
            median=0.7 * sheet.matmul_flop_per_s,
            log_sigma=0.3,
            meaning="matrix products of unlimited size, one device",
        ),
        "half_tokens": Prior(
            median=150.0, log_sigma=1.0, meaning="tokens at which products run at half speed"
        ),
        "half_width": Prior(
            median=100.0, log_sigma=1.0, meaning="hidden / tp at which products run at half speed"
        ),
        "attention_cost": Prior(
            median=1.0, log_sigma=0.5, meaning="fused attention: time over that of its FLOP"
        ),
        "memory_bytes_per_s": Prior(
            median=0.7 * sheet.memory_bytes_per_s,
            log_sigma=0.5,
            meaning="norms, activations, residuals, optimizer",
        ),
        "backward_ratio": Prior(
            median=2.0, log_sigma=0.1, meaning="backward over forward pass of a layer"
        ),
        "head_cost": Prior(median=1.0, log_sigma=0.1, meaning="output head: time over its FLOP's"),
        "layer_host_s": Prior(
            median=300e-6, log_sigma=1.0, meaning="host time to issue one layer's forward pass"
        ),
        "tensor_host_share": Prior(
            median=0.5, log_sigma=1.0, meaning="more host time per layer with tensor parallelism"
        ),
        "micro_step_s": Prior(
            median=2e-3, log_sigma=1.0, meaning="fixed time per micro-batch and stage"
        ),
        "step_s": Prior(median=10e-3, log_sigma=1.5, meaning="fixed time per step"),
        "optimizer_bytes": Prior(
            median=30.0, log_sigma=0.5, meaning="memory traffic per updated parameter"
        ),
    }


def _communication_priors(sheet: DeviceSheet) -> dict[str, Prior]:
    return {
        "tensor_latency_s": Prior(
            median=20e-6, log_sigma=1.0, meaning="one tensor-parallel collective, per doubling"
        ),
        "tensor_bytes_per_s": Prior(
            median=0.8 * sheet.link_bytes_per_s,
            log_sigma=0.5,
            meaning="bus bandwidth inside a node",
        ),
        "tensor_node_s": Prior(
            median=200e-6,
            log_sigma=1.0,
            meaning="tensor parallelism across nodes: per layer and rank beyond the node",
        ),
        "crowded_s": Prior(
            median=300e-6,
            log_sigma=2.0,
            meaning="tensor parallelism beside a pipeline across nodes: per layer and rank",
        ),
        "node_bytes_per_s": Prior(
            median=0.7 * sheet.node_bytes_per_s,
            log_sigma=0.5,
            meaning="network bandwidth per device between nodes",
        ),
        "hop_latency_s": Prior(
            median=100e-6, log_sigma=1.0, meaning="one hand-over between pipeline stages"
        ),
        "data_bytes_per_s": Prior(
            median=0.7 * sheet.link_bytes_per_s,
            log_sigma=0.5,
            meaning="bus bandwidth of gradients inside a node",
        ),
        "overlap": Prior(
            median=1.5, log_sigma=0.5, meaning="hiding of gradients: 1 none, large perfect"
        ),
        "straggler_share": Prior(
            median=0.01, log_sigma=1.0, meaning="slower per doubling of the nodes"
        ),
    }


def stall_prior() -> Prior:
    """Prior of the stall per pipeline hop of runs in a disturbed state."""
    return Prior(
        median=0.1, log_sigma=1.5, meaning="disturbed runs: stall per hop between nodes and batch"
    )


def medians(priors: Mapping[str, Prior]) -> dict[str, float]:
    """The latents before any run."""
    return {name: prior.median for name, prior in priors.items()}
