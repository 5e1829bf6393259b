"""Every single flipped bit in every kind of file is caught, or changes nothing that is loaded.

Parts (test_image.py) and manifests (test_damage.py) have their own tests; here are the other kinds.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from crc32c import crc32c

from holdfast.errors import CheckpointError
from holdfast.snapshots.slot_file import PAGE_BYTES, SLOTS, SlotPage, SlotStatus
from holdfast.storage.checkpoint_writer import CheckpointWriter
from holdfast.storage.manifest import METADATA, ManifestNote, decode, note_file
from holdfast.storage.stores import open_store
from support.saves import about, flip, image, saved
from support.slot_records import slot_record

SAMPLED = 61
"""Where a look at a file takes a while, one bit in so many bytes, each time another of the eight."""


def flips(raw: bytes) -> Iterator[bytes]:
    for position in range(len(raw) * 8):
        changed = bytearray(raw)
        changed[position // 8] ^= 1 << position % 8
        yield bytes(changed)


def test_every_bit_of_a_note(tmp_path: Path) -> None:
    with CheckpointWriter(open_store(str(tmp_path)), about(1), "job-1") as writing:
        writing.write_part(0, image(100))
        (note,) = tmp_path.glob(f"*/{note_file(0)}")
        for changed in flips(note.read_bytes()):
            with pytest.raises(CheckpointError):
                decode(changed, ManifestNote, "it")


def test_a_checkpoint_with_a_damaged_note_is_not_published_and_another_attempt_is(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with CheckpointWriter(store, about(1), "job-1") as writing:
        for number in range(2):
            writing.write_part(number, image(100 + number))
        (path,) = tmp_path.glob(f"*/{note_file(1)}")
        raw = path.read_bytes()
        for byte in range(0, len(raw), SAMPLED):
            flip(path, byte, byte % 8)
            with pytest.raises(CheckpointError, match=note_file(1)):
                writing.publish()
            path.write_bytes(raw)
        flip(path, 3)
    assert saved(tmp_path, []).latest() is None
    assert saved(tmp_path, [1], nonce="job-2").open(1).manifest.nonce == "job-2"


def test_every_bit_of_what_only_stock_readers_read(tmp_path: Path) -> None:
    """We do not read it: nothing that we load can change. But it is named."""
    catalogue = saved(tmp_path, [1])
    found = catalogue.open(1)
    assert METADATA in {part.file for part in found.manifest.stock}
    for part in found.manifest.stock:
        path = tmp_path / "step-1" / part.file
        raw, checksum = path.read_bytes(), part.checksum(0)
        assert crc32c(raw) == checksum
        assert all(crc32c(changed) != checksum for changed in flips(raw))
        for byte in range(0, len(raw), SAMPLED):
            flip(path, byte, byte % 8)
            (finding,) = catalogue.inspect(found)
            assert (finding.file, finding.matters) == (part.file, False)
            catalogue.verify(found)
            path.write_bytes(raw)


def test_every_bit_of_the_records_of_slots(tmp_path: Path) -> None:
    """A slot whose record is damaged counts as empty; the other one stays what it is."""
    slots = SlotPage.create(tmp_path / "rank-0")
    records = {
        slot: slot_record(SlotStatus.SEALED, 40 + slot, 3, slot, 2, 1, 8192, 7, 0, 0, 123) for slot in range(SLOTS)
    }
    for slot, record in records.items():
        slots.write(slot, record)
    page = tmp_path / "rank-0" / "control"
    raw = page.read_bytes()
    assert len(raw) == PAGE_BYTES
    with page.open("r+b", buffering=0) as file:
        for position in range(PAGE_BYTES * 8):
            file.seek(position // 8)
            file.write(bytes([raw[position // 8] ^ 1 << position % 8]))
            found = slots.sealed()
            assert all(records[slot] == record for slot, record in found.items())
            assert len(found) >= SLOTS - 1
            file.seek(position // 8)
            file.write(raw[position // 8 : position // 8 + 1])
    assert slots.sealed() == records
    slots.close()
