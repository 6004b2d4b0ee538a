"""A function in a copy of this process, beside it or in a heap of its own; Linux and its kin."""

import contextlib
import os
import pickle
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Generic, NoReturn, Self, TypeVar

import torch

from perfmodel.units import Seconds

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
