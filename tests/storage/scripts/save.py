"""A writer in a process of its own: save.py URL STEP NONCE PARTS NUMBER… writes those parts, then publishes.

With HOLD in the environment it says "written" and waits for a line before it publishes. Prints the step or "None".
"""

import os
import sys

from holdfast.storage.checkpoint_writer import CheckpointWriter
from holdfast.storage.stores import open_store
from support.saves import about, image

url, step, nonce, parts, *numbers = sys.argv[1:]
with CheckpointWriter(open_store(url, retry_for_s=20.0), about(int(step), int(parts)), nonce) as writing:
    for number in numbers:
        writing.write_part(int(number), image(int(step) * 100 + int(number)))
    if os.environ.get("HOLD"):
        print("written", flush=True)
        sys.stdin.readline()
    found = writing.publish()
print(found.step if found else None)
