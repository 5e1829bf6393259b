"""`python -m holdfast` is `holdfast`."""

import sys

if not sys.flags.safe_path:
    sys.path.pop(0)  # the working directory is the user's: its modules do not come before Python's own

from holdfast.cli.main import main

if __name__ == "__main__":
    main()
