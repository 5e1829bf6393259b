"""What `holdfast run` ends with. Documented in docs/torchrun.md."""

SUCCESS = 0
WORKER_FAILED = 1
USAGE = 2
NODES_MISSING = 3
REFUSED = 4
NO_MASTER = 5
ADDRESS_TAKEN = 6
"""Only of `holdfast master`: its port is in use."""
DUMPED = 7
"""Ended after a checkpoint of the last committed step; the next start goes on from there."""
UNFIT = 8
"""Of `holdfast check`: a node or a link did not pass."""
SIGNAL_BASE = 128
