"""The words for faults: what kind, whose fault, how bad, and what may be done about it. Data only.

    FaultType   a kind of fault and how it is judged          "driver-error": the node's, serious
    FaultRule   what such a fault looks like                   exit code 201
    Fault       one that happened, judged                      goes into the failure, and so into the journal

An accelerator's plug-in and a user's file bring rules; a user's file may bring kinds too. How rules are matched is in
fault_table.py, what we bring ourselves in builtin_rules.py, what the ladder makes of it in blame.py.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from holdfast.core.strategies import Strategy


class Blame(StrEnum):
    """Who has to do something about it."""

    USER_CODE = "user code"
    PROCESS = "process"
    """One process, which may as well have been another: a new one will do."""
    NODE = "node"
    """The machine or a device of it: not there again."""
    NETWORK = "network"
    STORAGE = "storage"
    PLATFORM = "platform"
    """What runs the nodes: an image, a driver rolled out everywhere, the last job's remains."""


class Severity(StrEnum):
    """How bad it is."""

    PASSING = "passing"
    """May not come back."""
    SERIOUS = "serious"
    """Will come back unless something changes. Of a node: it leaves this job."""
    CRITICAL = "critical"
    """Nothing that can be done from here helps. Of a node: it is cordoned, for every job, until a person lets it
    back."""


class FaultType(msgspec.Struct, frozen=True, kw_only=True):
    """A kind of fault."""

    name: str
    blame: Blame
    severity: Severity
    meaning: str
    """For a person, without a full stop."""
    forbids: tuple[Strategy, ...] = ()
    """What would not help, or would do harm."""
    examine: bool = False
    """Whether a broken machine may be behind it, though it is not blamed: with `--node-check` its node is examined. A
    fault of the node's is a reason by itself."""


class FaultRule(msgspec.Struct, frozen=True, kw_only=True):
    """What a fault looks like. All that is given must be so; at least one thing is."""

    fault: str
    """The name of a FaultType."""
    exception: str = ""
    """The exception's type: `OutOfMemoryError` whatever its module, or with it `torch.OutOfMemoryError`."""
    code: int | None = None
    """The exit code."""
    signal: str = ""
    """The signal that ended it, as `SIGSEGV`; also where a shell says so by an exit code above 128."""
    text: str = ""
    """A regular expression, searched for in the error's message or the last lines of its log, in any case of
    letters."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """A fault that happened, judged by the tables of its time: other tables later do not change what it was."""

    name: str
    blame: Blame
    severity: Severity
    meaning: str
    forbids: tuple[Strategy, ...] = ()
    evidence: str = ""
    """By what it was recognised; empty if only by how the process ended."""
    examine: bool = False


class FaultTable(msgspec.Struct, frozen=True):
    """Kinds by name, and the rules of each table, the one that goes first first."""

    types: dict[str, FaultType]
    tables: tuple[tuple[FaultRule, ...], ...]


def describe_fault(fault: Fault) -> str:
    """Return one line: what the fault is, whose it is, and how severe."""
    by = f", by {fault.evidence}" if fault.evidence else ""
    return f"{fault.name}: {fault.meaning} (blame: {fault.blame.value}, {fault.severity.value}{by})"
