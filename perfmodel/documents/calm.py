"""When a machine counts as calm: for doctor, measurements and reports.

The testbed, where all ranks wait for the slowest, has a stricter rule of its own.
"""

from typing import Final

#: Of the processor time that is wanted, the share that a hypervisor may give to others without a word.
CALM: Final = 0.05
