"""Gets stuck before the first step, each rank in its own way: ranks 0 and 1 in an import, rank 2 in a build of an
extension, rank 3 in a C call that holds the GIL. Needs no torch and has no session.

WORK/stuck-RANK    the rank is about to get stuck
"""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

work, rank = Path(os.environ["WORK"]), int(os.environ["RANK"])


def waits_in_an_import():
    time.sleep(1000)


def builds_an_extension():
    subprocess.run(["sleep", "1000"], check=True)


def holds_the_interpreter():
    re.match(r"(a|a)*b", "a" * 100)


threading.Thread(target=threading.Event().wait, daemon=True).start()
(work / f"stuck-{rank}").touch()
sys.setswitchinterval(0.001)
[waits_in_an_import, waits_in_an_import, builds_an_extension, holds_the_interpreter][rank]()
