"""A function in a copy of this process."""

import multiprocessing
import pickle
import signal
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Generic, Self, TypeVar

import torch

from perfmodel.units import Seconds

Result = TypeVar("Result")


class Fork(Generic[Result]):
    """Runs a function in a copy of this process; leaving the context ends the copy."""

    def __init__(self, act: Callable[[], Result]) -> None:
        context = multiprocessing.get_context("fork")
        self._answer, answering = context.Pipe(duplex=False)
        self._child = context.Process(target=_live, args=(act, answering))
        with answering, warnings.catch_warnings():
            # Idle threads of others stay behind; nothing in the copy asks for them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._child.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the copy and forget it."""
        self._answer.close()
        self._child.kill()
        self._child.join()

    def result(self, *, within_s: Seconds | None = None) -> Result:
        """What the function returned; whatever it raised is raised here.

        ``TimeoutError`` if it has not answered within so long from now [s], ``RuntimeError`` if it ended
        without an answer.
        """
        if not self._answer.poll(within_s):
            raise TimeoutError(
                f"a copy of this process must answer within {within_s:g} s, got nothing"
            )
        try:
            content = self._answer.recv_bytes()
        except EOFError:
            raise RuntimeError(
                f"a copy of this process must answer before it ends, got {self._ending()}"
            ) from None
        found, error = pickle.loads(content)  # noqa: S301 - written by this very program
        if error is not None:
            raise error
        result: Result = found
        return result

    def _ending(self) -> str:
        self._child.join()
        code = self._child.exitcode
        if code is None or code >= 0:
            return f"exit code {code}"
        name = signal.Signals(-code).name
        return f"{name} (out of memory?)" if name == "SIGKILL" else name


def _live(act: Callable[[], Result], answering: Connection) -> None:
    """Send what the function returns or raises."""
    # A copy renews torch's pool of threads when it is first asked for. The threads of autograd would
    # ask at the same time, and one of them find none and abort (`caffe2::pthreadpool`, torch 2.15).
    torch.set_num_threads(torch.get_num_threads())
    try:
        content = pickle.dumps((act(), None), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        told = "".join(traceback.format_exception(error))
        error.add_note(told)
        try:
            content = pickle.dumps((None, error))
            pickle.loads(content)  # noqa: S301 - written above
        except Exception:  # noqa: BLE001 - an error with arguments of its own need not survive
            content = pickle.dumps((None, RuntimeError(told)))
    answering.send_bytes(content)
