"""One attempt at a checkpoint, by several writers who do not talk to each other.

    write_part(0) ─ part, note ─┐
    write_part(1) ─ part, note ─┼─ whoever sees all notes: .metadata, manifest, published in one move
    write_part(2) ─ part, note ─┘

Each writer writes its parts and calls `publish`, which gives None as long as notes are missing. The last one finds all,
and publishes; if two are last at once, one wins and the other finds it published. What they write is a function of the
notes alone, so it does not matter who does it. A writer that died leaves an attempt that is never published; whoever
takes its place may go on with it: a part that has a note is whole, and is not written again.

All writers of an attempt use the same nonce, another attempt at the same step another one. One wins; who would have
published the other removes it. Two who write the same part write the same bytes. What lies there under our nonce, but
is of another run or cut, is not ours: whoever writes the part begins it anew.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import msgspec

from holdfast.errors import CheckpointError, MissingError, StorageError
from holdfast.storage import points
from holdfast.storage.blocks import Blocks, halfway
from holdfast.storage.catalogue import Catalogue, Found
from holdfast.storage.image import Layout, parse
from holdfast.storage.manifest import (
    MANIFEST,
    NONCE,
    OBJECTS,
    STEP_MAX,
    STOCK,
    About,
    Manifest,
    Note,
    Part,
    decode,
    encode,
    note_file,
    part_file,
)
from holdfast.storage.objects import stock_objects
from holdfast.storage.pickles import dcp_metadata
from holdfast.storage.shelves import shelf_of
from holdfast.storage.stores import Progress, Store

READERS = 8
"""Heads of parts read at once before publishing: it is waiting for the network, not work."""
NOTE_BYTES_MAX = 2**30


class Writing:
    """An attempt. Close it when it is published, or given up."""

    def __init__(self, store: Store, about: About, nonce: str) -> None:
        if not 0 <= about.step <= STEP_MAX or about.shards < 1 or about.shares < 1 or not NONCE.match(nonce):
            raise CheckpointError(f"step {about.step} with nonce {nonce!r:.80}: no checkpoint can be named so")
        self._store = store
        self._about = about
        self._nonce = nonce
        self._shelf = shelf_of(store)
        self._catalogue = Catalogue(store)
        self._folder = self._shelf.partial(about.step, nonce)
        self._written: set[str] = set()
        self._holding = ExitStack()
        self._is_held = False

    def __enter__(self) -> Writing:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Nobody of this process writes any longer; what is not published may be swept."""
        self._holding.close()
        self._is_held = False

    def write_part(self, number: int, image: memoryview, on_progress: Progress | None = None) -> Part:
        """Write a part, then its note. Checksums are computed on the way. A part that is there already stays."""
        if not 0 <= number < self._about.parts:
            raise CheckpointError(f"step {self._about.step} has {self._about.parts} parts, none with number {number}")
        if (there := self._part_there(number)) is not None:
            return there
        self._hold()
        points.reach("part-begun")
        self._clear_foreign(number)
        name = part_file(number)
        blocks = Blocks(image)
        self._written |= {name, note_file(number)}
        self._store.put(f"{self._folder}/{name}", blocks, blocks.size_bytes, halfway(on_progress))
        points.reach("part-named")
        file = self._shelf.file_prefix(self._nonce) + name
        part = Part(number=number, file=file, size_bytes=blocks.size_bytes, checksums=blocks.checksums)
        note = encode(Note(about=self._about, nonce=self._nonce, part=part))
        self._store.put_new(f"{self._folder}/{note_file(number)}", note)
        points.reach("note-written")
        return part

    def publish(self) -> Found | None:
        """Make it a checkpoint, if all parts are there; if another attempt's is, and is sound, that is it. None as long
        as parts are missing. Anybody may call this, at any time, again."""
        if (found := self._ours()) is not None:
            return found
        notes = self._notes()
        if notes is None:
            return self._settled_by_others()
        points.reach("parts-complete")
        if (found := self._rival()) is not None:
            return found
        manifest = self._manifest(notes)
        if manifest is not None:
            self._shelf.publish(self._about.step, self._nonce, encode(manifest))
        return self._ours() or self._rival()

    def abandon(self) -> None:
        """Remove what this attempt wrote, by whomever, unless it is published."""
        self.close()
        if self._ours() is None:
            self._remove()

    def _hold(self) -> None:
        if not self._is_held:
            self._holding.enter_context(self._shelf.writing(self._about.step, self._nonce))
            self._is_held = True

    def _part_there(self, number: int) -> Part | None:
        note = self._note(number)
        if note is not None:
            return note.part
        found = self._ours()
        return found.manifest.parts[number] if found is not None else None

    def _clear_foreign(self, number: int) -> None:
        """Remove what another attempt of the same name has said about this part, and all: its note first, so that
        nobody believes it while the part is written anew."""
        said = {f"{self._folder}/{name}" for name in (note_file(number), *STOCK.values(), MANIFEST)}
        if f"{self._folder}/{note_file(number)}" in (there := self._store.names(self._folder)):
            for name in sorted(said & there.keys(), key=lambda name: not name.endswith(note_file(number))):
                self._store.delete(name)

    def _published(self) -> Found | None:
        """The checkpoint of our step, whoever wrote it, if it looks whole."""
        try:
            return self._catalogue.open(self._about.step)
        except StorageError:
            raise
        except CheckpointError:
            return None

    def _ours(self) -> Found | None:
        """Our attempt, published."""
        found = self._published()
        if found is None or found.manifest.nonce != self._nonce:
            return None
        self.close()
        return found

    def _rival(self) -> Found | None:
        """The checkpoint that another attempt made of our step, if it is sound: then ours is garbage. A damaged one
        makes room. Asked only by who has seen all our parts, so that not every writer reads all of it."""
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
            self._shelf.put_aside(step, self._nonce, manifest)
            return None
        self.close()
        if found.manifest.nonce != self._nonce:
            self._remove()
        return found

    def _settled_by_others(self) -> Found | None:
        """What is published, if what we wrote is no longer there: then others of our attempt have seen to it."""
        there = self._store.names(self._folder)
        if any(f"{self._folder}/{name}" in there for name in self._written):
            return None
        found = self._published()
        if found is not None:
            self.close()
        return found

    def _notes(self) -> list[Note] | None:
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

    def _note(self, number: int) -> Note | None:
        """Of a part of ours. One that another attempt left under our name is none: its writer begins anew."""
        name = f"{self._folder}/{note_file(number)}"
        try:
            note = decode(self._store.read(name, 0, NOTE_BYTES_MAX), Note, f"{self._store.url}/{name}")
        except MissingError:
            return None
        return note if (note.nonce, _identity(note.about)) == (self._nonce, _identity(self._about)) else None

    def _check(self, note: Note, there: dict[str, int]) -> None:
        """Its part is there."""
        size = there.get(f"{self._folder}/{part_file(note.part.number)}")
        if size != note.part.size_bytes:
            raise CheckpointError(
                f"{self._folder}/{part_file(note.part.number)} has {size} bytes, its note says"
                f" {note.part.size_bytes}: it is damaged"
            )

    def _manifest(self, notes: list[Note]) -> Manifest | None:
        """None if the attempt went away meanwhile: published by another, or given up."""
        try:
            with ThreadPoolExecutor(READERS, thread_name_prefix="holdfast-heads") as pool:
                layouts = list(pool.map(self._layout, notes))
            stock = self._put_stock(notes, layouts)
        except MissingError:
            return None
        points.reach("metadata-written")
        about = msgspec.structs.replace(
            notes[0].about, notes={key: value for note in notes for key, value in note.about.notes.items()}
        )
        parts = tuple(note.part for note in notes)
        return Manifest(about=about, nonce=self._nonce, parts=parts, stock=stock)

    def _layout(self, note: Note) -> Layout:
        name = f"{self._folder}/{part_file(note.part.number)}"
        try:
            return parse(lambda start, size: self._store.read(name, start, size), note.part.size_bytes)
        except (MissingError, StorageError):
            raise
        except CheckpointError as error:
            raise CheckpointError(f"{self._store.url}/{name}: {error}") from None

    def _put_stock(self, notes: list[Note], layouts: list[Layout]) -> tuple[Part, ...]:
        """What stock readers want beside the parts: a function of the parts, so all who publish write the same."""
        objects, stored = stock_objects(self._skeleton(layouts[0]))
        files = [part_file(note.part.number) for note in notes]
        parts = list(zip(files, layouts, strict=True))
        metadata = dcp_metadata(parts, [(OBJECTS, one) for one in stored])
        return tuple(self._put_small(number, content) for number, content in ((-2, objects), (-1, metadata)))

    def _put_small(self, number: int, content: bytes) -> Part:
        self._store.put_new(f"{self._folder}/{STOCK[number]}", content)
        file = self._shelf.file_prefix(self._nonce) + STOCK[number]
        checksums = "".join(Blocks(memoryview(content)).computed())
        return Part(number=number, file=file, size_bytes=len(content), checksums=checksums)

    def _skeleton(self, layout: Layout) -> bytes:
        """Of the first part: what is no tensor is the same in all, or is known by the first."""
        room = self._store.read(f"{self._folder}/{part_file(0)}", layout.skeleton_start, layout.skeleton_capacity)
        return layout.skeleton_in(room)

    def _remove(self) -> None:
        """All that this attempt wrote, by whomever."""
        for name in self._store.names(self._folder):
            self._store.delete(name)
        self._shelf.forget(self._about.step, self._nonce)


def _identity(about: About) -> tuple[object, ...]:
    """What the parts of one checkpoint have in common. Not the seed: each rank of a script may have its own."""
    return about.step, about.shards, about.shares, about.run
