"""The slots of a rank: records that are torn, locks of processes that die, the pages that outlive them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from holdfast.snapshots import slot_file
from holdfast.snapshots.slot_file import (
    EMPTY,
    PAGE_BYTES,
    SLOTS,
    ImageLock,
    SlotImage,
    SlotPage,
    SlotRecord,
    SlotStatus,
    WantedSnapshot,
    map_image,
)
from support.slot_records import changed, slot_record

SEALED = slot_record(SlotStatus.SEALED, 7, 3, 1, 2, 2, PAGE_BYTES, -5, 4, WantedSnapshot.YES, 123_456_789)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[SlotPage]:
    made = SlotPage.create(tmp_path / "rank-0")
    for slot in range(SLOTS):
        made.path(slot).write_bytes(bytes([slot + 1]) * PAGE_BYTES)
    yield made
    made.close()


def reading(page: SlotPage, slot: int, expected: SlotRecord) -> AbstractContextManager[memoryview | None]:
    return SlotImage(page, slot, expected, expected.image).reading()


@contextmanager
def holder(path: Path, kind: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a lock on an image until it is killed."""
    code = (
        "import sys, signal, pathlib\n"
        "from holdfast.snapshots.slot_file import ImageLock\n"
        f"lock = ImageLock(pathlib.Path({str(path)!r}), is_writable={kind == 'writer'})\n"
        "print(lock.acquire(), flush=True)\n"
        "signal.pause()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_page_keeps_its_content_when_it_is_opened_again(page: SlotPage) -> None:
    assert page.get("complete") == -1 and page.sealed() == {}
    page.write(1, SEALED)
    page.put(complete=7)
    page.count("taken")
    for again in (SlotPage.create(page.directory), SlotPage.open(page.directory)):
        assert again.record(0) == EMPTY and again.record(1) == SEALED and again.sealed() == {1: SEALED}
        assert (again.get("complete"), again.get("taken"), SEALED.image.parts) == (7, 1, 4)
        again.close()


def test_a_file_that_is_no_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        SlotPage.open(tmp_path)
    (tmp_path / "control").write_bytes(b"")
    with pytest.raises(ValueError):
        SlotPage.open(tmp_path)
    (tmp_path / "control").write_bytes(bytes(PAGE_BYTES))
    with pytest.raises(ValueError, match="is not a page of slots"):
        SlotPage.open(tmp_path)


def test_a_record_torn_at_any_byte_counts_as_empty(page: SlotPage) -> None:
    """Whatever was there before: nothing, or the record of another step. The old one, untouched, still counts."""
    later = changed(SEALED, step=9, view=4, created_ns=999_999_999_999, size_bytes=2 * PAGE_BYTES)
    at, size = slot_file._record_at(0), slot_file._RECORD.size
    page.write(0, later)
    new = bytes(page._page[at : at + size])
    for old in (bytes(size), packed(page, SEALED), packed(page, SEALED._replace(status=SlotStatus.WRITING))):
        before, said = read(page, old), slot_file._FIELDS.size + 4  # what follows is padding
        for cut in range(size):
            torn = new[:cut] + old[cut:]
            wanted = {old[:said]: before, new[:said]: later}.get(torn[:said], EMPTY)
            assert read(page, torn) == wanted


def test_a_record_with_any_flipped_bit_counts_as_empty(page: SlotPage) -> None:
    good = packed(page, SEALED)
    for bit in range((slot_file._FIELDS.size + 4) * 8):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        assert read(page, bytes(flipped)) == EMPTY


def packed(page: SlotPage, record: SlotRecord) -> bytes:
    page.write(0, record)
    at = slot_file._record_at(0)
    return bytes(page._page[at : at + slot_file._RECORD.size])


def read(page: SlotPage, content: bytes) -> SlotRecord:
    at = slot_file._record_at(0)
    page._page[at : at + len(content)] = content
    return page.record(0)


def test_readers_share_and_writers_do_not(page: SlotPage) -> None:
    path = page.path(0)
    with holder(path, "reader"):
        reader, writer = ImageLock(path, is_writable=False), ImageLock(path, is_writable=True)
        assert reader.acquire() and not writer.acquire()
        reader.close()
        assert not writer.acquire()
        writer.close()
        other = ImageLock(page.path(1), is_writable=True)
        assert other.acquire()
        other.close()


def test_the_lock_of_a_killed_writer_is_gone(page: SlotPage) -> None:
    page.write(0, SEALED)
    with holder(page.path(0), "writer") as process:
        with reading(page, 0, SEALED) as memory:
            assert memory is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        with reading(page, 0, SEALED) as memory:
            assert memory is not None and memory[:] == b"\1" * PAGE_BYTES


def test_a_forked_process_holds_no_lock(page: SlotPage) -> None:
    """A data loader's process may outlive its worker: it must not keep the worker's slots."""
    lock = ImageLock(page.path(0), is_writable=True)
    assert lock.acquire()
    awake, wake = os.pipe()
    child = os.fork()
    if not child:
        os.read(awake, 1)
        os._exit(0)
    lock.close()  # as the worker's death would
    again = ImageLock(page.path(0), is_writable=True)
    try:
        while not again.acquire():  # until the child has come so far
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.write(wake, b".")
        os.waitpid(child, 0)
        again.close()
        os.close(awake)
        os.close(wake)


def test_what_is_read_is_what_was_expected(page: SlotPage) -> None:
    page.write(0, SEALED)
    with reading(page, 0, SEALED) as memory:
        assert memory is not None
        writer = ImageLock(page.path(0), is_writable=True)
        assert not writer.acquire()
        writer.close()
    for other in (changed(SEALED, step=8), changed(SEALED, view=4), SEALED._replace(status=SlotStatus.WRITING)):
        with reading(page, 0, other) as memory:
            assert memory is None


def test_how_large_an_image_may_be(page: SlotPage) -> None:
    assert page.capacity_bytes() == PAGE_BYTES
    with page.path(1).open("ab") as file:
        file.truncate(3 * PAGE_BYTES)
    assert page.capacity_bytes() == PAGE_BYTES
    page.path(0).unlink()
    assert page.capacity_bytes() == 0


def test_pages_are_put_in_place_and_what_is_on_them_stays(page: SlotPage) -> None:
    memory = map_image(page.path(1), PAGE_BYTES, is_writable=True)
    slot_file.populate(memory)
    assert memory[:] == b"\2" * PAGE_BYTES
    memory[:3] = b"new"
    memory.close()
    assert page.path(1).read_bytes()[:4] == b"new\2"
