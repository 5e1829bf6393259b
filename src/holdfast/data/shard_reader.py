"""Reading leased shards: ahead of the loop, on threads, and again from the committed record when a step is repeated.

A `ShardReader` reads one lease. It stores the records from the first that is not committed on, so that a repeated step
finds them; committed ones are dropped. A record that cannot be read is tried once more, from a newly opened file;
then the reader has failed, at that record, for good.

A reader always looks one record beyond what is asked for: that a shard is at its end must be known
in the same step whether or not a thread happened to be ahead.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from holdfast.core.shard_leases import WHY_CHARS_MAX, LeasedShard, StreamEnd, TakenShard
from holdfast.errors import ShardError, UsageError

OPENINGS_MAX = 2
"""The tries for one record: a file handle that went stale is worth a second try, a broken record is not worth more."""

Open = Callable[[int, int], Iterator[Any]]
"""The records of a turn from this one on."""


class ShardReader:
    """A reader of one lease, from the first record that is not committed. `error` says why there are no more."""

    def __init__(self, opened: Callable[[int], Iterator[Any]], first: int) -> None:
        self._open, self._first = opened, first
        self._records: deque[Any] = deque()
        self._iterator: Iterator[Any] | None = None
        self._is_over = False
        self._lock = threading.Lock()
        self.error = ""

    @property
    def first(self) -> int:
        """Return the first record that is still here."""
        return self._first

    def fill(self, stop: int) -> None:
        """Read all records before this one, or find that there are not so many. Other threads may call it too."""
        while not self._has(stop):
            with self._lock:
                if self._first + len(self._records) < stop:
                    self._read_one()

    def _has(self, stop: int) -> bool:
        return self._first + len(self._records) >= stop or self._is_over or bool(self.error)

    def _read_one(self) -> None:
        for opening in range(OPENINGS_MAX):
            try:
                self._append_next()
                return
            except UsageError:
                raise
            except Exception as error:  # whatever a reader raises is about this shard
                self._iterator = None
                if opening == OPENINGS_MAX - 1:
                    self.error = f"{type(error).__name__}: {error}"[:WHY_CHARS_MAX]

    def _append_next(self) -> None:
        if self._is_over or self.error:
            return
        if self._iterator is None:
            self._iterator = self._open(self._first + len(self._records))
        try:
            self._records.append(next(self._iterator))
        except StopIteration:
            self._is_over, self._iterator = True, None

    def available(self, cursor: int, wanted: int) -> TakenShard:
        """Return what there is for a slot that is at `cursor` and wants so many."""
        self.fill(cursor + wanted + 1)
        with self._lock:
            there = self._first + len(self._records) - cursor
        if there > wanted:
            return TakenShard(wanted)
        return TakenShard(there, StreamEnd.FAILED if self.error else StreamEnd.ENDED)

    def records(self, first: int, count: int) -> list[Any]:
        """Return records that `taken` reported to be there."""
        self.fill(first + count)
        with self._lock:
            found = list(itertools.islice(self._records, first - self._first, first - self._first + count))
        if len(found) < count:
            raise ShardError(f"records {first} to {first + count - 1} of a shard were there before: {self.error}")
        return found

    def drop(self, before: int) -> None:
        """Drop records that are committed. While a thread is reading, this can wait."""
        if self._lock.acquire(blocking=False):
            while self._records and self._first < before:
                self._records.popleft()
                self._first += 1
            self._lock.release()


class ShardReaders:
    """The readers of this rank's leases. They read ahead on `threads` threads; with 0, when a record is asked for."""

    def __init__(self, opened: Open, threads: int) -> None:
        self._open = opened
        self._readers: dict[tuple[int, int], ShardReader] = {}
        self._pool = ThreadPoolExecutor(threads, "holdfast-stream") if threads else None
        self._ahead: list[Future[None]] = []

    def reader_of(self, lease: LeasedShard) -> ShardReader:
        """Return the reader of a lease; it is opened again if what is asked for was dropped."""
        key = (lease.number, lease.turn)
        found = self._readers.get(key)
        if found is None or found.first > lease.cursor:
            found = self._readers[key] = ShardReader(lambda first: self._open(lease.turn, first), lease.cursor)
        return found

    def read_ahead(self, leases: Sequence[LeasedShard], counts: Sequence[int]) -> None:
        """Fetch so many records of each of these leases in the background. All other readers are closed."""
        self.close_others(leases)
        for lease in leases:
            self.reader_of(lease).drop(lease.cursor)
        if self._pool is None:
            return
        self._ahead = [future for future in self._ahead if not future.done()]
        if not self._ahead:  # else storage is slower than the loop, and nothing is gained by asking for more
            for lease, count in zip(leases, counts, strict=True):
                self._ahead.append(self._pool.submit(self.reader_of(lease).fill, lease.cursor + count + 1))

    def close_others(self, leases: Sequence[LeasedShard]) -> None:
        """Close the readers of all other leases."""
        wanted = {(lease.number, lease.turn) for lease in leases}
        self._readers = {key: found for key, found in self._readers.items() if key in wanted}

    def close(self) -> None:
        """End the threads and forget everything."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        self._readers.clear()
