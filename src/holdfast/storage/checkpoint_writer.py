"""One attempt at a checkpoint, by several writers that do not communicate.

    write_part(0) ─ part, note ─┐
    write_part(1) ─ part, note ─┼─ the writer that sees all notes: .metadata, manifest, published in one move
    write_part(2) ─ part, note ─┘

Each writer writes its parts and calls `publish`, which gives None as long as notes are missing. The last one finds all,
and publishes; if two are last at once, one wins and the other finds it published. What they write is a function of the
notes alone, so it does not matter who does it. A writer that died leaves an attempt that is never published; its
replacement may continue it: a part that has a note is complete, and is not written again.

All writers of an attempt use the same nonce, another attempt at the same step another one. One wins; the
other is removed by the writer that would have published it. Two that write the same part write the same bytes. Files
under our nonce that are of another run or sharding are not ours: the writer of the part replaces them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec

from holdfast.errors import CheckpointError, MissingError, StorageError
from holdfast.storage import failpoints
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue, FoundCheckpoint
from holdfast.storage.image import ImageLayout, parse
from holdfast.storage.manifest import (
    MANIFEST,
    NONCE,
    OBJECTS,
    STEP_MAX,
    STOCK,
    CheckpointInfo,
    Manifest,
    ManifestNote,
    PartInfo,
    checksum_text,
    decode,
    encode,
    note_file,
    part_file,
)
from holdfast.storage.non_tensors import stock_objects
from holdfast.storage.pickles import dcp_metadata
from holdfast.storage.publish import publisher_of
from holdfast.storage.stores import Progress, Store
from holdfast.util.blocks import ChecksummedBlocks, block_checksums

READERS = 8
"""Heads of parts read at once before publishing: the time is spent waiting for the network."""
NOTE_BYTES_MAX = 32 * 2**20


class CheckpointWriter:
    """One attempt at a checkpoint. Close it when it is published or given up."""

    def __init__(self, store: Store, about: CheckpointInfo, nonce: str) -> None:
        if not 0 <= about.step <= STEP_MAX or about.shards < 1 or about.shares < 1 or not NONCE.match(nonce):
            raise CheckpointError(f"step {about.step} with nonce {nonce!r:.80}: not a valid checkpoint name")
        self._store = store
        self._about = about
        self._nonce = nonce
        self._publisher = publisher_of(store)
        self._catalogue = CheckpointCatalogue(store)
        self._folder = self._publisher.partial(about.step, nonce)
        self._written: set[str] = set()
        self._protection = ExitStack()
        self._is_protected = False

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the writing of this process; an attempt that is not published may be swept from now on."""
        self._protection.close()
        self._is_protected = False

    def write_part(self, number: int, image: memoryview, on_progress: Progress | None = None) -> PartInfo:
        """Write a part, then its note. Checksums are computed on the way. A part that is there already stays."""
        if not 0 <= number < self._about.parts:
            raise CheckpointError(f"step {self._about.step} has {self._about.parts} parts, none with number {number}")
        if (there := self._part_there(number)) is not None:
            return there
        self._protect()
        failpoints.reach("part-begun")
        self._clear_foreign(number)
        name = part_file(number)
        blocks, size_bytes = ChecksummedBlocks(image), image.nbytes
        self._written |= {name, note_file(number)}
        self._store.put(f"{self._folder}/{name}", blocks, size_bytes, _with_failpoint(on_progress))
        failpoints.reach("part-named")
        file = self._publisher.file_prefix(self._nonce) + name
        part = PartInfo(number=number, file=file, size_bytes=size_bytes, checksums=checksum_text(blocks.checksums))
        note = encode(ManifestNote(about=self._about, nonce=self._nonce, part=part))
        self._store.put_new(f"{self._folder}/{note_file(number)}", note)
        failpoints.reach("note-written")
        return part

    def publish(self) -> FoundCheckpoint | None:
        """Publish the checkpoint if all parts are there, and return it; if another attempt has published a sound one,
        return that; return None as long as parts are missing. Any writer may call this, at any time, again."""
        if (found := self._ours()) is not None:
            return found
        notes = self._notes()
        if notes is None:
            return self._published_by_others()
        failpoints.reach("parts-complete")
        if (found := self._rival()) is not None:
            return found
        manifest = self._manifest(notes)
        if manifest is not None:
            self._publisher.publish(self._about.step, self._nonce, encode(manifest))
        return self._ours() or self._rival()

    def abandon(self) -> None:
        """Remove what any writer wrote for this attempt, unless it is published."""
        self.close()
        if self._ours() is None:
            self._remove()

    def _protect(self) -> None:
        if not self._is_protected:
            self._protection.enter_context(self._publisher.writing(self._about.step, self._nonce))
            self._is_protected = True

    def _part_there(self, number: int) -> PartInfo | None:
        note = self._note(number)
        if note is not None:
            return note.part
        found = self._ours()
        return found.manifest.parts[number] if found is not None else None

    def _clear_foreign(self, number: int) -> None:
        """Remove the files that another attempt of the same name left for this part: its note first, so that no
        publisher relies on it while the part is written again."""
        foreign = {f"{self._folder}/{name}" for name in (note_file(number), *STOCK.values(), MANIFEST)}
        if f"{self._folder}/{note_file(number)}" in (there := self._store.names(self._folder)):
            for name in sorted(foreign & there.keys(), key=lambda name: not name.endswith(note_file(number))):
                self._store.delete(name)

    def _published(self) -> FoundCheckpoint | None:
        """Return the checkpoint of our step, by whichever attempt, if it looks complete."""
        try:
            return self._catalogue.open(self._about.step)
        except StorageError:
            raise
        except CheckpointError:
            return None

    def _ours(self) -> FoundCheckpoint | None:
        """Return our attempt as a published checkpoint."""
        found = self._published()
        if found is None or found.manifest.nonce != self._nonce:
            return None
        self.close()
        return found

    def _rival(self) -> FoundCheckpoint | None:
        """Return the checkpoint that another attempt published for our step, if it is sound: then ours is garbage. A
        damaged one is moved aside. Only a writer that has seen all our parts asks, so that not every writer reads all
        of it."""
        step = self._about.step
        manifest = self._catalogue.manifest_bytes(step)
        try:
            found = self._catalogue.open(step)
            if found.manifest.nonce != self._nonce:
                self._catalogue.verify(found)
        except (MissingError, StorageError) as error:
            if isinstance(error, StorageError):
                raise
            return None
        except CheckpointError:
            self._publisher.move_aside(step, self._nonce, manifest)
            return None
        self.close()
        if found.manifest.nonce != self._nonce:
            self._remove()
        return found

    def _published_by_others(self) -> FoundCheckpoint | None:
        """Return what is published if our files are gone: then another writer of our attempt has published or removed
        it."""
        there = self._store.names(self._folder)
        if any(f"{self._folder}/{name}" in there for name in self._written):
            return None
        found = self._published()
        if found is not None:
            self.close()
        return found

    def _notes(self) -> list[ManifestNote] | None:
        there = self._store.names(self._folder)
        wanted = [f"{self._folder}/{note_file(number)}" for number in range(self._about.parts)]
        if any(name not in there for name in wanted):
            return None
        with ThreadPoolExecutor(READERS, thread_name_prefix="holdfast-notes") as pool:
            notes = list(pool.map(self._note, range(self._about.parts)))
        if any(note is None for note in notes):
            return None
        found = [note for note in notes if note is not None]
        for note in found:
            self._check(note, there)
        return found

    def _note(self, number: int) -> ManifestNote | None:
        """Return the note of one of our parts. A note that another attempt left under our name does not count: its
        writer starts over."""
        name = f"{self._folder}/{note_file(number)}"
        try:
            note = decode(self._store.read(name, 0, NOTE_BYTES_MAX), ManifestNote, f"{self._store.url}/{name}")
        except MissingError:
            return None
        return note if (note.nonce, _identity(note.about)) == (self._nonce, _identity(self._about)) else None

    def _check(self, note: ManifestNote, there: dict[str, int]) -> None:
        """Raise CheckpointError unless the part of a note is there."""
        size = there.get(f"{self._folder}/{part_file(note.part.number)}")
        if size != note.part.size_bytes:
            raise CheckpointError(
                f"{self._folder}/{part_file(note.part.number)} has {size} bytes, its note says"
                f" {note.part.size_bytes}: it is damaged"
            )

    def _manifest(self, notes: list[ManifestNote]) -> Manifest | None:
        """Return the manifest; None if the attempt is gone because another writer published it or gave it up."""
        try:
            with ThreadPoolExecutor(READERS, thread_name_prefix="holdfast-heads") as pool:
                layouts = list(pool.map(self._layout, notes))
            stock = self._put_stock(notes, layouts)
        except MissingError:
            return None
        failpoints.reach("metadata-written")
        about = msgspec.structs.replace(
            notes[0].about, notes={key: value for note in notes for key, value in note.about.notes.items()}
        )
        parts = tuple(note.part for note in notes)
        return Manifest(about=about, nonce=self._nonce, parts=parts, stock=stock)

    def _layout(self, note: ManifestNote) -> ImageLayout:
        name = f"{self._folder}/{part_file(note.part.number)}"
        try:
            return parse(lambda start, size: self._store.read(name, start, size), note.part.size_bytes)
        except (MissingError, StorageError):
            raise
        except CheckpointError as error:
            raise CheckpointError(f"{self._store.url}/{name}: {error}") from None

    def _put_stock(self, notes: list[ManifestNote], layouts: list[ImageLayout]) -> tuple[PartInfo, ...]:
        """Write what stock readers need beside the parts. It is a function of the parts, so all publishers write the
        same."""
        shards = self._about.shards
        skeletons = (self._skeleton(shard, layouts[shard]) for shard in _shards_with_names(layouts, shards))
        objects, stored = stock_objects(skeletons)
        files = [part_file(note.part.number) for note in notes]
        parts = list(zip(files, layouts, strict=True))
        metadata = dcp_metadata(parts, [(OBJECTS, one) for one in stored], shards)
        return tuple(self._put_small(number, content) for number, content in ((-2, objects), (-1, metadata)))

    def _put_small(self, number: int, content: bytes) -> PartInfo:
        self._store.put_new(f"{self._folder}/{STOCK[number]}", content)
        file = self._publisher.file_prefix(self._nonce) + STOCK[number]
        checksums = checksum_text(block_checksums(memoryview(content)))
        return PartInfo(number=number, file=file, size_bytes=len(content), checksums=checksums)

    def _skeleton(self, number: int, layout: ImageLayout) -> bytes:
        """Return the skeleton of a part, which is that of its shard."""
        name = f"{self._folder}/{part_file(number)}"
        reserved = self._store.read(name, layout.skeleton_start, layout.skeleton_capacity)
        return layout.skeleton_in(reserved)

    def _remove(self) -> None:
        """Remove all that any writer wrote for this attempt."""
        for name in self._store.names(self._folder):
            self._store.delete(name)
        self._publisher.forget(self._about.step, self._nonce)


def _shards_with_names(layouts: Sequence[ImageLayout], shards: int) -> Iterator[int]:
    """Return the shards that have tensors of names that no earlier one has, as the stages of a pipeline have: values
    that are not tensors are the same in all others, and to read a thousand skeletons takes long."""
    seen: set[str] = set()
    for shard in range(shards):
        names = {entry.name for layout in layouts[shard::shards] for entry in layout.entries}
        if shard == 0 or not names <= seen:
            yield shard
        seen |= names


def _with_failpoint(on_progress: Progress | None) -> Progress:
    """Return a progress function that calls `on_progress`, and reaches the fail point `part-half` in the middle."""
    is_past = False

    def progress(done: int, total: int) -> None:
        nonlocal is_past
        if done * 2 >= total and not is_past:
            is_past = True
            failpoints.reach("part-half")
        if on_progress is not None:
            on_progress(done, total)

    return progress


def _identity(about: CheckpointInfo) -> tuple[object, ...]:
    """Return what the parts of one checkpoint have in common. The seed is not part of it: each rank of a script may
    have its own."""
    return about.step, about.shards, about.shares, about.run
