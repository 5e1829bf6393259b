"""Copies made beside a training that goes on: of the state as it was, never of a mixture."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from holdfast.state import copier
from holdfast.state.copier import Copier, CopyTask, CopyWork, StateCopy
from support.simulated_device import DeviceWork, Event


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that small tensors have many pieces, and a thread is worth it."""
    monkeypatch.setattr(copier, "CHUNK_BYTES", 64)
    monkeypatch.setattr(copier, "THREAD_WORTH_BYTES", 0)
    yield


def has_ended(copy: StateCopy) -> bool:
    """Ask anew: a type checker takes an attribute for unchanged where another thread changes it."""
    return copy.is_over


class Outcome:
    """What `on_done` was told."""

    def __init__(self) -> None:
        self.results: list[bool] = []
        self.moved: list[CopyTask] = []
        self.threads: list[str] = []
        self._event = threading.Event()

    def __call__(self, moved: list[CopyTask]) -> None:
        self.results.append(bool(moved))
        self.moved = moved
        self.threads.append(threading.current_thread().name)
        self._event.set()

    def wait(self) -> bool:
        assert self._event.wait(30.0)
        (spoiled,) = self.results
        return spoiled


def tasks(*owners: int, rows: int = 40) -> list[CopyTask]:
    return [CopyTask(torch.zeros(rows, 4), torch.rand(rows, 4) + 1.0, owner) for owner in owners]


def copied(pieces: list[CopyTask]) -> list[bool]:
    """Which are copied."""
    return [torch.equal(task.target, task.source) for task in pieces]


@pytest.mark.usefixtures("small_chunks")
def test_the_thread_copies_everything_if_no_caller_joins() -> None:
    todo, outcome = tasks(0, 1, -1), Outcome()
    copy = Copier().start(CopyWork(todo), outcome)
    assert outcome.wait() is False
    copy.join()
    assert copy.is_over and all(copied(todo)) and outcome.threads == [copier.THREAD_NAME]


@pytest.mark.usefixtures("small_chunks")
def test_without_the_thread_an_update_does_its_own_share_only() -> None:
    """A Copy that no thread works on: join copies what is its own, and no more."""
    todo, outcome = tasks(0, 1, 0, 2), Outcome()
    copy = StateCopy(CopyWork(todo), outcome)
    copy.join(0)
    assert copied(todo) == [True, False, True, False] and not copy.is_over
    copy.join(5)  # owns nothing: nothing to wait for
    assert copied(todo) == [True, False, True, False]
    copy.join(1)
    copy.join(2)
    assert has_ended(copy) and outcome.results == [False] and all(copied(todo))


def test_little_is_copied_at_once() -> None:
    todo, outcome = tasks(0, 1), Outcome()
    copy = Copier().start(CopyWork(todo), outcome)
    assert copy.is_over and outcome.results == [False] and outcome.threads == ["MainThread"]
    nothing = Outcome()
    assert Copier().start(CopyWork([]), nothing).is_over and nothing.results == [False]


@pytest.mark.usefixtures("small_chunks")
def test_an_update_waits_for_the_chunk_that_the_thread_is_copying(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is held up in a piece of owner 0. Owner 1 goes through, owner 0 does the rest of its own and waits."""
    begun, go_on = threading.Event(), threading.Event()
    original = StateCopy._copy

    def slow(self: StateCopy, piece: copier._CopyChunk) -> None:
        if threading.current_thread().name == copier.THREAD_NAME and not begun.is_set():
            begun.set()
            assert go_on.wait(30.0)
        original(self, piece)

    monkeypatch.setattr(StateCopy, "_copy", slow)
    todo, outcome = tasks(0, 1), Outcome()
    copy = Copier().start(CopyWork(todo), outcome)
    assert begun.wait(30.0)
    copy.join(1)
    assert copied(todo)[1] and not copy.is_over
    joined = threading.Thread(target=copy.join, args=(0,))
    joined.start()
    while sum(len(pieces) for pieces in copy._waiting.values()):
        pass
    joined.join(0.05)
    assert joined.is_alive() and not outcome.results
    go_on.set()
    joined.join(30.0)
    assert not joined.is_alive() and all(copied(todo)) and outcome.wait() is False


@pytest.mark.usefixtures("small_chunks")
def test_what_changes_after_its_owner_joined_spoils_nothing() -> None:
    """Two optimizers: the first updates while the second's tensors are still waiting."""
    todo, outcome = tasks(0, 1), Outcome()
    before = todo[0].source.clone()
    copy = StateCopy(CopyWork(todo), outcome)
    copy.join(0)
    todo[0].source.add_(1.0)
    copy.join(1)
    assert outcome.results == [False] and torch.equal(todo[0].target, before)


@pytest.mark.usefixtures("small_chunks")
def test_what_changes_before_it_is_copied_spoils_the_copy() -> None:
    for changed in (0, 1):
        todo, outcome = tasks(0, 1), Outcome()
        copy = StateCopy(CopyWork(todo), outcome)
        todo[changed].source.mul_(2.0)
        copy.join()
        assert outcome.results == [True]


@pytest.mark.usefixtures("small_chunks")
def test_a_view_notices_that_its_base_has_changed() -> None:
    """A piece of a cut tensor shares the version of the parameter."""
    whole, outcome = torch.rand(40, 4), Outcome()
    copy = StateCopy(CopyWork([CopyTask(torch.zeros(20, 4), whole[:20], 0)]), outcome)
    whole.add_(1.0)
    copy.join()
    assert outcome.results == [True]


@pytest.mark.usefixtures("small_chunks")
def test_no_thread_writes_after_abandon(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    original = StateCopy._copy

    def slow(self: StateCopy, piece: copier._CopyChunk) -> None:
        begun.set()
        assert go_on.wait(30.0)
        original(self, piece)

    monkeypatch.setattr(StateCopy, "_copy", slow)
    todo, outcome, worker = tasks(0, 1, 2), Outcome(), Copier()
    copy = worker.start(CopyWork(todo), outcome)
    assert begun.wait(30.0)
    abandoning = threading.Thread(target=copy.abandon)
    abandoning.start()
    abandoning.join(0.05)
    assert abandoning.is_alive()  # a piece is under way
    go_on.set()
    abandoning.join(30.0)
    assert not abandoning.is_alive() and copy.is_over and not outcome.results
    for task in todo:
        task.target.fill_(-1.0)
    copy.join()
    monkeypatch.undo()
    again = Outcome()
    worker.start(CopyWork(more := tasks(0)), again)  # the thread is free for the next, and has nothing left of this one
    assert again.wait() is False and all(copied(more))
    assert all(bool((task.target == -1.0).all()) for task in todo) and not outcome.results


def test_shapes_of_all_kinds(small_chunks: None) -> None:
    sources = [
        torch.rand(()),
        torch.rand(0, 3),
        torch.rand(50, 6).t(),
        torch.rand(50, 6)[::2],
        torch.arange(700, dtype=torch.uint8),
        torch.rand(33, 5, dtype=torch.float64),
        torch.rand(129).to(torch.bfloat16),
    ]
    todo = [CopyTask(torch.zeros_like(source).contiguous(), source, index % 3) for index, source in enumerate(sources)]
    outcome = Outcome()
    Copier().start(CopyWork(todo), outcome)
    assert outcome.wait() is False and all(copied(todo))


@pytest.mark.parametrize("seed", range(40))
def test_random_updates_beside_the_copy(small_chunks: None, seed: int) -> None:
    """A training with several optimizers joins and updates in any order, several steps, over one set of targets. A copy
    that is not spoiled is the state at its begin, bit for bit; and spoiled are those alone that were meant to be."""
    chance = random.Random(seed)
    owners = chance.randint(1, 4)
    todo: list[CopyTask] = []
    for owner in range(owners):
        todo += tasks(*[owner] * chance.randint(1, 3), rows=chance.randint(1, 60))
    work, worker = CopyWork(todo), Copier()
    for _ in range(6):
        before = [task.source.clone() for task in todo]
        outcome = Outcome()
        copy = worker.start(work, outcome)
        sinner = chance.randrange(owners) if chance.random() < 0.15 else None
        if chance.random() < 0.15 and sinner is None:
            copy.abandon()
            [task.source.add_(1.0) for task in todo]
            continue
        was_early = False
        for owner in chance.sample(range(owners), owners):
            if owner == sinner:
                was_early = copy._on_host[owner] > 0  # the thread may have been quicker: then no harm is done
            else:
                copy.join(owner)
            for task in todo:
                if task.owner == owner:
                    task.source.mul_(chance.random()).add_(1.0)
        copy.join()
        spoiled = outcome.wait()
        assert not spoiled or was_early
        if not spoiled:
            assert all(torch.equal(task.target, was) for task, was in zip(todo, before, strict=True))


# --- from a device (simulated: see support/simulated_device.py)


class DeviceClock:
    """Events of a device on whose stream each of its operations takes a second."""

    now_s = 0.0

    def __init__(self, device: torch.device, *, enable_timing: bool = False) -> None:
        self.at_s, self.has_timing, self.is_passed = -1.0, enable_timing, False

    def record(self, stream: object) -> None:
        DeviceClock.now_s += 1.0
        self.at_s = DeviceClock.now_s

    def wait(self, stream: object) -> None:
        DeviceClock.now_s += 4.0

    def query(self) -> bool:
        return self.is_passed

    def elapsed_time(self, end: DeviceClock) -> float:
        assert self.has_timing and end.has_timing
        return 1e3 * (end.at_s - self.at_s)


def test_what_an_update_on_a_device_waits_is_measured_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host only tells it to wait, which takes nothing."""
    monkeypatch.setattr(torch, "Event", DeviceClock)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: "stream")
    arrival = copier.DeviceArrival(torch.device("cuda", 0), "side stream")  # type: ignore[arg-type]
    for _ in range(2):
        arrival.wait()
    assert arrival.waited_s() is None, "the device has not come past it"
    for _, behind in arrival._waits:
        behind.is_passed = True  # type: ignore[attr-defined]
    assert arrival.waited_s() == 2 * 5.0


@pytest.fixture
def held_device() -> Iterator[None]:
    DeviceWork.hold()
    yield
    DeviceWork.release()


@pytest.mark.usefixtures("small_chunks", "held_device")
def test_who_joins_does_not_wait_for_a_device_and_who_finishes_does() -> None:
    """The thread waits for the tensors to arrive, and has begun to: an update goes through all the same."""
    todo, outcome = tasks(0, 1), Outcome()
    before = [task.source.clone() for task in todo]
    copy = Copier().start(DeviceWork(todo), outcome)
    while sum(len(pieces) for pieces in copy._waiting.values()) == 2:
        pass  # until the thread has taken the first
    copy.join()
    assert not copy.is_over and not outcome.results
    for task in todo:
        task.source.add_(1.0)
    finishing = threading.Thread(target=copy.finish)
    finishing.start()
    finishing.join(0.05)
    assert finishing.is_alive()
    DeviceWork.release()
    finishing.join(30.0)
    assert not finishing.is_alive() and has_ended(copy) and outcome.results == [False]
    assert all(torch.equal(task.target, was) for task, was in zip(todo, before, strict=True))


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("wait", ["join", "finish", "abandon"])
def test_an_error_of_the_device_that_the_thread_meets_is_raised_to_who_waits(
    wait: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to end the thread with a chunk in its hands, which was then waited for without end."""

    def fail(self: object) -> None:
        raise RuntimeError("CUDA error: misaligned address")

    monkeypatch.setattr(Event, "synchronize", fail)
    outcome, worker = Outcome(), Copier()
    copy = worker.start(DeviceWork(tasks(0, 1)), outcome)
    deadline = time.monotonic() + 30.0
    while not copy.is_over:
        assert time.monotonic() < deadline, "the copy does not end"
        time.sleep(0.001)
    if wait == "abandon":
        copy.abandon()
    else:
        with pytest.raises(RuntimeError, match="misaligned"):
            getattr(copy, wait)()
    assert not outcome.results
    after = Outcome()
    worker.start(CopyWork(tasks(0)), after)
    assert after.wait() is False, "the thread is there for the next one"


@pytest.mark.usefixtures("small_chunks", "held_device")
def test_what_changes_on_a_device_before_anybody_joined_spoils_the_copy() -> None:
    todo, outcome = tasks(0, 1), Outcome()
    copy = Copier().start(DeviceWork(todo), outcome)
    copy.join(0)
    todo[0].source.add_(1.0)
    todo[1].source.add_(1.0)
    DeviceWork.release()
    copy.finish()
    assert outcome.moved == [todo[1]]
