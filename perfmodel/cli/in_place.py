"""Models that the profile does not hold yet: traced, and timed operator by operator, before they are predicted.

What was timed stays beside the profile, in ``workloads/``, by operator, shapes, type and memory layout: the next
model that has the same operators need not be timed.
"""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from perfmodel.cli.output import measurement
from perfmodel.errors import PerfModelError

if TYPE_CHECKING:
    from perfmodel.answer.answer import Forecast
    from perfmodel.machine.measured import OperatorCosts
    from perfmodel.workload.step import SymbolicStep

#: What a user who names a model alone does not choose.
_METHOD = "traced with SGD in {precision}; perfmodel trace takes another optimizer and precision"
_IN_WORDS = {"fp32": "fp32", "fp16": "fp16 autocast"}
#: Samples of one pass where the operators of a model are found; the file serves every batch.
_TRACED_SAMPLES = 8


def traced_file(profile: Path, model: str, folder: Path) -> Path:
    """Trace a model for the kind of device of a profile into a folder, and return its workload file.

    It is traced again each time: nothing tells whether what a factory imports has changed.
    """
    from perfmodel.documents.profile import ProfileDocument
    from perfmodel.models import refuse_without_torch, traced_document
    from perfmodel.workload.optimizers import CUDA_DEFAULT, DEFAULT
    from perfmodel.workload.step import StepMethod

    refuse_without_torch(f"--workload: {model}")
    machine = ProfileDocument.read(profile).machine
    costs = machine.device_costs
    precision = "fp32" if costs is None or costs.left_out[0].precision == "fp32" else "fp16"
    method = StepMethod(
        optimizer="sgd",
        optimizer_implementation=DEFAULT if costs is None else CUDA_DEFAULT,
        precision=precision,
        checkpointing="none",
        device_kind=machine.traced_kind if costs is None else "cpu",
    )
    document = traced_document(
        model,
        method,
        micro_batch=_TRACED_SAMPLES,
        image_size=None,
        sequence_length=None,
        argv=sys.argv,
        as_on_cuda=costs is not None,
    )
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", document.workload.name)
    path = folder / f"{name}.json"
    assert document.trace is not None
    caveats = (*document.trace.caveats, _METHOD.format(precision=_IN_WORDS[precision]))
    trace = replace(document.trace, caveats=caveats)
    document.model_copy(update={"trace": trace}).write(path)
    return path


def time_in_place(profile: Path, file: Path, request: "Forecast") -> None:
    """Time the operators of a workload file that nothing was timed of, if this is the machine of the profile.

    Nothing is measured, and nothing said, on another machine: curves answer there.
    """
    from calibrate.workloads import with_stored_workloads
    from perfmodel.answer.measured import open_workload
    from perfmodel.documents.profile import ProfileDocument
    from perfmodel.documents.workload import WorkloadDocument

    machine = ProfileDocument.read(profile).machine
    trace = WorkloadDocument.read(file).trace
    if (
        trace is None
        or machine.operators is None
        or trace.method.device_kind != machine.traced_kind
    ):
        return
    machine = with_stored_workloads(machine, profile.parent)
    micro_batch = request.layouts(open_workload(machine, str(file)))[0].micro_batch
    if machine.operators is None or _is_timed(machine.operators, trace, micro_batch):
        return
    from importlib.util import find_spec

    if any(find_spec(name) is None for name in ("torch", "psutil")):
        return
    from calibrate import workloads
    from calibrate.environment import describe_environment
    from calibrate.launch import TorchrunLauncher

    here = describe_environment(observe_s=0.0)["host"]["fingerprint"]
    if here != machine.origin.fingerprint:
        return
    asked = workloads.WorkloadRequest(
        folder=profile.parent,
        document=file,
        micro_batches=(micro_batch,),
        resume=True,
        by_content=True,
        waits=False,
    )
    try:
        with measurement("timing in place") as on_progress:
            workloads.measure_workload(
                asked, TorchrunLauncher(), profile=machine, on_progress=on_progress
            )
    except PerfModelError as error:
        typer.echo(f"not timed in place, curves answer: {error}", err=True)


def _is_timed(operators: "OperatorCosts", trace: "SymbolicStep", micro_batch: int) -> bool:
    from perfmodel.cost.operators import OperatorDurations

    return OperatorDurations(operators).holds(trace.at(micro_batch=micro_batch))
