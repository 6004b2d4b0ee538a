"""How old what a document holds may be."""

import datetime as dt
from typing import Final

#: Drivers, libraries and neighbours change: a calibration older than this is said to be old.
STALE_AFTER_DAYS: Final = 180


def today_utc() -> dt.date:
    """The day it is."""
    return dt.datetime.now(dt.UTC).date()


def age_notes(made_utc: str, *, today: dt.date) -> tuple[str, ...]:
    """A sentence about a calibration that is too old to be relied on, if it is."""
    made = dt.datetime.fromisoformat(made_utc).date()
    age_days = (today - made).days
    if age_days <= STALE_AFTER_DAYS:
        return ()
    note = f"made {age_days} days ago ({made}); old after {STALE_AFTER_DAYS}, calibrate again"
    return (f"{note}: drivers and libraries change",)


def age_caveats(made_utc: str) -> tuple[str, ...]:
    """The same as caveats of what is predicted today."""
    notes = age_notes(made_utc, today=today_utc())
    return tuple(f"calibration {note}" for note in notes)
