"""Measure while the hypervisor leaves the machine its processors.

On a shared host others may get the time that this machine wants. From inside everything then looks
slow, by any factor and without a trace in its own load; but the kernel counts what was stolen, where
the hypervisor tells (KVM and Xen can). Nothing stolen may also mean that nobody tells.
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
#: No task is tried again at once while all tries again took more than this share of the first ones.
_MOST_AGAIN: Final = 0.5
#: Who waits for calm lets the machine rest for so long, then keeps it busy for a moment to see.
_REST_S: Final = 16.0
_LOOK_S: Final = 4.0
_BLOCK_BYTES: Final = 2**20

_T = TypeVar("_T")


class ProcessorTime(NamedTuple):
    """Of all processors of the machine together. [s]"""

    busy_s: Seconds
    stolen_s: Seconds
    """Wanted here, and given to others."""

    def since(self, start: "ProcessorTime") -> "ProcessorTime":
        """What was spent from then on; counters that were set back count as standing still."""
        return ProcessorTime(
            busy_s=max(0.0, self.busy_s - start.busy_s),
            stolen_s=max(0.0, self.stolen_s - start.stolen_s),
        )

    @property
    def stolen_share(self) -> float:
        """Of what was wanted, in [0, 1]."""
        wanted_s = self.busy_s + self.stolen_s
        return self.stolen_s / wanted_s if wanted_s > 0 else 0.0


def processor_time() -> ProcessorTime:
    """Since the start of the machine; nothing is stolen where nobody counts it."""
    times = psutil.cpu_times()
    busy = (getattr(times, name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    return ProcessorTime(busy_s=sum(busy), stolen_s=getattr(times, "steal", 0.0))


def stolen_under_load(num_cores: int, load_s: Seconds) -> float:
    """Share that is stolen while so many cores are kept busy: an idle machine has nothing to lose."""
    start = processor_time()
    keep_busy(num_cores, load_s)
    return processor_time().since(start).stolen_share


def keep_busy(num_cores: int, load_s: Seconds) -> None:
    """Use so many cores for so long."""
    block = bytes(_BLOCK_BYTES)
    end_s = time.monotonic() + load_s

    def work() -> None:
        # Hashing lets other threads run.
        while time.monotonic() < end_s:
            hashlib.sha256(block)

    threads = [threading.Thread(target=work) for _ in range(num_cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried(Generic[_T]):
    """What was measured, and what the machine spent meanwhile."""

    found: _T
    spent: ProcessorTime
    wall_s: Seconds


@dataclass(slots=True, kw_only=True)
class Patience:
    """Measures again what was measured while others had the processors."""

    agree: Callable[[tuple[ProcessorTime, Seconds]], tuple[ProcessorTime, Seconds]]
    """One answer on all ranks, which must try equally often: that of the machine that lost most."""
    on_again: Callable[[], None]
    """Called before another try."""
    wait_s: Seconds = 0.0
    """How long it may still wait for calm before tasks are tried again, all together."""
    on_wait: Callable[[Seconds], None] = lambda _waited_s: None
    """Called with how long it has waited since the last call."""
    look: Callable[[Seconds], None] = lambda load_s: keep_busy(1, load_s)
    """Keeps the cores of this rank busy."""
    rest: Callable[[Seconds], None] = time.sleep
    clock: Callable[[], Seconds] = time.monotonic
    read: Callable[[], ProcessorTime] = processor_time
    _once_s: Seconds = 0.0
    _again_s: Seconds = 0.0

    def calmest(self, act: Callable[[], _T], *, most_tries: int = MOST_TRIES) -> Tried[_T]:
        """The calmest of some tries, nearly always the first one; all ranks must call it."""
        best = self._try(act)
        self._once_s += best.wall_s
        for number in range(1, most_tries):
            if best.spent.stolen_share <= CALM:
                break
            is_spent = self._again_s > _MOST_AGAIN * self._once_s
            # What disturbs for a moment is over by the second try.
            is_over = (number > 1 or is_spent) and self._waited_for_calm()
            if is_spent and not is_over:
                break
            self.on_again()
            again = self._try(act)
            self._again_s += again.wall_s
            best = min(best, again, key=lambda tried: tried.spent.stolen_share)
        return best

    def _waited_for_calm(self) -> bool:
        """Whether others left the processors alone before nothing might be waited any more."""
        while self.wait_s > 0:
            rest_s = min(_REST_S, self.wait_s)
            self.rest(rest_s)
            seen = self._try(lambda: self.look(_LOOK_S))
            waited_s = rest_s + seen.wall_s
            self.wait_s -= waited_s
            self.on_wait(waited_s)
            if seen.spent.stolen_share <= CALM:
                return True
        return False

    def _try(self, act: Callable[[], _T]) -> Tried[_T]:
        start, start_s = self.read(), self.clock()
        found = act()
        spent, wall_s = self.agree((self.read().since(start), self.clock() - start_s))
        return Tried(found=found, spent=spent, wall_s=wall_s)
