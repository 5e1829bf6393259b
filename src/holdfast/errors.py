"""Every exception Holdfast raises on purpose, drawn.

HoldfastError                 something expected went wrong; its text says what, and what to do
├── UsageError                a flag, a setting or a file the user gave cannot work
├── RefusedError              the master will not have this agent (its id is alive, wrong job, wrong size)
├── WireError                 bytes on a connection are not what the protocol allows
│   └── AuthenticationError   the other side did not prove that it knows the job's token
├── JournalError              the journal cannot be opened, read or appended to
│   ├── JournalDamagedError   its contents do not add up; never repaired silently
│   └── JournalLockedError    another master of this job holds it
└── LaunchError               a process could not be started

A user's mistake is a sentence. A bug of ours is an AssertionError and a crash: nothing catches it.
"""


class HoldfastError(Exception):
    """Base of all expected failures. `str(error)` is a sentence for a person."""


class UsageError(HoldfastError):
    """A flag, a setting or a file the user gave cannot work."""


class RefusedError(HoldfastError):
    """The master will not have this agent."""


class WireError(HoldfastError):
    """Bytes on a connection are not what the protocol allows."""


class AuthenticationError(WireError):
    """The other side did not prove that it knows the job's token."""


class JournalError(HoldfastError):
    """The journal cannot be opened, read or appended to."""


class JournalDamagedError(JournalError):
    """The journal's contents do not add up."""


class JournalLockedError(JournalError):
    """Another master of this job holds the journal."""


class LaunchError(HoldfastError):
    """A process could not be started."""
