"""Copies tensors while the training goes on; whoever cannot wait takes over what is left.

Parameters and optimizer state do not change between two updates, so they can be copied during the next forward and
backward. A thread of the lowest priority (SCHED_IDLE) does it, with what the processors have left over; the update that
comes too early calls `join`, which does the rest itself, for its own tensors only. Where a core is free nobody waits;
where none is, it costs what a copy in the open would.

A tensor that changed while it was copied (its version moved) spoils the copy. Whoever copies the last piece of an
owner looks, before that owner may go on: what changes later is no harm. `on_done(moved)` is called once, by whichever
thread copies the last piece of all: with what has moved, nothing if the copy is good.

Device tensors are first copied into pinned memory on a stream of their own, behind what the device is doing now; an
update on the device waits for that, not the host. The thread moves them on when they have arrived. So what is theirs to
change is looked at when they arrive, or when the owner joins, whichever is sooner; and a copy that every owner has
joined need not be over: `finish` waits for that.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

PIECE_BYTES = 2 * 2**20
"""A quarter of a millisecond's work: so long may an update wait for a piece that the thread has begun."""
THREAD_WORTH_BYTES = 2 * 2**20
"""Less than that is copied sooner than a thread is woken."""
THREAD_NAME = "holdfast-copier"


@dataclass(frozen=True, slots=True)
class Task:
    """A tensor to copy, and who must not change it before it is."""

    target: torch.Tensor
    source: torch.Tensor
    owner: int
    name: str = ""
    """For people."""


class Arrival(Protocol):
    """That what was on a device is in pinned memory: a torch.Event."""

    def wait(self) -> None:
        """The device's stream waits, not the host."""

    def synchronize(self) -> None:
        """The host waits."""


@dataclass(frozen=True, slots=True)
class _Piece:
    target: torch.Tensor
    source: torch.Tensor
    owner: int
    arrived: Arrival | None = None
    """Of one that comes from a device: the source is pinned memory that is being filled."""
    plain: tuple[int, int, int] | None = None
    """Where to, where from, how many bytes, if it is a mere run of bytes."""

    def copy(self) -> None:
        """A run of bytes without torch, which would have all its threads share each piece: where every core is busy,
        they spend more time on waiting for each other than on copying. Two can copy anyway: the thread, and who
        joins it."""
        if self.plain is not None:
            ctypes.memmove(*self.plain)
        else:
            with torch.no_grad():
                self.target.copy_(self.source)


class Work:
    """Tasks cut into pieces: made once, copied many times."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        tasks = list(tasks)
        self._staging: dict[int, torch.Tensor] = {}
        self._on_host: dict[int, list[_Piece]] = {}
        self._watched: dict[int, list[Task]] = {}
        self._on_device = [task for task in tasks if not self._is_on_host(task)]
        for task in tasks:
            self._watched.setdefault(task.owner, []).append(task)
            if self._is_on_host(task):
                self._on_host.setdefault(task.owner, []).extend(_pieces(task))
        self.size_bytes = sum(task.source.numel() * task.source.element_size() for task in tasks)

    def begin(self) -> dict[int, deque[_Piece]]:
        """The pieces of one copy, by owner. Device tensors set out at once."""
        found = {owner: deque(pieces) for owner, pieces in self._on_host.items() if pieces}
        for piece in self._from_device():
            found.setdefault(piece.owner, deque()).append(piece)
        return found

    def versions(self, owner: int) -> list[tuple[Task, int]]:
        """Of an owner's tensors: they move when one is changed."""
        return [(task, task.source._version) for task in self._watched.get(owner, ())]

    def _from_device(self) -> list[_Piece]:
        if not self._on_device:
            return []
        arrived = self._set_out()
        return [
            _Piece(task.target, self._staging[index], task.owner, arrived)
            for index, task in enumerate(self._on_device)
        ]

    def _set_out(self) -> Arrival:
        device = self._on_device[0].source.device
        side, current = torch.Stream(device), torch.accelerator.current_stream(device)
        side.wait_stream(current)
        with side:
            for index, task in enumerate(self._on_device):
                self._pinned(index, task).copy_(task.source, non_blocking=True)
            arrived = torch.Event(device)
            arrived.record(side)
        return arrived

    def _pinned(self, index: int, task: Task) -> torch.Tensor:
        if index not in self._staging:
            self._staging[index] = torch.empty_like(task.source, device="cpu", pin_memory=True)
        return self._staging[index]

    def _is_on_host(self, task: Task) -> bool:
        return task.source.is_cpu


class Copy:
    """One copy under way."""

    def __init__(
        self, work: Work, on_done: Callable[[list[Task]], None], hurry: Callable[[], None] = lambda: None
    ) -> None:
        self._on_done, self._hurry = on_done, hurry
        self._changed = threading.Condition()
        self._work, self._waiting = work, work.begin()
        self._versions = {owner: work.versions(owner) for owner in self._waiting}
        self._unseen = set(self._waiting)
        """Owners whose tensors nobody has looked at since."""
        self._moved: list[Task] = []
        self._arrived = next((pieces[-1].arrived for pieces in self._waiting.values() if pieces[-1].arrived), None)
        self._on_host = {
            owner: sum(piece.arrived is None for piece in pieces) for owner, pieces in self._waiting.items()
        }
        """Pieces of host memory that are not copied yet, by owner."""
        self._travelling = {owner for owner, pieces in self._waiting.items() if pieces[-1].arrived is not None}
        """Owners with something on a device."""
        self._in_all = sum(len(pieces) for pieces in self._waiting.values())
        self.is_over = False
        if not self._in_all:
            with self._changed:
                self._end()

    def join(self, owner: int | None = None) -> None:
        """Return when the tensors of an owner, or all, may change. What nobody has begun is done here and now. Those of
        a device are safe in pinned memory once its stream has passed the copy, which the device waits for by itself."""
        owners = list(self._on_host) if owner is None else [owner]
        if self._arrived is not None and not self.is_over:
            self._arrived.wait()
        for one in owners:
            while (piece := self._take(one, is_patient=False)) is not None:
                self._copy(piece)
        with self._changed:
            if not self._may_change(owners):
                self._hurry()
                self._changed.wait_for(lambda: self._may_change(owners))
            for one in owners:
                self._look(one)

    def finish(self) -> None:
        """Return when it is over, also with what has to arrive from a device."""
        self.join()
        self.work_off()
        with self._changed:
            if not self.is_over:
                self._hurry()
                self._changed.wait_for(lambda: self.is_over)

    def work_off(self) -> None:
        """The thread's part: everything that is left, whoever owns it."""
        for owner in list(self._waiting):
            while (piece := self._take(owner, is_patient=True)) is not None:
                self._copy(piece)

    def abandon(self) -> None:
        """Nobody wants it any more. Returns when nobody writes to the targets any more; `on_done` is not called."""
        with self._changed:
            for pieces in self._waiting.values():
                self._in_all -= len(pieces)
                pieces.clear()
            was_over, self.is_over = self.is_over, True
            if not was_over:
                self._changed.wait_for(lambda: self._in_all == 0)

    def _may_change(self, owners: Sequence[int]) -> bool:
        return self.is_over or all(not self._on_host.get(owner) for owner in owners)

    def _take(self, owner: int, *, is_patient: bool) -> _Piece | None:
        """The next piece. One that comes from a device is left to those who can wait for it."""
        with self._changed:
            pieces = self._waiting.get(owner)
            if not pieces or (pieces[0].arrived is not None and not is_patient):
                return None
            return pieces.popleft()

    def _copy(self, piece: _Piece) -> None:
        if piece.arrived is not None:
            piece.arrived.synchronize()
        piece.copy()
        with self._changed:
            self._in_all -= 1
            self._on_host[piece.owner] -= piece.arrived is None
            if not self._on_host[piece.owner]:
                if piece.arrived is not None or piece.owner not in self._travelling:
                    self._look(piece.owner)
                self._changed.notify_all()
            if not self._in_all:
                if not self.is_over:
                    self._end()
                self._changed.notify_all()

    def _look(self, owner: int) -> None:
        """Whether something of an owner's has moved, once: from now on it may."""
        if owner in self._unseen:
            self._unseen.discard(owner)
            now = self._work.versions(owner)
            before = self._versions[owner]
            self._moved += [task for (task, is_), (_, was) in zip(now, before, strict=True) if is_ != was]

    def _end(self) -> None:
        for owner in list(self._unseen):
            self._look(owner)
        self._on_done(self._moved)
        self.is_over = True  # not before: who sees it may use what was done
        self._changed.notify_all()


class Copier:
    """The thread. One a process; it sleeps while there is nothing to copy."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: Copy | None = None
        self._thread: threading.Thread | None = None
        self._is_hurried = self._is_closed = False

    def start(self, work: Work, on_done: Callable[[list[Task]], None]) -> Copy:
        """Begin a copy. The one before must be over."""
        copy = Copy(work, on_done, self._hurry)
        if work.size_bytes <= THREAD_WORTH_BYTES:
            copy.join()
        if not copy.is_over:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=THREAD_NAME, daemon=True)
                self._thread.start()
            with self._changed:
                self._next = copy
                self._changed.notify()
        return copy

    def _run(self) -> None:
        torch.set_num_threads(1)
        _set_policy(threading.get_native_id(), os.SCHED_IDLE)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._next is not None or self._is_closed)
                copy, self._next = self._next, None
            if self._is_hurried:
                self._is_hurried = False
                _set_policy(threading.get_native_id(), os.SCHED_IDLE)
            if copy is None:
                return
            copy.work_off()
            del copy  # it knows tensors that may have to go

    def close(self) -> None:
        """No more copies: the thread ends."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _hurry(self) -> None:
        """Somebody waits for the piece that the thread has begun: it must not be kept waiting by all the rest."""
        if self._thread is not None and self._thread.native_id is not None:
            self._is_hurried = True
            _set_policy(self._thread.native_id, os.SCHED_OTHER)


def _set_policy(thread_id: int, policy: int) -> None:
    try:
        os.sched_setscheduler(thread_id, policy, os.sched_param(0))
    except OSError:
        pass  # a sandbox that does not allow it, or an ordinary user, who may not go back up: then it stays as it is


def _pieces(task: Task) -> Sequence[_Piece]:
    """Of a large tensor many, so that two can share the work."""
    source, target = task.source.detach(), task.target
    size_bytes = source.numel() * source.element_size()
    is_plain = source.is_contiguous() and target.is_contiguous() and source.dtype == target.dtype
    if not size_bytes:
        return []
    if not is_plain or source.is_conj() or source.is_neg():
        return [_Piece(target, source, task.owner)]
    to, origin = target.data_ptr(), source.data_ptr()
    return [
        _Piece(target, source, task.owner, plain=(to + at, origin + at, min(PIECE_BYTES, size_bytes - at)))
        for at in range(0, size_bytes, PIECE_BYTES)
    ]
