"""Which faults are a reason to examine a node, and what becomes of a suspect."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from holdfast.core import orders as o
from holdfast.core import records as r
from holdfast.core.events import ResizeRequested, SessionInfo
from holdfast.core.faults.failures import End, Exited, Failure, NotStarted, OutOfMemory, Signalled
from holdfast.core.faults.fault_table import BUILT_IN, read_fault_table, typed
from holdfast.core.faults.fault_types import FaultTable
from holdfast.core.health.checkup import is_suspicious
from holdfast.core.shard_map import ShardMap
from holdfast.core.state import Awaited, Fit, Unfit
from holdfast.core.strategies import LADDER, Strategy, Verdict
from support.clinic import Clinic

SEGFAULT = Signalled(11, "SIGSEGV")
ABORTED = Signalled(6, "SIGABRT")
ONE = Exited(1)


def failure(end: End, exception: str = "", message: str = "", *log: str, table: FaultTable = BUILT_IN) -> Failure:
    worker = {"node_id": "b", "view": 1, "rank": 1, "local_rank": 0, "pid": 7}
    said = {"exception": exception, "message": message, "log_tail": log}
    return typed(Failure(**worker, **said, end=end, failed_at=1.0), table)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("end", "exception", "text"),
    [
        (Exited(14), "", ""),
        (Exited(201), "", ""),
        (Exited(202), "", "a node on which others' processes hold the device is not fit"),
        (Signalled(11, "SIGSEGV"), "", ""),
        (Signalled(7, "SIGBUS"), "", ""),
        (ABORTED, "", ""),
        (Exited(139), "", "a shell's word for SIGSEGV"),
        (ONE, "", "driver: uncorrectable ECC error"),
        (ONE, "", "eth0: link is down"),
        (ONE, "CorruptionError", "the parameters of rank 1 differ"),
    ],
)
def test_what_a_broken_machine_does_is_a_reason_to_examine_it(end: End, exception: str, text: str) -> None:
    assert is_suspicious(failure(end, exception, text if exception else "", *([] if exception else [text])))


@pytest.mark.parametrize(
    ("end", "exception", "message"),
    [
        (ONE, "", ""),
        (ONE, "ValueError", "uncorrectable ECC error, says the script"),
        (ONE, "torch.OutOfMemoryError", ""),
        (ONE, "OSError", "No space left on device"),
        (ABORTED, "KeyError", "the script raised, and its threads did not let it end in peace"),
        (Signalled(9, "SIGKILL"), "", ""),
        (Signalled(15, "SIGTERM"), "", ""),
        (OutOfMemory("/job, 4 GiB"), "", ""),
        (NotStarted("no such file"), "", ""),
        (ONE, "DistNetworkError", "Connection reset by peer"),
        (ABORTED, "DistBackendError", "NCCL communicator was aborted"),
    ],
)
def test_what_is_the_scripts_or_somebody_elses_is_none(end: End, exception: str, message: str) -> None:
    assert not is_suspicious(failure(end, exception, message))


def test_who_is_pardoned_is_not_examined_and_nor_is_what_nobody_has_judged() -> None:
    crashed = failure(Signalled(11, "SIGSEGV"))
    assert not is_suspicious(msgspec.structs.replace(crashed, verdict=Verdict.PARDON))
    assert not is_suspicious(msgspec.structs.replace(crashed, fault=None))


@pytest.mark.parametrize("says_so", [True, False])
def test_a_users_kind_says_itself_whether_it_is_a_reason(says_so: bool) -> None:
    text = f"""
[[fault]]
name = "fan-loud"
blame = "process"
severity = "passing"
meaning = "the fan is loud"
{"examine = true" if says_so else ""}

[[rule]]
fault = "fan-loud"
code = 77
"""
    table = read_fault_table(text, "mine.toml")
    assert is_suspicious(failure(Exited(77), table=table)) is says_so


# --- while the job goes on


def training(*nodes: str, least: int = 1, **settings: Any) -> Clinic:
    """Two nodes of two workers each at work, the others stand by; all have passed their check."""
    settings = {"workers": 2, "restarts": 1, "session": SessionInfo(), "spare_nodes": 1} | settings
    world = Clinic(nodes=(least, 2), **settings)
    world.come(*nodes)
    world.prove()
    assert world.members == ["a", "b"] and set(world.health().values()) == {Fit}
    world.tasks.clear()
    return world


def decided(world: Clinic) -> r.IncidentDecided:
    return [record for record in world.history if isinstance(record, r.IncidentDecided)][-1]


def crash(world: Clinic, node_id: str, *local_ranks: int) -> None:
    world.do(*(world.failed(node_id, local_rank, end=SEGFAULT) for local_rank in local_ranks or (0,)))


def is_kept(world: Clinic) -> bool:
    assert world.job.view
    return world.job.view.keeps_workers


def test_a_node_that_stands_by_takes_a_suspects_place_and_it_is_examined_meanwhile() -> None:
    world = training("a", "b", "c")
    crash(world, "b")
    assert world.members == ["a", "c"] and is_kept(world), "the others go on at once"
    assert decided(world).strategy is Strategy.RECOVER and "c for b, which must be checked" in decided(world).why
    assert isinstance(world.order_to("b"), o.Hold) and {n for n, _ in world.open_tasks()} == {"b"}
    world.prove()
    assert world.job.incidents.current is None and world.health()["b"] is Awaited, "nobody waits for its verdict"
    world.play()
    assert {n for n, _ in world.tasks} == {"b"} and world.health()["b"] is Fit, "nobody who trains was asked"
    world.do(world.broke("c"))
    world.wait(0.3)
    assert world.members == ["a", "b"] and is_kept(world), "one that passed stands by again"


def test_a_suspect_takes_nobodys_place_before_it_has_passed() -> None:
    world = training("a", "b", "c")
    world.wrong = {"b"}
    crash(world, "b")
    world.prove()
    world.do(world.broke("c"))
    world.wait(0.3)
    assert world.members == ["a"], "it is still examined"
    world.prove()
    world.play()
    world.wait(world.settings.park_timeout_s)
    assert world.members == ["a"] and world.health()["b"] is Unfit, "and is found broken"


def test_without_another_node_the_suspect_works_on_and_is_examined_before_all_start_anew() -> None:
    world = training("a", "b")
    crash(world, "b")
    world.prove()
    assert world.members == ["a", "b"] and is_kept(world) and decided(world).strategy is Strategy.RECOVER_IN_PLACE
    assert world.health() == {"a": Fit, "b": Awaited} and not world.open_tasks(), "nobody who trains is disturbed"
    world.restart_master()
    world.reconnect_all()
    assert world.health() == {"a": Fit, "b": Awaited} and world.view_number == 2, "it is not forgotten"
    world.do(*(world.failed(n, i, end=Signalled(9, "SIGKILL")) for n in "ab" for i in range(2)))
    assert decided(world).strategy is Strategy.RESTART and "2 of 2 nodes" in decided(world).why
    assert world.gathering and {n for n, _ in world.open_tasks()} == {"b"}
    world.play()
    world.wait(world.settings.settle_s)
    assert world.members == ["a", "b"] and not is_kept(world) and world.health()["b"] is Fit


def test_a_suspect_whose_ranks_are_done_without_comes_back_after_its_check_only() -> None:
    world = training("a", "b", recovery=tuple(s for s in LADDER if s is not Strategy.RECOVER_IN_PLACE))
    crash(world, "b", 0, 1)
    world.prove()
    assert world.members == ["a"] and is_kept(world) and decided(world).strategy is Strategy.ELASTIC_TRAINING
    world.wait(world.settings.park_timeout_s)
    assert world.members == ["a"] and world.open_tasks()
    world.play()
    world.do(world.parked("b", 2))
    assert world.members == ["a", "b"] and is_kept(world), "it passed"


def test_a_suspect_that_leaves_by_plan_is_examined_once_its_workers_have_left() -> None:
    world = Clinic(nodes=(1, 3), session=SessionInfo(), restarts=0)
    world.come("a", "b", "c")
    world.prove()
    crash(world, "c")
    world.prove()
    assert world.members == ["a", "b", "c"] and world.health()["c"] is Awaited
    world.do(ResizeRequested(nodes=2, why="asked to"))
    assert world.members == ["a", "b"] and is_kept(world)
    assert not world.open_tasks(), "its workers train until the step boundary"
    world.prove()
    assert {n for n, _ in world.open_tasks()} == {"c"}


def test_of_two_suspects_one_is_replaced_if_one_stands_by() -> None:
    world = training("a", "b", "c")
    world.do(world.failed("a", 0, end=SEGFAULT), world.failed("b", 0, end=SEGFAULT))
    assert world.members == ["c", "b"] and is_kept(world)
    assert {n for n, _ in world.open_tasks()} == {"a"} and world.health()["b"] is Awaited


def test_where_a_shard_is_gone_whoever_takes_over_the_suspect_is_examined_before_all_start_anew() -> None:
    world = training("a", "b", "c", session=SessionInfo(shard_map=ShardMap(4), replicas=0, resizable=False))
    crash(world, "b")
    assert decided(world).strategy is Strategy.RESTART
    assert world.gathering and {n for n, _ in world.open_tasks()} == {"b"}


def test_who_is_to_blame_and_must_stay_is_examined_before_all_start_anew() -> None:
    world = training("a", "b", least=2)
    world.do(world.failed("b", 0, end=Exited(201)))
    assert world.members == ["a", "b"] and is_kept(world) and "is not evicted though at fault" in decided(world).why
    assert world.health() == {"a": Fit, "b": Awaited}


def test_the_scripts_own_fault_makes_nobody_a_suspect() -> None:
    world = training("a", "b", "c")
    world.do(world.failed("b", 0, exception="ValueError"))
    world.prove()
    assert world.members == ["a", "b"] and set(world.health().values()) == {Fit} and not world.open_tasks()
