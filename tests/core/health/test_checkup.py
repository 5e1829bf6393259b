"""Checks of nodes in the core: when they are due, who takes part in the view afterwards, what a restart forgets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import pytest

from holdfast import exit_codes
from holdfast.core import orders as o
from holdfast.core import records as r
from holdfast.core.events import SessionInfo
from holdfast.core.faults.failures import Exited, Signalled
from holdfast.core.health.checkup import ALONE_TIMEOUT_S, PAIR_TIMEOUT_S, PAUSE_S
from holdfast.core.health.findings import ALONE, PAIRED, CheckProblem, CheckResult, CheckTask
from holdfast.core.state import Awaited, Fit, LeftOut, Slow, Unfit
from support.clinic import WRONG, Clinic, clinic
from support.world import START, World, only, tags

SEGFAULT = Signalled(11, "SIGSEGV")


def kinds(tasks: Iterable[tuple[str, CheckTask]]) -> list[str]:
    return [task.kind for _, task in tasks]


def test_nodes_are_checked_before_the_first_view() -> None:
    world = clinic(3)
    world.do(world.hello("a"), world.hello("b"), world.hello("c"))
    assert world.gathering and len(world.open_tasks()) == 3, "on machines of their own all are examined at once"
    world.play()
    assert world.serving and world.members == ["a", "b", "c"]
    assert set(world.health().values()) == {Fit}
    record = only(world.history, r.CheckConcluded)
    assert record.why == "before the job" and {norm.stage for norm in record.norms} == {*ALONE, *PAIRED}
    assert kinds(world.tasks) == ["alone"] * 3 + ["pair"] * 6, "everybody with everybody"


def test_nodes_of_one_machine_are_examined_one_after_the_other() -> None:
    world = clinic(3)
    world.do(*(world.hello(node_id, boot_id="same") for node_id in "abc"))  # with names of their own, as containers
    assert [node_id for node_id, _ in world.open_tasks()] == ["a"]
    world.play()
    assert world.serving


def busy_while(world: Clinic, shares: Mapping[str, list[float]], **info: Any) -> r.CheckConcluded:
    """A check during which others had the processors for shares of the times; the work itself takes as long on all."""

    def result(node_id: str, task: CheckTask) -> CheckResult:
        plain = Clinic.result(world, node_id, task)
        if task.kind != "alone":
            return plain
        share = shares[node_id].pop(0)
        return msgspec.structs.replace(plain, timings=tuple(replace(t, waited=share) for t in plain.timings))

    replace = msgspec.structs.replace
    world.result = result  # type: ignore[method-assign]
    world.come("a", "b", "c", **info)
    return only(world.history, r.CheckConcluded)


def test_nodes_of_one_machine_are_not_told_apart_by_what_others_did_on_it_meanwhile() -> None:
    record = busy_while(clinic(3), {"a": [0.0], "b": [0.6], "c": [0.3]}, boot_id="same")
    assert [verdict.fitness for verdict in record.nodes] == ["fit"] * 3


def test_a_machine_that_others_use_all_the_time_is_slow() -> None:
    record = busy_while(clinic(3), {"a": [0.0] * 3, "b": [0.6, 0.5, 0.5], "c": [0.0] * 3})
    assert [verdict.fitness for verdict in record.nodes] == ["fit", "slow", "fit"]
    assert "2.00 times the expected" in record.nodes[1].why, "by its best moment"


def test_a_machine_that_others_used_for_a_moment_is_not() -> None:
    record = busy_while(clinic(3), {"a": [0.0] * 3, "b": [0.6, 0.0], "c": [0.0] * 3})
    assert [verdict.fitness for verdict in record.nodes] == ["fit"] * 3


def test_what_has_become_slow_for_all_is_nobodys_fault() -> None:
    world = clinic(3)
    rounds: list[tuple[int, str]] = []

    def result(node_id: str, task: CheckTask) -> CheckResult:
        rounds.append((task.round, node_id))
        world.times = dict.fromkeys("abc", 1.0 if task.round < 2 else 1.8)
        return Clinic.result(world, node_id, task)

    world.result = result  # type: ignore[method-assign]
    world.come("a", "b", "c", boot_id="same")  # the machine becomes slower when c's turn comes
    record = only(world.history, r.CheckConcluded)
    assert rounds[:5] == [(0, "a"), (1, "b"), (2, "c"), (3, "a"), (4, "c")], "again, after one that was well"
    assert not [verdict.node_id for verdict in record.nodes if verdict.fitness != "fit"] and not record.links


def test_pairs_whose_ends_waited_for_others_are_not_called_slow_for_it() -> None:
    world = clinic(3)
    world.links = {frozenset("bc"): 3.0}
    plain = world.result

    def result(node_id: str, task: CheckTask) -> CheckResult:
        found = plain(node_id, task)
        waited = 0.35 if {node_id, task.partner} == {"b", "c"} else 0.0  # on each side
        timings = (msgspec.structs.replace(t, waited=waited) for t in found.timings)
        return msgspec.structs.replace(found, timings=tuple(timings))

    world.result = result  # type: ignore[method-assign]
    world.come("a", "b", "c")
    assert not only(world.history, r.CheckConcluded).links


def test_without_the_flag_nothing_is_checked() -> None:
    world = World(nodes=(2, 2))
    world.gather("a", "b")
    assert "checkup-began" not in tags(world.history)


def test_a_node_with_a_wrong_result_takes_no_part_and_the_job_waits_for_another() -> None:
    world = clinic(2)
    world.wrong = {"b"}
    world.come("a", "b")
    assert world.gathering and world.health() == {"a": Fit, "b": Unfit}
    assert "failed its check" in world.told["b.1"].why  # type: ignore[union-attr]
    world.come("c")
    assert world.serving and world.members == ["a", "c"]
    assert [task.kind for node_id, task in world.tasks if node_id == "a"].count("alone") == 1, "a is not asked again"


def test_nobody_waits_for_more_nodes_when_all_have_come_and_some_failed() -> None:
    world = clinic(2, 3, settle_s=60.0)
    world.wrong = {"b"}
    world.do(*(world.hello(node_id) for node_id in "abc"))
    world.play()
    assert world.serving and world.members == ["a", "c"] and world.now == START


def test_a_job_that_lacks_nodes_says_which_failed_their_check() -> None:
    world = clinic(2)
    world.wrong = {"b"}
    world.come("a", "b")
    world.wait(world.settings.join_timeout_s)
    assert world.finished
    assert "failed their check: b (matmul check: device 0: the product is wrong)" in world.finished.why


@pytest.mark.parametrize(
    ("kinds", "odd"),
    [
        ({"a": "cpu"}, ["a"]),
        ({"c": "xpu"}, ["c"]),
        ({"a": "cpu", "b": "cpu", "c": "cpu"}, []),
        ({"a": "cpu", "b": "cpu"}, ["c"]),
    ],
)
@pytest.mark.parametrize("times", [0.1, 10.0])
def test_who_has_another_processor_is_named_for_that_and_not_for_its_speed(
    kinds: dict[str, str], odd: list[str], times: float
) -> None:
    world = clinic(3, times=dict.fromkeys(kinds, times) if len(kinds) < 3 else {}, check_only=True)
    world.kinds = kinds
    world.come("a", "b", "c")
    verdicts = {verdict.node_id: verdict for verdict in world.checked()[0].nodes}
    assert [node_id for node_id, verdict in verdicts.items() if verdict.fitness != "fit"] == odd
    assert all("device check: it is checked as" in verdicts[node_id].why for node_id in odd)


def test_of_two_nodes_the_one_with_nothing_but_a_cpu_is_the_exception() -> None:
    for cpu in ("a", "b"):
        world = clinic(2, check_only=True)
        world.kinds = {cpu: "cpu"}
        world.come("a", "b")
        assert world.finished and world.finished.why == f"bad nodes: {cpu}"


def test_a_newcomer_with_another_processor_is_compared_with_the_check_before() -> None:
    world = clinic(1, 2)
    world.kinds = {"b": "cpu"}
    world.come("a")
    world.come("b")
    assert world.health() == {"a": Fit, "b": Unfit} and world.members == ["a"]


def test_a_node_that_came_and_was_not_yet_checked_is_counted_among_those_that_came() -> None:
    world = clinic(2)
    world.come("a")
    world.wait(world.settings.join_timeout_s)
    assert world.finished and "for 2 nodes, 1 joined" in world.finished.why


def test_a_slow_node_takes_part_unless_stragglers_are_to_be_left_out() -> None:
    kept = clinic(3, times={"b": 2.0})
    kept.come("a", "b", "c")
    assert kept.members == ["a", "b", "c"] and kept.health()["b"] is Slow
    left = clinic(2, 3, times={"b": 2.0}, exclude_straggler=True)
    left.come("a", "b", "c")
    assert left.members == ["a", "c"] and left.health()["b"] is LeftOut
    assert only(left.history, r.CheckConcluded).nodes[1].is_left_out


def test_the_minimum_holds_and_the_slowest_goes_first() -> None:
    world = clinic(3, 4, times={"b": 2.0, "c": 3.0}, exclude_straggler=True)
    world.come("a", "b", "c", "d", "e")
    assert world.health() == {"a": Fit, "b": LeftOut, "c": LeftOut, "d": Fit, "e": Fit}
    tight = clinic(4, times={"b": 2.0, "c": 3.0}, exclude_straggler=True)
    tight.come("a", "b", "c", "d", "e")
    assert tight.health()["c"] is LeftOut and tight.health()["b"] is Slow


def test_a_node_that_was_left_out_is_taken_in_when_the_minimum_needs_it() -> None:
    world = clinic(2, 3, times={"b": 2.0}, exclude_straggler=True)
    world.come("a", "b", "c")
    world.start_all()
    assert world.members == ["a", "c"]
    world.do(world.silent("c"))
    world.wait(1.0)
    assert world.serving and world.members == ["a", "b"]
    assert only(world.history, r.NodeReadmitted).node_id == "b"


def test_an_end_of_a_broken_link_is_left_out_while_the_minimum_holds() -> None:
    world = clinic(2, 3)
    world.links = {frozenset("ab"): float("inf")}
    world.come("a", "b", "c")
    record = only(world.history, r.CheckConcluded)
    assert [(link.first, link.second, link.state) for link in record.links] == [("a", "b", "broken")]
    assert not [v for v in record.nodes if v.fitness != "fit"], "no node is to blame"
    assert world.members == ["a", "c"] and world.health()["b"] is LeftOut


def test_one_that_joins_later_is_checked_with_the_help_of_those_that_stand_by() -> None:
    world = clinic(2, 2, spare_nodes=2)
    world.come("a", "b")
    world.start_all()
    world.come("c")
    assert world.health()["c"] is Fit and world.view_number == 1, "the others train on"
    assert "pair" not in kinds(task for task in world.tasks if task[0] == "c"), "there was nobody to try it with"
    world.links = {frozenset("cd"): 2.0}
    world.come("d")
    assert [t.partner for n, t in world.tasks if n == "d" and t.kind == "pair"] == ["c"] * 3, "slow: tried again"
    assert [(link.first, link.second) for link in world.checked()[-1].links] == [("c", "d")]
    world.times["e"] = 2.0
    world.come("e")
    assert world.health()["e"] is Slow, "slower than those that were checked before"


def test_one_that_joins_a_running_job_takes_part_only_after_its_check() -> None:
    world = clinic(1, 2)
    world.come("a")
    world.start_all()
    world.do(world.hello("b"))
    world.wait(5.0)
    assert world.members == ["a"]
    world.play()
    world.wait(world.settings.settle_s)
    assert world.members == ["a", "b"]


def test_a_node_that_comes_back_is_checked_again() -> None:
    world = clinic(2)
    world.come("a", "b")
    world.start_all()
    world.do(world.broke("b"))
    world.wait(1.0)
    world.next_life("b")
    world.come("b")
    assert world.members == ["a", "b"] and len(world.checked()) == 2
    assert [verdict.node_id for verdict in world.checked()[1].nodes] == ["b"], "only the one that was away"


def test_spares_are_checked_again_while_they_stand_by() -> None:
    world = clinic(1, 1, spare_nodes=1, spare_check_interval_s=100.0)
    world.come("a", "b")
    world.start_all()
    assert world.members == ["a"]
    world.wrong = {"b"}
    world.wait(101.0)
    world.play()
    assert world.health() == {"a": Fit, "b": Unfit} and world.checked()[-1].why == "standing by"


@pytest.mark.parametrize(("end", "is_checked"), [(SEGFAULT, True), (Exited(201), True), (Exited(1), False)])
def test_after_a_fault_only_the_suspect_is_checked(end: Any, is_checked: bool) -> None:
    world = clinic(3)
    world.come("a", "b", "c")
    world.start_all()
    world.tasks.clear()
    world.do(world.failed("b", end=end), world.failed("a", collateral=True))
    world.play()
    world.wait(1.0)
    assert world.serving and world.view_number == 2 and world.members == ["a", "b", "c"]
    assert {n for n, t in world.tasks if t.kind == "alone"} == ({"b"} if is_checked else set())
    assert bool(world.tasks) == is_checked
    if is_checked:
        assert {n for n, t in world.tasks if t.kind == "ready"} == {"a", "c"}, "as partners"


@pytest.mark.parametrize(
    ("times", "waited", "found"), [(1.15, 0.0, Fit), (1.0, 0.6, Fit), (1.3, 0.0, Slow), (2.0, 0.0, Slow)]
)
def test_one_alone_is_slow_if_it_is_clearly_slower_than_before(times: float, waited: float, found: type) -> None:
    world = clinic(1)
    world.come("a")
    world.start_all()
    plain = world.result

    def result(node_id: str, task: CheckTask) -> CheckResult:
        timings = (msgspec.structs.replace(t, waited=waited) for t in plain(node_id, task).timings)
        return msgspec.structs.replace(plain(node_id, task), timings=tuple(timings))

    world.result, world.times = result, {"a": times}  # type: ignore[method-assign]
    world.do(world.failed("a", end=SEGFAULT))
    world.play()
    world.wait(1.0)
    assert len(world.checked()) == 2 and world.health() == {"a": found}


def test_a_suspect_that_is_broken_does_not_come_back() -> None:
    world = clinic(2, 3)
    world.come("a", "b", "c")
    world.start_all()
    world.wrong = {"b"}
    world.do(world.failed("b", end=SEGFAULT))
    world.play()
    world.wait(1.0)
    assert world.serving and world.members == ["a", "c"]
    assert [i.cause for i in world.job.incidents.closed] == [] and world.start_all()
    assert "SIGSEGV" in world.job.incidents.closed[-1].cause


def test_a_node_that_does_not_answer_is_unfit_after_a_while() -> None:
    world = clinic(2)
    world.mute = {"b"}
    world.do(world.hello("a"), world.hello("b"), world.hello("c"))
    world.play()
    for _ in range(2):
        world.wait(ALONE_TIMEOUT_S)
        world.play()
    assert world.health() == {"a": Fit, "b": Unfit, "c": Fit} and world.members == ["a", "c"]
    assert "no answer" in world.job.nodes["b"].health.why  # type: ignore[union-attr]


def test_a_node_that_falls_mute_in_the_pairs_is_blamed_and_its_partners_are_not() -> None:
    world = clinic(3)
    world.do(*(world.hello(node_id) for node_id in "abcd"))
    for node_id, task in world.open_tasks():
        world.answered.add((world.life(node_id), task.checkup, task.round))
        world.do(world.examined(node_id, world.result(node_id, task)))
    world.mute = {"b"}
    for _ in range(12):
        world.play()
        world.wait(PAIR_TIMEOUT_S)
    assert world.health() == {"a": Fit, "b": Unfit, "c": Fit, "d": Fit} and world.serving


@pytest.mark.parametrize("killed", ["a", "b", "c", "ab", "abc"])
def test_a_process_that_dies_once_in_a_pair_costs_nobody_its_name(killed: str) -> None:
    world = clinic(3, check_only=True)
    world.killed = set(killed)
    world.come("a", "b", "c")
    record = only(world.history, r.CheckConcluded)
    assert [verdict.fitness for verdict in record.nodes] == ["fit"] * 3 and not record.links
    assert world.finished and world.finished.exit_code == 0
    assert {n for n, t in world.tasks if t.kind == "ready"} == set(killed), "they have other stores now"


def test_a_partner_that_begins_another_life_takes_no_further_part() -> None:
    world = clinic(2, 2, spare_nodes=3)
    world.come("a", "b", "c", "d", "e")
    world.start_all()
    world.do(world.hello("f"))
    while not (pairs := [task for _, task in world.open_tasks() if task.kind == "pair"]):
        (node_id, task), *_ = world.open_tasks()
        world.answered.add((world.life(node_id), task.checkup, task.round))
        world.do(world.examined(node_id, world.result(node_id, task)))
    partner = next(task.partner for task in pairs if task.partner != "f")
    told = len(world.tasks)
    world.do(world.broke(partner))
    world.next_life(partner)
    world.do(world.hello(partner, dead_incarnations=[f"{partner}.1"]))
    world.play()
    record = next(record for record in world.checked() if [v.node_id for v in record.nodes] == ["f"])
    assert record.nodes[0].fitness == "fit" and not record.links
    assert partner not in {n for n, task in world.tasks[told:] if task.checkup == pairs[0].checkup}


PASSING = [
    CheckProblem("device", "device-memory-taken", "only 1.0 of 8.0 GiB of its memory are free", 0),
    CheckProblem("disk", "disk-error", "/tmp cannot be written: No space left on device"),
    CheckProblem("examination", "check-failed", "the examination could not be started"),
]


@pytest.mark.parametrize("problem", PASSING)
def test_what_may_pass_is_looked_at_once_more_before_the_node_is_unfit(problem: CheckProblem) -> None:
    world = clinic(3)
    world.fails_alone = {"b": [problem]}
    world.come("a", "b", "c")
    assert world.gathering and not world.checked(), "it is given a moment"
    world.wait(PAUSE_S)
    world.play()
    assert world.serving and set(world.health().values()) == {Fit} and world.now < START + 60
    again = clinic(3, times={"b": 2.0})
    again.fails_alone = {"b": [problem]}
    again.come("a", "b", "c")
    again.wait(PAUSE_S)
    again.play()
    assert again.health() == {"a": Fit, "b": Slow, "c": Fit}, "it is compared with the others none the less"


@pytest.mark.parametrize("problem", PASSING)
def test_who_fails_twice_by_what_may_pass_is_unfit(problem: CheckProblem) -> None:
    world = clinic(2)
    world.fails_alone = {"b": [problem] * 2}
    world.come("a", "b", "c")
    world.wait(PAUSE_S)
    world.play()
    assert world.serving and world.health() == {"a": Fit, "b": Unfit, "c": Fit}
    assert problem.text in world.job.nodes["b"].health.why  # type: ignore[union-attr]


@pytest.mark.parametrize("fault", ["wrong-result", "ecc-errors"])
def test_a_wrong_result_and_a_counter_are_final(fault: str) -> None:
    world = clinic(2)
    world.fails_alone = {"b": [CheckProblem("device", fault, "it is broken", 0)]}
    world.come("a", "b", "c")
    assert world.serving and world.health() == {"a": Fit, "b": Unfit, "c": Fit} and world.now < START + PAUSE_S
    assert kinds(task for task in world.tasks if task[0] == "b") == ["alone"]


def test_a_spare_that_is_checked_has_no_parked_workers_until_its_check_is_over() -> None:
    world = clinic(1, 1, spare_nodes=1, spare_check_interval_s=100.0, session=SessionInfo())
    world.come("a", "b")
    world.start_all()
    world.do(world.settled("a"))
    order = world.told["b.1"]
    assert isinstance(order, o.Hold) and order.spares > 0
    world.wait(101.0)
    order = world.told["b.1"]
    assert isinstance(order, o.Hold) and order.check and order.spares == 0
    world.play()
    order = world.told["b.1"]
    assert isinstance(order, o.Hold) and order.check is None and order.spares > 0


def test_a_node_that_dies_in_a_check_is_left_behind() -> None:
    world = clinic(2, 3)
    world.do(world.hello("a"), world.hello("b"), world.hello("c"))
    world.do(world.broke("b"))
    world.wait(1.0)
    world.play()
    assert world.members == ["a", "c"]
    assert [verdict.node_id for verdict in only(world.history, r.CheckConcluded).nodes] == ["a", "c"]


def test_when_all_of_a_check_are_gone_it_is_given_up() -> None:
    world = clinic(1)
    world.do(world.hello("a"))
    world.do(world.broke("a"))
    world.wait(1.0)
    assert world.job.checks.checkup is None and "checkup-dropped" in tags(world.history)


def test_a_master_that_takes_over_begins_the_check_anew_and_old_results_count_for_nothing() -> None:
    world = clinic(2)
    world.do(world.hello("a"), world.hello("b"))
    stale = world.examined("a", CheckResult(problems=WRONG))
    world.restart_master()
    world.reconnect_all()
    world.do(stale)
    world.play()
    assert world.serving and world.health() == {"a": Fit, "b": Fit}


def test_verdicts_survive_a_restart_of_the_master() -> None:
    world = clinic(2, 3)
    world.wrong = {"b"}
    world.come("a", "b", "c")
    world.restart_master()
    world.reconnect_all()
    assert world.health() == {"a": Fit, "b": Unfit, "c": Fit} and len(world.checked()) == 1


def test_a_result_that_was_not_asked_for_changes_nothing() -> None:
    world = clinic(2)
    world.do(world.hello("a"), world.hello("b"))
    event = world.examined("a", CheckResult())
    world.do(event)
    assert not world.do(event).records
    assert isinstance(world.job.nodes["a"].health, Awaited)


def test_a_check_alone_ends_with_its_outcome() -> None:
    good = clinic(2, check_only=True)
    good.come("a", "b")
    assert good.finished and good.finished.exit_code == 0
    bad = clinic(2, check_only=True)
    bad.wrong = {"b"}
    bad.come("a", "b")
    assert bad.finished and bad.finished.exit_code == exit_codes.UNFIT and "bad nodes: b" in bad.finished.why
    assert "a" not in bad.finished.why.replace("bad", "")
