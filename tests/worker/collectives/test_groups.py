"""Elastic groups: what a process may expect of them, with real ranks that are killed, replaced and interrupted."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from holdfast.errors import HoldfastError, ViewOverError
from holdfast.worker.collectives import groups
from support.crowd import TIMEOUT, Crowd, Member, together


def hung(collective: Callable[[], Any]) -> BaseException:
    """The error that a collective ends with."""
    try:
        collective()
    except Exception as error:
        assert groups.is_communication_error(error), repr(error)
        return error
    raise AssertionError("the collective has succeeded")


def revoke_when_told(member: Member, key: str, view: int) -> None:
    line = member.connect()

    def side() -> None:
        line.wait([key], TIMEOUT)
        groups.revoke("somebody died", view=view)

    threading.Thread(target=side, daemon=True).start()


# The same bits as gloo


def every_collective(rank: int, size: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    data = torch.randn(4 * size, generator=generator)
    results: list[torch.Tensor] = []

    def note(*tensors: torch.Tensor) -> None:
        results.extend(tensor.detach().clone() for tensor in tensors)

    for operation in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
        reduced = data.clone()
        dist.all_reduce(reduced, operation)
        note(reduced)
    gathered = [torch.zeros_like(data) for _ in range(size)]
    dist.all_gather(gathered, data)
    into = torch.zeros(size * data.numel())
    dist.all_gather_into_tensor(into, data)
    scattered = torch.zeros(4)
    dist.reduce_scatter_tensor(scattered, data.clone())
    listed = torch.zeros(4)
    dist.reduce_scatter(listed, list(data.clone().split(4)))
    exchanged = torch.zeros_like(data)
    dist.all_to_all_single(exchanged, data)
    exchanged_list = [torch.zeros(4) for _ in range(size)]
    dist.all_to_all(exchanged_list, list(data.split(4)))
    at_one = [torch.zeros_like(data) for _ in range(size)] if rank == 1 else None
    dist.gather(data, at_one, dst=1)
    from_one = torch.zeros(4)
    dist.scatter(from_one, list(data.split(4)) if rank == 1 else None, src=1)
    reduced_at_zero = data.clone()
    dist.reduce(reduced_at_zero, 0)
    spread = data.clone()
    dist.broadcast(spread, size - 1)
    note(*gathered, into, scattered, listed, exchanged, *exchanged_list, *(at_one or []), from_one, spread)
    note(reduced_at_zero if rank == 0 else data)
    received = torch.zeros_like(data)
    peers = ((rank + 1) % size, (rank - 1) % size)
    operations = [dist.P2POp(dist.isend, data, peers[0]), dist.P2POp(dist.irecv, received, peers[1])]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    note(received)
    world = dist.group.WORLD
    assert world is not None
    note(functional.all_reduce(data, "sum", world) + 0)
    note(functional.all_gather_tensor(data, 0, world) + 0)
    note(functional.reduce_scatter_tensor(data, "sum", 0, world) + 0)
    note(functional.all_to_all_single(data, None, None, world) + 0)
    note(*[part + 0 for part in functional.all_gather_into_tensor_coalesced([data, data * 2], world)])
    note(*[part + 0 for part in functional.reduce_scatter_tensor_coalesced([data, data * 2], "sum", [0, 0], world)])
    with dist.distributed_c10d._coalescing_manager():
        many = [data.clone(), data * 3]
        for tensor in many:
            dist.all_reduce(tensor)
    note(*many)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    shared: list[Any] = [rank, "x"]
    dist.broadcast_object_list(shared, src=1)
    note(torch.tensor([entry["rank"] for entry in objects]), torch.tensor(shared[0]))
    dist.barrier()
    pair = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        paired = data.clone()
        dist.all_reduce(paired, group=pair)
        note(paired, torch.tensor([dist.get_rank(pair), dist.get_world_size(pair)]))
    return results


def compare_with_gloo(member: Member, rank: int, size: int) -> int:
    plain_store = dist.PrefixStore("plain", member.store)
    dist.init_process_group("gloo", store=plain_store, rank=rank, world_size=size, timeout=TIMEOUT)
    plain = every_collective(rank, size)
    dist.destroy_process_group()
    member.start(rank, size)
    ours = every_collective(rank, size)
    assert len(ours) == len(plain) and all(torch.equal(one, other) for one, other in zip(ours, plain, strict=True))
    groups.default_group().monitored_barrier(TIMEOUT)
    groups.close()
    assert not dist.is_initialized()
    return len(ours)


def test_every_collective_gives_the_same_bits_as_plain_gloo() -> None:
    assert min(together(compare_with_gloo, 3)) >= 30


def small_exchanges(member: Member, rank: int, size: int) -> Any:
    calls = []
    member.start(rank, size)
    groups.on_collective(lambda: calls.append(1))
    assert groups.agree([rank, -rank, 7]) == [size - 1, 0, 7]
    assert groups.gather([rank, 10 * rank]) == [[other, 10 * other] for other in range(size)]
    assert len(calls) == 2
    types = (torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.float8_e4m3fn, torch.int64)
    for at, kind in enumerate(types):
        for value in (torch.ones(3, 2).t().to(kind), torch.ones(()).to(kind), torch.ones(0).to(kind)):
            empty = torch.zeros_like(value)
            groups.broadcast(value if rank == 1 else empty, 1)
            assert rank == 1 or torch.equal(empty.float(), value.float())
            if rank == 0:
                groups.send(value, 1, at)
            elif rank == 1:
                got = torch.zeros_like(value)
                groups.recv(got, 0, at)
                assert torch.equal(got.float(), value.float())
    return None


def test_agree_gather_and_transfers_of_every_type() -> None:
    together(small_exchanges, 3)


def break_off_in_a_coalesced_block(member: Member, rank: int, size: int) -> float:
    member.start(rank, size)
    groups.agree([rank])  # both are here
    with pytest.raises(ConnectionError), dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(torch.ones(1))
        raise ConnectionError("a step that is repeated")
    groups.revoke("it broke", view=1)
    member.switch(rank, size, 2)
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    return total.item()


def test_a_collective_after_a_coalesced_block_that_broke_is_made() -> None:
    """torch notes the block's collectives in a table until its end: with what an exception leaves there, it would only
    note all later ones too."""
    assert together(break_off_in_a_coalesced_block, 2) == [1.0, 1.0]


# Ranks that die


def survive(member: Member, rank: int, size: int, victim: int, then: str) -> Any:
    member.start(rank, size)
    pair = dist.new_group([0, 1])
    if rank in (0, 1):
        dist.all_reduce(torch.ones(1), group=pair)
    revoke_when_told(member, "dead", 1)
    groups.agree([0])
    if rank == victim:
        member.say("hanging")
        time.sleep(60)
    error = hung(lambda: dist.all_reduce(torch.ones(100_000)))
    again = hung(lambda: dist.barrier())
    member.hear("dead")
    while not groups.is_revoked():
        time.sleep(0.001)
    assert isinstance(hung(dist.barrier), ViewOverError)
    if then == "smaller":
        new_rank = rank if rank < victim else rank - 1
        member.switch(new_rank, size - 1, 2)
        assert (dist.get_rank(), dist.get_world_size()) == (new_rank, size - 1)
        assert dist.get_process_group_ranks(None) == list(range(size - 1))
        if rank in (0, 1):
            with pytest.raises(HoldfastError, match="make the others"):
                dist.all_reduce(torch.ones(1), group=pair)
    else:
        member.switch(rank, size, 2)
        if rank in (0, 1):
            total = torch.tensor([float(rank)])
            dist.all_reduce(total, group=pair)
            assert total.item() == 1
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item(), repr(error), repr(again)


def newcomer(member: Member, rank: int, size: int) -> Any:
    member.start(rank, size, 1, believe=True)
    kept = torch.full((2,), float(rank))
    dist.all_reduce(kept)
    dist.broadcast(kept, 0)
    parts = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(parts, kept)
    assert all(torch.equal(part, kept) for part in parts)
    with pytest.raises(HoldfastError, match="not joined"):
        dist.send(kept, 0)
    pair = dist.new_group([0, 1])
    member.hear("dead")
    member.switch(rank, size, 2)
    if rank in (0, 1):
        total = torch.tensor([float(rank)])
        dist.all_reduce(total, group=pair)
        assert total.item() == 1
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize("victim", [1, 3])
def test_a_killed_rank_frees_nobody_but_a_revoke_all_and_the_rest_go_on_without_it(victim: int) -> None:
    with Crowd() as crowd:
        for rank in range(4):
            crowd.add(survive, rank, 4, victim, "smaller")
        crowd.hear("hanging")
        crowd.kill(victim)
        crowd.say("dead")
        assert [result and result[0] for result in crowd.results()] == [None if r == victim else 3.0 for r in range(4)]


def test_a_replacement_that_made_believe_takes_the_rank_and_its_subgroups() -> None:
    with Crowd() as crowd:
        for rank in range(3):
            crowd.add(survive, rank, 3, 1, "same")
        crowd.add(newcomer, 1, 3)
        crowd.hear("hanging")
        crowd.kill(1)
        crowd.say("dead")
        results = crowd.results()
        assert results[0][0] == results[2][0] == results[3] == 3.0


def grow(member: Member, rank: int, size: int) -> float:
    """The world grows by one at each view; a spare believed to be rank 0 of another world."""
    if rank == size - 1:
        member.start(0, size - 1, 0, believe=True)
    else:
        member.start(rank, size - 1)
    everyone = dist.new_group()
    member.switch(rank, size, 2)
    total = torch.ones(1)
    dist.all_reduce(total, group=everyone)
    assert dist.get_process_group_ranks(everyone) == list(range(size))
    return total.item() + dist.get_rank(everyone)


def test_groups_of_all_ranks_follow_a_growing_world() -> None:
    assert together(grow, 3) == [3.0, 4.0, 5.0]


def connect_in_own_order(member: Member, rank: int, size: int) -> Any:
    """Two threads have a group each, as a script that saves its checkpoints on a thread does; groups connect when they
    are first used, here on each rank another one first."""
    member.start(rank, size)
    two = [dist.new_group([0, 1]) for _ in range(2)]
    sums = [torch.ones(1), torch.ones(1)]
    threads = [threading.Thread(target=dist.all_reduce, args=(sums[at],), kwargs={"group": two[at]}) for at in range(2)]
    threads[rank].start()
    time.sleep(0.3)
    threads[1 - rank].start()
    for thread in threads:
        thread.join()
    return [total.item() for total in sums]


def test_groups_of_two_threads_connect_in_whatever_order_each_rank_comes_to_them() -> None:
    assert together(connect_in_own_order, 2) == [[2.0, 2.0]] * 2


# Interruptions at any moment


def interrupt_switch(member: Member, rank: int, size: int) -> str:
    member.start(rank, size)
    groups.agree([0])
    if rank == 0:
        timer = threading.Timer(0.1, groups.revoke, ("the other one will not come", 2))
        timer.start()
        with pytest.raises(ViewOverError, match="will not come"):
            member.switch(rank, size, 2)
        groups.revoke("over before it began", view=3)
        with pytest.raises(ViewOverError, match="before it began"):
            member.switch(rank, size, 3)
    groups.revoke("late", view=3)
    member.switch(rank, size, 4)
    groups.revoke("too late", view=3)
    assert groups.current_connections().view == 4 and not groups.is_revoked()
    return str(groups.agree([rank]))


def test_a_switch_is_interrupted_and_a_late_revoke_does_not_touch_the_newer_view() -> None:
    assert together(interrupt_switch, 2) == ["[1]", "[1]"]


def interrupt_start(member: Member) -> list[str]:
    threading.Timer(0.1, groups.revoke, ("nobody comes", 1)).start()
    with pytest.raises(ViewOverError):
        member.start(0, 2)
    assert not dist.is_initialized() and dist.distributed_c10d._world.group_count == 0
    groups.start(0, 1, None, view=2, timeout=TIMEOUT)
    dist.all_reduce(torch.ones(1))
    return [groups.default_group().group_name, str(groups.agree([5]))]


def test_an_interrupted_start_leaves_torch_as_it_was() -> None:
    with Crowd() as crowd:
        crowd.add(interrupt_start)
        assert crowd.results() == [["0", "[5]"]]


def race(member: Member, rank: int, size: int, views: int) -> int:
    """In each view a side thread revokes at a moment of its own; whoever survives the view is whole."""
    member.start(rank, size, 0)
    for view in range(1, views, 2):
        side = threading.Timer(0.0007 * (view % 9), groups.revoke, ("race", view))
        side.start()
        try:
            member.switch(rank, size, view)
            for _ in range(100):
                dist.all_reduce(torch.ones(10))
        except Exception as error:
            assert groups.is_communication_error(error), repr(error)
        # No waiting for the side thread: it may come during the next switch.
        member.switch(rank, size, view + 1)
        assert groups.agree([rank]) == [size - 1]
        side.join()
    return len(os.listdir("/proc/self/fd"))


def test_revokes_that_race_with_switches_end_only_their_own_view() -> None:
    together(race, 2, 40)


# Sockets


def switch_often(member: Member, rank: int, size: int) -> Any:
    member.start(rank, size)
    pair = dist.new_group([0, 1])
    descriptors = []
    for view in range(2, 22):
        member.switch(rank, size, view)
        dist.all_reduce(torch.ones(3))
        if rank < 2:
            dist.all_reduce(torch.ones(3), group=pair)
        for thread in threading.enumerate():
            if thread.name == "holdfast-retire":
                thread.join()
        dist.barrier()
        descriptors.append(len(os.listdir("/proc/self/fd")))
    return descriptors


def test_twenty_switches_leak_no_sockets() -> None:
    for descriptors in together(switch_often, 3):
        assert max(descriptors[2:]) <= descriptors[1] + 2, descriptors


def keep_foreign_connections(member: Member, rank: int, size: int) -> int:
    """Another thread opens connections all the time, as a logging library may."""
    server = socket.create_server(("127.0.0.1", 0))
    opened: list[tuple[socket.socket, socket.socket]] = []
    stop = threading.Event()

    def chatter() -> None:
        while not stop.is_set():
            client = socket.create_connection(server.getsockname())
            opened.append((client, server.accept()[0]))
            time.sleep(0.0005)

    thread = threading.Thread(target=chatter)
    thread.start()
    member.start(rank, size)
    for view in range(2, 12):
        groups.agree([1])
        groups.revoke("again", view=view - 1)
        member.switch(rank, size, view)
    groups.revoke("last", view=11)
    stop.set()
    thread.join()
    for client, accepted in opened:
        client.sendall(b"x")
        assert accepted.recv(1) == b"x"
    return len(opened)


def test_connections_of_other_libraries_are_never_touched() -> None:
    assert min(together(keep_foreign_connections, 2)) > 10


def leave_child(member: Member, rank: int, size: int) -> Any:
    member.start(rank, size)
    groups.agree([0])
    if rank == 0:
        if os.fork() == 0:
            member.say("forked")
            time.sleep(3)  # as a data loader's worker that has not noticed yet
            os._exit(0)
        time.sleep(60)
    return repr(hung(lambda: groups.agree([1])))


def test_a_forked_child_does_not_keep_a_dead_rank_connected() -> None:
    with Crowd() as crowd:
        crowd.add(leave_child, 0, 2)
        crowd.add(leave_child, 1, 2)
        crowd.hear("forked")
        crowd.kill(0)
        before = time.monotonic()
        assert crowd._result(1, before + 2.5) is not None
