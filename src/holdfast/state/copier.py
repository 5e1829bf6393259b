"""Copies tensors while the training goes on; a caller that cannot wait copies what is left.

Parameters and optimizer state do not change between two updates, so they can be copied during the next forward and
backward. A thread of the lowest priority (SCHED_IDLE) does it, with what the processors have left over; the update that
comes too early calls `join`, which does the rest itself, for its own tensors only. Where a core is free no update
waits; where none is, it costs what a copy in the open would.

A tensor that changed while it was copied (its version differs) spoils the copy. The thread that copies the last chunk
of an owner compares the versions before that owner may go on: later changes do no harm. `on_done(changed)` is called
once, by the thread that copies the last chunk of all: with the tensors that changed, none if the copy is good.

Device tensors are first copied into pinned memory on a stream of their own, behind what the device is doing now; an
update on the device waits for that, not the host. The thread moves them on when they have arrived. So what is theirs to
change is looked at when they arrive, or when the owner joins, whichever is sooner; and a copy that every owner has
joined need not be over: `finish` waits for that.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from holdfast.state.graph_captures import captures_of_others_ignored
from holdfast.torch_compat import version_of

CHUNK_BYTES = 2 * 2**20
"""A quarter of a millisecond's work: so long may an update wait for a chunk that the thread is copying."""
THREAD_WORTH_BYTES = 2 * 2**20
"""Less than that is copied sooner than a thread is woken."""
ARRIVAL_POLL_S = 0.001
THREAD_NAME = "holdfast-copier"


@dataclass(frozen=True, slots=True)
class CopyTask:
    """A tensor to copy, and the owner that must not change it before."""

    target: torch.Tensor
    source: torch.Tensor
    owner: int
    name: str = ""
    """A name for people."""


class CopyArrival(Protocol):
    """The arrival of a device's data in pinned memory."""

    def wait(self) -> None:
        """Make the device's current stream wait, not the host."""

    def waited_s(self) -> float | None:
        """Return how long the stream waited in all; None if it has not come past that yet."""

    def synchronize(self) -> None:
        """Make the host wait."""


class DeviceArrival:
    """The arrival, as an event on the stream of the copy. What a stream waits for it is measured by events before and
    behind the wait: to the host it costs nothing, and reads as nothing."""

    def __init__(self, device: torch.device, stream: torch.Stream) -> None:
        self._device = device
        self._arrived = torch.Event(device)
        self._arrived.record(stream)
        self._waits: list[tuple[torch.Event, torch.Event]] = []

    def wait(self) -> None:
        """Make the device's current stream wait, not the host."""
        stream = torch.accelerator.current_stream(self._device)
        before, behind = (torch.Event(self._device, enable_timing=True) for _ in range(2))
        before.record(stream)
        self._arrived.wait(stream)
        behind.record(stream)
        self._waits.append((before, behind))

    def synchronize(self) -> None:
        """Make the host wait, asleep: a wait by the vendor's library would keep a core busy."""
        with captures_of_others_ignored():
            while not self._arrived.query():
                time.sleep(ARRIVAL_POLL_S)

    def waited_s(self) -> float | None:
        """Return how long the stream waited in all; None if it has not come past that yet."""
        if not all(behind.query() for _, behind in self._waits):
            return None
        return sum(before.elapsed_time(behind) for before, behind in self._waits) / 1e3


@dataclass(frozen=True, slots=True)
class _CopyChunk:
    target: torch.Tensor
    source: torch.Tensor
    owner: int
    arrived: CopyArrival | None = None
    """Set if it comes from a device: the source is pinned memory that is being filled."""
    plain: tuple[int, int, int] | None = None
    """Where to, where from, how many bytes, if it is a mere run of bytes."""

    def copy(self) -> None:
        """Copy a run of bytes without torch, which would have all its threads share each chunk: where every core is
        busy, they spend more time on waiting for each other than on copying. Two threads can copy anyway: the copier's,
        and the one that joins it."""
        if self.plain is not None:
            ctypes.memmove(*self.plain)
        else:
            with torch.no_grad():
                self.target.copy_(self.source)


class CopyWork:
    """Tasks split into chunks: made once, copied many times."""

    def __init__(self, tasks: Iterable[CopyTask]) -> None:
        tasks = list(tasks)
        self._staging: dict[int, torch.Tensor] = {}
        self._on_host: dict[int, list[_CopyChunk]] = {}
        self._watched: dict[int, list[CopyTask]] = {}
        self._on_device = [task for task in tasks if not self._is_on_host(task)]
        for task in tasks:
            self._watched.setdefault(task.owner, []).append(task)
            if self._is_on_host(task):
                self._on_host.setdefault(task.owner, []).extend(_chunks(task))
        self.size_bytes = sum(task.source.numel() * task.source.element_size() for task in tasks)

    def begin(self) -> dict[int, deque[_CopyChunk]]:
        """Return the chunks of one copy, by owner. Copies from devices start at once."""
        found = {owner: deque(chunks) for owner, chunks in self._on_host.items() if chunks}
        for chunk in self._from_device():
            found.setdefault(chunk.owner, deque()).append(chunk)
        return found

    def versions(self, owner: int) -> list[tuple[CopyTask, int]]:
        """Return the versions of an owner's tensors, which change when one of them is changed."""
        return [(task, version_of(task.source)) for task in self._watched.get(owner, ())]

    def _from_device(self) -> list[_CopyChunk]:
        if not self._on_device:
            return []
        arrived = self._set_out()
        return [
            _CopyChunk(task.target, self._staging[index], task.owner, arrived)
            for index, task in enumerate(self._on_device)
        ]

    def _set_out(self) -> CopyArrival:
        device = self._on_device[0].source.device
        side, current = torch.Stream(device), torch.accelerator.current_stream(device)
        side.wait_stream(current)
        with side:
            for index, task in enumerate(self._on_device):
                self._pinned(index, task).copy_(task.source, non_blocking=True)
        return DeviceArrival(device, side)

    def _pinned(self, index: int, task: CopyTask) -> torch.Tensor:
        if index not in self._staging:
            self._staging[index] = torch.empty_like(task.source, device="cpu", pin_memory=True)
        return self._staging[index]

    def _is_on_host(self, task: CopyTask) -> bool:
        return task.source.is_cpu


class StateCopy:
    """One copy in progress."""

    def __init__(
        self,
        work: CopyWork,
        on_done: Callable[[list[CopyTask]], None],
        raise_priority: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_done, self._raise_priority = on_done, raise_priority
        self._changed = threading.Condition()
        self._work, self._waiting = work, work.begin()
        self._versions = {owner: work.versions(owner) for owner in self._waiting}
        self._unseen = set(self._waiting)
        """Owners whose versions were not compared yet."""
        self._modified: list[CopyTask] = []
        self._arrived = next((chunks[-1].arrived for chunks in self._waiting.values() if chunks[-1].arrived), None)
        self._on_host = {
            owner: sum(chunk.arrived is None for chunk in chunks) for owner, chunks in self._waiting.items()
        }
        """Chunks of host memory that are not copied yet, by owner."""
        self._travelling = {owner for owner, chunks in self._waiting.items() if chunks[-1].arrived is not None}
        """Owners with something on a device."""
        self._in_all = sum(len(chunks) for chunks in self._waiting.values())
        self.is_over = self.is_lost = False
        self._error: BaseException | None = None
        """What the thread met: a device that has failed. Raised to the threads that wait for it."""
        self._began_at = time.monotonic()
        self.duration_s = 0.0
        """How long it was under way, once it is over."""
        if not self._in_all:
            with self._changed:
                self._end()

    def join(self, owner: int | None = None) -> None:
        """Return when the tensors of an owner, or all, may change. What was not started yet is copied here and now.
        Those of a device are safe in pinned memory once its stream has passed the copy, which the device waits for by
        itself."""
        owners = list(self._on_host) if owner is None else [owner]
        if self._arrived is not None and not self.is_over:
            self._arrived.wait()
        for one in owners:
            while (chunk := self._next_chunk(one, can_wait=False)) is not None:
                self._copy(chunk)
        with self._changed:
            if not self._may_change(owners):
                self._raise_priority()
                self._changed.wait_for(lambda: self._may_change(owners))
            self.check()
            for one in owners:
                self._check_versions(one)

    def finish(self) -> None:
        """Return when it is over, also with what has to arrive from a device."""
        self.join()
        self.work_off()
        with self._changed:
            if not self.is_over:
                self._raise_priority()
                self._changed.wait_for(lambda: self.is_over)
            self.check()

    def fail(self, error: BaseException) -> None:
        """End the copy, of which the thread has lost a part; `on_done` is not called."""
        with self._changed:
            self._error, self.is_over, self.is_lost, self._in_all = error, True, True, 0
            self._waiting.clear()
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what the thread met, if that has ended the copy."""
        if self._error is not None:
            raise self._error

    def work_off(self) -> None:
        """Copy everything that is left, of all owners. This is the thread's part."""
        for owner in list(self._waiting):
            while (chunk := self._next_chunk(owner, can_wait=True)) is not None:
                self._copy(chunk)

    @property
    def is_from_device(self) -> bool:
        """Return whether something of it comes from a device."""
        return self._arrived is not None

    def device_wait_s(self) -> float | None:
        """Return how long updates on the device had to wait for this copy; None if that is not known yet."""
        return self._arrived.waited_s() if self._arrived is not None else 0.0

    def abandon(self) -> None:
        """Give the copy up. On return the targets are not written to any more; `on_done` is not called."""
        with self._changed:
            for chunks in self._waiting.values():
                self._in_all -= len(chunks)
                chunks.clear()
            was_over, self.is_over = self.is_over, True
            if not was_over:
                self._changed.wait_for(lambda: self._in_all == 0)

    def _may_change(self, owners: Sequence[int]) -> bool:
        return self.is_over or all(not self._on_host.get(owner) for owner in owners)

    def _next_chunk(self, owner: int, *, can_wait: bool) -> _CopyChunk | None:
        """Return the next chunk. One that comes from a device is left to the callers that can wait for it."""
        with self._changed:
            chunks = self._waiting.get(owner)
            if not chunks or (chunks[0].arrived is not None and not can_wait):
                return None
            return chunks.popleft()

    def _copy(self, chunk: _CopyChunk) -> None:
        if chunk.arrived is not None:
            chunk.arrived.synchronize()
        chunk.copy()
        with self._changed:
            self._in_all -= 1
            self._on_host[chunk.owner] -= chunk.arrived is None
            if not self._on_host[chunk.owner]:
                if chunk.arrived is not None or chunk.owner not in self._travelling:
                    self._check_versions(chunk.owner)
                self._changed.notify_all()
            if not self._in_all:
                if not self.is_over:
                    self._end()
                self._changed.notify_all()

    def _check_versions(self, owner: int) -> None:
        """Check once whether something of an owner's has changed; from now on it may."""
        if owner in self._unseen:
            self._unseen.discard(owner)
            now = self._work.versions(owner)
            before = self._versions[owner]
            self._modified += [task for (task, is_), (_, was) in zip(now, before, strict=True) if is_ != was]

    def _end(self) -> None:
        for owner in list(self._unseen):
            self._check_versions(owner)
        self._on_done(self._modified)
        self.duration_s = time.monotonic() - self._began_at
        self.is_over = True  # last: a thread that sees it may use the copy
        self._changed.notify_all()


class Copier:
    """The copying thread. There is one per process; it sleeps while there is nothing to copy."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next: StateCopy | None = None
        self._thread: threading.Thread | None = None
        self._is_raised = self._is_closed = False

    def start(self, work: CopyWork, on_done: Callable[[list[CopyTask]], None]) -> StateCopy:
        """Begin a copy. The one before must be over."""
        copy = StateCopy(work, on_done, self._raise_priority)
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
            if self._is_raised:
                self._is_raised = False
                _set_policy(threading.get_native_id(), os.SCHED_IDLE)
            if copy is None:
                return
            try:
                copy.work_off()
            except Exception as error:  # a vendor's library may raise anything: the waiting thread gets it
                copy.fail(error)
            del copy  # it knows tensors that may have to go

    def close(self) -> None:
        """End the thread: no more copies."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _raise_priority(self) -> None:
        """Raise the thread's priority: a caller waits for the chunk that the thread is copying."""
        if self._thread is not None and self._thread.native_id is not None:
            self._is_raised = True
            _set_policy(self._thread.native_id, os.SCHED_OTHER)


def _set_policy(thread_id: int, policy: int) -> None:
    try:
        os.sched_setscheduler(thread_id, policy, os.sched_param(0))
    except OSError:
        pass  # not permitted (a sandbox, or an ordinary user that may not raise it again): it stays as it is


def _chunks(task: CopyTask) -> Sequence[_CopyChunk]:
    """Yield the chunks of a task; a large tensor has many, so that two threads can share the work."""
    source, target = task.source.detach(), task.target
    size_bytes = source.numel() * source.element_size()
    is_plain = source.is_contiguous() and target.is_contiguous() and source.dtype == target.dtype
    if not size_bytes:
        return []
    if not is_plain or source.is_conj() or source.is_neg():
        return [_CopyChunk(target, source, task.owner)]
    to, origin = target.data_ptr(), source.data_ptr()
    return [
        _CopyChunk(target, source, task.owner, plain=(to + at, origin + at, min(CHUNK_BYTES, size_bytes - at)))
        for at in range(0, size_bytes, CHUNK_BYTES)
    ]
