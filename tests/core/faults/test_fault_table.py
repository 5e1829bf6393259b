"""Every row of the fault tables, in the order of evidence; and users' files, good and bad."""

from __future__ import annotations

import pytest

from holdfast.core.faults.builtin_rules import FAULT_RULES, FAULT_TYPES
from holdfast.core.faults.failures import End, Exited, Failure, NotStarted, OutOfMemory, Signalled
from holdfast.core.faults.fault_table import (
    BUILT_IN,
    classify,
    read_fault_table,
    signal_of,
    with_accelerator,
    with_detected,
    with_rules,
)
from holdfast.core.faults.fault_types import Blame, FaultRule, Severity
from holdfast.core.strategies import Strategy
from holdfast.errors import UsageError

ONE = Exited(1)


def failure(end: End = ONE, exception: str = "", message: str = "", *log: str) -> Failure:
    return Failure(
        node_id="a",
        view=1,
        rank=0,
        local_rank=0,
        pid=1,
        end=end,
        failed_at=0.0,
        exception=exception,
        message=message,
        log_tail=log,
    )


@pytest.mark.parametrize(
    ("end", "exception", "message", "name", "blame"),
    [
        (Exited(14), "", "", "inforom-corrupted", Blame.NODE),
        (Exited(128), "", "", "unknown-device", Blame.NODE),
        (Exited(201), "", "", "driver-error", Blame.NODE),
        (Exited(202), "", "", "residual-processes", Blame.PLATFORM),
        (Exited(134), "", "", "aborted", Blame.PROCESS),
        (Exited(137), "", "", "killed", Blame.PROCESS),
        (Exited(139), "", "", "crashed", Blame.PROCESS),
        (Exited(143), "", "", "terminated", Blame.PROCESS),
        (Signalled(6, "SIGABRT"), "", "", "aborted", Blame.PROCESS),
        (Signalled(9, "SIGKILL"), "", "", "killed", Blame.PROCESS),
        (Signalled(11, "SIGSEGV"), "", "", "crashed", Blame.PROCESS),
        (Signalled(7, "SIGBUS"), "", "", "bus-error", Blame.PROCESS),
        (Signalled(15, "SIGTERM"), "", "", "terminated", Blame.PROCESS),
        (Signalled(34, "signal 34"), "", "", "killed", Blame.PROCESS),
        (OutOfMemory("oom_kill 1"), "", "", "host-out-of-memory", Blame.PROCESS),
        (NotStarted("no such file"), "", "", "not-started", Blame.PLATFORM),
        (Exited(127), "", "", "not-started", Blame.PLATFORM),
        (Exited(3), "", "", "exited", Blame.PROCESS),
        (ONE, "ValueError", "ValueError: boom", "script-error", Blame.USER_CODE),
        (ONE, "my.package.OddError", "odd", "script-error", Blame.USER_CODE),
        (ONE, "SyntaxError", "invalid syntax", "script-broken", Blame.USER_CODE),
        (ONE, "torch.OutOfMemoryError", "out of memory", "device-out-of-memory", Blame.USER_CODE),
        (ONE, "OSError", "OSError: [Errno 28] No space left on device: '/ckpt'", "storage-full", Blame.STORAGE),
        (ONE, "OSError", "OSError: [Errno 116] Stale file handle", "storage-error", Blame.STORAGE),
        (ONE, "RuntimeError", "DataLoader worker (pid 77) is killed by signal", "loader-died", Blame.PROCESS),
        (ONE, "torch.distributed.DistNetworkError", "", "connection-lost", Blame.NETWORK),
    ],
)
def test_the_built_in_table(end: End, exception: str, message: str, name: str, blame: Blame) -> None:
    fault = classify(failure(end, exception, message))
    assert (fault.name, fault.blame) == (name, blame)


def test_the_type_of_an_exception_goes_before_its_text() -> None:
    said = "uncorrectable ECC error encountered"
    assert classify(failure(ONE, "ValueError", f"do not retry on {said}")).name == "script-error"
    assert classify(failure(ONE, "RuntimeError", f"CUDA error: {said}")).name == "device-memory-error"


def test_what_native_code_said_goes_before_the_signal_that_ended_it_and_may_be_in_the_log() -> None:
    end = Signalled(6, "SIGABRT")
    fault = classify(failure(end, "", "", "step 12", "CUDA error: Uncorrectable ECC error encountered"))
    assert fault.name == "device-memory-error"
    assert fault.evidence == "“CUDA error: Uncorrectable ECC error encountered”"
    assert fault.severity is Severity.CRITICAL


@pytest.mark.parametrize(
    ("end", "exception", "name"),
    [(Signalled(9, "SIGKILL"), "", "killed"), (ONE, "RuntimeError", "script-error"), (ONE, "", "connection-lost")],
)
def test_what_was_said_before_another_cause_explains_nothing(end: End, exception: str, name: str) -> None:
    handled = "warning: Connection reset by peer, trying again"
    assert classify(failure(end, exception, "the loss is odd" if exception else "", handled)).name == name


def test_an_accelerators_rules_go_before_ours_and_a_users_before_those() -> None:
    mine = with_rules(BUILT_IN, [FaultRule(fault="device-error", code=201), FaultRule(fault="device-lost", code=3)])
    assert classify(failure(Exited(201)), mine).name == "device-error"
    assert classify(failure(Exited(3)), mine).name == "device-lost"
    both = read_fault_table('[[rule]]\nfault = "killed"\ncode = 3\n', "mine.toml", mine)
    assert classify(failure(Exited(3)), both).name == "killed"
    assert classify(failure(Exited(201)), both).name == "device-error"


def test_a_name_that_only_an_accelerator_knows_means_hardware() -> None:
    rules = [
        FaultRule(fault="xxxx-memory-error", text=r"X\d+ parity"),
        FaultRule(fault="xxxx-driver-error", code=77),
        FaultRule(fault="xxxx-residual-processes", code=78),
        FaultRule(fault="driver-error", code=79),
    ]
    table = with_accelerator(BUILT_IN, rules)
    found = [classify(failure(Exited(code)), table) for code in (77, 78, 79)]
    assert [fault.blame for fault in found] == [Blame.NODE, Blame.PLATFORM, Blame.NODE]
    lost = classify(failure(Signalled(6, "SIGABRT"), "", "", "driver: X17 parity"), table)
    assert (lost.name, lost.severity) == ("xxxx-memory-error", Severity.CRITICAL)


def test_a_table_that_was_merely_found_adds_and_takes_nothing_away() -> None:
    rules = [
        FaultRule(fault="xxxx-driver-error", code=201),
        FaultRule(fault="xxxx-lost", code=77),
        FaultRule(fault="xxxx-machine-check", signal="SIGILL"),
        FaultRule(fault="xxxx-memory-error", signal="SIGBUS", text="hardware memory error"),
        FaultRule(fault="xxxx-driver-error", exception="xxxx.OutOfMemoryError"),
        FaultRule(fault="xxxx-driver-error", exception="XxxxError"),
        FaultRule(fault="xxxx-lost", text="X is lost"),
    ]
    failures = {
        "exit 201": failure(Exited(201)),
        "exit 77": failure(Exited(77)),
        "SIGILL": failure(Signalled(4, "SIGILL")),
        "SIGBUS": failure(Signalled(7, "SIGBUS")),
        "SIGBUS and why": failure(Signalled(7, "SIGBUS"), "", "", "kernel: hardware memory error"),
        "memory": failure(ONE, "torch.OutOfMemoryError"),
        "raised": failure(ONE, "xxxx.XxxxError"),
        "said": failure(ONE, "", "", "X is lost"),
    }
    found, named = with_detected(BUILT_IN, rules), with_accelerator(BUILT_IN, rules)
    assert {what: classify(one, found).name for what, one in failures.items()} == {
        "exit 201": "driver-error",
        "exit 77": "xxxx-lost",
        "SIGILL": "crashed",
        "SIGBUS": "bus-error",
        "SIGBUS and why": "xxxx-memory-error",
        "memory": "device-out-of-memory",
        "raised": "xxxx-driver-error",
        "said": "xxxx-lost",
    }
    assert [classify(failures[what], named).name for what in ("exit 201", "SIGILL")] == [
        "xxxx-driver-error",
        "xxxx-machine-check",
    ], "whoever names it means it"


def test_all_that_a_rule_names_must_be_so() -> None:
    rule = FaultRule(fault="device-lost", signal="SIGABRT", text="fell off the bus")
    table = with_rules(BUILT_IN, [rule])
    assert classify(failure(Signalled(6, "SIGABRT"), "", "", "GPU fell off the bus"), table).name == "device-lost"
    assert classify(failure(Signalled(6, "SIGABRT")), table).name == "aborted"
    assert classify(failure(Signalled(11, "SIGSEGV"), "", "", "GPU fell off the bus"), table).name == "crashed"


def test_every_rule_of_ours_is_for_a_kind_that_there_is() -> None:
    assert {rule.fault for rule in FAULT_RULES} <= {one.name for one in FAULT_TYPES}
    assert len({one.name for one in FAULT_TYPES}) == len(FAULT_TYPES)
    assert all(not one.meaning.endswith(".") for one in FAULT_TYPES)


def test_a_shells_word_for_a_signal() -> None:
    assert signal_of(Exited(139)) == "SIGSEGV"
    assert signal_of(Exited(128)) == signal_of(Exited(1)) == ""


LICENCE = """
[[fault]]
name = "licence-server"
blame = "platform"
severity = "passing"
meaning = "the licence server did not answer"
forbids = ["recover-in-place"]

[[rule]]
fault = "licence-server"
exception = "RuntimeError"
text = "no licence"
"""


def test_a_users_file_may_bring_kinds_of_its_own() -> None:
    table = read_fault_table(LICENCE, "mine.toml")
    fault = classify(failure(ONE, "RuntimeError", "No Licence left"), table)
    assert (fault.name, fault.blame, fault.forbids) == (
        "licence-server",
        Blame.PLATFORM,
        (Strategy.RECOVER_IN_PLACE,),
    )
    assert classify(failure(ONE, "RuntimeError", "something else"), table).name == "script-error"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[[rule]\n", "is no TOML: Expected ']]'"),
        ("x = 1\n", "line 1: there is no 'x', give [[fault]] and [[rule]]"),
        ('[rule]\nfault = "killed"\n', "write [[rule]], in double brackets"),
        ('# mine\n[[rule]]\nfault = "killed"\ncod = 3\n', "line 4: no key 'cod', did you mean code?"),
        ('[[rule]]\nfault = "drver-error"\ncode = 3\n', "line 2: key fault: there is no fault 'drver-error'"),
        ('[[rule]]\nfault = "killed"\ncode = "3"\n', "line 3, key code: Expected"),
        ('[[rule]]\nfault = "killed"\n', "line 1: a rule needs at least one of"),
        ('[[rule]]\nfault = "killed"\ncode = 0\n', "line 3: key code: 0 is no exit code of a failure"),
        ('[[rule]]\nfault = "killed"\nsignal = "SIGFOO"\n', "line 3: key signal: there is no signal 'SIGFOO'"),
        ('[[rule]]\nfault = "killed"\ntext = "(pid"\n', "line 3: key text: '(pid' is no regular expression"),
        ('[[rule]]\nfault = "killed"\ncode = 3\nsignal = "SIGKILL"\n', "line 4: key signal: who exits with code 3"),
        (
            '[[rule]]\nfault = "killed"\ncode = 3\n[[rule]]\nfault = "exited"\ncode = 3\n',
            "line 4: a rule above has the same signs, and means 'killed'",
        ),
        (LICENCE + LICENCE.partition("[[rule]]")[0], "there is a fault 'licence-server' above"),
        (LICENCE.replace('"licence-server"', '""'), "line 3: key name: a fault needs a name"),
        (LICENCE.replace("platform", "me"), "line 4, key blame: Invalid enum value 'me', there are user code, process"),
        (LICENCE.replace("recover-in", "cover-in"), "line 7, key forbids: Invalid enum value"),
        (LICENCE.replace("meaning", "#"), "line 2: Object missing required field `meaning`"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_with_line_and_key(text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_fault_table(text, "mine.toml")
    assert str(caught.value).startswith("--fault-table mine.toml")
    assert sentence in str(caught.value)
