"""The main module of the fork server. It is started by its path: with `-m` the working directory would be the first on
the search path, and a `queue.py` of the user's there would come before Python's own while the server is imported."""

import sys

if not sys.flags.safe_path:
    sys.path.pop(0)  # this file's directory

from holdfast.worker.launch.fork_server import main

if __name__ == "__main__":
    main()
