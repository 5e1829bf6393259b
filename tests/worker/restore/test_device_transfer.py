"""A state from device to device: what is cut into batches, where it arrives, and when a newcomer has it.

The device is the CPU, told through a group as one would be told; e2e/test_device_matrix.py has one that is late.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from holdfast.errors import StateConflictError
from holdfast.state.arena import Arena
from holdfast.state.tracked import Tracked
from holdfast.worker.collectives import elastic_group, groups
from holdfast.worker.restore import device_transfer
from holdfast.worker.restore.device_transfer import DeviceLink, batches, link_to, receive_state, send_state
from support.crowd import Crowd, Member, together

STEP = 7


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], []),
        ([0, 0], []),
        ([4, 6], [[(0, 0, 4), (1, 0, 6)]]),
        ([4, 0, 7], [[(0, 0, 4), (2, 0, 6)], [(2, 6, 7)]]),
        ([25], [[(0, 0, 10)], [(0, 10, 20)], [(0, 20, 25)]]),
        ([10, 1], [[(0, 0, 10)], [(1, 0, 1)]]),
    ],
)
def test_batches_are_cut_by_the_sizes_alone(sizes: list[int], expected: list[list[tuple[int, int, int]]]) -> None:
    assert [[tuple(piece) for piece in batch] for batch in batches(sizes, 10)] == expected


class Meter:
    """What a script tracks beside its model."""

    def __init__(self) -> None:
        self.sums = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"sums": self.sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = state["sums"]


def objects(seed: int, *, is_trained: bool) -> Tracked:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    last = model[2]
    last.weight = nn.Parameter(torch.randn(7, 3).t())  # its elements do not lie in their order
    optimizer, meter = torch.optim.Adam(model.parameters()), Meter()
    if is_trained:
        model(torch.randn(4, 5)).sum().backward()
        optimizer.step()
        meter.sums += 5
    return Tracked(model=model, optimizer=optimizer, meter=meter)


def link() -> DeviceLink:
    """To the other rank, as if the CPU were a device that must be told of transfers together; in tiny batches."""
    device_transfer.BATCH_BYTES = 100
    elastic_group.ElasticGroup._start_coalescing = lambda *_: None  # type: ignore[method-assign]
    elastic_group.ElasticGroup._end_coalescing = lambda *_: None  # type: ignore[method-assign]
    return DeviceLink(groups.default_group(), torch.device("cpu"))


def digest(tracked: Tracked) -> list[bytes]:
    flat = tracked.state()
    return [flat.skeleton, *(one.detach().contiguous().numpy().tobytes() for one in flat.tensors)]


def hand_over(member: Member, rank: int, size: int, is_copy: bool) -> list[bytes]:
    member.start(rank, size)
    tracked = objects(rank, is_trained=rank == 0)
    if rank == 0:
        state = tracked.state()
        copy = Arena(is_kept=False)
        copy.take(state, STEP)
        send_state(link(), copy.flat() if is_copy else state, state, STEP, 1)
        return digest(tracked)
    parameters = list(tracked.modules()["model"].parameters())
    before = [(one.data_ptr(), one._version) for one in parameters]
    tree = receive_state(link(), tracked, 0, STEP)
    for parameter, (memory, version) in zip(parameters, before, strict=True):
        assert parameter.data_ptr() == memory and (parameter._version > version or not parameter.is_contiguous())
        assert (tree["model"]["0.weight"].data_ptr() == memory) is (parameter is parameters[0]), "into live tensors"
    tracked.load_tree(tree, is_ours=True)
    assert [one.data_ptr() for one in parameters] == [memory for memory, _ in before]
    return digest(tracked)


@pytest.mark.parametrize("is_copy", [False, True], ids=["live state", "copy of another rank"])
def test_a_newcomer_has_the_same_bits_in_the_same_memory(is_copy: bool) -> None:
    sent, received = together(hand_over, 2, is_copy)
    assert sent == received


def be_told_another_step(member: Member, rank: int, size: int) -> None:
    member.start(rank, size)
    tracked = objects(rank, is_trained=rank == 0)
    if rank == 0:
        try:
            send_state(link(), tracked.state(), tracked.state(), STEP, 1)
        except (RuntimeError, dist.DistError):
            return  # the other one has gone
    with pytest.raises(StateConflictError, match="of step 7; the settled step is 8"):
        receive_state(link(), tracked, 0, STEP + 1)


def test_a_state_of_another_step_is_refused() -> None:
    together(be_told_another_step, 2)


def send_and_die(member: Member, rank: int, size: int) -> None:
    member.start(rank, size)
    tracked = objects(rank, is_trained=True)
    state = tracked.state()
    DeviceLink.wait = lambda _: os.kill(os.getpid(), 9)  # type: ignore[assignment, method-assign]
    send_state(link(), state, state, STEP, 1)


def receive_from_the_dead(member: Member, rank: int, size: int) -> bool:
    member.start(rank, size)
    tracked = objects(rank, is_trained=False)
    try:
        receive_state(link(), tracked, 0, STEP)
    except Exception as error:
        return groups.is_communication_error(error)
    return False


def test_a_source_that_dies_before_its_device_has_sent_all_leaves_no_state_that_counts() -> None:
    """On a device, an abort ends what was queued with part of the bytes."""
    with Crowd() as crowd:
        crowd.add(send_and_die, 0, 2)
        crowd.add(receive_from_the_dead, 1, 2)
        assert crowd.results() == [None, True]


class Library:
    """What a view has connected on a device."""

    def __init__(self, supports_coalescing: bool) -> None:
        self.supports_coalescing = supports_coalescing


def find_links(member: Member, rank: int, size: int) -> list[bool]:
    member.start(rank, size)
    pair = dist.new_group([0, 1])
    found = [link_to(0) is not None]
    if rank == 1:
        assert isinstance(pair, elastic_group.ElasticGroup) and pair._connections is None
        pair.reconnect(groups.current_connections(), {"meta": Library(False)})
        pair.devices_used.add("meta")
        found.append(link_to(0) is not None)
        pair.reconnect(groups.current_connections(), {"meta": Library(True)})
        found += [groups.connected_with(0) == (pair, "meta"), groups.connected_with(2) is not None]
        member.switch(rank, size, 2)
        found.append(groups.connected_with(0) is not None)
    else:
        member.switch(rank, size, 2)
    return found


def test_ranks_are_linked_by_a_group_of_this_view_that_has_both() -> None:
    assert together(find_links, 3)[1] == [False, False, True, False, False]
