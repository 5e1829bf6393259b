"""Ranks that count as replicas compare what they hold: as many threads, each with objects of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn

from holdfast.core.shard_map import ShardMap
from holdfast.errors import ScriptError
from holdfast.state.tracked import Tracked
from holdfast.worker.replica_check import Due, ReplicaCheck

DEADLINE_S = 20.0


class Number:
    """One plain value."""

    def __init__(self, value: float) -> None:
        self.value = value

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


def compared(build: Callable[[int], Tracked], ranks: int = 4, shards: int = 1) -> list[str]:
    """Return what each rank says of objects that are built by rank."""
    meeting = threading.Barrier(ranks, timeout=DEADLINE_S)
    rows: list[list[int]] = [[] for _ in range(ranks)]
    said = ["" for _ in range(ranks)]

    def live(rank: int) -> None:
        def gather(values: Sequence[int]) -> list[list[int]]:
            rows[rank] = list(values)
            meeting.wait()
            found = [list(row) for row in rows]
            meeting.wait()
            return found

        try:
            ReplicaCheck().compare(tracked[rank], True, ShardMap(shards), gather)
        except ScriptError as error:
            said[rank] = str(error)

    tracked = [build(rank) for rank in range(ranks)]
    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    return said


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def trained(seed: int, momentum: float = 0.9) -> Tracked:
    model = model_of(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return Tracked(model=model, optimizer=optimizer, number=Number(1.0))


def test_equal_ranks_are_replicas() -> None:
    assert compared(lambda rank: trained(0)) == [""] * 4


def test_ranks_with_other_shards_may_differ() -> None:
    assert compared(lambda rank: trained(rank % 2), shards=2) == [""] * 4
    assert all("ranks 0, 2 (0.weight)" in text for text in compared(lambda rank: trained(rank), shards=2))


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (lambda: Tracked(model=model_of(1)), "model is not the same on ranks 0, 3 (0.weight)"),
        (lambda: Tracked(model=model_of(0).double()), "(its structure or a plain value in it)"),
    ],
)
def test_all_ranks_name_what_differs(other: Callable[[], Tracked], text: str) -> None:
    said = compared(lambda rank: other() if rank == 3 else Tracked(model=model_of(0)))
    assert len(set(said)) == 1 and text in said[0], said


def test_plain_values_settings_and_names_count() -> None:
    assert "job.track_local(number=…)" in compared(lambda rank: Tracked(number=Number(rank)))[0]
    assert "optimizer is not the same" in compared(lambda rank: trained(0, 0.9 if rank else 0.8))[0]
    assert "track different names" in compared(lambda rank: Tracked(**{f"model{rank // 2}": model_of(0)}))[0]


def test_it_is_due_in_the_first_steps_of_a_run_and_until_one_has_updated() -> None:
    check = ReplicaCheck()
    assert check.due is Due.NOT, "a replacement is told by the others"
    check.want()
    due = []
    for has_updated in (False, False, False, True, True):
        now: Due = check.due
        due.append(now is Due.FIRST_STEPS)
        check.compare(Tracked(model=model_of(0)), has_updated, ShardMap(), lambda values: [list(values)])
    assert due == [True, True, True, True, False]


def test_it_is_due_after_others_have_joined_in_the_second_commit_and_whenever_their_number_doubles() -> None:
    check = ReplicaCheck()
    check.joined(7)
    due: list[int] = []
    for commit in range(1, 18):
        if check.due is Due.AFTER_JOIN:
            due.append(commit)
        check.committed()
    assert due == [2, 4, 8, 16] and check.joined_at == 7
    check.want()
    assert check.joined_at == -1, "all begin together"


def test_attributes_that_differ_are_each_ranks_own(caplog: pytest.LogCaptureFixture) -> None:
    built: list[Tracked] = []

    def build(rank: int) -> Tracked:
        model = model_of(0)
        tracked = Tracked(model=model)
        tracked.flags.begin()
        model.last_loss, model.calls = rank, 1  # type: ignore[assignment]
        built.append(tracked)
        return tracked

    assert compared(build) == [""] * 4
    assert [tracked.flags.attributes.of_each_rank for tracked in built] == [{"model.last_loss"}] * 4
    assert [tracked.flags.changed()["attributes"] for tracked in built] == [{"model": {"calls": 1}}] * 4
    assert "model.last_loss: an attribute with another value on each rank" in caplog.text


def test_attributes_that_not_all_ranks_have_are_each_ranks_own() -> None:
    def build(rank: int) -> Tracked:
        model = model_of(0)
        tracked = Tracked(model=model)
        tracked.flags.begin()
        if rank == 0:
            model.best = 1.0  # type: ignore[assignment]
        return tracked

    assert compared(build) == [""] * 4


def test_a_flag_that_differs_is_named() -> None:
    def build(rank: int) -> Tracked:
        model = model_of(0)
        tracked = Tracked(model=model)
        tracked.flags.begin()
        model.train(rank != 1)
        return tracked

    assert "a flag of a module or a setting of torch is not the same on ranks 0-1" in compared(build)[0]
