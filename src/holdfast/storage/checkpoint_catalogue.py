"""The checkpoints of a store.

Reading trusts nothing. A damaged checkpoint is reported and skipped for the one before; it stays where it is. There is
no file that says which is the latest: it is found by looking, so it cannot point to what is not there.

An unreachable store says nothing about its checkpoints: that is a StorageError, never "there is none".
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from holdfast.errors import CheckpointError, MissingError, StorageError, UsageError
from holdfast.storage import prune
from holdfast.storage.coverage import describe_gaps
from holdfast.storage.manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    CheckpointInfo,
    Manifest,
    PartInfo,
    read_manifest,
    step_folder,
)
from holdfast.storage.part_readers import FilePart, PartSource, RangePart
from holdfast.storage.publish import GRACE_S, UnfinishedAttempt, publisher_of
from holdfast.storage.retention import Policy
from holdfast.storage.stores import Progress, Store
from holdfast.storage.verify import VerifyFinding, inspect
from holdfast.util.logs import get_logger

OPENED_AT_ONCE = 8
TAG = re.compile(r"[0-9a-zA-Z][0-9a-zA-Z_.+-]{0,63}\Z")
TAG_SUFFIX = ".tag"

log = get_logger(__name__)


def warn_of_damage(text: str) -> None:
    """Log that a checkpoint is damaged."""
    log.warning("checkpoint-damaged", text)


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint whose manifest is sound and whose parts are there in full size."""

    store: Store
    folder: str
    manifest: Manifest
    tags: tuple[str, ...] = ()
    skipped: tuple[str, ...] = field(default=())
    """The defects of newer ones."""

    @property
    def step(self) -> int:
        return self.manifest.about.step

    @property
    def about(self) -> CheckpointInfo:
        return self.manifest.about

    @property
    def size_bytes(self) -> int:
        return sum(part.size_bytes for part in self.manifest.parts)

    @property
    def url(self) -> str:
        return f"{self.store.url}/{self.folder}"

    def name(self, part: PartInfo) -> str:
        """Return the name of a part's file in the store."""
        return f"{self.folder}/{part.file}"


@dataclass(frozen=True, slots=True)
class DamagedCheckpoint:
    """A published checkpoint that cannot be read."""

    step: int
    folder: str
    why: str


@dataclass(frozen=True, slots=True)
class CheckpointListing:
    """All checkpoints of a store, newest first."""

    found: list[FoundCheckpoint]
    damaged: list[DamagedCheckpoint]
    unfinished: list[UnfinishedAttempt]


class CheckpointCatalogue:
    """The checkpoints of one store."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self.store = store
        self.publisher = publisher_of(store, clock)
        self._clock = clock

    def list(self) -> CheckpointListing:
        """Return everything in the store, judged by manifests and sizes; contents are not read."""
        with ThreadPoolExecutor(OPENED_AT_ONCE, thread_name_prefix="holdfast-open") as pool:
            opened = [item for item in pool.map(self._try, self.publisher.steps()) if item is not None]
        found = [item for item in opened if isinstance(item, FoundCheckpoint)]
        damaged = [item for item in opened if isinstance(item, DamagedCheckpoint)]
        return CheckpointListing(found, damaged, sorted(self.publisher.unfinished(), key=lambda item: -item.step))

    def latest(self, is_deep: bool = True, on_damage: Callable[[str], None] = warn_of_damage) -> FoundCheckpoint | None:
        """Return the newest complete checkpoint. Damaged ones are reported to `on_damage`, left in place and skipped.

        With `is_deep` every part is read and its checksums compared; without it, damage in the contents is found by
        loading.
        """
        skipped: list[str] = []
        for step in self.publisher.steps():
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
                on_damage(f"checkpoint skipped: {error}")
            else:
                return FoundCheckpoint(found.store, found.folder, found.manifest, found.tags, tuple(skipped))
        return None

    def open(self, step: int) -> FoundCheckpoint:
        """Read a manifest and check that the parts exist in full size. Raise MissingError if there is no such step, and
        CheckpointError if it is damaged."""
        folder = step_folder(step)
        there = self.store.names(folder)
        try:
            manifest = read_manifest(self.store, folder, step, there)
        except MissingError:
            if self.publisher.is_published(step):
                raise CheckpointError(f"{self.store.url}/{folder} has no {MANIFEST}: it is damaged") from None
            raise MissingError(f"{self.store.url} has no checkpoint of step {step}") from None
        found = FoundCheckpoint(self.store, folder, manifest, _tags(folder, there))
        for part in manifest.parts:
            self._check_size(found, part, there.get(found.name(part)))
        return found

    def verify(self, found: FoundCheckpoint, on_progress: Progress | None = None) -> None:
        """Read all parts and compare their checksums. Raise CheckpointError that names what is damaged."""
        with self.reading(found):
            findings = inspect(self.store, found.folder, found.manifest.parts, on_progress)
        if wrong := findings or self._gaps(found):
            raise CheckpointError("; ".join(finding.text for finding in wrong[:3]))

    def inspect(self, found: FoundCheckpoint, on_progress: Progress | None = None) -> Sequence[VerifyFinding]:
        """Return all that is wrong with a checkpoint, including the files that only stock readers use."""
        with self.reading(found):
            wrong = inspect(self.store, found.folder, (*found.manifest.parts, *found.manifest.stock), on_progress)
        return wrong if any(finding.matters for finding in wrong) else [*wrong, *self._gaps(found)]

    @contextmanager
    def reading(self, found: FoundCheckpoint) -> Iterator[None]:
        """Protect a checkpoint from removal while this context lasts. Raise MissingError if it was removed already."""
        with self.publisher.reading(found.step, found.manifest):
            yield

    @contextmanager
    def sources(self, found: FoundCheckpoint, numbers: Iterable[int] | None = None) -> Iterator[dict[int, PartSource]]:
        """Open the parts to load from, all if no numbers are given. Every block is verified when it is read, and the
        checkpoint is protected from removal while this context lasts."""
        wanted = range(len(found.manifest.parts)) if numbers is None else numbers
        with self.reading(found), ExitStack() as stack:
            yield {number: self._source(found, found.manifest.parts[number], stack) for number in wanted}

    def remove(self, step: int, is_forced: bool = False) -> None:
        """Remove one checkpoint, damaged or not. A pinned one, and the only good one, need force; one that is being
        read is never removed."""
        prune.remove(self, step, is_forced)

    def prune(
        self,
        policy: Policy,
        trusted: Collection[int] = (),
        is_dry: bool = False,
        grace_s: float = GRACE_S,
        on_damage: Callable[[str], None] = warn_of_damage,
    ) -> prune.PruneResult:
        """Remove what the policy does not keep. `trusted` are steps that the caller knows to be good, because it has
        just written or verified them: they need not be read again."""
        return prune.prune(self, policy, trusted, is_dry, grace_s, on_damage)

    def pin(self, step: int, tag: str) -> None:
        """Protect a checkpoint from removal by a tag, which is a small file beside its manifest."""
        name = f"{self.open(step).folder}/{_tag_file(tag)}"
        self.store.put_new(name, json.dumps({"created_unix_s": self._clock()}).encode())

    def unpin(self, step: int, tag: str) -> None:
        """Remove a tag. Raise CheckpointError if the checkpoint does not have it."""
        file, found = _tag_file(tag), self.open(step)
        if tag not in found.tags:
            raise CheckpointError(f"{found.url} is not pinned as {tag}")
        self.store.delete(f"{found.folder}/{file}")

    def manifest_bytes(self, step: int) -> bytes | None:
        """Return the manifest that is published for this step; None if it cannot be read."""
        try:
            return self.store.read(f"{step_folder(step)}/{MANIFEST}", 0, MANIFEST_BYTES_MAX)
        except StorageError:
            raise
        except CheckpointError:
            return None

    def _gaps(self, found: FoundCheckpoint) -> Sequence[VerifyFinding]:
        """Return the tensors that the parts, each sound in itself, do not cover completely."""
        with self.sources(found) as sources:
            gaps = describe_gaps(source.layout.entries for source in sources.values())
        texts = [f"{found.url}: no part has {missing} of {name}: it is damaged" for name, missing in gaps.items()]
        return [VerifyFinding(file=found.folder, text=text, matters=True) for text in texts]

    def _try(self, step: int) -> FoundCheckpoint | DamagedCheckpoint | None:
        try:
            return self.open(step)
        except (MissingError, StorageError) as error:
            if isinstance(error, StorageError):
                raise
            return None  # removed since
        except CheckpointError as error:
            return DamagedCheckpoint(step, step_folder(step), str(error))

    def _source(self, found: FoundCheckpoint, part: PartInfo, stack: ExitStack) -> PartSource:
        name, checksums = found.name(part), part.checksum_list()
        if self.store.local is not None:
            return stack.enter_context(FilePart(self.store.local / name, checksums, root=self.store.local))
        read = partial(self.store.read, name)
        try:
            return RangePart(read, part.size_bytes, checksums, f"{self.store.url}/{name}")
        except CheckpointError as error:
            if isinstance(error.__context__, StorageError):  # it is not the part that is wrong
                raise error.__context__ from None
            raise

    def _check_size(self, found: FoundCheckpoint, part: PartInfo, size: int | None) -> None:
        name = f"{found.url}/{part.file}"
        if size is None:
            raise CheckpointError(f"{name} is missing")
        if size != part.size_bytes:
            raise CheckpointError(f"{name} has {size} bytes, its manifest says {part.size_bytes}: it is damaged")


def _tags(folder: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the tags among the files of a checkpoint."""
    files = (name[len(folder) + 1 :] for name in names)
    return tuple(sorted(f.removesuffix(TAG_SUFFIX) for f in files if f.endswith(TAG_SUFFIX) and "/" not in f))


def _tag_file(tag: str) -> str:
    if not TAG.match(tag):
        raise UsageError(f"{tag!r:.80} is not a valid tag: use letters, digits and - _ . +, at most 64")
    return f"{tag}{TAG_SUFFIX}"
