"""Tasks about a single model or layer, each in a process of its own that has measured nothing before."""

import contextlib
import functools
import importlib
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import NoReturn

from calibrate.agent import die_with_parent
from calibrate.task import Task
from perfmodel.trace.fork import Fork


@contextlib.contextmanager
def own_heaps(
    act: Callable[[Task], str | None], *, imports: Sequence[str]
) -> Iterator[Callable[[Task], str | None]]:
    """Inside, a function that carries out a task in a copy of this process as it is now.

    Models that are measured one after another in one process find holes in its heap that earlier ones
    left: a large tensor in such a hole touches no page for the first time, in a training of its own it
    does. So a copy of this process waits from now on, and is itself copied for every task.

    Parameters
    ----------
    imports
        Modules that tasks import late, which would take seconds in every copy.
    """
    for name in imports:
        importlib.import_module(name)
    here, there = multiprocessing.Pipe()
    with here, Fork(functools.partial(_serve, there, here, act)):
        there.close()

        def carry_out(task: Task) -> str | None:
            here.send(task)
            found, error = here.recv()
            if error is not None:
                raise error
            result: str | None = found
            return result

        yield carry_out


def _serve(
    orders: Connection, parents_end: Connection, act: Callable[[Task], str | None]
) -> NoReturn:
    """The life of the copy that is copied: it measures nothing itself."""
    die_with_parent()
    # Else the end of the parent would not end the wait for orders.
    parents_end.close()
    while True:
        task: Task = orders.recv()
        with Fork(functools.partial(_measured, act, task)) as copy:
            answer: tuple[str | None, Exception | None]
            try:
                answer = copy.result(), None
            except Exception as error:  # noqa: BLE001 - the worker raises it
                answer = None, error
        orders.send(answer)


def _measured(act: Callable[[Task], str | None], task: Task) -> str | None:
    die_with_parent()
    return act(task)
