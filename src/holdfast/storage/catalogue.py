"""The checkpoints of a store.

Reading trusts nothing. A damaged checkpoint is named and passed over for the one before; it stays where it is. There is
no file that says which is the latest: it is found by looking, so it cannot point to what is not there.

A store that is away says nothing about its checkpoints: that is a StorageError, never "there is none".
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from holdfast.errors import CheckpointError, MissingError, StorageError
from holdfast.storage import pruning, tags
from holdfast.storage.manifest import MANIFEST, About, Manifest, Part, read_manifest, step_folder
from holdfast.storage.retention import Policy
from holdfast.storage.shelves import GRACE_S, Unfinished, shelf_of
from holdfast.storage.sources import FilePart, PartSource, RangePart
from holdfast.storage.stores import Progress, Store
from holdfast.storage.verifying import Finding, inspect

OPENED_AT_ONCE = 8

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint whose manifest is sound and whose parts are there in full size."""

    store: Store
    folder: str
    manifest: Manifest
    tags: tuple[str, ...] = ()
    skipped: tuple[str, ...] = field(default=())
    """What was wrong with newer ones."""

    @property
    def step(self) -> int:
        return self.manifest.about.step

    @property
    def about(self) -> About:
        return self.manifest.about

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.manifest.parts)

    @property
    def url(self) -> str:
        return f"{self.store.url}/{self.folder}"

    def name(self, part: Part) -> str:
        """Of a part's file in the store."""
        return f"{self.folder}/{part.file}"


@dataclass(frozen=True, slots=True)
class Damaged:
    """What is published as a checkpoint and is none."""

    step: int
    folder: str
    why: str


@dataclass(frozen=True, slots=True)
class Listing:
    """All there is, newest first."""

    found: list[Found]
    damaged: list[Damaged]
    unfinished: list[Unfinished]


class Catalogue:
    """Of one store."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self.shelf = shelf_of(store, clock)
        self._clock = clock

    def list(self) -> Listing:
        """Everything, by manifests and sizes; contents are not read."""
        with ThreadPoolExecutor(OPENED_AT_ONCE, thread_name_prefix="holdfast-open") as pool:
            opened = [item for item in pool.map(self._try, self.shelf.steps()) if item is not None]
        found = [item for item in opened if isinstance(item, Found)]
        damaged = [item for item in opened if isinstance(item, Damaged)]
        return Listing(found, damaged, sorted(self.shelf.unfinished(), key=lambda item: -item.step))

    def latest(self, is_deep: bool = True, on_damage: Callable[[str], None] = log.warning) -> Found | None:
        """The newest complete checkpoint. Damaged ones are named to `on_damage`, left in place and passed over.

        `is_deep` reads every part and compares checksums; without it, loading finds out the rest.
        """
        skipped: list[str] = []
        for step in self.shelf.steps():
            try:
                found = self.open(step)
                if is_deep:
                    self.verify(found)
            except (StorageError, MissingError) as error:
                if isinstance(error, StorageError):
                    raise
                continue  # removed since
            except CheckpointError as error:
                skipped.append(str(error))
                on_damage(f"checkpoint passed over: {error}")
            else:
                return Found(found.store, found.folder, found.manifest, found.tags, tuple(skipped))
        return None

    def open(self, step: int) -> Found:
        """Read a manifest and look whether the parts are there, in full size. MissingError if there is no such step,
        CheckpointError if it is damaged."""
        folder = step_folder(step)
        try:
            manifest = read_manifest(self.store, folder, step)
        except MissingError:
            if self.shelf.is_there(step):
                raise CheckpointError(f"{self.store.url}/{folder} has no {MANIFEST}: it is damaged") from None
            raise MissingError(f"{self.store.url} has no checkpoint of step {step}") from None
        there = self.store.names(folder)
        found = Found(self.store, folder, manifest, tags.of(folder, there))
        for part in manifest.parts:
            self._check_size(found, part, there.get(found.name(part)))
        return found

    def verify(self, found: Found, on_progress: Progress | None = None) -> None:
        """Read all parts and compare their checksums. CheckpointError names what is damaged."""
        with self.reading(found):
            findings = inspect(self.store, found.folder, found.manifest.parts, on_progress)
        if findings:
            raise CheckpointError("; ".join(finding.text for finding in findings[:3]))

    def inspect(self, found: Found, on_progress: Progress | None = None) -> Sequence[Finding]:
        """All that is wrong with a checkpoint, with what we do not read ourselves too."""
        with self.reading(found):
            return inspect(self.store, found.folder, (*found.manifest.parts, *found.manifest.stock), on_progress)

    @contextmanager
    def reading(self, found: Found) -> Iterator[None]:
        """Meanwhile it is not removed. MissingError if it was."""
        with self.shelf.reading(found.step, found.manifest):
            yield

    @contextmanager
    def sources(self, found: Found, numbers: Iterable[int] | None = None) -> Iterator[dict[int, PartSource]]:
        """Parts to load from, all if none are named: every block is verified when it is read. Held meanwhile."""
        wanted = range(len(found.manifest.parts)) if numbers is None else numbers
        with self.reading(found), ExitStack() as stack:
            yield {number: self._source(found, found.manifest.parts[number], stack) for number in wanted}

    def remove(self, step: int, is_forced: bool = False) -> None:
        """Remove one checkpoint, damaged or not. What is pinned, or the only good one, needs force; what is being read
        is not removed in any case."""
        pruning.remove(self, step, is_forced)

    def prune(
        self,
        policy: Policy,
        trusted: Collection[int] = (),
        is_dry: bool = False,
        grace_s: float = GRACE_S,
        on_damage: Callable[[str], None] = log.warning,
    ) -> pruning.Pruned:
        """Remove what the policy does not keep. `trusted` are steps that the caller knows to be good, because it has
        just written or verified them: they need not be read again."""
        return pruning.prune(self, policy, trusted, is_dry, grace_s, on_damage)

    def pin(self, step: int, tag: str) -> None:
        """Keep a checkpoint for ever, under a word."""
        tags.put(self.store, self.open(step).folder, tag, self._clock())

    def unpin(self, step: int, tag: str) -> None:
        """Take the word away."""
        tags.take(self.store, self.open(step).folder, tag)

    def manifest_bytes(self, step: int) -> bytes | None:
        """Of whatever is published as this step; None if it cannot be read."""
        try:
            return self.store.read(f"{step_folder(step)}/{MANIFEST}")
        except StorageError:
            raise
        except CheckpointError:
            return None

    def _try(self, step: int) -> Found | Damaged | None:
        try:
            return self.open(step)
        except (MissingError, StorageError) as error:
            if isinstance(error, StorageError):
                raise
            return None  # removed since
        except CheckpointError as error:
            return Damaged(step, step_folder(step), str(error))

    def _source(self, found: Found, part: Part, stack: ExitStack) -> PartSource:
        name, checksums = found.name(part), part.checksum_list()
        if self.store.local is not None:
            return stack.enter_context(FilePart(self.store.local / name, checksums))
        read = partial(self.store.read, name)
        try:
            return RangePart(read, part.size_bytes, checksums, f"{self.store.url}/{name}")
        except CheckpointError as error:
            if isinstance(error.__context__, StorageError):  # it is not the part that is wrong
                raise error.__context__ from None
            raise

    def _check_size(self, found: Found, part: Part, size: int | None) -> None:
        name = f"{found.url}/{part.file}"
        if size is None:
            raise CheckpointError(f"{name} is missing")
        if size != part.size_bytes:
            raise CheckpointError(f"{name} has {size} bytes, its manifest says {part.size_bytes}: it is damaged")
