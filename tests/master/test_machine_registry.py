"""The steward: machines' names go into events, what happens to them into the book, cordons to the platform."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast import monitors
from holdfast.cli.main import run_app
from holdfast.core.events import Event, Hello, WorkerFailed
from holdfast.core.faults.failures import Exited, Signalled
from holdfast.core.faults.fault_table import fault_of, typed
from holdfast.core.health import reputation
from holdfast.core.health.findings import CheckProblem, NodeVerdict
from holdfast.core.health.reputation import DAY_S, CordonMark, Grade, MachineEventKind
from holdfast.core.records import CheckConcluded
from holdfast.core.strategies import Verdict
from holdfast.errors import HoldfastError
from holdfast.journal import MachineBook, machines
from holdfast.master import machine_registry
from holdfast.master.machine_registry import MachineRegistry
from holdfast.monitors import ErrorMonitor, Fault, NodeFacts
from holdfast.platforms.local_platform import LocalPlatform
from support.clinic import Clinic
from support.world import World

DRIVER, INFOROM = 201, 14


class Care:
    """A world whose master has a steward."""

    def __init__(self, directory: Path, *asked: ErrorMonitor, **settings: Any) -> None:
        self.world = World(**settings)
        self.book = MachineBook(directory / "nodes.sqlite")
        self.platform = LocalPlatform(directory, clock=lambda: self.world.now)
        self.machine_registry = MachineRegistry(self.book, self.platform, asked, clock=lambda: self.world.now)

    def do(self, *events: Event) -> None:
        async def turn() -> None:
            told = await self.machine_registry.introduced(list(events))
            told = await self.machine_registry.judged(told, self.world.job)
            self.machine_registry.learn(self.world.do(*told).records, self.world.job)
            await self.machine_registry.close()

        asyncio.run(turn())

    def fails(self, node_id: str, code: int, local_rank: int = 0) -> WorkerFailed:
        event = self.world.failed(node_id, local_rank, end=Exited(code))
        return msgspec.structs.replace(event, failure=typed(event.failure))

    def kinds(self, machine: str) -> list[str]:
        return [f"{event.kind.value} {event.fault}".rstrip() for event in self.book.history(machine)]


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(work())  # type: ignore[arg-type]


def test_a_fault_of_a_node_is_remembered_once_and_its_return_is_probation(tmp_path: Path) -> None:
    care = Care(tmp_path, nodes=(1, 2), workers=2)
    care.do(care.world.hello("a"), care.world.hello("b"))
    care.do(care.fails("b", DRIVER), care.fails("b", DRIVER, 1))  # all of its workers die of it
    assert care.kinds("host-b") == ["fault driver-error"] and care.kinds("host-a") == []
    assert care.platform.unschedulable() == {}
    later = Care(tmp_path, nodes=(1, 2))
    later.world.now += 3 * DAY_S
    later.do(later.world.hello("b"))
    assert later.kinds("host-b") == ["fault driver-error", "returned"]
    reputation = later.world.job.nodes["b"].reputation
    assert reputation.grade is Grade.PROBATION and "driver-error 3 d ago" in reputation.why
    again = Care(tmp_path, nodes=(1, 2))
    again.world.now += 3 * DAY_S + 60
    again.do(again.world.hello("b"))
    assert again.world.job.nodes["b"].reputation.grade is Grade.PROBATION
    assert again.kinds("host-b") == ["fault driver-error", "returned"]


def test_what_an_agent_says_of_its_name_does_not_count(tmp_path: Path) -> None:
    care = Care(tmp_path, nodes=(1, 1))
    care.platform.mark_unschedulable(CordonMark(machine="host-a", at=0.0, by="ada", why="loud"))
    care.do(care.world.hello("a"))
    assert care.world.job.nodes["a"].reputation.grade is Grade.CORDONED and care.world.gathering


def test_a_critical_fault_cordons_the_machine_and_everybodys_fault_lets_it_back(tmp_path: Path) -> None:
    care = Care(tmp_path, nodes=(1, 3), restarts=3)
    care.do(*(care.world.hello(name) for name in "abc"))
    care.do(care.fails("b", INFOROM))
    assert list(care.platform.unschedulable()) == ["host-b"]
    assert care.platform.unschedulable()["host-b"].by == "job job"
    care.world.start_all()
    care.world.now += 10
    care.do(care.fails("c", INFOROM))
    assert care.platform.unschedulable() == {}
    assert care.kinds("host-b") == ["fault inforom-corrupted", "cordoned", "cleared inforom-corrupted"]
    assert care.kinds("host-c") == []


def test_somebody_elses_mark_is_not_taken_back(tmp_path: Path) -> None:
    care = Care(tmp_path, nodes=(1, 3), restarts=3)
    care.do(*(care.world.hello(name) for name in "abc"))
    care.do(care.fails("b", INFOROM))
    care.platform.mark_unschedulable(CordonMark(machine="host-b", at=care.world.now, by="ada", why="I look at it"))
    care.world.start_all()
    care.do(care.fails("c", INFOROM))
    assert list(care.platform.unschedulable()) == ["host-b"]


def test_a_lemon_is_banned_for_a_while_at_its_third_fault_in_a_week(tmp_path: Path) -> None:
    for day in range(3):
        care = Care(tmp_path, nodes=(1, 2))
        care.world.now += day * DAY_S
        care.do(care.world.hello("a"), care.world.hello("b"))
        assert (care.platform.unschedulable() == {}) is True
        care.do(care.fails("b", DRIVER))
    mark = care.platform.unschedulable()["host-b"]
    assert mark.until and 14 * DAY_S < mark.until - mark.at < 28 * DAY_S and "keeps failing" in mark.why
    last = Care(tmp_path, nodes=(1, 2))
    last.world.now += 4 * DAY_S
    last.do(last.world.hello("b"), last.world.hello("a"))
    last.world.wait(1)
    assert last.world.members == ["a"] and last.world.job.nodes["b"].reputation.grade is Grade.BANNED


def test_not_more_machines_than_the_limit_are_cordoned_within_a_day_by_all_jobs_together(tmp_path: Path) -> None:
    for number in range(3):
        care = Care(tmp_path, nodes=(1, 2), cordon_limit=2)
        care.do(care.world.hello("a"), care.world.hello(f"m{number}"))
        care.do(care.fails(f"m{number}", INFOROM))
    assert len(care.platform.unschedulable()) == 2
    assert len(care.kinds("host-m2")) == 1


def test_a_new_master_does_what_the_last_one_did_not_get_round_to(tmp_path: Path) -> None:
    care = Care(tmp_path, nodes=(1, 2))
    care.do(care.world.hello("a"), care.world.hello("b"))
    care.world.do(care.fails("b", INFOROM))  # journaled, and then the master died
    assert care.platform.unschedulable() == {}
    care.world.restart_master()

    async def start() -> None:
        care.machine_registry.reconcile(care.world.job)
        await care.machine_registry.close()

    run(start)
    assert list(care.platform.unschedulable()) == ["host-b"]
    care.platform.mark_schedulable("host-b")
    run(start)  # it was told once, and somebody let it back
    assert care.platform.unschedulable() == {}


def test_a_platform_or_a_book_that_fails_costs_nothing_but_what_it_knew(tmp_path: Path) -> None:
    class Broken(LocalPlatform):
        def unschedulable(self) -> dict[str, CordonMark]:
            raise HoldfastError("no route to the API server")

    care = Care(tmp_path, nodes=(1, 2))
    care.machine_registry = MachineRegistry(
        MachineBook(tmp_path), Broken(tmp_path), clock=lambda: care.world.now
    )  # a directory
    care.do(care.world.hello("a"), care.world.hello("b"))
    care.world.start_all()
    care.do(care.fails("b", INFOROM))
    assert care.world.members == ["a"]


# --- monitors


class Says(ErrorMonitor):
    def __init__(self, verdict: Any) -> None:
        self.verdict = verdict
        self.told: list[Any] = []

    def handle(self, fault: Fault, node: NodeFacts) -> Verdict:
        self.told.append((fault.name, node.machine, len(node.faults())))
        if isinstance(self.verdict, BaseException):
            raise self.verdict
        found: Verdict = self.verdict() if callable(self.verdict) else self.verdict
        return found


def test_a_monitor_may_cordon_and_pardon(tmp_path: Path) -> None:
    mine = Says(Verdict.CORDON)
    care = Care(tmp_path, mine, nodes=(1, 2))
    care.do(care.world.hello("a"), care.world.hello("b"))
    care.do(care.fails("b", 3))
    assert mine.told == [("exited", "host-b", 0)]
    assert list(care.platform.unschedulable()) == ["host-b"]
    other = Care(tmp_path / "other", Says(Verdict.PARDON), nodes=(1, 2))
    other.do(other.world.hello("a"), other.world.hello("b"))
    other.do(other.fails("b", INFOROM))
    assert other.platform.unschedulable() == {} and other.kinds("host-b") == []


@pytest.mark.parametrize("answer", [ValueError("no"), SystemExit(1), "cordon", None])
def test_whatever_goes_wrong_in_a_monitor_means_nothing_and_the_next_one_is_asked(tmp_path: Path, answer: Any) -> None:
    second = Says(Verdict.CORDON)
    care = Care(tmp_path, Says(answer), second, nodes=(1, 2))
    care.do(care.world.hello("a"), care.world.hello("b"))
    care.do(care.fails("b", 3))
    assert len(second.told) == 1 and list(care.platform.unschedulable()) == ["host-b"]


def test_a_monitor_that_hangs_holds_nobody_up_and_silences_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitors, "TIME_LIMIT_S", 0.5)
    release = threading.Event()
    hung, other = Says(lambda: release.wait(60) and Verdict.CORDON), Says(Verdict.NORMAL)
    care = Care(tmp_path, hung, other, nodes=(1, 3), restarts=3)
    care.do(*(care.world.hello(name) for name in "abc"))
    try:
        care.do(care.fails("b", 3))
        assert care.platform.unschedulable() == {} and care.world.job.progress.failed == {}
        other.verdict = Verdict.CORDON
        care.world.start_all()
        care.world.now += 60
        care.do(care.fails("c", 3))
        assert (len(hung.told), len(other.told)) == (1, 2)
        assert list(care.platform.unschedulable()) == ["host-c"]
    finally:
        release.set()
        for thread in care.machine_registry._monitors._monitors[0][1].stuck:
            thread.join(60)


def test_a_platform_that_hangs_holds_up_neither_the_master_nor_the_monitors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()

    class Hung(LocalPlatform):
        def unschedulable(self) -> dict[str, CordonMark]:
            release.wait(60)
            return {}

    monkeypatch.setattr(machine_registry, "PLATFORM_LIMIT_S", 0.1)
    mine = Says(Verdict.CORDON)
    care = Care(tmp_path, mine, nodes=(1, 2))
    care.do(care.world.hello("a"), care.world.hello("b"))
    care.machine_registry = MachineRegistry(care.book, Hung(tmp_path), [mine], clock=lambda: care.world.now)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0.01)
            turns += 1

    async def ask() -> list[Event]:
        counting = asyncio.create_task(count())
        judged = await care.machine_registry.judged([care.fails("b", 3)], care.world.job)
        counting.cancel()
        return judged

    try:
        (event,) = run(ask)
        assert isinstance(event, WorkerFailed) and event.failure.verdict is Verdict.CORDON
        assert mine.told == [("exited", "host-b", 0)] and turns > 10, "others were served meanwhile"
    finally:
        release.set()
        for thread in care.machine_registry._lookups.stuck:
            thread.join(60)


def test_an_introduction_of_a_stranger_costs_no_query_of_its_own(tmp_path: Path) -> None:
    care = Care(tmp_path, nodes=(1, 1000))
    hellos: list[Event] = [care.world.hello(f"n{number}") for number in range(1000)]
    told = asyncio.run(care.machine_registry.introduced(hellos))
    assert all(isinstance(event, Hello) and event.reputation.grade is Grade.GOOD for event in told)


def test_histories_know_what_happened(tmp_path: Path) -> None:
    care = Care(tmp_path, nodes=(1, 2), silence_timeout_s=5.0)
    care.do(care.world.hello("a"), care.world.hello("b"))
    care.do(care.world.silent("b"))
    assert [(e.kind, e.weight) for e in care.book.history("host-b")] == [(MachineEventKind.FAULT, 0.5)]


def test_what_a_check_found_is_kept_and_a_failed_one_is_probation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    care = Care(tmp_path)
    care.world = clinic = Clinic(nodes=(2, 3))
    clinic.wrong, clinic.times = {"b"}, {"d": 2.0}
    care.do(*(clinic.hello(name) for name in "abcd"))
    while tasks := clinic.open_tasks():
        for node_id, task in tasks:
            clinic.answered.add((clinic.life(node_id), task.checkup, task.round))
            care.do(clinic.examined(node_id, clinic.result(node_id, task)))
    kinds = {name: care.kinds(f"host-{name}") for name in "abcd"}
    assert kinds == {"b": ["check-failed check-failed"]} | {name: ["check-passed"] for name in "acd"}
    assert run_app(["nodes", "history", "host-b", "--state-dir", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "host-b  check-failed check-failed: matmul check: device 0: the product is wrong (before the job)" in told
    later = Care(tmp_path, nodes=(2, 2))
    later.do(later.world.hello("b"), later.world.hello("d"))
    grades = {name: later.world.job.nodes[name].reputation.grade for name in "bd"}
    assert grades == {"b": Grade.PROBATION, "d": Grade.GOOD}


def test_a_passed_check_ends_the_probation_and_does_not_push_faults_out_of_the_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "EVENTS_KEPT_MAX", 4)
    care = Care(tmp_path)
    care.world = clinic = Clinic(nodes=(1, 2))
    care.do(clinic.hello("a"))
    checked = CheckConcluded(at=0.0, checkup="1", why="standing by", took_s=1.0, accelerator="cpu", nodes=())
    for fitness in ("unfit", *("fit",) * 5):
        verdict = NodeVerdict(node_id="a", incarnation=clinic.life("a"), fitness=fitness, why="")
        care.machine_registry.learn([msgspec.structs.replace(checked, nodes=(verdict,))], clinic.job)
        clinic.now += 60
    assert care.kinds("host-a") == ["check-failed check-failed", "check-passed"]
    assert care.machine_registry._reputation("host-a").grade is Grade.GOOD


def test_of_nodes_on_one_machine_the_worst_counts(tmp_path: Path) -> None:
    care = Care(tmp_path, nodes=(1, 2))
    care.do(care.world.hello("a", host="h"), care.world.hello("b", host="h"))
    verdicts = tuple(
        NodeVerdict(node_id=name, incarnation=care.world.life(name), fitness=fitness, why="")  # type: ignore[arg-type]
        for name, fitness in (("a", "unfit"), ("b", "fit"))
    )
    care.machine_registry.learn(
        [CheckConcluded(at=0.0, checkup="1", why="", took_s=1.0, accelerator="", nodes=verdicts)], care.world.job
    )
    assert care.kinds("h") == ["check-failed check-failed"]


# --- what is held against a machine


def of_check(care: Care, *verdicts: tuple[str, str, str]) -> CheckConcluded:
    """By node: fitness, and the fault of what was found."""
    nodes = tuple(
        NodeVerdict(
            node_id=name,
            incarnation=care.world.life(name),
            fitness=fitness,  # type: ignore[arg-type]
            why=fault,
            problems=(CheckProblem("matmul", fault, ""),) if fault else (),
        )
        for name, fitness, fault in verdicts
    )
    return CheckConcluded(at=care.world.now, checkup="1", why="standing by", took_s=1.0, accelerator="", nodes=nodes)


def learn(care: Care, *records: CheckConcluded) -> None:
    async def turn() -> None:
        care.machine_registry.learn(records, care.world.job)
        await care.machine_registry.close()

    run(turn)


def weights(care: Care, machine: str) -> list[float]:
    return [event.weight for event in care.book.history(machine)]


def test_checks_that_fail_for_want_of_a_device_ban_nobody(tmp_path: Path) -> None:
    care = Care(tmp_path, nodes=(1, 2))
    care.do(care.world.hello("a"))
    for _ in range(3):
        learn(care, of_check(care, ("a", "unfit", "device-missing")))
        care.world.now += 3
    assert weights(care, "host-a") == [0.0] and care.platform.unschedulable() == {}
    assert care.machine_registry._reputation("host-a").grade is Grade.PROBATION


def test_a_machine_that_fails_its_check_every_hour_has_failed_once_until_it_passes(tmp_path: Path) -> None:
    care = Care(tmp_path, nodes=(1, 2))
    care.do(care.world.hello("a"))
    for _ in range(24):
        learn(care, of_check(care, ("a", "unfit", "wrong-result")))
        care.world.now += 3_600
    assert weights(care, "host-a") == [1.0]
    for _ in range(2):
        learn(care, of_check(care, ("a", "fit", "")))
        learn(care, of_check(care, ("a", "unfit", "wrong-result")))
    mark = care.platform.unschedulable()["host-a"]
    assert mark.until and "the last one check-failed" in mark.why, "it computes wrong numbers now and then"


def test_machines_that_fail_a_check_alike_are_all_well(tmp_path: Path) -> None:
    care = Care(tmp_path, nodes=(1, 3))
    care.do(*(care.world.hello(name) for name in "abc"))
    for _ in range(3):
        learn(care, of_check(care, *((name, "unfit", "gpu-driver-error") for name in "abc")))
        learn(care, of_check(care, *((name, "fit", "") for name in "abc")))
    assert care.platform.unschedulable() == {}
    assert all(care.machine_registry._reputation(f"host-{name}").grade is Grade.GOOD for name in "abc")


def watchdog(care: Care, node_id: str) -> WorkerFailed:
    """As NCCL's ends the process when its device dies."""
    text = "c10::DistBackendError: Process group watchdog thread terminated with exception: uncorrectable ECC error"
    event = care.world.failed(node_id, end=Signalled(6, "SIGABRT"))
    failure = msgspec.structs.replace(event.failure, exception="DistBackendError", message=text)
    return msgspec.structs.replace(event, failure=typed(failure))


def test_a_device_that_dies_in_a_collective_is_no_echo(tmp_path: Path) -> None:
    care = Care(tmp_path, nodes=(1, 2), restarts=3)
    care.do(care.world.hello("a"), care.world.hello("b"))
    care.world.start_all()
    care.do(watchdog(care, "b"))
    assert care.world.members == ["a"] and care.world.job.incidents.restarts_used == 0
    assert care.kinds("host-b") == ["fault device-memory-error", "cordoned"]


def test_an_echo_is_not_held_against_its_machine(tmp_path: Path) -> None:
    care = Care(tmp_path, nodes=(2, 2), restarts=3)
    care.do(care.world.hello("a"), care.world.hello("b"))
    event = care.world.failed("b", end=Exited(1))
    text = "Connection reset by peer: the link is down"
    failure = typed(msgspec.structs.replace(event.failure, exception="RuntimeError", message=text))
    assert failure.fault and failure.fault.name == "link-down"
    care.do(msgspec.structs.replace(event, failure=failure))
    assert care.kinds("host-b") == []


def test_a_persons_cordon_outlives_what_jobs_think(tmp_path: Path) -> None:
    ada = CordonMark(machine="host-b", at=0.0, by="ada", why="do not touch")
    for day in range(3):
        care = Care(tmp_path, nodes=(1, 3), restarts=3)
        care.world.now += day * DAY_S
        care.do(*(care.world.hello(name) for name in "abc"))
        care.platform.mark_unschedulable(ada)
        care.do(care.fails("b", INFOROM))
        assert care.platform.unschedulable() == {"host-b": ada}
        care.platform.mark_schedulable("host-b")
    assert reputation.ban("host-b", care.book.history("host-b"), care.world.now, "") is not None
    care.platform.mark_unschedulable(ada)
    care.world.start_all()
    care.do(care.fails("c", INFOROM))  # it was everybody's
    assert care.kinds("host-b")[-1] == "cleared inforom-corrupted"
    assert care.platform.unschedulable() == {"host-b": ada}


def test_a_job_makes_no_cordon_shorter(tmp_path: Path) -> None:
    there = CordonMark(machine="host-b", at=0.0, by="job other", why="inforom-corrupted")
    for day in range(3):
        care = Care(tmp_path, nodes=(1, 2))
        care.world.now += day * DAY_S
        care.do(care.world.hello("a"), care.world.hello("b"))
        if day == 2:
            care.platform.mark_unschedulable(there)
        care.do(care.fails("b", DRIVER))
    assert care.platform.unschedulable() == {"host-b": there}


def test_the_limit_is_for_bans_too_and_for_what_they_mean(tmp_path: Path) -> None:
    for number in range(3):
        for fault in range(3):
            care = Care(tmp_path, nodes=(1, 2), cordon_limit=1)
            care.world.now += fault * 3_600
            care.do(care.world.hello("a"), care.world.hello(f"m{number}"))
            care.do(care.fails(f"m{number}", DRIVER))
    grades = [care.machine_registry._reputation(f"host-m{number}").grade for number in range(3)]
    assert grades == [Grade.BANNED, Grade.PROBATION, Grade.PROBATION]
    assert list(care.platform.unschedulable()) == ["host-m0"]


def test_what_turns_out_to_be_everybodys_is_taken_back_also_from_nodes_that_stayed(tmp_path: Path) -> None:
    care = Care(tmp_path, nodes=(2, 2), restarts=3)
    care.do(care.world.hello("a"), care.world.hello("b"))
    care.do(care.fails("a", INFOROM))
    care.world.now += 0.5
    care.world.start_all()
    care.do(care.fails("b", INFOROM))
    assert care.kinds("host-a") == ["fault inforom-corrupted", "cleared inforom-corrupted"]
    assert care.kinds("host-b") == []
    assert care.machine_registry._reputation("host-a").grade is Grade.GOOD


@pytest.mark.parametrize("apart_s", [0.0, 4.0])
def test_nodes_that_fall_silent_at_the_same_moment_are_not_held_to_it(tmp_path: Path, apart_s: float) -> None:
    care = Care(tmp_path, nodes=(1, 3), silence_timeout_s=5.0)
    care.do(*(care.world.hello(name) for name in "abc"))
    events = [care.world.silent("b"), care.world.silent("c")]
    for event in events:
        care.do(event)
        care.world.now += apart_s
    assert all(care.machine_registry._reputation(f"host-{name}").grade is Grade.GOOD for name in "bc")
    care.world.now += 60
    care.do(care.world.silent("a"))
    assert weights(care, "host-a") == [0.5]


def test_of_what_befalls_a_machine_at_once_the_heaviest_counts(tmp_path: Path) -> None:
    care = Care(tmp_path, nodes=(1, 2), restarts=3)
    care.do(care.world.hello("a"), care.world.hello("b"))
    care.machine_registry._fault(care.world.job, "b", fault_of("hang"), "")
    care.world.now += 20
    care.do(care.fails("b", DRIVER))
    care.world.now += 20
    care.machine_registry._fault(care.world.job, "b", fault_of("node-lost"), "")
    assert care.kinds("host-b") == ["fault hang", "cleared hang", "fault driver-error"]
    assert reputation.add_up(care.book.history("host-b"), care.world.now).score == pytest.approx(1.0, abs=1e-3)
