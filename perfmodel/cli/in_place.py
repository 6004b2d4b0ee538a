"""Models that the profile does not hold yet: trained, and timed operator by operator, before they are predicted.

What was timed stays beside the profile, in ``workloads/``, by operator, shapes, type and memory layout: the next
model that has the same operators need not be timed.
"""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer

from perfmodel.cli import measurement
from perfmodel.errors import Interrupted, PerfModelError

if TYPE_CHECKING:
    from perfmodel.documents.workload import WorkloadDocument
    from perfmodel.machine.measured import MeasuredMachine, MeasuredWorkload, OperatorCosts
    from perfmodel.workload.step import SymbolicStep


def time_in_place(
    machine: "MeasuredMachine",
    calibration: Path,
    document: "WorkloadDocument",
    batch_of: Callable[["MeasuredWorkload"], int],
    *,
    code: str | None = None,
) -> None:
    """Time the step of a traced workload that nothing was timed of, if this is the machine.

    ``calibration`` is its folder, ``batch_of`` says at which micro-batch. With its ``code``, such as FILE.py:FACTORY,
    the model trains for some seconds, but on a GPU, whose operators are timed alone. Nothing is measured, and
    nothing said, on another machine: curves answer there.
    """
    from calibrate.workloads import is_unfinished, measure_workload, with_stored_workloads
    from perfmodel.answer import open_workload

    trace = document.trace
    if machine.operators is None or trace.method.device_kind != machine.traced_kind:
        return
    machine = with_stored_workloads(machine, calibration)
    micro_batch = batch_of(open_workload(machine, document))
    code = None if machine.asynchronous else code
    assert machine.operators is not None
    is_known = _is_timed(machine.operators, trace, micro_batch, code)
    if is_known and not is_unfinished(document, calibration, micro_batch=micro_batch, code=code):
        return
    from importlib.util import find_spec

    if any(find_spec(name) is None for name in ("torch", "psutil")):
        return
    from calibrate.environment import describe_environment

    here = describe_environment(observe_s=0.0)["host"]["fingerprint"]
    if here != machine.origin.fingerprint:
        return
    try:
        with TemporaryDirectory() as name, measurement("timing in place") as on_progress:
            file = Path(name, "workload.json")
            document.write(file)
            untrained = measure_workload(
                file,
                micro_batch=micro_batch,
                code=code,
                folder=calibration,
                profile=machine,
                on_progress=on_progress,
            )
    except Interrupted:
        words = "stopped by the user; what was measured is kept; repeat the command, or add --no-measure"
        raise Interrupted(f"timing in place: {words}") from None
    except PerfModelError as error:
        typer.echo(f"not timed in place, curves answer: {error}", err=True)
    else:
        if untrained:
            typer.echo(f"not trained in every round: {untrained}", err=True)


def _is_timed(
    operators: "OperatorCosts", trace: "SymbolicStep", micro_batch: int, code: str | None
) -> bool:
    from perfmodel.cost.operators import OperatorDurations

    known, step = OperatorDurations(operators), trace.at(micro_batch=micro_batch)
    return known.holds(step) if code is None else known.trained(step) is not None
