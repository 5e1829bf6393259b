"""remove.py URL STEP"""

import sys

from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue
from holdfast.storage.stores import open_store

CheckpointCatalogue(open_store(sys.argv[1])).remove(int(sys.argv[2]))
