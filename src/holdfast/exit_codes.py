"""The exit codes of Holdfast's commands and processes. Those of `holdfast run` are documented in docs/torchrun.md."""

SUCCESS = 0
"""The job has finished."""
WORKER_FAILED = 1
"""A worker failed and no restart was left; of other commands: what was asked for was not found or not done."""
USAGE = 2
"""A flag, a setting or a file that the user gave cannot work."""
NODES_MISSING = 3
"""Too few nodes for too long."""
REFUSED = 4
"""The master refused this agent: wrong token, wrong job, or a node id that is in use."""
NO_MASTER = 5
"""The master could not be reached; of `holdfast master`: its journal cannot be used."""
ADDRESS_TAKEN = 6
"""The port is in use; of `holdfast master` only."""
DUMPED = 7
"""The job ended after a checkpoint of the last committed step; the next start continues from there."""
UNFIT = 8
"""A node or a link did not pass; of `holdfast check` and `doctor`, and of jobs with a check before they start."""
INTERNAL_ERROR = 70
"""A bug in Holdfast ended the process; its traceback is in the log (EX_SOFTWARE of sysexits.h)."""
NO_PROCESS = 71
"""The operating system did not start a process; between an agent and its master only (EX_OSERR of sysexits.h)."""
SIGNAL_BASE = 128
"""A signal ended the job: this plus the signal's number."""
