"""A process that dies with its parent; ``python -m calibrate.agent MODULE ...`` runs a module so.

Standard library only: workers call ``die_with_parent`` before they import torch.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


def die_with_parent(signal_number: int = signal.SIGKILL) -> None:
    """Ask Linux to signal this process as soon as its parent is gone; elsewhere nothing happens.

    The setting survives ``exec`` and is not inherited by children. "Parent" is the thread that
    started this process.
    """
    if not sys.platform.startswith("linux"):
        return
    parent_pid = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal_number), 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal_number)


def main(arguments: Sequence[str]) -> None:
    """Become ``python -m <arguments>``, bound to the life of the parent."""
    # torchrun ends its workers on SIGTERM; SIGKILL would leave them behind.
    die_with_parent(signal.SIGTERM)
    os.execv(sys.executable, [sys.executable, "-m", *arguments])  # noqa: S606


if __name__ == "__main__":
    main(sys.argv[1:])
