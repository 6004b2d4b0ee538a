"""The real CPU allocator's peak over a step, beside the sweep's; a process of its own.

``python -m perfmodel.trace.allocator MODEL BATCH OPTIMIZER`` prints one JSON object.
Every allocation and release of the allocator is an event of the profiler, with its bytes; their running
sum from before the model exists is what is in use.
"""

import contextlib
import json
import os
import pickle
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from perfmodel.trace.sources import ModelSource, SampleSize, find_source
from perfmodel.trace.step import ModelSpec, autocast, build_model_spec, record_step, without_content
from perfmodel.units import Bytes, Seconds
from perfmodel.workload.step import StepMethod

_STEP = "perfmodel step"
_ALLOCATION = "[memory]"


def allocator_peak_bytes(source: ModelSource, method: StepMethod, micro_batch: int) -> Bytes:
    """Train two real steps and take the most memory in use during the second. [B]"""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model_spec = build_model_spec(source, method)
        batch = source.draw_batch(micro_batch)
        _real_step(model_spec, batch)
        with record_function(_STEP):
            _real_step(model_spec, batch)
    results = profiler.profiler.kineto_results  # type: ignore[union-attr]
    return peak_of_events(list(results.events()))


def peak_of_events(events: list[Any]) -> Bytes:
    """Highest running sum of the allocator's events during the marked step. [B]"""
    step = next(event for event in events if event.name() == _STEP)
    changes = sorted(
        ((event.start_ns(), event.nbytes()) for event in events if event.name() == _ALLOCATION),
        key=lambda change: change[0],
    )
    in_use = peak = 0
    for time_ns, size_bytes in changes:
        in_use += size_bytes
        if step.start_ns() <= time_ns <= step.end_ns():
            peak = max(peak, in_use)
    return peak


def _real_step(model_spec: ModelSpec, batch: Any) -> None:
    model_spec.optimizer.zero_grad(set_to_none=True)
    with autocast(model_spec.method):
        outputs = model_spec.module(*batch.positional, **batch.keyword)
        loss = model_spec.source.loss(outputs, batch.targets)
    loss.backward()  # type: ignore[no-untyped-call]
    model_spec.optimizer.step()


def main(arguments: list[str]) -> None:
    """Print predicted and measured peak of one setting."""
    name, batch, optimizer = arguments
    torch.set_num_threads(1)
    method = StepMethod(
        optimizer=optimizer,
        optimizer_implementation="loop",
        precision="fp32",
        checkpointing="none",
        device_kind="cpu",
    )
    source = find_source(name, SampleSize())
    with without_content("cpu"):
        sweep = record_step(build_model_spec(source, method), int(batch)).sweep
    measured = allocator_peak_bytes(source, method, int(batch))
    place = sweep.places[int(sweep.parts.sum(axis=1).argmax())]
    found = {
        "predicted_bytes": sweep.peak_bytes,
        "measured_bytes": measured,
        "phase": place.phase.value,
        "operator": place.operator,
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])


Result = TypeVar("Result")


class Fork(Generic[Result]):
    """Runs a function from now on; leaving the context ends the copy, whatever it does."""

    def __init__(self, act: Callable[[], Result]) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        reading, writing = os.pipe()
        with warnings.catch_warnings():
            # Idle threads of others stay behind; nothing in the copy asks for them.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                self._child = os.fork()
            except OSError:
                os.close(reading)
                os.close(writing)
                raise
        if self._child == 0:
            os.close(reading)
            _live(act, writing)
        os.close(writing)
        self._reading = reading

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the copy and forget it."""
        os.close(self._reading)
        # Where SIGCHLD is ignored, the kernel has forgotten a copy that ended.
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)

    def result(self, *, within_s: Seconds | None = None) -> Result:
        """What the function returned, once it has.

        Raises
        ------
        TimeoutError
            If the copy has not answered within so long from now. [s]
        RuntimeError
            If the copy ended without an answer.
        Exception
            Whatever the function raised.
        """
        answered, _, _ = select.select([self._reading], [], [], within_s)
        if not answered:
            raise TimeoutError(
                f"a copy of this process must answer within {within_s:g} s, got nothing"
            )
        with os.fdopen(os.dup(self._reading), "rb") as file:
            content = file.read()
        if not content:
            raise RuntimeError(
                f"a copy of this process must answer before it ends, got {self._ending()}"
            )
        found, error = pickle.loads(content)  # noqa: S301 - written by this very program
        if error is not None:
            raise error
        result: Result = found
        return result

    def _ending(self) -> str:
        """How the copy ended; leaves it to be waited for."""
        found = os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOWAIT)
        assert found is not None
        if found.si_code == os.CLD_EXITED:
            return f"exit code {found.si_status}"
        name = signal.Signals(found.si_status).name
        return f"{name} (out of memory?)" if name == "SIGKILL" else name


def _live(act: Callable[[], Result], writing: int) -> NoReturn:
    """The life of the copy: nothing may run the parent's code twice."""
    status = 1
    try:
        # A copy renews torch's pool of threads when it is first asked for. The threads of autograd would
        # ask at the same time, and one of them find none and abort (`caffe2::pthreadpool`, torch 2.15).
        torch.set_num_threads(torch.get_num_threads())
        content = _answer(act)
        with os.fdopen(writing, "wb") as file:
            file.write(content)
        status = 0
    finally:
        os._exit(status)


def _answer(act: Callable[[], Result]) -> bytes:
    """What the function returned, or the error that the parent raises."""
    try:
        return pickle.dumps((act(), None), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        told = "".join(traceback.format_exception(error))
        error.add_note(told)
        try:
            content = pickle.dumps((None, error))
            pickle.loads(content)  # noqa: S301 - written above
        except Exception:  # noqa: BLE001 - an error with arguments of its own need not survive
            return pickle.dumps((None, RuntimeError(told)))
        return content
