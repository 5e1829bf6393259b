"""The victim is gone before the culprit: rank 1 raises and is slow to end, rank 0 breaks at once because of it."""

import os
import time
from pathlib import Path

work = Path(os.environ["WORK"])
broken, victim = work / "broken", work / "victim"


def wait_for(condition) -> None:
    while not condition():
        time.sleep(0.01)


if os.environ["RANK"] == "0":
    draft = work / "draft"
    draft.write_text(str(os.getpid()))
    draft.rename(victim)
    wait_for(broken.exists)
    raise ConnectionResetError("Connection reset by peer")

wait_for(victim.exists)
try:
    raise KeyError("the culprit")
finally:
    broken.touch()
    wait_for(lambda: not Path("/proc", victim.read_text()).exists())  # ended, and noticed
