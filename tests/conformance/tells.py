"""Tells what its launcher gave it: printed, so that the console and the log files can be compared. Without torch."""

import os
import sys

VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "ROLE_RANK",
    "ROLE_NAME",
    "ROLE_WORLD_SIZE",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
)

me = f"rank {os.environ['RANK']}"
print(me, __name__, [word.rpartition("/")[2] for word in sys.argv], {name: os.environ.get(name) for name in VARIABLES})
print(me, "an apple, and a pear")
print(me, "an orange", file=sys.stderr)
print(me, "reads", repr(sys.stdin.read()))
