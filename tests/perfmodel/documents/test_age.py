"""How old a calibration may be."""

import datetime as dt

from perfmodel.documents.base import STALE_AFTER_DAYS, age_notes

MADE = "2026-01-31T23:59:59+00:00"


def test_a_calibration_is_old_after_half_a_year() -> None:
    last = dt.date(2026, 1, 31) + dt.timedelta(days=STALE_AFTER_DAYS)
    assert age_notes(MADE, today=last) == ()
    (note,) = age_notes(MADE, today=last + dt.timedelta(days=1))
    assert note.startswith("made 181 days ago (2026-01-31); old after 180, calibrate again")
