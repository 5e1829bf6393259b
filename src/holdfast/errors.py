"""Every exception that Holdfast raises on purpose, drawn.

HoldfastError                 something expected went wrong; its text says what, and what to do
├── UsageError                a flag, a setting or a file the user gave cannot work
│   └── ScriptError           the training script cannot be run in a session as it is written: the job ends at once
├── WireError                 bytes on a connection are not what the protocol allows
│   ├── ForeignBytesError     bytes are of another protocol altogether (wire/frames.py)
│   └── AuthenticationError   the other side did not prove that it knows the job's token
├── JournalError              the journal cannot be opened, read or appended to
│   ├── JournalDamagedError   the journal is corrupt; it is never repaired silently
│   └── JournalLockedError    another master of this job holds the journal
├── MasterFailedError         this node's master could not be started
├── StateError                something in a tracked state cannot be stored, or does not fit where it is loaded
├── ShardError                so many streamed shards cannot be read that the cause is not in the shards
├── CheckpointError           a checkpoint cannot be written, or what is on disk cannot be read
│   ├── BusyError             a checkpoint is being read or written, and therefore not removed
│   ├── MissingError          there is no checkpoint, or no file of one, by that name
│   └── StorageError          the storage is full, unreachable or denies access: says nothing about what is stored
│       └── OutageError       the storage is unreachable or overloaded: the next try may succeed
├── ReplicaError              a copy of a snapshot was refused by the node that should store it, or cannot be read there
├── LaunchError               a process could not be started
├── BuildLockError            the process died that was building a C++ extension for which this one waits
├── UserCodeError             a failover extension or an error monitor raised an exception or did not answer in time
├── MissingRanksError         some ranks did not come to a barrier in time; it names them
├── NumericError              a loss or a gradient was not a number, also when its step was repeated
├── CorruptionError           this rank's parameters differ from those of ranks that should have the same
├── TorchVersionError         this version of torch lacks a private interface that Holdfast needs
├── DeviceError               this process cannot use its device, or a communicator on it, any more: it is replaced
├── StateConflictError        the members of a view contradict one another about their state
│   └── StateLostError        a part of the state is in no rank's memory any more: all start again from what is stored
├── ViewOverError             the view is over: a collective did not happen, and the step will be repeated
└── RetryableError            for users to raise inside a step: worth a second try in the same process

Exceptions outside of that tree. The first group unwinds a stack; those are no Exceptions, so that `except Exception` in
a script or in a library does not swallow them.

BaseException
├── RepeatStep                leaves the body of a step that is to be repeated
├── Reenter                   leaves an elastic function that is to be entered again
├── FinishAlone               leaves the wait for the next view: the step under way is committed and must be finished
└── ImportTookTooLong         leaves an import that has used up the fork server's time (worker/launch/preload.py)
Exception
└── WrongResultError          a collective of a node check returned wrong numbers (worker/check_pairs.py)
OSError
├── LockUnsupportedError      the file system has no locks
├── LockTakenError            another process does not give a lock back (util/files.py)
└── NotPrivateError           another user owns a directory, or could replace it (util/private_directories.py)

A user's mistake is a sentence. A bug of ours is an AssertionError and a crash: nothing catches it.
"""

from __future__ import annotations

from collections.abc import Sequence


class HoldfastError(Exception):
    """Base of all expected failures. `str(error)` is a sentence for a person."""


class UsageError(HoldfastError):
    """A flag, a setting or a file the user gave cannot work. `commands` are for the reader to copy: in the text, too,
    each has a line of its own."""

    def __init__(self, sentence: str, commands: Sequence[str] = ()) -> None:
        super().__init__("\n".join([sentence, *(f"  {command}" for command in commands)]))
        self.sentence, self.commands = sentence, tuple(commands)


class ScriptError(UsageError):
    """The training script cannot be run in a session as it is written; the text says what to change.

    The job ends with it at once, whatever restarts are left: another process would run the same script.
    """


class WireError(HoldfastError):
    """Bytes on a connection are not what the protocol allows."""


class AuthenticationError(WireError):
    """The other side did not prove that it knows the job's token."""


class JournalError(HoldfastError):
    """The journal cannot be opened, read or appended to."""


class JournalDamagedError(JournalError):
    """The journal is corrupt."""


class JournalLockedError(JournalError):
    """Another master of this job holds the journal."""


class MasterFailedError(HoldfastError):
    """This node's master could not be started; its own log says why."""


class StateError(HoldfastError):
    """Something in a tracked state cannot be stored, or does not fit where it is loaded."""


class ShardError(HoldfastError):
    """So many streamed shards cannot be read that the cause is not in the shards."""


class CheckpointError(HoldfastError):
    """A checkpoint cannot be written, or what is on disk cannot be read."""


class BusyError(CheckpointError):
    """A checkpoint is being read or written, and therefore not removed."""


class MissingError(CheckpointError):
    """There is no checkpoint, or no file of one, by that name."""


class StorageError(CheckpointError):
    """The storage is full, unreachable or denies access. It says nothing about what is stored there."""


class OutageError(StorageError):
    """The storage is unreachable or overloaded: the next try may succeed."""


class ReplicaError(HoldfastError):
    """A copy of a snapshot was refused by the node that should store it, or cannot be read there."""


class BuildLockError(HoldfastError):
    """The process died that was building a C++ extension for which this one waits."""


class LaunchError(HoldfastError):
    """A process could not be started."""


class UserCodeError(HoldfastError):
    """A user's extension gave no answer. The text says why; it completes a sentence about the extension."""


class MissingRanksError(HoldfastError):
    """Some ranks did not come to a barrier in time."""

    def __init__(self, text: str, ranks: tuple[int, ...]) -> None:
        super().__init__(text)
        self.ranks = ranks


class NumericError(HoldfastError):
    """A loss or a gradient was not a number, or far from all before, also when its step was repeated."""


class CorruptionError(HoldfastError):
    """This rank's parameters differ from those of ranks that should have the same."""


class DeviceError(HoldfastError):
    """This process cannot use its device, or a communicator on it, any more."""


class TorchVersionError(HoldfastError):
    """This version of torch lacks a private interface that Holdfast needs."""


class StateConflictError(HoldfastError):
    """The members of a view contradict one another about their state."""


class StateLostError(StateConflictError):
    """A part of the state that a new worker needs is in no rank's memory any more."""


class ViewOverError(HoldfastError):
    """The view is over: the collective did not happen, and the step will be repeated."""


class RetryableError(HoldfastError):
    """An error for users to raise inside a step that is worth a second try, in the same process."""


class RepeatStep(BaseException):
    """An exception that leaves the body of a step that is to be repeated. User code must not swallow it."""


class Reenter(BaseException):
    """An exception that leaves an elastic function that is to be entered again. User code must not swallow it."""


class FinishAlone(BaseException):
    """An exception that leaves the wait for the next view: a committed step must be finished first."""
