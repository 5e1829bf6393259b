"""remove.py URL STEP"""

import sys

from holdfast.storage.catalogue import Catalogue
from holdfast.storage.stores import open_store

Catalogue(open_store(sys.argv[1])).remove(int(sys.argv[2]))
