"""Copies made beside a training that goes on: of the state as it was, never of a mixture."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest
import torch

from devices import DeviceWork
from holdfast.state import copier
from holdfast.state.copier import Copier, Copy, Task, Work


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that small tensors have many pieces, and a thread is worth it."""
    monkeypatch.setattr(copier, "PIECE_BYTES", 64)
    monkeypatch.setattr(copier, "THREAD_WORTH_BYTES", 0)
    yield


class Said:
    """What `on_done` was told."""

    def __init__(self) -> None:
        self.words: list[bool] = []
        self.moved: list[Task] = []
        self.threads: list[str] = []
        self._event = threading.Event()

    def __call__(self, moved: list[Task]) -> None:
        self.words.append(bool(moved))
        self.moved = moved
        self.threads.append(threading.current_thread().name)
        self._event.set()

    def wait(self) -> bool:
        assert self._event.wait(30.0)
        (spoiled,) = self.words
        return spoiled


def tasks(*owners: int, rows: int = 40) -> list[Task]:
    return [Task(torch.zeros(rows, 4), torch.rand(rows, 4) + 1.0, owner) for owner in owners]


def held(pieces: list[Task]) -> list[bool]:
    """Which are copied."""
    return [torch.equal(task.target, task.source) for task in pieces]


@pytest.mark.usefixtures("small_pieces")
def test_the_thread_does_it_all_if_nobody_hurries() -> None:
    todo, said = tasks(0, 1, -1), Said()
    copy = Copier().start(Work(todo), said)
    assert said.wait() is False
    copy.join()
    assert copy.is_over and all(held(todo)) and said.threads == [copier.THREAD_NAME]


@pytest.mark.usefixtures("small_pieces")
def test_without_the_thread_an_update_does_its_own_share_only() -> None:
    """A Copy that no thread works on: join copies what is its own, and no more."""
    todo, said = tasks(0, 1, 0, 2), Said()
    copy = Copy(Work(todo), said)
    copy.join(0)
    assert held(todo) == [True, False, True, False] and not copy.is_over
    copy.join(5)  # owns nothing: nothing to wait for
    assert held(todo) == [True, False, True, False]
    copy.join(1)
    copy.join(2)
    assert copy.is_over and said.words == [False] and all(held(todo))


def test_little_is_copied_at_once() -> None:
    todo, said = tasks(0, 1), Said()
    copy = Copier().start(Work(todo), said)
    assert copy.is_over and said.words == [False] and said.threads == ["MainThread"]
    nothing = Said()
    assert Copier().start(Work([]), nothing).is_over and nothing.words == [False]


@pytest.mark.usefixtures("small_pieces")
def test_an_update_waits_for_the_piece_that_the_thread_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread is held up in a piece of owner 0. Owner 1 goes through, owner 0 does the rest of its own and waits."""
    begun, go_on = threading.Event(), threading.Event()
    original = Copy._copy

    def slow(self: Copy, piece: copier._Piece) -> None:
        if threading.current_thread().name == copier.THREAD_NAME and not begun.is_set():
            begun.set()
            assert go_on.wait(30.0)
        original(self, piece)

    monkeypatch.setattr(Copy, "_copy", slow)
    todo, said = tasks(0, 1), Said()
    copy = Copier().start(Work(todo), said)
    assert begun.wait(30.0)
    copy.join(1)
    assert held(todo)[1] and not copy.is_over
    joined = threading.Thread(target=copy.join, args=(0,))
    joined.start()
    while sum(len(pieces) for pieces in copy._waiting.values()):
        pass
    joined.join(0.05)
    assert joined.is_alive() and not said.words
    go_on.set()
    joined.join(30.0)
    assert not joined.is_alive() and all(held(todo)) and said.wait() is False


@pytest.mark.usefixtures("small_pieces")
def test_what_changes_after_its_owner_joined_spoils_nothing() -> None:
    """Two optimizers: the first updates while the second's tensors are still waiting."""
    todo, said = tasks(0, 1), Said()
    before = todo[0].source.clone()
    copy = Copy(Work(todo), said)
    copy.join(0)
    todo[0].source.add_(1.0)
    copy.join(1)
    assert said.words == [False] and torch.equal(todo[0].target, before)


@pytest.mark.usefixtures("small_pieces")
def test_what_changes_before_it_is_copied_spoils_the_copy() -> None:
    for changed in (0, 1):
        todo, said = tasks(0, 1), Said()
        copy = Copy(Work(todo), said)
        todo[changed].source.mul_(2.0)
        copy.join()
        assert said.words == [True]


@pytest.mark.usefixtures("small_pieces")
def test_a_view_notices_that_its_whole_has_changed() -> None:
    """A piece of a cut tensor shares the version of the parameter."""
    whole, said = torch.rand(40, 4), Said()
    copy = Copy(Work([Task(torch.zeros(20, 4), whole[:20], 0)]), said)
    whole.add_(1.0)
    copy.join()
    assert said.words == [True]


@pytest.mark.usefixtures("small_pieces")
def test_nobody_writes_after_abandon(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    original = Copy._copy

    def slow(self: Copy, piece: copier._Piece) -> None:
        begun.set()
        assert go_on.wait(30.0)
        original(self, piece)

    monkeypatch.setattr(Copy, "_copy", slow)
    todo, said, worker = tasks(0, 1, 2), Said(), Copier()
    copy = worker.start(Work(todo), said)
    assert begun.wait(30.0)
    abandoning = threading.Thread(target=copy.abandon)
    abandoning.start()
    abandoning.join(0.05)
    assert abandoning.is_alive()  # a piece is under way
    go_on.set()
    abandoning.join(30.0)
    assert not abandoning.is_alive() and copy.is_over and not said.words
    for task in todo:
        task.target.fill_(-1.0)
    copy.join()
    monkeypatch.undo()
    again = Said()
    worker.start(Work(more := tasks(0)), again)  # the thread is free for the next, and has nothing left of this one
    assert again.wait() is False and all(held(more))
    assert all(bool((task.target == -1.0).all()) for task in todo) and not said.words


def test_shapes_of_all_kinds(small_pieces: None) -> None:
    sources = [
        torch.rand(()),
        torch.rand(0, 3),
        torch.rand(50, 6).t(),
        torch.rand(50, 6)[::2],
        torch.arange(700, dtype=torch.uint8),
        torch.rand(33, 5, dtype=torch.float64),
        torch.rand(129).to(torch.bfloat16),
    ]
    todo = [Task(torch.zeros_like(source).contiguous(), source, index % 3) for index, source in enumerate(sources)]
    said = Said()
    Copier().start(Work(todo), said)
    assert said.wait() is False and all(held(todo))


@pytest.mark.parametrize("seed", range(40))
def test_random_updates_beside_the_copy(small_pieces: None, seed: int) -> None:
    """A training with several optimizers joins and updates in any order, several steps, over one set of targets. A copy
    that is not spoiled is the state at its begin, bit for bit; and spoiled are those alone that were meant to be."""
    chance = random.Random(seed)
    owners = chance.randint(1, 4)
    todo: list[Task] = []
    for owner in range(owners):
        todo += tasks(*[owner] * chance.randint(1, 3), rows=chance.randint(1, 60))
    work, worker = Work(todo), Copier()
    for _ in range(6):
        before = [task.source.clone() for task in todo]
        said = Said()
        copy = worker.start(work, said)
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
        spoiled = said.wait()
        assert not spoiled or was_early
        if not spoiled:
            assert all(torch.equal(task.target, was) for task, was in zip(todo, before, strict=True))


# --- from a device (simulated: see devices.py)


@pytest.fixture
def held_device() -> Iterator[None]:
    DeviceWork.hold()
    yield
    DeviceWork.release()


@pytest.mark.usefixtures("small_pieces", "held_device")
def test_who_joins_does_not_wait_for_a_device_and_who_finishes_does() -> None:
    """The thread waits for the tensors to arrive, and has begun to: an update goes through all the same."""
    todo, said = tasks(0, 1), Said()
    before = [task.source.clone() for task in todo]
    copy = Copier().start(DeviceWork(todo), said)
    while sum(len(pieces) for pieces in copy._waiting.values()) == 2:
        pass  # until the thread has taken the first
    copy.join()
    assert not copy.is_over and not said.words
    for task in todo:
        task.source.add_(1.0)
    finishing = threading.Thread(target=copy.finish)
    finishing.start()
    finishing.join(0.05)
    assert finishing.is_alive()
    DeviceWork.release()
    finishing.join(30.0)
    assert not finishing.is_alive() and copy.is_over and said.words == [False]
    assert all(torch.equal(task.target, was) for task, was in zip(todo, before, strict=True))


@pytest.mark.usefixtures("small_pieces", "held_device")
def test_what_changes_on_a_device_before_anybody_joined_spoils_the_copy() -> None:
    todo, said = tasks(0, 1), Said()
    copy = Copier().start(DeviceWork(todo), said)
    copy.join(0)
    todo[0].source.add_(1.0)
    todo[1].source.add_(1.0)
    DeviceWork.release()
    copy.finish()
    assert said.moved == [todo[1]]
