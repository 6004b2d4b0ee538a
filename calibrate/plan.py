"""Which kernels are measured alone, by kind of device; pure, and free of torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeProbe:
    """One thing to time: which kernel, on which type, of which shape."""

    probe: str
    dtype: str
    shape: tuple[int, ...]


def planned_probes(device_kind: str) -> tuple[ComputeProbe, ...]:
    """Everything that is measured on a kind of device."""
    return _cuda_probes() if device_kind == "cuda" else _cpu_probes()


def _cuda_probes() -> tuple[ComputeProbe, ...]:
    dtypes = ("fp32", "tf32", "bf16", "fp16")
    return (
        *_matmuls(dtypes, widths=(512, 1024, 2048, 4096, 8192)),
        *_convolutions(dtypes, num_samples=64, widths=(64, 128)),
        *_memory(mebibytes=(1, 16, 256, 1024)),
        ComputeProbe(probe="host_to_device", dtype="fp32", shape=(64 * 2**18,)),
        ComputeProbe(probe="device_to_host", dtype="fp32", shape=(64 * 2**18,)),
        *_common(),
    )


def _cpu_probes() -> tuple[ComputeProbe, ...]:
    # Without matrix units bf16 runs a hundred times slower than fp32 on a CPU: small shapes suffice.
    return (
        *_matmuls(("fp32", "bf16"), widths=(64, 256)),
        *_matmuls(("fp32",), widths=(1024,)),
        *_convolutions(("fp32", "bf16"), num_samples=2, widths=(16, 64)),
        *_memory(mebibytes=(1, 16, 128)),
        *_common(),
    )


def _matmuls(dtypes: tuple[str, ...], *, widths: tuple[int, ...]) -> tuple[ComputeProbe, ...]:
    return tuple(
        ComputeProbe(probe="matmul", dtype=dtype, shape=(width, width, width))
        for dtype in dtypes
        for width in widths
    )


def _convolutions(
    dtypes: tuple[str, ...], *, num_samples: int, widths: tuple[int, ...]
) -> tuple[ComputeProbe, ...]:
    return tuple(
        ComputeProbe(probe="convolution", dtype=dtype, shape=(num_samples, width, 28, 28))
        for dtype in dtypes
        for width in widths
    )


def _memory(*, mebibytes: tuple[int, ...]) -> tuple[ComputeProbe, ...]:
    return tuple(
        ComputeProbe(probe="memory", dtype="fp32", shape=(size * 2**18,)) for size in mebibytes
    )


def _common() -> tuple[ComputeProbe, ...]:
    return (
        ComputeProbe(probe="dispatch", dtype="fp32", shape=(1,)),
        ComputeProbe(probe="optimizer", dtype="fp32", shape=(64, 2**16)),
    )
