"""Which rank failed first and why, out of what torchrun and its workers wrote."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

_FAILURES: Final = "Failures:"
_ROOT_CAUSE: Final = "Root Cause (first observed failure)"
_RANK: Final = re.compile(r"^\s*rank\s*:\s*(\d+)")
_EXIT_CODE: Final = re.compile(r"^\s*exitcode\s*:\s*(-?\d+)")
_EXCEPTION: Final = re.compile(
    r"^\s*(?:\[\w+\]:)?\s*([A-Za-z_][\w.]*(?:Error|Exception|Exit|Failed|Interrupt)\b.*)$"
)
# torchrun's own report of the crash, not its cause.
_NOISE: Final = re.compile(
    r"ChildFailedError|SignalException|torch/distributed/elastic|^\s*[=\-*]{5,}|^\s*error_file\s*:"
)
#: Of what a process said last, in a message.
MAX_CHARACTERS: Final = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The first rank that failed, as far as it is known.

    Attributes
    ----------
    rank
        None if torchrun itself failed, or does not say.
    exit_code
        Of that rank, else of torchrun; negative for a signal.
    last_words
        The line of its error output that says most; empty if there is none.
    """

    rank: int | None
    exit_code: int
    last_words: str

    def __str__(self) -> str:
        """One clause for an error message."""
        who = "torchrun" if self.rank is None else f"rank {self.rank}"
        words = f": {self.last_words}" if self.last_words else ""
        return f"{who} must exit with 0, got {exit_text(self.exit_code)}{words}"


def first_failure(stderr_lines: Sequence[str], *, exit_code: int) -> Failure:
    """Find the first failed rank, its exit code and its last useful words."""
    report = _first_section(stderr_lines)
    rank = _first_number(_RANK, report)
    rank_code = _first_number(_EXIT_CODE, report)
    words = [match[1] for line in report if (match := _EXCEPTION.match(line))]
    return Failure(
        rank=rank,
        exit_code=exit_code if rank_code is None else rank_code,
        last_words=(words[-1] if words else _fallback(stderr_lines)).strip()[:MAX_CHARACTERS],
    )


def exit_text(exit_code: int) -> str:
    """Name an exit code the way a user knows it: ``SIGKILL (out of memory?)``, ``exit code 1``."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"{name} (out of memory?)" if name == "SIGKILL" else name


def _root_cause(lines: Sequence[str]) -> Sequence[str]:
    starts = [index for index, line in enumerate(lines) if _ROOT_CAUSE in line]
    return lines[starts[-1] :] if starts else ()


def _first_section(lines: Sequence[str]) -> Sequence[str]:
    """Part of torchrun's report on the rank that failed first.

    torchrun ends the others with SIGTERM. Where it sees all of them end at once, it takes the
    lowest rank for the first; one that nobody ended by SIGTERM is the likelier cause.
    """
    root_cause = _root_cause(lines)
    starts = [index for index, line in enumerate(lines) if line.strip() == _FAILURES]
    others = lines[starts[-1] : len(lines) - len(root_cause)] if starts and root_cause else ()
    ranks = [index for index, line in enumerate(others) if _RANK.match(line)]
    sections = [others[i:j] for i, j in pairwise([*ranks, len(others)])]
    sections = [root_cause, *sections]
    return next((found for found in sections if not _was_ended(found)), root_cause)


def _was_ended(section: Sequence[str]) -> bool:
    return _first_number(_EXIT_CODE, section) == -signal.SIGTERM


def _first_number(pattern: re.Pattern[str], lines: Sequence[str]) -> int | None:
    return next((int(match[1]) for line in lines if (match := pattern.match(line))), None)


def _fallback(lines: Sequence[str]) -> str:
    useful = [line for line in lines if line.strip() and not _NOISE.search(line)]
    # The first exception: the others fail because their peer is gone.
    exceptions = (match[1] for line in useful if (match := _EXCEPTION.match(line)))
    if (first := next(exceptions, None)) is not None:
        return first
    return "" if _root_cause(lines) else next(reversed(useful), "")
