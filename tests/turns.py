"""Whether somebody holds the machine for a measurement."""

import fcntl

from calibrate import turns


def machine_is_held() -> bool:
    with turns.lock_path().open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
