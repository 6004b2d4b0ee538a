"""A function in a copy of this process, beside it or in a heap of its own; Linux and its kin."""

import contextlib
import os
import pickle
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Generic, NoReturn, Self, TypeVar

import torch

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
            self._child = os.fork()
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
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)

    def result(self) -> Result:
        """What the function returned, once it has.

        Raises
        ------
        RuntimeError
            If the copy ended without an answer.
        Exception
            Whatever the function raised.
        """
        with os.fdopen(os.dup(self._reading), "rb") as file:
            content = file.read()
        if not content:
            raise RuntimeError(
                "a copy of this process must answer before it ends, got nothing; its own last words are above"
            )
        found, error = pickle.loads(content)  # noqa: S301 - written by this very program
        if error is not None:
            raise error
        result: Result = found
        return result


def _live(act: Callable[[], Result], writing: int) -> NoReturn:
    """The life of the copy: nothing may run the parent's code twice."""
    try:
        # A copy renews torch's pool of threads when it is first asked for. The threads of autograd would
        # ask at the same time, and one of them find none and abort (`caffe2::pthreadpool`, torch 2.15).
        torch.set_num_threads(torch.get_num_threads())
        try:
            content = pickle.dumps((act(), None), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            error.add_note("".join(traceback.format_exception(error)))
            content = pickle.dumps((None, error), protocol=pickle.HIGHEST_PROTOCOL)
        with os.fdopen(writing, "wb") as file:
            file.write(content)
    finally:
        os._exit(0)
