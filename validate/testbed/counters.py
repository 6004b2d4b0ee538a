"""What the kernel counts: bytes of every link, CPU time of the machine, and what was taken from it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from perfmodel.units import Seconds
from validate.testbed.namespace import inside
from validate.testbed.wiring import sent_bytes

#: Key of the machine's busy CPU time among the counters. [s]
BUSY: Final = "busy cpu"
#: Key of the CPU time that the hypervisor gave to other guests. [s]
STOLEN: Final = "stolen cpu"

#: Fields of the first line of /proc/stat that count as busy: user, nice, system, irq, softirq.
_BUSY_FIELDS: Final = (1, 2, 3, 6, 7)
_STOLEN_FIELDS: Final = (8,)
_LARGEST_TEXT_BYTES: Final = 65536


@dataclass(frozen=True, slots=True)
class CounterReader:
    """Counters of links in other namespaces.

    The kernel ties ``/proc/net/dev`` to a namespace when it is opened, so that files opened here
    can be read from anywhere, without entering that namespace again.
    """

    files: dict[str, tuple[int, str]]
    """For each link an open file, and the name of its device there."""

    @classmethod
    def open(cls, links: dict[str, tuple[str, str]]) -> "CounterReader":
        """Open the counters of links, given by namespace and device."""
        files = {}
        for link, (namespace, device) in links.items():
            with inside(namespace):
                files[link] = (os.open("/proc/thread-self/net/dev", os.O_RDONLY), device)
        return cls(files)

    def read(self) -> dict[str, float]:
        """Bytes sent by each link, and busy and stolen seconds of the machine."""
        found: dict[str, float] = {
            link: sent_bytes(os.pread(file, _LARGEST_TEXT_BYTES, 0).decode(), device)
            for link, (file, device) in self.files.items()
        }
        text = Path("/proc/stat").read_text(encoding="ascii")
        return found | {BUSY: busy_s(text), STOLEN: stolen_s(text)}

    def close(self) -> None:
        """Close the files."""
        for file, _ in self.files.values():
            os.close(file)


def busy_s(text: str) -> Seconds:
    """Busy CPU time of all cores, from the text of ``/proc/stat``. [s]"""
    return _seconds(text, _BUSY_FIELDS)


def stolen_s(text: str) -> Seconds:
    """Time in which cores had work but other guests of the host ran, from ``/proc/stat``. [s]"""
    return _seconds(text, _STOLEN_FIELDS)


def _seconds(text: str, fields: tuple[int, ...]) -> Seconds:
    ticks = text.split("\n", 1)[0].split()
    return sum(int(ticks[field]) for field in fields) / os.sysconf("SC_CLK_TCK")
