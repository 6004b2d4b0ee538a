"""When a machine counts as calm: one rule for doctor, measurements and reports."""

from typing import Final

#: Of the processor time that is wanted, the share that a hypervisor may give to others without a word.
CALM: Final = 0.05
