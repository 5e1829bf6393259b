"""For scripts that hurt themselves: wait until the job is known to have begun and no incident is
open, so that each fault is one of its own."""

import os
import time
from pathlib import Path

from holdfast.core.records import IncidentClosed, IncidentOpened, ViewJoinedRecord
from holdfast.journal.sqlite import read_entries

DEADLINE_S = 30.0


def wait_until_calm() -> None:
    (journal,) = (Path(os.environ["WORK"]).parent / "state").glob("jobs/*/journal.sqlite")
    give_up_at = time.monotonic() + DEADLINE_S
    while time.monotonic() < give_up_at:
        records = [entry.record for entry in read_entries(journal)]
        opened, closed = (sum(isinstance(r, kind) for r in records) for kind in (IncidentOpened, IncidentClosed))
        if opened == closed and any(isinstance(record, ViewJoinedRecord) for record in records):
            return
        time.sleep(0.01)
    raise TimeoutError("an incident stays open")
