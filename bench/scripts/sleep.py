"""A worker that does nothing, for as long as it is left alone."""

import time

time.sleep(1e6)
