"""Measure while the hypervisor leaves the machine its processors.

On a shared host others may get the time that this machine wants. From inside everything then looks
slow, by any factor and without a trace in its own load; but the kernel counts what was stolen, where
the hypervisor tells (KVM and Xen do).
"""

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

import psutil

from perfmodel.documents.calm import CALM
from perfmodel.units import Seconds

#: How often a task is measured before the calmest time is taken.
MOST_TRIES: Final = 3
#: Trying again takes no more than this share of what was spent before.
_MOST_AGAIN: Final = 0.5
_BLOCK_BYTES: Final = 2**20

_T = TypeVar("_T")


class ProcessorTime(NamedTuple):
    """Since the start of the machine, over all its processors. [s]"""

    busy_s: Seconds
    stolen_s: Seconds


def processor_time() -> ProcessorTime:
    """Now; nothing is stolen where nobody counts it."""
    times = psutil.cpu_times()
    busy = (getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    return ProcessorTime(busy_s=sum(busy), stolen_s=getattr(times, "steal", 0.0))


def stolen_share(start: ProcessorTime, end: ProcessorTime) -> float:
    """Share of the processor time that was wanted in between and went to others, in [0, 1]."""
    stolen_s = max(0.0, end.stolen_s - start.stolen_s)
    wanted_s = stolen_s + max(0.0, end.busy_s - start.busy_s)
    return stolen_s / wanted_s if wanted_s > 0 else 0.0


def stolen_under_load(num_cores: int, load_s: Seconds) -> float:
    """The same share while so many cores are kept busy: an idle machine has nothing to lose."""
    block = bytes(_BLOCK_BYTES)
    end_s = time.monotonic() + load_s

    def work() -> None:
        # Hashing lets other threads run.
        while time.monotonic() < end_s:
            hashlib.sha256(block)

    start = processor_time()
    threads = [threading.Thread(target=work) for _ in range(num_cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return stolen_share(start, processor_time())


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried(Generic[_T]):
    """What was measured, and the share of the processors that others had meanwhile."""

    found: _T
    stolen: float


@dataclass(slots=True, kw_only=True)
class Patience:
    """Measures again what was measured while others had the processors."""

    agree: Callable[[tuple[float, Seconds]], tuple[float, Seconds]]
    """Rank 0's value, on all ranks: they must try equally often."""
    clock: Callable[[], Seconds] = time.monotonic
    read: Callable[[], ProcessorTime] = processor_time
    _once_s: Seconds = 0.0
    _again_s: Seconds = 0.0

    def calmest(self, act: Callable[[], _T], *, most_tries: int = MOST_TRIES) -> Tried[_T]:
        """The calmest of some tries, nearly always the first one; all ranks must call it."""
        best, spent_s = self._try(act)
        self._once_s += spent_s
        for _ in range(most_tries - 1):
            if best.stolen <= CALM or self._again_s > _MOST_AGAIN * self._once_s:
                break
            again, spent_s = self._try(act)
            self._again_s += spent_s
            best = min(best, again, key=lambda tried: tried.stolen)
        return best

    def _try(self, act: Callable[[], _T]) -> tuple[Tried[_T], Seconds]:
        start, start_s = self.read(), self.clock()
        found = act()
        mine = stolen_share(start, self.read()), self.clock() - start_s
        stolen, spent_s = self.agree(mine)
        return Tried(found=found, stolen=stolen), spent_s
