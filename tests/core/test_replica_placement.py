"""Who holds whose images: tables for what is expected, properties for what must hold of any nodes and any history."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.replica_placement import (
    HOLDS_FACTOR_MAX,
    Groups,
    PlacementSite,
    ReplicaPlacement,
    parity_groups,
    place,
)


def sites(text: str) -> list[PlacementSite]:
    """`a1 a2 b1`: the letter is the domain."""
    return [PlacementSite(word, word[0]) for word in text.split()]


def arrows(placement: ReplicaPlacement) -> str:
    return " ".join(f"{owner}>{'+'.join(held)}" for owner, held in placement.partners.items())


@pytest.mark.parametrize(
    ("nodes", "replicas", "expected"),
    [
        ("a1", 1, ""),
        ("a1 b1", 0, ""),
        ("a1 b1", 1, "a1>b1 b1>a1"),
        ("a1 b1", 3, "a1>b1 b1>a1"),
        ("a1 b1 c1", 1, "a1>b1 b1>c1 c1>a1"),
        ("a1 b1 c1 d1", 2, "a1>b1+c1 b1>c1+d1 c1>d1+a1 d1>a1+b1"),
        ("a1 a2 a3", 1, "a1>a2 a2>a3 a3>a1"),
        ("a1 a2 b1 b2", 1, "a1>b1 a2>b2 b1>a1 b2>a2"),
        ("a1 a2 b1 b2 c1 c2", 1, "a1>b1 a2>c2 b1>c1 b2>a2 c1>a1 c2>b2"),
        ("a1 a2 b1 b2 c1 c2", 2, "a1>b1+c1 a2>c2+b2 b1>c1+a1 b2>a2+c2 c1>a1+b1 c2>b2+a2"),
        ("a1 a2 b1", 1, "a1>b1 a2>b1 b1>a1"),
        ("a1 a2 a3 a4 b1", 1, "a1>b1 a2>b1 a3>a4 a4>a1 b1>a2"),
    ],
)
def test_partners(nodes: str, replicas: int, expected: str) -> None:
    assert arrows(place(sites(nodes), replicas)) == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("a1 b1 c1 d1", "a1 c1 d1", "a1>c1 c1>d1 d1>a1"),
        ("a1 b1 c1 d1", "a1 b1 c1 d1 e1", "a1>b1 b1>c1 c1>d1 d1>e1 e1>a1"),
        ("a1 b1 c1 d1", "d1 c1 b1 a1", "d1>a1 c1>d1 b1>c1 a1>b1"),
        ("a1 b1 c1 d1", "a1 e1 c1 d1", "a1>e1 e1>c1 c1>d1 d1>a1"),
        ("a1 a2", "a1 a2 b1", "a1>b1 a2>b1 b1>a1"),
    ],
)
def test_what_must_move_moves(before: str, after: str, expected: str) -> None:
    assert arrows(place(sites(after), 1, place(sites(before), 1))) == expected


@pytest.mark.parametrize(
    ("nodes", "doubtful", "expected"),
    [
        ("a1 b1 c1", "b1", "a1>c1 b1>a1 c1>a1"),
        ("a1 b1", "b1", "a1>b1 b1>a1"),
        ("a1 a2 b1", "b1", "a1>a2 a2>a1 b1>a1"),
        ("a1 b1 c1 d1", "c1 d1", "a1>b1 b1>a1 c1>a1 d1>b1"),
    ],
)
def test_nodes_in_doubt_are_used_last(nodes: str, doubtful: str, expected: str) -> None:
    assert arrows(place(sites(nodes), 1, doubtful=doubtful.split())) == expected


def test_a_node_that_comes_into_doubt_is_left_and_taken_up_again_when_needed() -> None:
    ring = place(sites("a1 b1 c1 d1"), 1)
    doubted = place(sites("a1 b1 c1 d1"), 1, ring, {"b1"})
    assert "b1" not in doubted.owners
    assert [o for o in ring.partners if ring.partners[o] != doubted.partners[o]] == ["a1"]
    assert place(sites("a1 b1"), 1, doubted, {"b1"}).partners["a1"] == ("b1",)


domains = st.sampled_from("abcd")
nodes = st.lists(st.tuples(domains, st.integers(0, 9)), unique=True, max_size=16).map(
    lambda pairs: [PlacementSite(f"{domain}{number}", domain) for domain, number in pairs]
)
doubts = st.sets(st.tuples(domains, st.integers(0, 9)).map(lambda pair: f"{pair[0]}{pair[1]}"), max_size=4)


def holds(placement: ReplicaPlacement, there: list[PlacementSite], replicas: int) -> None:
    """What must be true of every placement."""
    ids = {site.node_id for site in there}
    copies = min(replicas, len(there) - 1)
    loads: Counter[str] = Counter()
    for owner in ids:
        held = placement.partners.get(owner, ())
        assert len(set(held)) == len(held) == max(copies, 0) and owner not in held and set(held) <= ids
        loads.update(held)
    for holder, owners in placement.owners.items():
        assert len(owners) == loads[holder] and all(holder in placement.partners[o] for o in owners)
    if len(there) > 2 * copies:
        assert all(load <= HOLDS_FACTOR_MAX * copies for load in loads.values())


def could_not_be_safer(
    placement: ReplicaPlacement, there: list[PlacementSite], replicas: int, doubtful: set[str]
) -> None:
    """Whoever has a copy in its own domain, or on a node in doubt, has it for want of room elsewhere."""
    domain = {site.node_id: site.domain for site in there}
    for owner, held in placement.partners.items():
        for holder in held:
            rank = (holder in doubtful, domain[holder] == domain[owner])
            for other in domain.keys() - {owner, *held}:
                has_room = len(placement.owners.get(other, ())) < HOLDS_FACTOR_MAX * replicas
                assert not has_room or (other in doubtful, domain[other] == domain[owner]) >= rank


@given(st.lists(st.tuples(nodes, doubts), min_size=1, max_size=5), st.integers(0, 3))
@settings(deadline=None, max_examples=400)
def test_any_history_leads_to_a_whole_placement(
    history: list[tuple[list[PlacementSite], set[str]]], replicas: int
) -> None:
    placement = ReplicaPlacement()
    for there, doubtful in history:
        placement = place(there, replicas, placement, doubtful)
        holds(placement, there, replicas)
        could_not_be_safer(placement, there, replicas, doubtful)
        assert place(there, replicas, placement, doubtful) == placement, "what is settled stays"


@given(st.integers(2, 40), st.data())
@settings(deadline=None)
def test_with_a_domain_each_one_loss_and_one_join_move_one_copy_each(size: int, data: st.DataObject) -> None:
    there = [PlacementSite(f"n{i}", f"n{i}") for i in range(size)]
    placement = place(there, 1)
    gone = data.draw(st.sampled_from(there))
    left = [site for site in there if site is not gone]
    after = place(left, 1, placement)
    if len(left) > 1:
        assert sum(after.partners[s.node_id] != placement.partners[s.node_id] for s in left) == 1
        assert set(map(len, after.owners.values())) == {1}
    joined = place([*left, PlacementSite("new", "new")], 1, after)
    assert sum(joined.partners[s.node_id] != after.partners.get(s.node_id) for s in left) == 1
    assert set(map(len, joined.owners.values())) == {1}


@given(st.integers(1, 5), st.integers(2, 4), st.integers(1, 3))
def test_equal_domains_never_keep_a_copy_at_home(size: int, count: int, replicas: int) -> None:
    there = [PlacementSite(f"{d}{i}", f"{d}") for d in range(count) for i in range(size)]
    placement = place(there, replicas)
    copies = min(replicas, len(there) - 1)
    for owner, held in placement.partners.items():
        assert sum(h[0] == owner[0] for h in held) == max(copies - size * (count - 1), 0)
        assert len({h[0] for h in held if h[0] != owner[0]}) == min(copies, count - 1), "in different domains"
    assert max(map(len, placement.owners.values())) <= copies + (replicas > 1)


@pytest.mark.parametrize("shape", [[1] * 4_000, [40] * 100, [3_000, 2], [2_000, *[1] * 1_000]])
def test_thousands_of_nodes_are_placed_by_looking_at_few(shape: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    there = [PlacementSite(f"{d}.{i}", f"{d}") for d, size in enumerate(shape) for i in range(size)]
    from holdfast.core import replica_placement as module

    rank = module._Table._rank

    def counted(self: module._Table, *args: object, **more: bool) -> module.Rank:
        nonlocal looks
        looks += 1
        return rank(self, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(module._Table, "_rank", counted)
    placement = place(there, 1)
    assert looks < 600 * len(there) and len(placement.partners) == len(there)
    assert max(map(len, placement.owners.values())) <= HOLDS_FACTOR_MAX


# --- parity groups


def shown(groups: Groups) -> str:
    return " | ".join(" ".join(group) for group in groups)


@pytest.mark.parametrize(
    ("nodes", "size", "expected"),
    [
        ("a1", 3, ""),
        ("a1 b1", 3, "a1 b1"),
        ("a1 b1 c1", 3, "a1 b1 c1"),
        ("a1 a2 b1 b2 c1 c2", 3, "a1 b1 c1 | a2 b2 c2"),
        ("a1 a2 a3 b1 c1 d1", 2, "a1 b1 | a2 c1 | a3 d1"),
        ("a1 b1 c1 d1 e1", 2, "a1 c1 e1 | b1 d1"),
    ],
)
def test_groups(nodes: str, size: int, expected: str) -> None:
    assert shown(parity_groups(sites(nodes), size)) == expected


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("a1 a2 b1 b2 c1 c2", "a1 a2 b1 b2 c1 d1", "a1 b1 c1 | a2 b2 d1"),
        ("a1 a2 b1 b2 c1 c2", "a1 a2 b1 b2 c1", "a1 b1 c1 a2 b2"),
        ("a1 a2 b1 b2 c1 c2", "a1 a2 b1 b2 c1 c2 d1", "a1 b1 c1 d1 | a2 b2 c2"),
    ],
)
def test_groups_stay_together(before: str, after: str, expected: str) -> None:
    assert shown(parity_groups(sites(after), 3, parity_groups(sites(before), 3))) == expected


@given(st.lists(st.tuples(nodes, doubts), min_size=1, max_size=4), st.integers(2, 5))
@settings(deadline=None, max_examples=300)
def test_every_node_is_in_one_group_of_a_right_size(
    history: list[tuple[list[PlacementSite], set[str]]], size: int
) -> None:
    groups: Groups = ()
    for there, doubtful in history:
        groups = parity_groups(there, size, groups, doubtful)
        members = [node_id for group in groups for node_id in group]
        assert sorted(members) == (sorted(s.node_id for s in there) if len(there) > 1 else [])
        assert all(len(group) >= min(size, len(there)) for group in groups)
        assert len({len(group) for group in groups}) <= 2
        assert parity_groups(there, size, groups, doubtful) == groups


def test_nodes_in_doubt_are_in_different_groups() -> None:
    before = parity_groups(sites("a1 b1 c1 d1"), 2, doubtful={"a1", "c1"})
    assert not any({"a1", "c1"} <= set(group) for group in parity_groups(sites("a1 b1 c1 d1 e1 f1"), 2, before))
