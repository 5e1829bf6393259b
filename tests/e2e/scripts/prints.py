"""A line on each stream. With a code, the first attempt exits with it."""

import os
import sys

me = f"{os.environ['RANK']} attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}"
print(f"out {me}")
print(f"err {me}", file=sys.stderr)
if sys.argv[1:] and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(int(sys.argv[1]))
