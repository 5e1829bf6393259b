"""Images on their way to storage: what the persister has to know of one, whoever's it is, and how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

import structlog

from holdfast.agent.memory.vault import Kept, Vault
from holdfast.agent.replicas.guests import Guests, Held

SAY_PROGRESS_S = 10.0
"""Between two words about a part that is being written; one that takes less time is not spoken of."""

log = structlog.get_logger("agent")


@dataclass(frozen=True)
class Piece:
    """An image that may become a part of a checkpoint."""

    step: int
    view: int
    part: int
    shards: int
    shares: int
    seed: int
    created_unix_s: float
    reading: Callable[[], AbstractContextManager[memoryview | None]]
    """Its bytes, which stay as they are meanwhile; None if it was overwritten."""
    note: Callable[[list[int]], None] = lambda checksums: None
    """Told the checksums of its blocks, as they were read."""

    @property
    def age(self) -> tuple[int, int]:
        return self.step, self.view

    @property
    def parts(self) -> int:
        return self.shards * self.shares


def own(vault: Vault, kept: Kept) -> Piece:
    """Of a worker of this node."""

    @contextmanager
    def reading() -> Iterator[memoryview | None]:
        with vault.taking(kept) as memory:
            if memory is None:
                yield None
                return
            with memoryview(memory) as image:
                yield image

    r = kept.record
    note = partial(vault.note_checksums, kept)
    return Piece(r.step, r.view, r.part, r.shards, r.shares, r.seed, r.created_ns / 1e9, reading, note)


def guest(guests: Guests, held: Held) -> Piece:
    """Of a worker of another node, which is held here."""
    one = held.label

    def reading() -> AbstractContextManager[memoryview]:
        return guests.reading(one.node_id, one.seat, one.view, one.step)

    return Piece(one.step, one.view, one.part, one.shards, one.shares, one.seed, time.time(), reading)


def are_whole(pieces: Iterable[Piece]) -> bool:
    """Whether they are all parts of their step."""
    known = {piece.part: piece.parts for piece in pieces}
    return bool(known) and known.keys() == set(range(max(known.values())))


class Progress:
    """Says now and then how far a part is (storage.stores.Progress)."""

    def __init__(self, piece: Piece) -> None:
        self._piece = piece
        self._began_at = self._said_at = time.monotonic()

    def __call__(self, done_bytes: int, all_bytes: int) -> None:
        now = time.monotonic()
        if now - self._said_at < SAY_PROGRESS_S or done_bytes >= all_bytes:
            return
        self._said_at = now
        rate = done_bytes / 1e6 / (now - self._began_at)
        log.info(
            f"part {self._piece.part} of the checkpoint of step {self._piece.step}: {100 * done_bytes // all_bytes} %"
            f" of {all_bytes / 1e6:.0f} MB are written, {rate:.1f} MB/s"
        )
