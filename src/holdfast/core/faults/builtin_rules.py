"""The built-in kinds of faults, and what they look like on any processor. Data.

What is particular to one kind of device comes with its plug-in. The exit codes 14, 128, 201 and 202 are those by which
launchers and health scripts of several clouds end a worker whose device is not well.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.faults.fault_types import Blame, FaultRule, FaultType, Severity
from holdfast.core.strategies import Strategy

ALL_CONTINUING = (
    Strategy.RETRY,
    Strategy.RECOVER_IN_PLACE,
    Strategy.RECOVER,
    Strategy.ELASTIC_TRAINING,
    Strategy.RESTART,
)

_T = FaultType
_PASSING, _SERIOUS, _CRITICAL = Severity.PASSING, Severity.SERIOUS, Severity.CRITICAL
_CODE, _PROCESS, _NODE = Blame.USER_CODE, Blame.PROCESS, Blame.NODE
_NETWORK, _STORAGE, _PLATFORM = Blame.NETWORK, Blame.STORAGE, Blame.PLATFORM

FAULT_TYPES: tuple[FaultType, ...] = (
    # The script.
    _T(name="script-error", blame=_CODE, severity=_SERIOUS, meaning="the script raised an exception"),
    _T(
        name="script-broken",
        blame=_CODE,
        severity=_CRITICAL,
        meaning="the script is no valid Python, and will not be the next time",
        forbids=ALL_CONTINUING,
    ),
    _T(
        name="script-refused",
        blame=_CODE,
        severity=_CRITICAL,
        meaning="a session cannot run the script as it is written",
        forbids=(*ALL_CONTINUING, Strategy.DUMP),  # a state that is not complete is not one to go on from
    ),
    _T(
        name="device-out-of-memory",
        blame=_CODE,
        severity=_SERIOUS,
        meaning="the device's memory is too small for what the script wants, or in pieces",
    ),
    _T(name="device-assertion", blame=_CODE, severity=_SERIOUS, meaning="a kernel on the device found a wrong index"),
    _T(
        name="numeric-fault",
        blame=_CODE,
        severity=_SERIOUS,
        meaning="a loss or a gradient was not a number, also when its step was repeated",
        forbids=ALL_CONTINUING,
    ),
    # One process.
    _T(name="exited", blame=_PROCESS, severity=_PASSING, meaning="the process ended itself"),
    _T(
        name="host-out-of-memory",
        blame=_PROCESS,
        severity=_SERIOUS,
        meaning="the kernel ended the process because the machine's or the container's memory ran out",
    ),
    _T(name="killed", blame=_PROCESS, severity=_PASSING, meaning="the process was killed from outside"),
    _T(name="terminated", blame=_PROCESS, severity=_PASSING, meaning="the process was asked to end"),
    _T(name="aborted", blame=_PROCESS, severity=_PASSING, meaning="native code gave up", examine=True),
    _T(name="crashed", blame=_PROCESS, severity=_PASSING, meaning="native code crashed", examine=True),
    _T(
        name="bus-error",
        blame=_PROCESS,
        severity=_PASSING,
        meaning="memory behind an address was gone, as when /dev/shm is full or a mapped file was truncated",
        examine=True,
    ),
    _T(
        name="gpu-launch-failure",
        blame=_PROCESS,
        severity=_SERIOUS,
        meaning="a kernel on the device did not come to its end, by its own fault or the device's",
        examine=True,
    ),
    _T(
        name="device-stuck",
        blame=_PROCESS,
        severity=_SERIOUS,
        meaning="the device, or a communicator on it, did not come to rest after an abort: the process was replaced",
        examine=True,
    ),
    _T(
        name="device-not-found",
        blame=_PROCESS,
        severity=_SERIOUS,
        meaning="the script wants a device that is not there: its number is wrong, or the device is gone",
        examine=True,
    ),
    _T(name="loader-died", blame=_PROCESS, severity=_PASSING, meaning="a data loader's own process died"),
    _T(name="hang", blame=_PROCESS, severity=_PASSING, meaning="the process did not move any more"),
    # The node.
    _T(name="inforom-corrupted", blame=_NODE, severity=_CRITICAL, meaning="the device's information ROM is damaged"),
    _T(name="unknown-device", blame=_NODE, severity=_CRITICAL, meaning="the device does not answer to its name"),
    _T(name="device-lost", blame=_NODE, severity=_CRITICAL, meaning="the device has fallen off the bus"),
    _T(
        name="device-memory-error",
        blame=_NODE,
        severity=_CRITICAL,
        meaning="the device's memory had an error that could not be corrected",
    ),
    _T(name="driver-error", blame=_NODE, severity=_SERIOUS, meaning="the device's driver does not work"),
    _T(name="device-error", blame=_NODE, severity=_SERIOUS, meaning="the device reported an error of its own"),
    _T(name="device-slow", blame=_NODE, severity=_SERIOUS, meaning="the device is slower than its peers"),
    _T(name="silent-corruption", blame=_NODE, severity=_CRITICAL, meaning="the same step gave other numbers here"),
    _T(
        name="replicas-differ",
        blame=_PLATFORM,
        severity=_CRITICAL,
        meaning="copies of the parameters differ, and it cannot be told which is right",
        forbids=(Strategy.RETRY, Strategy.RECOVER_IN_PLACE, Strategy.RECOVER, Strategy.ELASTIC_TRAINING, Strategy.DUMP),
    ),
    _T(name="node-lost", blame=_NODE, severity=_SERIOUS, meaning="the node was lost"),
    _T(name="check-failed", blame=_NODE, severity=_SERIOUS, meaning="a check of the node failed"),
    # The ways between nodes.
    _T(name="connection-lost", blame=_NETWORK, severity=_PASSING, meaning="a connection to another rank broke"),
    _T(name="link-down", blame=_NETWORK, severity=_SERIOUS, meaning="a network link of the node is down", examine=True),
    _T(
        name="network-device-error",
        blame=_NETWORK,
        severity=_SERIOUS,
        meaning="a network card failed, or what it spoke to did",
        examine=True,
    ),
    _T(name="collective-timeout", blame=_NETWORK, severity=_PASSING, meaning="others did not come to a collective"),
    # Files.
    _T(
        name="storage-full",
        blame=_STORAGE,
        severity=_SERIOUS,
        meaning="no space is left",
        forbids=(Strategy.DUMP,),
    ),
    _T(name="storage-error", blame=_STORAGE, severity=_PASSING, meaning="files could not be read or written"),
    # What runs the nodes.
    _T(
        name="residual-processes",
        blame=_PLATFORM,
        severity=_SERIOUS,
        meaning="processes of an earlier job still hold the device",
        examine=True,
    ),
    _T(name="not-started", blame=_PLATFORM, severity=_SERIOUS, meaning="the process could not be started"),
)

CRITICAL_ENDINGS = ("memory-error", "uncorrectable", "lost", "inforom-corrupted", "unknown-device", "machine-check")


def hardware_types(rules: Iterable[FaultRule]) -> tuple[FaultType, ...]:
    """Return fault types for an accelerator's rules that name none of ours. They mean hardware; failing memory and lost
    devices do not recover by themselves."""
    known = {one.name for one in FAULT_TYPES}
    return tuple(
        FaultType(
            name=name,
            blame=_PLATFORM if name.endswith("residual-processes") else _NODE,
            severity=_CRITICAL if name.endswith(CRITICAL_ENDINGS) else _SERIOUS,
            meaning=f"the hardware or its driver failed ({name.replace('-', ' ')})",
            examine=True,
        )
        for name in dict.fromkeys(rule.fault for rule in rules)
        if name not in known
    )


_R = FaultRule

SCRIPT_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    FileNotFoundError,
    ImportError,
    IndexError,
    KeyError,
    LookupError,
    ModuleNotFoundError,
    NameError,
    NotImplementedError,
    RecursionError,
    StopIteration,
    TypeError,
    UnboundLocalError,
    UnicodeDecodeError,
    UnicodeEncodeError,
    ValueError,
    ZeroDivisionError,
)

FAULT_RULES: tuple[FaultRule, ...] = (
    _R(fault="script-broken", exception="SyntaxError"),
    _R(fault="script-broken", exception="IndentationError"),
    _R(fault="script-broken", exception="TabError"),
    _R(fault="script-refused", exception="holdfast.errors.ScriptError"),
    _R(fault="script-refused", exception="holdfast.errors.UsageError"),
    _R(fault="device-out-of-memory", exception="OutOfMemoryError"),
    _R(fault="device-stuck", exception="DeviceError"),
    _R(fault="numeric-fault", exception="NumericError"),
    _R(fault="replicas-differ", exception="CorruptionError", text="none of them has a majority"),
    _R(fault="silent-corruption", exception="CorruptionError"),
    _R(fault="connection-lost", exception="DistNetworkError"),
    _R(fault="connection-lost", exception="ConnectionResetError"),
    _R(fault="connection-lost", exception="BrokenPipeError"),
    _R(fault="connection-lost", exception="ConnectionRefusedError"),
    _R(fault="loader-died", exception="RuntimeError", text=r"DataLoader worker \(pid"),
    _R(fault="storage-full", exception="OSError", text="No space left on device"),
    _R(fault="storage-full", exception="OSError", text="Disk quota exceeded"),
    _R(fault="storage-error", exception="OSError", text="Input/output error"),
    _R(fault="storage-error", exception="OSError", text="Stale file handle"),
    _R(fault="storage-error", exception="OSError", text="Read-only file system"),
    _R(fault="storage-error", exception="OSError", text="Transport endpoint is not connected"),
    _R(fault="storage-error", exception="CheckpointError"),
    # What the interpreter raises for the script's own mistakes is the script's, whatever its text.
    *(_R(fault="script-error", exception=error.__name__) for error in SCRIPT_ERRORS),
    _R(fault="inforom-corrupted", code=14),
    _R(fault="unknown-device", code=128),
    _R(fault="driver-error", code=201),
    _R(fault="residual-processes", code=202),
    _R(fault="not-started", code=126),
    _R(fault="not-started", code=127),
    _R(fault="device-memory-error", text="uncorrectable ECC error"),
    _R(fault="link-down", text="link is down"),
    _R(fault="collective-timeout", text="Watchdog caught collective operation timeout"),
    _R(fault="collective-timeout", text=r"ProcessGroup\w+ watchdog hang|watchdog got stuck"),
    _R(fault="connection-lost", text="remote process exited or there was a network error|ncclRemoteError"),
    _R(fault="connection-lost", text="Connection closed by peer"),
    _R(fault="connection-lost", text="Connection reset by peer"),
    _R(fault="bus-error", text="unable to allocate shared memory"),
    _R(fault="killed", signal="SIGKILL"),
    _R(fault="terminated", signal="SIGTERM"),
    _R(fault="terminated", signal="SIGINT"),
    _R(fault="terminated", signal="SIGHUP"),
    _R(fault="aborted", signal="SIGABRT"),
    _R(fault="bus-error", signal="SIGBUS"),
    *(_R(fault="crashed", signal=name) for name in ("SIGSEGV", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")),
)
