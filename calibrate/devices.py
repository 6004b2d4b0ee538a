"""The device of a rank, by its kind; a virtual one costs what a truth file says."""

import importlib

from calibrate.device import Cpu, Cuda, Device


def open_device(
    kind: str, *, local_rank: int, truth: str | None = None, occasion: str = ""
) -> Device:
    """The device of a rank, which this process keeps for good."""
    if kind == "cuda":
        return Cuda(local_rank)
    if kind == "cpu":
        return Cpu()
    assert truth is not None, kind
    from calibrate.virtual import Truth  # noqa: PLC0415 - few need it
    from calibrate.virtual.carrier import Carrier  # noqa: PLC0415
    from calibrate.virtual.gpu import VirtualGpu  # noqa: PLC0415

    gpu = VirtualGpu(Truth.read(truth), rank=local_rank, occasion=occasion)
    Carrier.open(gpu)
    return gpu


def prepare(kind: str) -> None:
    """Import what each task would import again, in seconds, before copies of this process carry them out."""
    if kind != "cuda":  # its tasks share one process
        # The first optimizer asks for the compiler, and so does the first fake tensor.
        importlib.import_module("torch._dynamo")
    if kind == "virtual":
        importlib.import_module("calibrate.virtual.carrier")


def traced_as(kind: str) -> str:
    """What torch calls a kind of device whose operators are traced in this process."""
    if kind != "virtual":
        return kind
    from calibrate.virtual.carrier import NAME, register  # noqa: PLC0415 - few need it

    register()
    return NAME
