"""Which fault is it? From how a process ended and what it said to a typed fault, by tables. Pure.

The kind of evidence decides first, the best first; within a kind, whose table it is: the user's, the accelerator's,
ours. Of an accelerator that was detected and not named by the user, rows by which an exit code, a signal or an
exception of ours would mean something else are left out. Within a table, the first row that fits.

    1. rules that name an exception       its type is the best that is known; a text beside it narrows it down
    2. rules that name an exit code       they were chosen for a reason
    3. rules that have a text only        the error's message; without one, the last lines of the log
    4. rules that name a signal           native code that dies has most often said why, so they come after texts
    5. how the process ended              an exception of unknown type is the script's

A rule may name several things; its kind is the first of these, and all of them must be so.

A user's file (`--fault-table FILE.toml`) adds rules, and kinds of its own or another judgement of a known one:

    [[fault]]
    name = "licence-server"          # refer to it in rules
    blame = "platform"               # user code, process, node, network, storage, platform
    severity = "passing"             # passing, serious, critical
    meaning = "the licence server did not answer"
    forbids = ["recover-in-place"]   # strategies that would not help; none if left out
    examine = true                   # with --node-check, its node is examined; what is blamed on the node always is

    [[rule]]
    fault = "licence-server"
    code = 77                        # and/or: exception, signal, text (a regular expression)
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from signal import Signals
from typing import TypeVar

import msgspec

from holdfast.core.faults.builtin_rules import FAULT_RULES, FAULT_TYPES, hardware_types
from holdfast.core.faults.failures import End, Exited, Failure, NotStarted, OutOfMemory, Signalled
from holdfast.core.faults.fault_types import Blame, Fault, FaultRule, FaultTable, FaultType, Severity
from holdfast.core.strategies import Strategy
from holdfast.errors import UsageError

EVIDENCE_CHARS_MAX = 200
SHELL_BASE = 128
CRASHES = frozenset({"SIGABRT", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS"})
"""Signals by which native code ends itself, most often after having said why."""
WORDS = {"blame": tuple(Blame), "severity": tuple(Severity), "forbids": tuple(Strategy)}
FALL_BACK = {Exited: "exited", Signalled: "killed", OutOfMemory: "host-out-of-memory", NotStarted: "not-started"}

_T = TypeVar("_T", FaultType, FaultRule)

BUILT_IN = FaultTable({one.name: one for one in FAULT_TYPES}, (FAULT_RULES,))


def with_rules(table: FaultTable, rules: Iterable[FaultRule], types: Iterable[FaultType] = ()) -> FaultTable:
    """Return the table with further rules before its own. A rule for an unknown type is a bug of its author."""
    known = table.types | {one.name: one for one in types}
    added = tuple(rules)
    for rule in added:
        assert rule.fault in known, f"a rule for {rule.fault}, which is no kind of fault"
    return FaultTable(known, (added, *table.tables))


def with_accelerator(table: FaultTable, rules: Iterable[FaultRule]) -> FaultTable:
    """Return the table with an accelerator's rules before its own. They mean hardware, whatever their names."""
    added = tuple(rules)
    return with_rules(table, added, (one for one in hardware_types(added) if one.name not in table.types))


def with_detected(table: FaultTable, rules: Iterable[FaultRule]) -> FaultTable:
    """Return the table with the rules of processors that were detected and not named by the user. They only add to it:
    what the table says of an exit code, a signal or an exception stays."""
    said = {_by_itself(rule) for ours in table.tables for rule in ours if not rule.text}
    return with_accelerator(table, [rule for rule in rules if rule.text or _by_itself(rule) not in said])


def _by_itself(rule: FaultRule) -> tuple[str, int | None, str]:
    return rule.exception.rpartition(".")[2], rule.code, rule.signal


def typed(failure: Failure, table: FaultTable = BUILT_IN) -> Failure:
    """Return the failure with its fault."""
    return msgspec.structs.replace(failure, fault=classify(failure, table))


def classify(failure: Failure, table: FaultTable = BUILT_IN) -> Fault:
    """Return the fault that this failure is."""
    if isinstance(failure.end, OutOfMemory | NotStarted):
        return _fault(table, FALL_BACK[type(failure.end)], "")
    for is_of_kind in (_names_exception, _names_code, _is_text, _names_signal):
        for rules in table.tables:
            for rule in rules:
                if is_of_kind(rule) and (evidence := _evidence(rule, failure)):
                    return _fault(table, rule.fault, evidence)
    return _fault(table, "script-error" if failure.exception else FALL_BACK[type(failure.end)], "")


def fault_of(name: str, evidence: str = "", table: FaultTable = BUILT_IN) -> Fault:
    """Return a fault that was not seen in a process's end: a hang, a lost node, a failed check."""
    return _fault(table, name, evidence)


def blame_of(name: str) -> Blame:
    """Return whom our own table blames for a fault of this name; an unknown name is an accelerator's."""
    kinds = BUILT_IN.types | {one.name: one for one in hardware_types([FaultRule(fault=name)])}
    return kinds[name].blame


def _fault(table: FaultTable, name: str, evidence: str) -> Fault:
    kind = table.types[name]
    return Fault(
        name=kind.name,
        blame=kind.blame,
        severity=kind.severity,
        meaning=kind.meaning,
        forbids=kind.forbids,
        evidence=evidence[:EVIDENCE_CHARS_MAX],
        examine=kind.examine,
    )


def _names_exception(rule: FaultRule) -> bool:
    return bool(rule.exception)


def _names_code(rule: FaultRule) -> bool:
    return rule.code is not None and not rule.exception


def _is_text(rule: FaultRule) -> bool:
    return bool(rule.text) and not rule.exception and rule.code is None and not rule.signal


def _names_signal(rule: FaultRule) -> bool:
    return bool(rule.signal) and not rule.exception and rule.code is None


def _evidence(rule: FaultRule, failure: Failure) -> str:
    """Return the part of the failure that matches the rule; empty if anything does not."""
    found = []
    if rule.exception:
        is_same = rule.exception in (failure.exception, failure.exception.rpartition(".")[2])
        found.append(failure.exception if is_same else "")
    if rule.code is not None:
        found.append(f"exit code {rule.code}" if failure.end == Exited(rule.code) else "")
    if rule.signal:
        found.append(rule.signal if signal_of(failure.end) == rule.signal else "")
    if rule.text:
        found.append(_line_with(rule.text, _said(failure)))
    return ", ".join(found) if all(found) else ""


def _said(failure: Failure) -> Iterable[str]:
    """Return the texts that may explain this end, the newest first. A signal from outside is not explained by earlier
    output, and output before an exception is not about the exception."""
    yield failure.message
    is_explained = isinstance(failure.end, Exited) or signal_of(failure.end) in CRASHES
    if is_explained and not failure.exception:
        yield from reversed(failure.log_tail)


def _line_with(text: str, lines: Iterable[str]) -> str:
    wanted = re.compile(text, re.IGNORECASE)
    line = next((line for line in lines if wanted.search(line)), "")
    return f"“{line.strip()}”" if line else ""


def signal_of(end: End) -> str:
    """Return the signal that ended a process, or by a shell's exit code the program that the shell ran."""
    match end:
        case Signalled(_, name):
            return name
        case Exited(code) if code - SHELL_BASE in set(Signals):
            return Signals(code - SHELL_BASE).name
    return ""


# --- a user's file


def read_fault_table(text: str, name: str, table: FaultTable = BUILT_IN) -> FaultTable:
    """Return the table with a user's file before it. A UsageError names the line and the key that is invalid."""
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # also of numbers of thousands of digits, and of deep nesting
        raise UsageError(f"--fault-table {name} is no TOML: {error}") from None
    _check_shape(content, text, name)
    types = [_convert(entry, FaultType, "fault", i, text, name) for i, entry in enumerate(content.get("fault", []))]
    rules = [_convert(entry, FaultRule, "rule", i, text, name) for i, entry in enumerate(content.get("rule", []))]
    for i, one in enumerate(types):
        if problem := _problem_of_type(one, types[:i]):
            raise UsageError(f"--fault-table {name}, {_line(text, 'fault', i, 'name')}: key name: {problem}")
    known = {*table.types, *(one.name for one in types)}
    for i, rule in enumerate(rules):
        if found := _problem(rule, known) or _repetition(rule, rules[:i]):
            raise UsageError(f"--fault-table {name}, {_line(text, 'rule', i, found[0])}: {found[1]}")
    return with_rules(table, rules, types)


def _check_shape(content: dict[str, object], text: str, name: str) -> None:
    for key, entries in content.items():
        if key not in ("fault", "rule"):
            begins = re.compile(rf"\s*\[*\s*[\"']?{re.escape(key)}\b")
            line = next((number for number, one in enumerate(text.splitlines(), 1) if begins.match(one)), 1)
            raise UsageError(f"--fault-table {name}, line {line}: there is no {key!r}, give [[fault]] and [[rule]]")
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise UsageError(f"--fault-table {name}: write [[{key}]], in double brackets, for each {key}")


def _convert(entry: dict[str, object], kind: type[_T], header: str, index: int, text: str, name: str) -> _T:
    fields = kind.__struct_fields__
    for key in entry:
        if key not in fields:
            near = get_close_matches(key, fields, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(fields)}"
            raise UsageError(f"--fault-table {name}, {_line(text, header, index, key)}: no key {key!r}, {hint}")
    try:
        return msgspec.convert(entry, kind)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$.")
        key = re.split(r"[`\[.]", path)[0]
        where = f"{_line(text, header, index, key)}{f', key {key}' if key else ''}"
        choice = f", there are {', '.join(WORDS[key])}" if key in WORDS else ""
        raise UsageError(f"--fault-table {name}, {where}: {reason}{choice}") from None


def _problem_of_type(one: FaultType, before: Sequence[FaultType]) -> str:
    if not one.name.strip():
        return "a fault needs a name, by which rules refer to it"
    if any(other.name == one.name for other in before):
        return f"there is a fault {one.name!r} above, give each one [[fault]]"
    return ""


def _problem(rule: FaultRule, known: Iterable[str]) -> tuple[str, str] | None:
    """Return the invalid key, and why it is invalid."""
    if rule.fault not in known:
        near = get_close_matches(rule.fault, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "describe it in a [[fault]]"
        return "fault", f"key fault: there is no fault {rule.fault!r}, {hint}"
    if rule.code is None and not (rule.exception or rule.signal or rule.text):
        return "", "a rule needs at least one of exception, code, signal and text"
    if rule.code is not None and not 1 <= rule.code <= 255:
        return "code", f"key code: {rule.code} is no exit code of a failure, give 1 to 255"
    if rule.text:
        try:
            re.compile(rule.text)
        except re.error as error:
            return "text", f"key text: {rule.text!r} is no regular expression, {error}"
    if rule.signal and rule.signal not in Signals.__members__:
        return "signal", f"key signal: there is no signal {rule.signal!r}, give a name such as SIGSEGV"
    if rule.signal and rule.code is not None and signal_of(Exited(rule.code)) != rule.signal:
        return "signal", f"key signal: who exits with code {rule.code} was not ended by {rule.signal}, give one of them"
    return None


def _repetition(rule: FaultRule, before: Sequence[FaultRule]) -> tuple[str, str] | None:
    """Return a rule that can never be the first to match."""
    same = [other for other in before if msgspec.structs.replace(other, fault=rule.fault) == rule]
    return ("", f"a rule above has the same signs, and means {same[0].fault!r}: leave one out") if same else None


def checked_rules(rules: object) -> tuple[FaultRule, ...]:
    """Return a plug-in's rules. A UsageError says which of them is invalid, before the first fault would."""
    try:
        found = msgspec.convert(msgspec.to_builtins(rules), tuple[FaultRule, ...])
    except (msgspec.ValidationError, TypeError) as error:
        raise UsageError(f"its faults are no rows of FaultRule: {error}") from None
    for number, rule in enumerate(found, 1):
        if problem := _problem(rule, {rule.fault}):
            raise UsageError(f"row {number} of its faults, {problem[1]}")
    return found


def _line(text: str, header: str, index: int, key: str = "") -> str:
    """Return the line of the index-th [[header]], or of the key in it."""
    lines: Sequence[str] = text.splitlines()
    starts = [n for n, line in enumerate(lines) if re.match(rf"\s*\[\[\s*{header}\s*\]\]", line)]
    if index >= len(starts):
        return f"{header} {index + 1}"
    ends = [n for n, line in enumerate(lines) if n > starts[index] and line.lstrip().startswith("[")]
    inside = range(starts[index], min(ends, default=len(lines)))
    found = next((n for n in inside if key and re.match(rf"\s*[\"']?{re.escape(key)}\b", lines[n])), starts[index])
    return f"line {found + 1}"
