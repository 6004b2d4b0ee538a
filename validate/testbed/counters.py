"""What the kernel counts: bytes of every link, CPU time of the machine, and what was taken from it."""

import os
from dataclasses import dataclass
from typing import Final

from calibrate.environment import processor_time
from validate.testbed.namespace import inside
from validate.testbed.wiring import sent_bytes

#: Key of the machine's busy CPU time among the counters. [s]
BUSY: Final = "busy cpu"
#: Key of the CPU time that the hypervisor gave to other guests. [s]
STEAL: Final = "steal cpu"

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
        """Bytes sent by each link, and busy and steal seconds of the machine."""
        found: dict[str, float] = {
            link: sent_bytes(os.pread(file, _LARGEST_TEXT_BYTES, 0).decode(), device)
            for link, (file, device) in self.files.items()
        }
        now = processor_time()
        return found | {BUSY: now.busy_s, STEAL: now.steal_s}

    def close(self) -> None:
        """Close the files."""
        for file, _ in self.files.values():
            os.close(file)
