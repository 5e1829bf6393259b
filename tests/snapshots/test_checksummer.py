"""Every image in memory gets checksums, by a process that nobody waits for."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.snapshots.checksummer import STARTS_MAX, Checksummer, SnapshotReader
from holdfast.snapshots.slot_file import SlotImage, SlotPage, SlotRecord, SlotStatus, WantedSnapshot
from holdfast.snapshots.snapshot_store import SnapshotStore
from holdfast.util.blocks import unpack_checksums
from support.slot_records import checksums_of, slot_record

SIZE = 20 * 2**20
"""Three blocks, the last one short."""


@pytest.fixture
def snapshot_store(tmp_path: Path) -> Iterator[SnapshotStore]:
    made = SnapshotStore(tmp_path, "node-0")
    made.open("job")
    yield made
    made.close()


@pytest.fixture
def checksummer() -> Iterator[Checksummer]:
    made = Checksummer()
    yield made
    made.close()


def put(snapshot_store: SnapshotStore, slot: int, step: int, created_ns: int) -> SlotImage:
    ready = asyncio.run(snapshot_store.allocate(0, SIZE))
    assert not ready.why
    page = snapshot_store._pages[0]
    content = os.urandom(SIZE)
    page.write(slot, slot_record(SlotStatus.WRITING, step, created_ns=created_ns))
    with page.path(slot).open("r+b") as file:
        file.write(content)
    record = slot_record(SlotStatus.SEALED, step, 1, 0, 1, 1, SIZE, 7, 0, WantedSnapshot.NO, created_ns)
    page.write(slot, record)
    return SlotImage(page, slot, record, record.image)


def right(image: SlotImage) -> bytes:
    return checksums_of(image.path.read_bytes()[:SIZE])


def until(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_images_get_checksums_and_so_does_what_overwrites_them(
    snapshot_store: SnapshotStore, checksummer: Checksummer
) -> None:
    images = [put(snapshot_store, slot, slot, 100 + slot) for slot in range(2)]
    assert snapshot_store.directory is not None and not images[0].checksums
    checksummer.wake(snapshot_store.directory)
    until(lambda: all(bool(image.checksums) for image in images))
    assert [image.checksums for image in images] == [right(image) for image in images]
    later = put(snapshot_store, 0, 2, 102)
    assert not later.checksums, "those of another image"
    checksummer.wake(snapshot_store.directory)
    until(lambda: bool(later.checksums))
    assert later.checksums == right(later)
    again = SnapshotStore(snapshot_store._root, "node-0")
    snapshot_store.close()
    again.open("job")
    assert [one.stored.info.checksums for one in again.images()] == [right(one) for one in again.images()]
    again.close()


def test_an_image_that_is_overwritten_meanwhile_gets_none(
    snapshot_store: SnapshotStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = put(snapshot_store, 0, 1, 100)
    page, looks = snapshot_store._pages[0], [0]
    looking = SlotPage.record

    def look(self: SlotPage, slot: int) -> SlotRecord:
        looks[0] += 1
        if looks[0] == 5:  # in the midst of it: the worker begins the next one
            page.write(0, image.record._replace(status=SlotStatus.WRITING))
        return looking(self, slot)

    monkeypatch.setattr(SlotPage, "record", look)
    assert snapshot_store.directory is not None
    SnapshotReader(snapshot_store.directory).read_all()
    assert looks[0] >= 5 and not image.checksums


def test_torn_checksums_are_none(snapshot_store: SnapshotStore) -> None:
    image = put(snapshot_store, 0, 1, 100)
    image.record_checksums(unpack_checksums(right(image)))
    assert image.checksums == right(image)
    path = image.path.with_name("details-0")
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:8], whole[:-4] + b"\0\0\0\0", bytes([whole[0] ^ 1]) + whole[1:]):
        path.write_bytes(damaged)
        assert not image.checksums


def test_the_process_ends_with_who_started_it_and_its_end_hurts_nobody(
    snapshot_store: SnapshotStore, checksummer: Checksummer
) -> None:
    put(snapshot_store, 0, 1, 100)
    assert snapshot_store.directory is not None
    checksummer.wake(snapshot_store.directory)
    process = checksummer._process
    assert process is not None and process.stdin is not None
    until(lambda: bool(snapshot_store.images()[0].checksums))
    process.send_signal(signal.SIGSTOP)
    for _ in range(100_000):  # more than a pipe holds
        checksummer.wake(snapshot_store.directory)
    checksummer.close()
    checksummer.wake(snapshot_store.directory)
    process = checksummer._process
    assert process is not None and process.stdin is not None
    process.stdin.close()  # as the kernel does it for an agent that was killed
    assert process.wait(60.0) == 0


def test_one_that_is_killed_is_started_again_but_not_for_ever(
    snapshot_store: SnapshotStore, checksummer: Checksummer
) -> None:
    assert snapshot_store.directory is not None
    for step in range(STARTS_MAX):
        image = put(snapshot_store, 0, step, 100 + step)
        checksummer.wake(snapshot_store.directory)
        until(lambda image=image: bool(image.checksums))  # type: ignore[misc]
        assert image.checksums == right(image)
        assert checksummer._process is not None
        checksummer._process.kill()
        checksummer._process.wait()
    checksummer.wake(snapshot_store.directory)
    assert checksummer._process is None


def test_an_image_that_cannot_be_read_is_left_out_and_the_others_are_not(
    snapshot_store: SnapshotStore, checksummer: Checksummer
) -> None:
    older, newer = (put(snapshot_store, slot, slot, 100 + slot) for slot in range(2))
    assert snapshot_store.directory is not None
    os.truncate(newer.path, 0)
    (snapshot_store.directory / "rank-7").mkdir()
    (snapshot_store.directory / "rank-7" / "control").write_bytes(b"no page")
    checksummer.wake(snapshot_store.directory)
    until(lambda: bool(older.checksums))
    again = put(snapshot_store, 1, 2, 102)
    checksummer.wake(snapshot_store.directory)
    until(lambda: bool(again.checksums))
    assert again.checksums == right(again)
