"""Every exception Holdfast raises on purpose, drawn.

HoldfastError                 something expected went wrong; its text says what, and what to do
├── UsageError                a flag, a setting or a file the user gave cannot work
├── RefusedError              the master will not have this agent (its id is alive, wrong job, wrong size)
├── WireError                 bytes on a connection are not what the protocol allows
│   └── AuthenticationError   the other side did not prove that it knows the job's token
├── JournalError              the journal cannot be opened, read or appended to
│   ├── JournalDamagedError   its contents do not add up; never repaired silently
│   └── JournalLockedError    another master of this job holds it
├── StateError                something in a tracked state cannot be kept, or does not fit where it is loaded
├── ShardError                streamed shards cannot be read, so many that it is not the shards
├── CheckpointError           a checkpoint cannot be written, or what is on disk cannot be read
│   ├── BusyError             it is being read or written, and therefore not removed
│   ├── MissingError          something of that name is not there
│   └── StorageError          the storage is full, away or will not have us: says nothing about what lies there
├── ReplicaError              a copy of a snapshot was not taken in by its holder, or cannot be had from it
├── LaunchError               a process could not be started
├── MissingRanksError         some ranks did not come to a barrier in time; it names them
├── NumericError              a loss or a gradient was not a number, also when its step was repeated
├── CorruptionError           this rank's parameters are not those of the others that should have the same
├── SettleError               the members of a view contradict one another about their state
└── RetryableError            for users to raise inside a step: worth a second try in the same process

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


class StateError(HoldfastError):
    """Something in a tracked state cannot be kept, or does not fit where it is loaded."""


class ShardError(HoldfastError):
    """Streamed shards cannot be read, so many that it is not the shards."""


class CheckpointError(HoldfastError):
    """A checkpoint cannot be written, or what is on disk cannot be read."""


class BusyError(CheckpointError):
    """It is being read or written, and therefore not removed."""


class MissingError(CheckpointError):
    """Something of that name is not there."""


class StorageError(CheckpointError):
    """The storage is full, away or will not have us: says nothing about what lies there."""


class ReplicaError(HoldfastError):
    """A copy of a snapshot was not taken in by its holder, or cannot be had from it."""


class LaunchError(HoldfastError):
    """A process could not be started."""


class MissingRanksError(HoldfastError):
    """Some ranks did not come to a barrier in time."""

    def __init__(self, text: str, ranks: tuple[int, ...]) -> None:
        super().__init__(text)
        self.ranks = ranks


class NumericError(HoldfastError):
    """A loss or a gradient was not a number, or far from all before, also when its step was repeated."""


class CorruptionError(HoldfastError):
    """This rank's parameters are not those of the others that should have the same."""


class SettleError(HoldfastError):
    """The members of a view contradict one another about their state."""


class RetryableError(HoldfastError):
    """For users to raise inside a step: the step is worth a second try, in the same process."""


class ViewOverError(HoldfastError):
    """The view is over: the collective did not happen, and the step will be repeated."""
