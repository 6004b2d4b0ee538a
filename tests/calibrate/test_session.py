"""Repeats are timed by the clock on the wall."""

import time

from calibrate.device import Cpu
from calibrate.probes.session import Session


def test_waiting_counts() -> None:
    session = Session(rank=0, world_size=1, measured=Cpu(), control={}, data={})
    durations_s = session.time_repeats(lambda: time.sleep(0.05), repeats=2)
    assert len(durations_s) == 2
    assert min(durations_s) >= 0.05
