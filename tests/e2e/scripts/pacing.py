"""Pauses between the steps of a script, for tests that hurt a running job from outside."""

import time
from pathlib import Path

LAST_STEPS, LAST_PAUSE_S = 10, 24.0


def pause(work: Path, seconds: float, left: int, until_hurry: bool) -> None:
    """Sleep after a step, until WORK/hurry is there. With `until_hurry` the last steps take longer and longer, more
    than a minute together: the job goes on from step to step and does not end before the test is done with it, however
    slow the machine is."""
    until = time.monotonic() + (
        max(seconds, LAST_PAUSE_S / left) if until_hurry and 0 < left <= LAST_STEPS else seconds
    )
    while (left_s := until - time.monotonic()) > 0 and not (work / "hurry").exists():
        time.sleep(min(left_s, 0.02))
