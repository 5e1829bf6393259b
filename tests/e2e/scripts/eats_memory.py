"""Moves itself into a memory cgroup and takes more than it allows."""

import os
import sys
from pathlib import Path

Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
eaten = [b"x" * (1 << 20) for _ in range(1 << 10)]
sys.exit("there was enough memory")
