"""A function in a copy of this process."""

import itertools
import multiprocessing
import pickle
import signal
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable
from functools import partial
from multiprocessing.connection import Connection
from typing import Generic, Self, TypeVar

import torch

from perfmodel.errors import described
from perfmodel.units import Seconds

Item = TypeVar("Item")
Result = TypeVar("Result")


class CrashedError(RuntimeError):
    """A copy of this process ended without an answer."""


class Fork(Generic[Result]):
    """Runs a function in a copy of this process; leaving the context ends the copy.

    The copy computes with one thread, unless it ``is_measured`` as this process would be. More are safe only if
    this process never used more: OpenMP in a copy waits for ever for threads that stayed behind (libgomp).
    """

    def __init__(self, act: Callable[[], Result], *, is_measured: bool = False) -> None:
        context = multiprocessing.get_context("fork")
        self.answer, answering = context.Pipe(duplex=False)
        threads = torch.get_num_threads() if is_measured else 1
        self._child = context.Process(target=_live, args=(act, threads, answering))
        with answering, warnings.catch_warnings():
            # Idle threads of others stay behind; nothing in the copy asks for them.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._child.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the copy and forget it."""
        self.answer.close()
        self._child.kill()
        self._child.join()

    def result(self, *, within_s: Seconds | None = None) -> Result:
        """What the function returned; whatever it raised is raised here.

        ``TimeoutError`` if it has not answered within a limit from now [s], ``CrashedError`` if it ended
        without an answer.
        """
        if not self.answer.poll(within_s):
            raise TimeoutError(
                f"a copy of this process must answer within {within_s:g} s, got nothing"
            )
        try:
            content = self.answer.recv_bytes()
        except EOFError:
            raise CrashedError(
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


def apart(
    act: Callable[[Item], Result], items: Iterable[Item], *, at_once: int
) -> Generator[tuple[Item, Result | Exception], None, None]:
    """Every item with what the function returns or raises for it, in their order.

    Each has a copy of this process to itself, ``at_once`` of them at a time: a crash costs
    one item, whose error is ``CrashedError``. This process must not have used autograd.
    """
    waiting, running = iter(items), deque[tuple[Item, Fork[Result]]]()
    try:
        while True:
            for item in itertools.islice(waiting, at_once - len(running)):
                running.append((item, Fork(partial(act, item))))
            if not running:
                return
            item, copy = running.popleft()
            found: Result | Exception
            with copy:
                try:
                    found = copy.result()
                except Exception as error:  # noqa: BLE001 - the caller decides
                    found = error
            yield item, found
    finally:
        for _, copy in running:
            copy.__exit__()


def _live(act: Callable[[], Result], threads: int, answering: Connection) -> None:
    """Send what the function returns or raises."""
    # To set any number renews torch's pool of threads, which a copy does when it is first asked for. The threads
    # of autograd would ask together, and one of them find none and abort (`caffe2::pthreadpool`, torch 2.15).
    # ``Fork`` says which number.
    torch.set_num_threads(threads)
    try:
        content = pickle.dumps((act(), None), protocol=pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # noqa: BLE001 - the parent raises it
        told = "".join(traceback.format_exception(error))
        error.add_note(told)
        try:
            content = pickle.dumps((None, error))
            pickle.loads(content)  # noqa: S301 - written above
        except Exception:  # noqa: BLE001 - an error with arguments of its own need not survive
            plain = RuntimeError(described(error))
            plain.add_note(told)
            content = pickle.dumps((None, plain))
    answering.send_bytes(content)
