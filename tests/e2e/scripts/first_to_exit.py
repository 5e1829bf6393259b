"""The victim is gone before the culprit: rank 1 raises and then takes its time, rank 0 breaks at once because of it."""

import os
import time
from pathlib import Path

work = Path(os.environ["WORK"])
broken, rank0_ended = work / "broken", work / "rank0-ended"


def wait_for_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


if os.environ["RANK"] == "0":
    wait_for_file(broken)
    rank0_ended.touch()
    raise ConnectionResetError("Connection reset by peer")

try:
    raise KeyError("the culprit")
finally:
    broken.touch()
    wait_for_file(rank0_ended)
