"""Variables of the environment that decide how fast ranks are.

A calibration chooses them, and whatever is judged by it or added to it runs under the same.
"""

import platform
from collections.abc import Mapping
from typing import Final

from calibrate.experiment import DeviceKind
from calibrate.processes import usable_cores
from calibrate.topology import Topology, without_torchrun
from perfmodel.documents.profile import ProfileDocument

_THREADS: Final = "OMP_NUM_THREADS"
_GOVERNING: Final = (_THREADS, "MALLOC_")
#: glibc gives large blocks, and free memory at the end of its heap, back to the kernel, and the next
#: step pays a page fault for every 4 KiB of them: how much depends on the order of all allocations
#: before. With these two it keeps what it has, as allocators of GPUs do; see ``mallopt(3)``.
KEPT_MEMORY: Final = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)}

#: Who sets one of these has decided what the heap gives back.
_DECIDING: Final = {*KEPT_MEMORY, "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"}


def chosen_conditions(
    environ: Mapping[str, str], *, topology: Topology, device_kind: DeviceKind
) -> dict[str, str]:
    """What the ranks of a calibration run under; what the user set wins."""
    threads = max(1, usable_cores() // topology.ranks_per_node)
    own = _governing(environ)
    if device_kind == "cpu" and not own.keys() & _DECIDING and _is_glibcs(environ):
        own |= KEPT_MEMORY
    return {**own, _THREADS: own.get(_THREADS) or str(threads)}


def _is_glibcs(environ: Mapping[str, str]) -> bool:
    """Whether tensors come from the heap that the variables are for."""
    return platform.libc_ver()[0] == "glibc" and "malloc" not in environ.get("LD_PRELOAD", "")


def keeps_memory(variables: Mapping[str, str], *, device_kind: DeviceKind) -> bool:
    """Whether a step finds all memory that the one before has freed, as with allocators of GPUs."""
    return device_kind != "cpu" or KEPT_MEMORY.items() <= variables.items()


def recorded_conditions(profile: ProfileDocument) -> dict[str, str]:
    """What the ranks of a calibration ran under, whatever is set now."""
    return _governing(profile.variables)


def under(environ: Mapping[str, str], conditions: Mapping[str, str]) -> dict[str, str]:
    """An environment for ranks: these conditions, and the rest of it."""
    inherited = without_torchrun(environ)
    rest = inherited.keys() - _governing(inherited).keys()
    return {**{name: inherited[name] for name in rest}, **conditions}


def _governing(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_GOVERNING)}
