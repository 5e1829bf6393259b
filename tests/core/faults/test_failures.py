"""Which of several failures is the cause."""

from __future__ import annotations

import pytest

from holdfast.core.faults.failures import (
    End,
    Exited,
    Failure,
    NotStarted,
    OutOfMemory,
    Signalled,
    describe,
    is_collateral,
    root_cause,
)

EXITED = Exited(1)


def failure(rank: int = 0, at: float = 0.0, end: End = EXITED, exception: str = "", message: str = "") -> Failure:
    return Failure(
        node_id="a",
        view=1,
        rank=rank,
        local_rank=rank,
        pid=1,
        end=end,
        failed_at=at,
        exception=exception,
        message=message,
    )


COLLATERAL = [
    ("torch.distributed.DistBackendError", "NCCL error in ..."),
    ("DistNetworkError", "The client socket has failed to connect"),
    ("torch.distributed.DistStoreError", "wait timeout"),
    ("ConnectionResetError", ""),
    ("BrokenPipeError", ""),
    ("RuntimeError", "[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4711"),
    ("RuntimeError", "Gloo connectFullMesh failed with ... Connection refused"),
    ("RuntimeError", "[Rank 3] NCCL communicator was aborted on rank 3."),
]
ITS_OWN = [
    ("ValueError", "the loss is not a number"),
    ("RuntimeError", "CUDA error: an illegal memory access was encountered"),
    ("torch.OutOfMemoryError", "CUDA out of memory"),
    ("", ""),
    ("", "Connection closed by peer"),  # text without an exception is a log line, and proves nothing
]


@pytest.mark.parametrize(("exception", "message"), COLLATERAL)
def test_what_a_healthy_rank_suffers_when_another_one_goes(exception: str, message: str) -> None:
    assert is_collateral(failure(exception=exception, message=message))


@pytest.mark.parametrize(("exception", "message"), ITS_OWN)
def test_what_is_a_ranks_own_fault(exception: str, message: str) -> None:
    assert not is_collateral(failure(exception=exception, message=message))


def test_a_process_killed_by_a_signal_is_its_own_cause() -> None:
    assert not is_collateral(failure(end=Signalled(9, "SIGKILL")))


def victim(rank: int, at: float) -> Failure:
    return failure(rank, at, exception="ConnectionResetError")


def test_a_failure_of_its_own_comes_before_collateral_however_late_it_was_seen() -> None:
    cause = failure(rank=3, at=9.0, exception="ValueError")
    assert root_cause([victim(rank=0, at=1.0), cause, victim(rank=1, at=0.5)]) is cause


def test_of_equals_the_first_to_happen_is_the_cause() -> None:
    early, late = failure(rank=5, at=1.0), failure(rank=0, at=2.0)
    assert root_cause([late, early]) is early
    first, second = victim(rank=5, at=1.0), victim(rank=0, at=2.0)
    assert root_cause([second, first]) is first


def test_of_the_same_moment_the_lowest_rank_is_the_cause() -> None:
    assert root_cause([failure(rank=2), failure(rank=1)]) == failure(rank=1)


def test_no_failures_no_cause() -> None:
    assert root_cause([]) is None


ENDS: list[tuple[End, int, str]] = [
    (Exited(3), 3, "rank 0 on a exited with code 3"),
    (Signalled(9, "SIGKILL"), -9, "rank 0 on a killed by SIGKILL"),
    (OutOfMemory("oom_kill 1"), -9, "rank 0 on a killed because memory ran out (oom_kill 1)"),
    (NotStarted("no such file: train.py"), 127, "rank 0 on a could not be started: no such file: train.py"),
]


@pytest.mark.parametrize(("end", "code", "text"), ENDS)
def test_how_an_end_is_told(end: End, code: int, text: str) -> None:
    assert failure(end=end).exit_code == code
    assert describe(failure(end=end)) == text
    assert describe(failure(end=end, message="boom")) == f"{text}: boom"
