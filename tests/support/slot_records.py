"""Records of slots, made in one line."""

from __future__ import annotations

import msgspec

from holdfast.core.image_info import ImageInfo
from holdfast.snapshots.slot_file import SlotRecord, SlotStatus, WantedSnapshot
from holdfast.util.blocks import block_checksums, pack_checksums


def slot_record(
    status: SlotStatus,
    step: int = -1,
    view: int = 0,
    part: int = 0,
    shards: int = 1,
    shares: int = 1,
    size_bytes: int = 0,
    seed: int = 0,
    first_step: int = 0,
    wanted: int = WantedSnapshot.NO,
    created_ns: int = 0,
) -> SlotRecord:
    """Return a record, in the order in which a page stores it."""
    image = ImageInfo(
        step, part, shards, shares, view, size_bytes=size_bytes, seed=seed, first_step=first_step, created_ns=created_ns
    )
    return SlotRecord(status, image, WantedSnapshot(wanted))


def changed(record: SlotRecord, **fields: int) -> SlotRecord:
    """Return a record with other fields, of its own or of its image."""
    if "wanted" in fields:
        record = record._replace(wanted=WantedSnapshot(fields.pop("wanted")))
    return record._replace(image=msgspec.structs.replace(record.image, **fields))


def checksums_of(content: bytes | memoryview) -> bytes:
    """Return the checksums of all blocks, as `ImageInfo.checksums` has them."""
    return pack_checksums(block_checksums(memoryview(content)))
