"""Dies of SIGSEGV in its first life, ends well in its second."""

import os
import signal

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGSEGV)
