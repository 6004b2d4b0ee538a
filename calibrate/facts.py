"""What is known about the machine that measures: plain JSON, None where it is unknown.

Keys name their unit as everywhere: bytes, seconds, hertz, watts; temperatures are in Celsius.
"""

from typing import TypedDict


class HostFacts(TypedDict):
    """Which machine; ``fingerprint`` ignores software and what the neighbours do."""

    name: str
    fingerprint: str
    os: str | None
    kernel: str
    is_virtual: bool | None


class CpuFacts(TypedDict):
    """Cores, what limits them, and how busy they are before the measurement.

    ``stolen`` is the share of wanted time that a hypervisor gives to others while all cores work, as
    far as it tells.
    """

    model: str | None
    usable_cores: int
    logical_cores: int | None
    physical_cores: int | None
    threads_per_core: int | None
    quota_cores: float | None
    governor: str | None
    frequency_hz: float | None
    max_frequency_hz: float | None
    load_average_1min: float | None
    busy_cores: float | None
    stolen: float | None


class MemoryFacts(TypedDict):
    """Memory of the host; ``limit_bytes`` is that of the control group."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None
    swap_used_bytes: int | None


class SoftwareFacts(TypedDict):
    """Versions; ``git_commit`` is that of the checkout this code runs from."""

    python: str
    torch: str | None
    torchvision: str | None
    numpy: str | None
    cuda_runtime: str | None
    cuda_driver: str | None
    nccl: str | None
    has_gloo: bool | None
    git_commit: str | None


class GpuFacts(TypedDict):
    """One row of ``nvidia-smi --query-gpu``; the PCIe link slows down when idle."""

    index: int | None
    name: str | None
    uuid: str | None
    pci_bus_id: str | None
    pcie_generation: int | None
    max_pcie_generation: int | None
    pcie_width: int | None
    max_pcie_width: int | None
    memory_bytes: int | None
    power_limit_w: float | None
    clock_hz: float | None
    max_clock_hz: float | None
    temperature_c: float | None
    compute_mode: str | None
    mig_mode: str | None
    persistence_mode: str | None
    uncorrected_ecc_errors: int | None
    driver: str | None


class GpuProcessFacts(TypedDict):
    """A process that computes on a GPU."""

    gpu_uuid: str | None
    pid: int | None
    name: str | None
    memory_bytes: int | None


class GpuTopologyFacts(TypedDict):
    """``nvidia-smi topo -m``: how two devices reach each other, such as ``NV18`` or ``SYS``."""

    raw: str
    paths: dict[str, dict[str, str]]


class TorchFacts(TypedDict):
    """What only a process with torch can say; ``p2p[i][j]`` is whether GPU i reads GPU j."""

    torch: str
    cuda_runtime: str | None
    nccl: str | None
    has_gloo: bool
    num_cuda_devices: int
    p2p: list[list[bool]] | None


class Environment(TypedDict):
    """Everything that a measurement must be read with."""

    time_utc: str
    command_line: list[str]
    variables: dict[str, str]
    host: HostFacts
    cpu: CpuFacts
    memory: MemoryFacts
    software: SoftwareFacts
    gpus: list[GpuFacts]
    gpu_topology: GpuTopologyFacts | None
    gpu_processes: list[GpuProcessFacts] | None
    p2p: list[list[bool]] | None
