"""A reader in a process of its own: read.py URL STEP holds the checkpoint until it gets a line."""

import sys

from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue
from holdfast.storage.stores import open_store

catalogue = CheckpointCatalogue(open_store(sys.argv[1]))
found = catalogue.open(int(sys.argv[2]))
with catalogue.reading(found):
    print("reading", flush=True)
    sys.stdin.readline()
    catalogue.verify(found)
print("complete")
