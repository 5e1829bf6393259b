"""Fails in the way that its arguments say, in rank 1; the others wait for the launcher to end them.

Rank 1 fails once rank 0 has said that it is there: else the launcher may end rank 0 before, and what it prints is a
matter of chance. MEETING is a directory, if the launch has one.
"""

import os
import signal
import sys
import time
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record


@record
def main() -> None:
    how, rank = sys.argv[1], os.environ["RANK"]
    print(f"rank {rank} is there", flush=True)
    if "MEETING" in os.environ:
        there = Path(os.environ["MEETING"], f"there-{os.environ['TORCHELASTIC_RESTART_COUNT']}")
        if rank == "0":
            there.touch()
        while how != "wait" and not there.exists():
            time.sleep(0.01)
    if how == "wait":
        open(f"{sys.argv[2]}/ready-{rank}", "w").close()
    if how == "wait" or rank != "1":
        signal.pause()
    if how == "raise":
        raise ValueError('no "data" in café')
    if how == "exit":
        sys.exit(int(sys.argv[2]))
    if how == "say":
        sys.exit("rank 1 gives up")
    if how == "signal":
        os.kill(os.getpid(), int(sys.argv[2]))
    if how == "timer":
        from torch.distributed.elastic import timer

        timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
        with timer.expires(after=0.5, scope="a slow part"):
            signal.pause()


if __name__ == "__main__":
    main()
