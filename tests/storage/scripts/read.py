"""A reader in a process of its own: read.py URL STEP holds the checkpoint until it gets a line."""

import sys

from holdfast.storage.catalogue import Catalogue
from holdfast.storage.stores import open_store

catalogue = Catalogue(open_store(sys.argv[1]))
found = catalogue.open(int(sys.argv[2]))
with catalogue.reading(found):
    print("reading", flush=True)
    sys.stdin.readline()
    catalogue.verify(found)
print("whole")
