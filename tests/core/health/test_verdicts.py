"""Who is found bad in clusters whose bad nodes and links are known: in tables, and in numbers over hundreds of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from holdfast.core.health.findings import CheckProblem, CheckResult, Norm, Timing
from holdfast.core.health.tournament import apart, disjoint, next_round, rounds
from holdfast.core.health.verdicts import Evidence, judge, lower_median, norm_of
from support.measured_clusters import Cluster, linked, named

SEED = 20_260
SIZES = (3, 4, 5, 7, 8, 16, 33)
FEW = (3, 4, 5, 6, 7, 8)
BROKEN = float("inf")


# --- the tournament


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 9, 33, 100])
def test_no_player_is_twice_in_a_round_and_no_pair_in_two(size: int) -> None:
    players = [f"n{number:03d}" for number in range(size)]
    played = list(rounds(players))
    for pairs in played:
        seen = [player for pair in pairs for player in pair]
        assert len(set(seen)) == len(seen) >= size - 1, "one at most has a bye"
    flat = [pair for pairs in played for pair in pairs]
    assert len(set(flat)) == len(flat)
    games = [sum(player in pair for pair in flat) for player in players]
    assert min(games) >= min(3, size - 1), "everybody has met enough others"


def test_nodes_that_share_a_machine_are_not_measured_at_the_same_time() -> None:
    machines = {"a": "x", "b": "x", "c": "y", "d": "z"}
    assert apart(["a", "b", "c"], machines) == ("a", "c")
    assert disjoint([("a", "c"), ("b", "d"), ("c", "d")], machines) == [("a", "c")]
    assert disjoint([("a", "b"), ("c", "d")], machines) == [("a", "b"), ("c", "d")]


# --- norms


def test_of_two_the_faster_is_expected_and_half_of_all_may_be_bad() -> None:
    assert lower_median([2.0, 1.0]) == 1.0
    assert lower_median([1.0, 1.0, 9.0, 9.0]) == 1.0


@pytest.mark.parametrize(
    ("values", "spread", "limit"),
    [
        ((1.0, 1.0, 1.0, 1.0), 0.0, 1.05),  # the floor
        ((1.0, 1.0, 1.0, 5.0), 0.0, 1.05),  # a bad one changes nothing
        ((1.0, 1.0, 1.0, 1.0), 0.04, 1.20),  # the blocks of one node differ by 4 %
        ((1.0, 1.04, 1.08, 1.12), 0.0, 1.0),  # the nodes differ: nobody is slow
    ],
)
def test_the_limit_follows_what_differs_by_nature(values: tuple[float, ...], spread: float, limit: float) -> None:
    norm = norm_of("matmul", [Timing("matmul", value, spread) for value in values])
    assert norm is not None
    if limit > 1.0:
        assert norm.limit_s == pytest.approx(limit)
    else:
        assert norm.limit_s > max(values)


def test_one_alone_is_compared_with_an_earlier_check_by_a_wider_margin() -> None:
    before = Norm(stage="matmul", expected_s=1.0, deviation=0.01, limit_s=1.05, count=8)
    norm = norm_of("matmul", [Timing("matmul", 1.15, 0.0)], before)
    assert norm is not None and norm.expected_s == 1.0 and norm.limit_s == pytest.approx(1.2)


# --- who is named


def cluster(size: int, seed: int = SEED, **faults: Any) -> Cluster:
    return Cluster(size, random.Random(seed), **faults)


@pytest.mark.parametrize("size", [3, 4, 5, 6, 7, 8, 33])
def test_a_bad_node_is_named_and_no_link(size: int) -> None:
    for stage in ("matmul", "bandwidth", "all-reduce"):
        nodes, links = cluster(size, slow_nodes={"n001": (stage, 1.6)}).check()
        assert named(nodes) == {"n001"} and not links
        slow = next(verdict for verdict in nodes if verdict.node_id == "n001")
        assert slow.fitness == "slow" and stage in slow.why and "times the expected" in slow.why


@pytest.mark.parametrize("size", [3, 4, 5, 6, 7, 8, 33])
@pytest.mark.parametrize("times", [1.6, BROKEN])
def test_a_bad_link_is_named_and_no_node(size: int, times: float) -> None:
    pair = next(iter(rounds([f"n{number:03d}" for number in range(size)])))[0]
    nodes, links = cluster(size, slow_links={pair: times}).check()
    assert not named(nodes) and linked(links) == {pair}
    assert links[0].state == ("broken" if times == BROKEN else "slow")


@pytest.mark.parametrize("size", [5, 6, 7, 9])
def test_two_bad_nodes_are_both_named(size: int) -> None:
    nodes, links = cluster(size, slow_nodes={"n000": ("all-reduce", 2.0), "n003": ("all-reduce", 3.0)}).check()
    assert named(nodes) == {"n000", "n003"} and not links


def test_a_bad_node_and_a_bad_link_elsewhere_are_told_apart() -> None:
    nodes, links = cluster(8, slow_nodes={"n000": ("all-reduce", 2.0)}, slow_links={("n003", "n004"): 3.0}).check()
    assert named(nodes) == {"n000"} and linked(links) == {("n003", "n004")}


def test_a_broken_link_of_a_bad_node_is_named_beside_the_node() -> None:
    pair = next(iter(rounds([f"n{number:03d}" for number in range(5)])))[0]
    nodes, links = cluster(5, slow_nodes={pair[0]: ("all-reduce", 1.5)}, slow_links={pair: 20.0}).check()
    assert named(nodes) == {pair[0]} and linked(links) == {pair}


def test_of_two_nodes_nobody_can_tell_an_end_from_the_link() -> None:
    nodes, links = cluster(2, slow_links={("n000", "n001"): BROKEN}).check()
    assert not named(nodes) and links[0].state == "broken"
    assert "n000 or n001" in links[0].why


def test_a_wrong_result_makes_a_node_unfit_and_it_plays_no_part_in_the_pairs() -> None:
    nodes, links = cluster(4, wrong={"n002"}).check()
    unfit = next(verdict for verdict in nodes if verdict.fitness == "unfit")
    assert named(nodes) == {"n002"} and "the product is wrong" in unfit.why and not links
    assert not [value for verdict in nodes for value in verdict.measured if value.partner == "n002"]


def test_a_node_whose_collectives_all_fail_is_unfit() -> None:
    pairs = {pair: BROKEN for of_round in rounds(["n000", "n001", "n002", "n003"]) for pair in of_round}
    nodes, links = cluster(4, slow_links={pair: BROKEN for pair in pairs if "n001" in pair}).check()
    assert [v.node_id for v in nodes if v.fitness == "unfit"] == ["n001"] and not links


def test_one_node_alone_has_nobody_to_be_compared_with() -> None:
    nodes, links = cluster(1).check()
    assert not named(nodes) and not links


def test_of_several_devices_the_worst_counts_and_is_named() -> None:
    good = [CheckResult(timings=tuple(Timing("matmul", 1.0, 0.001, device) for device in range(4)))]
    bad = [CheckResult(timings=tuple(Timing("matmul", 1.0 + (device == 2), 0.001, device) for device in range(4)))]
    evidence = Evidence(incarnations={"a": "a.1", "b": "b.1"}, alone={"a": good, "b": bad}, pairs={}, before={})
    nodes, _ = judge(evidence)
    assert named(nodes) == {"b"} and "device 2" in nodes[1].why


def test_a_partner_that_is_known_to_be_well_is_not_judged() -> None:
    evidence = Evidence(incarnations={"a": "a.1"}, alone={}, pairs={}, before={})
    machines = {"a": "a", "b": "b", "c": "c"}
    order = []
    while step := next_round(evidence, machines, ("b", "c")):
        order.append(step)
        for node_id in (*step.alone, *step.ready):
            evidence.alone.setdefault(node_id, []).append(CheckResult())
        for pair in step.pairs:
            failed = CheckResult(problems=(CheckProblem("all-reduce", "x", "x"),))
            good = CheckResult(timings=(Timing("all-reduce", 1.0, 0.0),))
            evidence.pairs.setdefault(pair, []).append(failed if "a" in pair else good)
    assert order[0].alone == ("a",) and order[1].ready == ("b", "c")
    nodes, links = judge(evidence)
    assert [verdict.node_id for verdict in nodes] == ["a"] and nodes[0].fitness == "unfit" and not links


# --- in numbers


class Score:
    """Over many clusters."""

    def __init__(self, count: int, make: Callable[[random.Random], Cluster]) -> None:
        chance = random.Random(SEED)
        self.found = self.bad = self.accused = self.good = self.disturbed_clusters = 0
        for _ in range(count):
            tried = make(chance)
            nodes, links = tried.check()
            truly = {*tried.slow_nodes, *tried.wrong}
            false_links = {pair for pair in linked(links) - set(tried.slow_links) if not truly & set(pair)}
            self.found += len(truly & named(nodes)) + len(set(tried.slow_links) & linked(links))
            self.bad += len(truly) + len(tried.slow_links)
            self.accused += len(named(nodes) - truly)
            self.good += tried.size - len(truly)
            self.disturbed_clusters += bool(named(nodes) - truly or false_links)

    @property
    def share(self) -> float:
        return self.found / self.bad


def with_slow_node(
    stage: str, times: float, sizes: tuple[int, ...] = SIZES, parts: float = 0.01
) -> Callable[[random.Random], Cluster]:
    def make(chance: random.Random) -> Cluster:
        made = Cluster(chance.choice(sizes), chance, parts=parts)
        made.slow_nodes = {chance.choice(made.nodes): (stage, times)}  # type: ignore[dict-item]
        return made

    return make


def with_slow_link(times: float) -> Callable[[random.Random], Cluster]:
    """One that the tournament looks at: of a larger cluster it looks at three links a node."""

    def make(chance: random.Random) -> Cluster:
        made = Cluster(chance.choice(SIZES), chance)
        made.slow_links = {chance.choice(chance.choice(list(rounds(made.nodes)))): times}
        return made

    return make


def test_healthy_clusters_are_left_alone() -> None:
    score = Score(300, lambda chance: Cluster(chance.choice((2, *SIZES, 64)), chance))
    assert score.good > 4_000
    assert score.accused == 0 and score.disturbed_clusters <= 1


def test_noisy_healthy_clusters_are_left_alone() -> None:
    """Blocks that differ five times as much, a block in five is disturbed, and a measurement in fifty."""
    score = Score(150, lambda chance: Cluster(chance.choice((2, *SIZES)), chance, blocks=0.05, disturbed=0.2))
    assert score.good > 1_200
    assert score.accused <= 2 and score.disturbed_clusters <= 2


@pytest.mark.parametrize(("times", "share"), [(1.25, 0.8), (2.0, 0.98)])
def test_a_slow_node_of_few_that_differ_by_three_per_cent_is_found(times: float, share: float) -> None:
    for stage in ("matmul", "all-reduce"):
        score = Score(100, with_slow_node(stage, times, FEW, parts=0.03))
        assert score.share >= share, f"{stage}: {score.found} of {score.bad}"


@pytest.mark.parametrize(("times", "share"), [(1.06, 0.65), (1.10, 0.85), (1.25, 0.97), (2.0, 1.0)])
def test_a_slow_node_is_found(times: float, share: float) -> None:
    for stage in ("matmul", "all-reduce"):
        score = Score(100, with_slow_node(stage, times))
        assert score.share >= share, f"{stage}: {score.found} of {score.bad}"
        assert score.accused <= 1 and score.disturbed_clusters <= 2


@pytest.mark.parametrize(("times", "share"), [(1.06, 0.85), (1.10, 0.98), (2.0, 1.0), (BROKEN, 1.0)])
def test_a_slow_link_is_found(times: float, share: float) -> None:
    score = Score(100, with_slow_link(times))
    assert score.share >= share, f"{score.found} of {score.bad}"
    assert score.accused == 0 and score.disturbed_clusters <= 1


def test_more_slowness_is_never_found_less_often() -> None:
    shares = [Score(50, with_slow_node("matmul", times)).share for times in (1.05, 1.08, 1.15, 1.5)]
    assert all(later >= earlier for earlier, later in pairwise(shares))
