"""What is kept of collectives, and for how long."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed import AllreduceOptions, BroadcastOptions, ReduceOptions

from holdfast.worker.collectives import kept_inputs
from holdfast.worker.collectives.kept_inputs import KEPT_SMALL_BYTES, OperationLog

BIG = KEPT_SMALL_BYTES // 4 + 1


def all_reduce(log: OperationLog, tensor: torch.Tensor) -> kept_inputs.Operation:
    return log.begin("allreduce", ([tensor], AllreduceOptions()), {})


def again(operation: kept_inputs.Operation) -> Any:
    return operation.arguments()[0]


def test_an_all_reduce_gets_its_input_back_in_the_callers_tensor() -> None:
    log, tensor = OperationLog(0), torch.arange(4.0)
    operation = all_reduce(log, tensor)
    tensor.fill_(9)  # as gloo does, half way
    ((repeated,), _) = again(operation)
    assert repeated is tensor and tensor.tolist() == [0, 1, 2, 3]
    assert (log.first, log.oldest) == (0, 0)


def test_one_that_has_succeeded_is_served_from_a_copy_and_leaves_the_callers_tensor_alone() -> None:
    log, tensor = OperationLog(0), torch.arange(4.0)
    operation = all_reduce(log, tensor)
    log.complete(operation)
    tensor.fill_(9)
    ((repeated,), _) = again(operation)
    assert repeated is not tensor and repeated.tolist() == [0, 1, 2, 3]
    repeated.fill_(7)
    assert again(operation)[0][0].tolist() == [0, 1, 2, 3], "each time"
    assert tensor.tolist() == [9] * 4 and (log.first, log.oldest) == (1, 0)


@pytest.mark.parametrize("name", ["_allgather_base", "_reduce_scatter_base", "alltoall_base"])
def test_a_large_input_that_is_not_written_over_is_read_again_while_it_is_the_groups(name: str) -> None:
    log, source, into = OperationLog(0), torch.ones(BIG), torch.zeros(BIG)
    operation = log.begin(name, (into, source), {})
    assert again(operation)[1] is source and log.oldest == 0
    log.complete(operation)
    assert (log.first, log.oldest) == (1, 1), "the caller may have changed it"


def test_an_output_that_overlaps_the_input_is_as_one_in_place() -> None:
    memory = torch.zeros(2 * BIG)
    log = OperationLog(0)
    operation = log.begin("_reduce_scatter_base", (memory[:BIG], memory), {})
    memory.fill_(5)
    assert again(operation)[1] is memory and not memory.any()


def test_what_others_can_no_longer_ask_for_is_dropped() -> None:
    log = OperationLog(0)
    buckets = [all_reduce(log, torch.ones(8)) for _ in range(3)]
    for operation in buckets:
        log.complete(operation)
    assert log.oldest == 0, "another rank may have got none of them"
    barrier = all_reduce(log, torch.ones(1))
    assert log.oldest == 0
    log.complete(barrier)
    assert log.oldest == 3


def test_a_broadcast_says_nothing_of_how_far_the_others_are() -> None:
    log, options = OperationLog(0), BroadcastOptions()
    log.complete(all_reduce(log, torch.ones(8)))
    log.complete(log.begin("broadcast", ([torch.ones(8)], options), {}))
    assert log.oldest == 0
    large = log.begin("broadcast", ([torch.ones(BIG)], options), {})
    log.complete(large)
    assert log.oldest == 3, "the root does not have it any more"


def test_a_rank_that_only_receives_a_broadcast_can_always_take_part_again() -> None:
    log, tensor = OperationLog(1), torch.ones(BIG)
    operation = log.begin("broadcast", ([tensor], BroadcastOptions()), {})
    log.complete(operation)
    assert log.oldest == 0 and again(operation)[0][0].shape == tensor.shape


def test_copies_have_a_bound_and_the_oldest_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_inputs, "KEPT_BYTES_MAX", 100)
    log = OperationLog(0)
    for _ in range(4):
        all_reduce(log, torch.ones(10))
    assert log.oldest == 2
    all_reduce(log, torch.ones(26))
    assert log.oldest == 5, "it is larger than the bound by itself"
    log = OperationLog(0)
    log.complete(all_reduce(log, torch.ones(20)))
    log.begin("reduce", ([torch.ones(20)], ReduceOptions()), {})
    assert log.oldest == 1, "its memory is another's now"


def test_a_sparse_tensor_is_not_kept() -> None:
    log = OperationLog(0)
    all_reduce(log, torch.eye(3).to_sparse())
    assert log.oldest == 1


def test_memory_of_copies_is_used_again() -> None:
    pool = kept_inputs.CopyPool()
    with torch.inference_mode():
        first = pool.copy(torch.ones(4))
        pool.give_back(first)
        second = pool.copy(torch.arange(4.0))
    assert second.data_ptr() == first.data_ptr() and second.view(torch.float32).tolist() == [0, 1, 2, 3]
    assert pool.bytes_in_use == 16
