"""From the node's memory to storage: snapshots become checkpoints, in the background, without the workers' help.

Each agent writes the parts of its own seats and then tries to publish; whoever comes last finds all parts there and
succeeds (storage/writing.py). No agent waits for another, and nobody coordinates: the attempt's name follows from the
job, its run, the view and the step. An image is read where it lies, under a lock that keeps its worker from overwriting
it; a worker that would, leaves a snapshot out.

When the job ends without having got there (`rescue`), the newest state that is whole is written: with several nodes
nobody knows which of the two steps in memory that is, so the newer one is tried first and then the other. Whoever has
written its parts need not wait for the slowest node, and takes nothing back: the last one publishes. Parts that nobody
has written by then are of nodes that are gone: who holds a copy of them writes that.

An attempt of which a part of ours could not be written will never be complete: it is removed, as it may be what fills
the disk. One that others do not complete is let go, for the next who prunes to sweep.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import structlog

from holdfast.agent.memory.pieces import Piece, Progress, are_whole, own
from holdfast.agent.memory.vault import Vault
from holdfast.errors import CheckpointError, HoldfastError
from holdfast.storage.catalogue import Catalogue, Found
from holdfast.storage.manifest import About, finite, versions
from holdfast.storage.retention import parse_policy
from holdfast.storage.stores import Store, open_store
from holdfast.storage.writing import Writing
from holdfast.wire.session import Sealed
from holdfast.wire.slots import word

WRITERS = 2
"""Parts at a time: enough to fill a disk or a link, few enough to leave the processors to the training."""
RETRY_S_MIN, RETRY_S_MAX = 0.05, 2.0
"""Between two looks whether the other nodes' parts are there."""
UNPUBLISHED_MAX_S = 600.0
"""An attempt whose other parts have not come by then is given up."""
RESCUE_WAIT_S = 5.0
"""For other nodes to write their parts, at the end of a job, once ours are written."""
RESCUE_LOOK_S = 0.2
"""Between two looks, then."""

log = structlog.get_logger("agent")

Published = Callable[[int, str], None]
"""Told the step and the place of a checkpoint that is complete."""
Others = Callable[[], Awaitable[Sequence[Piece]]]
"""Asked for other nodes' images that are held here, or can be made again."""


async def nobody() -> Sequence[Piece]:
    """Of others nothing is held."""
    return ()


class Key(NamedTuple):
    """Of an attempt. All agents of a job name it alike."""

    url: str
    view: int
    step: int


class Persister:
    """One for the life of an agent."""

    def __init__(self, vault: Vault, keep: str, published: Published) -> None:
        self._vault, self._keep, self._published = vault, keep, published
        self._url = self._job_id = self._run = ""
        self._stores: dict[str, Store] = {}
        self._threads = ThreadPoolExecutor(WRITERS, "holdfast-persist")
        self._tasks: set[asyncio.Task[None]] = set()
        self._attempts: dict[Key, Writing] = {}
        self._opening = threading.Lock()
        self._users: dict[Key, int] = {}
        """How many parts of ours are on their way to storage."""
        self._unwritten: dict[Key, int] = {}
        """How many of them are still to be written."""
        self._took_s: dict[Key, float] = {}
        """How long one of them took: the other nodes' may take as long."""
        self._doomed: dict[Key, str] = {}
        """Attempts of which a part of ours could not be written, and why."""
        self._is_ending = False
        self._news = asyncio.Event()
        """Another part of ours is written, or the job is over: set once, and then another one."""
        self._lost = -1
        """The newest step of which a part of ours could not be written, or that was whole and is not on storage."""
        self._publishing: dict[Key, asyncio.Task[str]] = {}
        self.newest: Found | None = None
        """The newest checkpoint that this agent knows to be complete."""

    def open(self, job_id: str, url: str, run: str = "") -> None:
        """Where checkpoints go, once it is known, and whose they are."""
        self._job_id, self._url, self._run = job_id, url, run

    def wanted(self, seat: int, message: Sealed, tell: Callable[[str], None] | None = None) -> None:
        """A worker's image is to become part of a checkpoint. `tell` is told why it did not, or nothing if it did."""
        of_step = [kept for kept in self._vault.kept() if (kept.seat, kept.record.step) == (seat, message.step)]
        kept = next((one for one in of_step if message.created_ns in (0, one.record.created_ns)), None)
        tell = tell or (lambda why: None)
        if kept is None:
            tell(f"the copy of step {message.step} is not there any more")
        else:
            self._beside(self._persist(own(self._vault, kept), message, tell))

    async def drain(self) -> None:
        """Until everything that was begun is written. Other nodes' parts are waited for a little while only."""
        self._is_ending = True
        self._stir()
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    @property
    def lost(self) -> int:
        """A step that could not be brought to storage, nor a later one; -1: none."""
        return self._lost if self.newest is None or self.newest.step < self._lost else -1

    async def rescue(self, is_alone: bool, others: Others = nobody) -> Found | None:
        """The job is over: bring the newest whole state to storage. What is there already need not be written.
        `is_alone`: no other node has a part of it. `others` is asked only if that is not enough."""
        await self.drain()
        ours, theirs = [own(self._vault, kept) for kept in self._vault.kept()], None
        ages = sorted({piece.age for piece in ours}, reverse=True)
        for age in ages:
            if self._is_stored(age[0]):
                break
            mine = [piece for piece in ours if piece.age == age]
            if not is_alone or are_whole(mine):
                await self._persist_all(mine)
            if self._is_stored(age[0]) or self._lost >= age[0]:
                continue
            theirs = list(await others()) if theirs is None else theirs
            both = [*mine, *(piece for piece in theirs if piece.age == age)]
            if len(both) > len(mine) and (not is_alone or are_whole(both)):
                await self._persist_all(both)
        self._note_unsaved(ours, theirs or [])
        return self.newest

    def _is_stored(self, step: int) -> bool:
        return self.newest is not None and self.newest.step >= step

    async def _persist_all(self, pieces: Sequence[Piece]) -> None:
        await asyncio.gather(*(self._persist(piece, Sealed(piece.step, True), lambda why: None) for piece in pieces))

    def _note_unsaved(self, ours: Sequence[Piece], theirs: Sequence[Piece]) -> None:
        """What is whole here, or was known to be whole everywhere, should be on storage now."""
        whole = self._vault.whole_word()
        for piece in ours:
            here = (one for one in (*ours, *theirs) if one.age == piece.age)
            if word(piece.view, piece.step) == whole or are_whole(here):
                self._lost = max(self._lost, piece.step)

    async def close(self) -> None:
        for task in (*self._tasks, *self._publishing.values()):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._publishing.values(), return_exceptions=True)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- one image

    async def _persist(self, piece: Piece, message: Sealed, tell: Callable[[str], None]) -> None:
        key = Key(message.url or self._url, piece.view, piece.step)
        self._users[key] = self._users.get(key, 0) + 1
        try:
            trouble = await self._bring(key, piece, message)
        except Exception as error:  # the outermost point: a user's file system may raise anything, and a worker waits
            trouble = self._doom(key, f"the checkpoint of step {key.step} is not published: {_words(error)}")
        finally:
            self._users[key] -= 1
            if not self._users[key]:
                await self._end(key)
        tell(trouble)

    async def _bring(self, key: Key, piece: Piece, message: Sealed) -> str:
        """Why it has not become a checkpoint, or nothing."""
        self._unwritten[key] = self._unwritten.get(key, 0) + 1
        trouble: str = await self._in_thread(self._write, key, piece, message)
        self._unwritten[key] -= 1
        self._stir()
        if trouble:
            return self._doom(key, trouble)
        publishing = self._publishing.get(key)
        if publishing is None or publishing.done():
            waiting = self._until_published(key, UNPUBLISHED_MAX_S, message.keep)
            publishing = self._publishing[key] = asyncio.create_task(waiting)
        return await publishing

    def _doom(self, key: Key, trouble: str) -> str:
        log.warning(trouble)
        self._doomed[key] = trouble
        self._lost = max(self._lost, key.step)
        return trouble

    async def _end(self, key: Key) -> None:
        """Nobody here works at the attempt any more."""
        for known in (self._users, self._unwritten, self._took_s, self._publishing):
            known.pop(key, None)
        await self._in_thread(self._abandon if self._doomed.pop(key, "") else self._let_go, key)

    def _write(self, key: Key, piece: Piece, message: Sealed) -> str:
        """What went wrong; nothing if it did not."""
        began_at = time.monotonic()
        try:
            with piece.reading() as image:
                if image is None:
                    raise CheckpointError("it was overwritten before it was read")
                part = self._attempt(key, piece, message).write_part(piece.part, image, Progress(piece))
        except Exception as error:  # as above
            return f"part {piece.part} of the checkpoint of step {piece.step} is not written: {_words(error)}"
        with suppress(OSError):  # then the image is believed as it is: the part is written
            piece.note(part.checksum_list())
        self._took_s[key] = took_s = time.monotonic() - began_at
        log.debug(f"part {part.number} of step {piece.step}: {part.size_bytes / 2**20:.0f} MiB in {took_s:.2f} s")
        return ""

    def _attempt(self, key: Key, piece: Piece, message: Sealed) -> Writing:
        with self._opening:
            if key not in self._attempts:
                self._attempts[key] = self._begin(key, piece, message)
            return self._attempts[key]

    def _begin(self, key: Key, piece: Piece, message: Sealed) -> Writing:
        about = About(
            step=piece.step,
            world_size=piece.parts,
            shards=piece.shards,
            shares=piece.shares,
            view=piece.view,
            seed=piece.seed,
            created_unix_s=piece.created_unix_s,
            job_id=self._job_id,
            run=self._run,
            versions=versions(),
            metrics=finite(message.metrics),
            notes=dict(message.notes),
        )
        run = f"-{self._run}" if self._run else ""
        return Writing(self._store(key.url), about, f"{_plain(self._job_id)}{run}-v{piece.view}")

    def _store(self, url: str) -> Store:
        if url not in self._stores:
            self._stores[url] = open_store(url)
        return self._stores[url]

    # --- all of them

    async def _until_published(self, key: Key, patience_s: float, keep: str = "") -> str:
        """Why it is not, or nothing. Looks again now and then, as other nodes' parts make no sound."""
        give_up_at, wait_s = time.monotonic() + patience_s, RETRY_S_MIN
        while True:
            if key in self._doomed:
                return self._doomed[key]
            news = self._news  # before we look: what comes meanwhile counts
            try:
                found = await self._in_thread(self._attempts[key].publish)
            except (HoldfastError, OSError) as error:
                log.warning(f"the checkpoint of step {key.step} is not published: {error}")
                self._lost = max(self._lost, key.step)
                return str(error)
            if found is not None:
                self._note(key, found)
                await self._in_thread(self._prune, key, keep or self._keep)
                return ""
            if self._is_ending and not self._unwritten[key]:
                wait_for_s = max(RESCUE_WAIT_S, self._took_s.get(key, 0.0))
                give_up_at = min(give_up_at, time.monotonic() + wait_for_s)
            is_late = self.newest is not None and self.newest.step > key.step
            if time.monotonic() >= give_up_at or is_late:
                return f"step {key.step} is not complete: parts of other nodes are missing"
            await self._pause(news, wait_s)
            wait_s = min(wait_s * 2.0, RETRY_S_MAX)

    async def _pause(self, news: asyncio.Event, wait_s: float) -> None:
        """Shorter once the job is over, and when there are news."""
        try:
            await asyncio.wait_for(news.wait(), min(wait_s, RESCUE_LOOK_S) if self._is_ending else wait_s)
        except TimeoutError:
            pass

    def _stir(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _note(self, key: Key, found: Found) -> None:
        log.info(f"checkpoint of step {found.step} is complete: {found.url}")
        if found.about.job_id != self._job_id:
            log.warning(f"{found.url} was there already, of job {found.about.job_id}: that one stays, ours is not kept")
        if key.url == self._url and (self.newest is None or found.step > self.newest.step):
            self.newest = found
            self._published(found.step, found.url)

    def _prune(self, key: Key, keep: str) -> None:
        try:
            pruned = Catalogue(self._store(key.url)).prune(parse_policy(keep), trusted=[key.step])
        except Exception as error:  # as above: the checkpoint is there all the same
            log.warning(f"old checkpoints stay: {_words(error)}")
        else:
            for step in pruned.removed:
                log.debug(f"checkpoint of step {step} removed, as --checkpoint-keep says")

    def _let_go(self, key: Key) -> None:
        if (attempt := self._attempts.pop(key, None)) is not None:
            attempt.close()

    def _abandon(self, key: Key) -> None:
        attempt = self._attempts.pop(key, None)
        try:
            if attempt is not None:
                attempt.abandon()
        except Exception as error:  # as above
            log.warning(f"an unfinished checkpoint of step {key.step} stays behind: {_words(error)}")

    def _beside(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)


def _words(error: Exception) -> str:
    """Ours are sentences, others' need their name."""
    return str(error) if isinstance(error, HoldfastError | OSError) else f"{type(error).__name__}: {error}"


def _plain(job_id: str) -> str:
    """A job's name as part of a file's."""
    letters = "".join(letter if letter.isalnum() and letter.isascii() else "-" for letter in job_id)
    return letters.strip("-")[:80] or "job"
