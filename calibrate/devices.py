"""The device of a rank, by its kind; a virtual one costs what a truth file says."""

import importlib
import os
from collections.abc import Iterable

from calibrate.device import Cpu, Cuda, Device
from calibrate.task import LayoutTask, ModelTask, ReplayTask, StepTask, Task


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


def prepare(kind: str, tasks: Iterable[Task]) -> None:
    """Import what each task would import again, in seconds, before copies of this process carry them out."""
    # Whether there is a GPU, torch then asks NVML. It would start CUDA otherwise, which copies cannot use.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    # The first optimizer asks for the compiler, and so does the first fake tensor.
    names = {"torch._dynamo"} | ({"calibrate.virtual.carrier"} if kind == "virtual" else set())
    for task in tasks:
        if isinstance(task, LayoutTask):  # needs torch 2.6
            names.add("calibrate.probes.strategies")
        elif isinstance(task, ModelTask) or (isinstance(task, StepTask) and task.random_model):
            names.add("calibrate.random_models")
        elif isinstance(task, ReplayTask) and task.document:
            names.add("torchvision")  # most models of users ask for it
    for name in sorted(names):
        importlib.import_module(name)


def traced_as(kind: str) -> str:
    """What torch calls a kind of device whose operators are traced in this process."""
    if kind != "virtual":
        return kind
    from calibrate.virtual.carrier import NAME, register  # noqa: PLC0415 - few need it

    register()
    return NAME
