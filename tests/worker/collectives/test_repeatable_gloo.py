"""Collectives that are run again below the step, with real ranks whose connections are cut."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from holdfast.core.environment_variables import RETRIES_VARIABLE
from holdfast.errors import ViewOverError
from holdfast.worker.collectives import groups, repeatable_gloo
from holdfast.worker.collectives.collective_retries import AGREE_S, retries
from holdfast.worker.collectives.elastic_group import state
from holdfast.worker.collectives.sockets import Mesh
from support.crowd import TIMEOUT, Crowd, Member, together

BIG = 1 << 20
SMALL = 1 << 16
"""Numbers: the inputs of all collectives are kept."""


@pytest.fixture(autouse=True)
def one_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """One retry, and limits that no busy machine reaches: a retry that takes longer is refused, and these tests are
    about those that are not."""
    monkeypatch.setenv(RETRIES_VARIABLE, "1")
    for limit in ("SETTLE_S", "CONNECT_S", "WAIT_S"):
        monkeypatch.setattr(repeatable_gloo, limit, TIMEOUT.total_seconds())


def cut() -> None:
    """End the connections of this rank with the others, as a reset does."""
    groups.current_connections().mesh.shut()


def data_of(rank: int, count: int) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


Collective = Callable[[int, int, int], tuple[list[torch.Tensor], Any]]
"""Begins a collective on a rank of so many, with so many numbers: the results, and the work."""


def all_reduce(rank: int, size: int, count: int) -> tuple[list[torch.Tensor], Any]:
    data = data_of(rank, count)
    return [data], dist.all_reduce(data, async_op=True)


def all_gather(rank: int, size: int, count: int) -> tuple[list[torch.Tensor], Any]:
    into = torch.zeros(size * count)
    return [into], dist.all_gather_into_tensor(into, data_of(rank, count), async_op=True)


def all_gather_in_place(rank: int, size: int, count: int) -> tuple[list[torch.Tensor], Any]:
    into = torch.zeros(size * count)
    own = into[rank * count : (rank + 1) * count]
    own.copy_(data_of(rank, count))
    return [into], dist.all_gather_into_tensor(into, own, async_op=True)


def all_gather_list(rank: int, size: int, count: int) -> tuple[list[torch.Tensor], Any]:
    into = [torch.zeros(count) for _ in range(size)]
    return into, dist.all_gather(into, data_of(rank, count), async_op=True)


def reduce_scatter(rank: int, size: int, count: int) -> tuple[list[torch.Tensor], Any]:
    into = torch.zeros(count)
    return [into], dist.reduce_scatter_tensor(into, data_of(rank, size * count), async_op=True)


def broadcast(rank: int, size: int, count: int) -> tuple[list[torch.Tensor], Any]:
    data = data_of(rank, count)
    return [data], dist.broadcast(data, 1, async_op=True)


def all_to_all(rank: int, size: int, count: int) -> tuple[list[torch.Tensor], Any]:
    into = torch.zeros(size * count)
    return [into], dist.all_to_all_single(into, data_of(rank, size * count), async_op=True)


def reduce(rank: int, size: int, count: int) -> tuple[list[torch.Tensor], Any]:
    data = data_of(rank, count)
    return ([data] if rank == 0 else []), dist.reduce(data, 0, async_op=True)


def gather(rank: int, size: int, count: int) -> tuple[list[torch.Tensor], Any]:
    into = [torch.zeros(count) for _ in range(size)] if rank == 0 else None
    return into or [], dist.gather(data_of(rank, count), into, 0, async_op=True)


def scatter(rank: int, size: int, count: int) -> tuple[list[torch.Tensor], Any]:
    into = torch.zeros(count)
    parts = list(data_of(rank, size * count).split(count)) if rank == 0 else None
    return [into], dist.scatter(into, parts, 0, async_op=True)


def barrier(rank: int, size: int, count: int) -> tuple[list[torch.Tensor], Any]:
    return [], dist.barrier(async_op=True)


COLLECTIVES: tuple[Collective, ...] = (
    all_reduce,
    all_gather,
    all_gather_in_place,
    all_gather_list,
    reduce_scatter,
    broadcast,
    all_to_all,
    reduce,
    gather,
    scatter,
    barrier,
)


def bits(tensors: list[torch.Tensor]) -> list[bytes]:
    return [tensor.numpy().tobytes() for tensor in tensors]


def through_each(member: Member, rank: int, size: int, when: str, count: int) -> tuple[list[list[bytes]], int, bool]:
    """The bits of each collective, run with one cut each if `when` says when, and how many were run again."""
    member.start(rank, size)
    results, again = [], []
    connections = groups.current_connections()
    for collective in COLLECTIVES:
        before = retries.count
        dist.barrier()
        if when == "before" and rank == 1:
            cut()
        found, work = collective(rank, size, count)
        if when == "within" and rank == 1:
            time.sleep(0.002)
            cut()
        work.wait()
        results.append(bits(found))
        dist.barrier()
        again.append(retries.count - before)
    return results, sum(again), groups.current_connections() is connections and connections.over is None


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_cut_at_any_collective_leaves_the_bits_and_the_view(when: str) -> None:
    undisturbed = together(through_each, 3, "never", SMALL if when == "within" else BIG)
    disturbed = together(through_each, 3, when, SMALL if when == "within" else BIG)
    assert [bits for bits, _, _ in disturbed] == [bits for bits, _, _ in undisturbed]
    assert all(is_same_view for _, _, is_same_view in disturbed)
    assert not any(count for _, count, _ in undisturbed)
    assert all(count >= len(COLLECTIVES) // 2 for _, count, _ in disturbed) or when == "within"
    assert any(count for _, count, _ in disturbed)


# --- who has the result already serves the others


def one_misses_the_end(member: Member, rank: int, size: int) -> tuple[list[bytes], int]:
    """All ranks get the sums, and rank 1 takes the last but one for broken: the others have gone on by then."""
    member.start(rank, size)
    dist.barrier()
    data = [data_of(10 * rank + index, 1000) for index in range(2)]
    inputs = [tensor.clone() for tensor in data]
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in data]
    for work in works if rank != 1 else ():
        work.wait()
    if rank == 1:
        for work, tensor, old in zip(works, data, inputs, strict=True):
            assert work.operation.attempt.has_ended(TIMEOUT)
            tensor.copy_(old)
            work.operation.attempt.error = RuntimeError("Connection reset by peer")
        cut()
        for work in works:
            work.wait()
    results = bits(data)
    for tensor in data:
        tensor.fill_(rank)
    dist.barrier()
    assert all((tensor == rank).all() for tensor in data), "what is served is not written into the caller's tensors"
    return results, retries.count


@pytest.mark.long  # a retry may be refused here, which is safe; why is not known yet
def test_ranks_that_have_gone_on_serve_those_that_have_not() -> None:
    (first, _), (second, again), (third, _) = together(one_misses_the_end, 3)
    assert first == second == third
    assert again >= 2


# --- works that are waited for in C++, several groups, several at once


def with_futures(member: Member, rank: int, size: int, is_cut: bool) -> tuple[list[bytes], int]:
    member.start(rank, size)
    dist.barrier()
    halves = dist.new_group([0, 1]), dist.new_group([0, 1, 2])
    for group in halves[rank == 2 :]:
        dist.barrier(group)
    buckets = [data_of(10 * rank + index, BIG // 4) for index in range(6)]
    works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets[:4]]
    if rank < 2:
        works.append(dist.all_reduce(buckets[4], group=halves[0], async_op=True))
    works.append(dist.all_reduce(buckets[5], group=halves[1], async_op=True))
    futures = [work.get_future() for work in works if work is not None]
    if is_cut and rank == 1:
        cut()
    try:
        torch.futures.wait_all(futures)
    except RuntimeError as error:
        refusals = [inner._refusal for group in state.groups for inner in group._inners.values()]
        raise AssertionError(f"no retry: {refusals}") from error
    dist.barrier()
    return bits(buckets), retries.count


@pytest.mark.long  # a retry may be refused here, which is safe; why is not known yet
def test_all_that_is_under_way_in_several_groups_is_run_again() -> None:
    undisturbed, disturbed = together(with_futures, 3, False), together(with_futures, 3, True)
    assert [found for found, _ in disturbed] == [found for found, _ in undisturbed]
    assert any(count for _, count in disturbed)


# --- a connection that breaks before anyone looks at it


def cut_at_once(member: Member, rank: int, size: int) -> tuple[list[bytes], int]:
    """Rank 0 looks at its new connections when gloo has closed one already."""
    remember = Mesh.remember

    def look_late(mesh: Mesh) -> dict[int, int]:
        Mesh.remember = remember  # type: ignore[method-assign]
        member.say("connected")
        member.hear("cut")
        give_up_at = time.monotonic() + TIMEOUT.total_seconds()
        while mesh._found():
            assert time.monotonic() < give_up_at
            time.sleep(0.001)
        return remember(mesh)

    if rank == 0:
        Mesh.remember = look_late  # type: ignore[method-assign, assignment]
    member.start(rank, size)
    data = data_of(rank, SMALL)
    work: Any = dist.all_reduce(data, async_op=True)
    if rank == 1:
        member.hear("connected")
        cut()
        member.say("cut")
    work.wait()
    return bits([data]), retries.count


def test_a_connection_that_breaks_as_soon_as_it_is_made_is_no_hindrance() -> None:
    (first, count), (second, _) = together(cut_at_once, 2)
    assert first == second
    assert count


# --- what is not retried


def failing(collective: Callable[[], Any]) -> None:
    """Run a collective that must fail as a broken connection does."""
    with pytest.raises((RuntimeError, ConnectionError)) as raised:
        collective()
    assert groups.is_communication_error(raised.value)


def out_of_limit(member: Member, rank: int, size: int) -> int:
    member.start(rank, size)
    dist.barrier()
    group: Any = groups.default_group()._inners["cpu"]
    repeat = group._repeat

    def cut_again(*arguments: Any) -> Any:
        if rank == 0:
            cut()
        return repeat(*arguments)

    group._repeat = cut_again
    if rank == 0:
        cut()
    data = torch.ones(BIG)
    failing(lambda: dist.all_reduce(data))
    return retries.count


def test_a_retry_that_breaks_as_often_as_allowed_is_the_end_of_it() -> None:
    assert max(together(out_of_limit, 2)) <= 1


def lost_message(member: Member, rank: int, size: int) -> None:
    member.start(rank, size)
    dist.barrier()
    if rank == 0:
        dist.isend(torch.ones(4), 1)
        cut()
        member.say("sent")
    member.hear("sent")
    failing(dist.barrier)


def test_nothing_is_run_again_while_a_message_may_be_lost() -> None:
    together(lost_message, 2)


def received_message(member: Member, rank: int, size: int) -> int:
    member.start(rank, size)
    data = torch.full((4,), float(rank))
    dist.send(data, 1) if rank == 0 else dist.recv(data, 0)
    assert not data.any()
    dist.barrier()
    if rank == 0:
        cut()
    dist.barrier()
    dist.send(data, 0) if rank == 1 else dist.recv(data, 1)
    return retries.count


def test_messages_that_came_are_no_hindrance() -> None:
    assert all(together(received_message, 2))


def turned_off(member: Member, rank: int, size: int) -> None:
    member.start(rank, size)
    dist.barrier()
    if rank == 0:
        cut()
    failing(dist.barrier)


def test_retries_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RETRIES_VARIABLE, "0")
    together(turned_off, 2)


# --- the end of the view


def revoked(member: Member, rank: int, size: int) -> float:
    member.start(rank, size)
    dist.barrier()
    if rank == 0:
        member.hear("never")  # it is killed here
    member.say(f"ready-{rank}")
    line = member.connect()

    def revoke() -> None:
        line.wait(["dead"], TIMEOUT)
        time.sleep(0.1)  # so that the retry waits for the dead member's report
        groups.revoke("rank 0 was killed", view=1)

    threading.Thread(target=revoke, daemon=True).start()
    began_at = time.monotonic()
    with pytest.raises(ViewOverError):
        dist.all_reduce(torch.ones(BIG))
    member.hear("dead")
    return time.monotonic() - began_at


def test_a_view_that_ends_ends_the_retry_with_it() -> None:
    with Crowd() as crowd:
        for rank in range(3):
            crowd.add(revoked, rank, 3)
        crowd.hear("ready-1", "ready-2")
        crowd.kill(0)
        crowd.say("dead")
        assert crowd.results()[0] is None


def dies(member: Member, rank: int, size: int) -> float:
    member.start(rank, size)
    dist.barrier()
    if rank == 0:
        member.hear("never")
    began_at = time.monotonic()  # not later: the break may be noticed before the collective begins
    member.say(f"ready-{rank}")
    failing(lambda: dist.all_reduce(torch.ones(BIG)))
    return time.monotonic() - began_at


def test_without_a_word_of_a_dead_member_the_error_is_raised_in_time() -> None:
    with Crowd() as crowd:
        for rank in range(3):
            crowd.add(dies, rank, 3)
        crowd.hear("ready-1", "ready-2")
        crowd.kill(0)
        assert all(waited_s >= AGREE_S for waited_s in crowd.results()[1:])


# --- what stays of a retry


def twice(member: Member, rank: int, size: int) -> tuple[int, bool, int]:
    member.start(rank, size)
    dist.barrier()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        if rank == 1:
            cut()
        dist.barrier()
        dist.barrier()
    time.sleep(0.5)  # for the thread that lets go of the last communicator
    is_broken = groups.current_connections().mesh.is_broken()
    return len(os.listdir("/proc/self/fd")) - before, is_broken, retries.count


def test_a_retried_group_is_whole_and_leaves_no_descriptors() -> None:
    for further, is_broken, count in together(twice, 2):
        assert further <= 6 and not is_broken and count >= 3, (further, is_broken, count)
