"""Trying again: with pauses that grow, until a deadline for all of it together."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from holdfast.errors import StorageError

PAUSE_FIRST_S = 0.2
PAUSE_MAX_S = 15.0

Result = TypeVar("Result")
log = logging.getLogger(__name__)


class OutageError(StorageError):
    """The store is away or has trouble: the next try may succeed."""


def persist(
    work: Callable[[], Result],
    patience_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Result:
    """Do it, again after an outage. What the last try said is raised when the time is over."""
    give_up_at = clock() + patience_s
    pause_s = PAUSE_FIRST_S
    tries = 0
    while True:
        tries += 1
        try:
            return work()
        except OutageError as error:
            wait_s = pause_s * random.uniform(0.5, 1.0)  # writers of one job shall not come back all at once
            if clock() + wait_s >= give_up_at:
                raise StorageError(f"{error} (given up after {tries} tries in {patience_s:g} s)") from error
            log.warning("%s; trying again in %.1f s", error, wait_s)
            sleep(wait_s)
            pause_s = min(pause_s * 2, PAUSE_MAX_S)
