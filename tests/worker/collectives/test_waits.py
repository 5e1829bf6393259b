"""Whether a process waits for other ranks is shown while it does, and not a moment longer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from holdfast.errors import ViewOverError
from holdfast.worker.collectives.guarded import Guarded, GuardedTransfer, GuardedWork
from holdfast.worker.collectives.waits import WaitCounter, waits


@pytest.fixture
def shown() -> Iterator[list[tuple[int, int]]]:
    numbers: list[tuple[int, int]] = []
    waits.show = lambda main, opened: numbers.append((main, opened))
    yield numbers
    waits.show = None


class FakeWork:
    """An operation that others complete when the test says so."""

    def __init__(self, shown: list[tuple[int, int]], has_future: bool = True) -> None:
        self._shown, self._has_future = shown, has_future
        self.future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        self.seen: list[tuple[int, int]] = []
        self.is_done = threading.Event()

    def wait(self, *_: object) -> bool:
        self.seen.append(self._shown[-1])
        return self._has_future or self.is_done.wait(30.0)

    def is_completed(self) -> bool:
        return self.is_done.is_set()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        if not self._has_future:
            raise RuntimeError("it has none")
        return self.future


def test_a_wait_of_the_main_thread_is_shown_while_it_lasts(shown: list[tuple[int, int]]) -> None:
    work: Any = FakeWork(shown)
    GuardedWork(Guarded(object()), work).wait()
    assert work.seen == [(1, 0)] and shown[-1] == (0, 0)


def test_a_wait_that_is_ended_with_its_view_is_not_shown_any_more(shown: list[tuple[int, int]]) -> None:
    guard, work = Guarded(object()), FakeWork(shown)
    guard.fail("a peer died")
    with pytest.raises(ViewOverError):
        GuardedWork(guard, work).wait()  # type: ignore[arg-type]
    assert shown[-1] == (0, 0)


@pytest.mark.parametrize("is_kept", [True, False])
def test_an_operation_that_is_waited_for_in_native_code_is_open_until_it_ends(
    shown: list[tuple[int, int]], is_kept: bool
) -> None:
    guard, work = Guarded(object()), FakeWork(shown)
    GuardedWork(guard, work).get_future()  # type: ignore[arg-type]
    assert shown[-1] == (0, 1)
    if is_kept:
        work.future.set_result([])
    else:
        guard.fail("a peer died")
    assert shown[-1] == (0, 0)


def test_a_transfer_is_open_too(shown: list[tuple[int, int]]) -> None:
    guard, work = Guarded(object()), FakeWork(shown, has_future=False)
    transfer = GuardedTransfer(guard, work)  # type: ignore[arg-type]
    assert shown[-1] == (0, 1)
    work.is_done.set()
    transfer.wait()
    assert shown[-1] == (0, 0)


def test_waits_of_other_threads_do_not_count() -> None:
    counter, numbers = WaitCounter(), list[tuple[int, int]]()
    counter.show = lambda main, opened: numbers.append((main, opened))

    def wait() -> None:
        with counter:
            pass

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()
    assert numbers == []
    with counter, counter:
        assert numbers[-1] == (2, 0)
    assert numbers[-1] == (0, 0)
