"""The slots of a seat: records that are torn, locks of processes that die, the pages that outlive them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from holdfast.wire import slots
from holdfast.wire.slots import EMPTY, PAGE_BYTES, SLOTS, ImageLock, Record, Seat, Status, Wanted, map_image, reading

SEALED = Record(Status.SEALED, 7, 3, 1, 2, 2, PAGE_BYTES, -5, 4, Wanted.YES, 123_456_789)


@pytest.fixture
def seat(tmp_path: Path) -> Iterator[Seat]:
    made = Seat.create(tmp_path / "seat-0")
    for slot in range(SLOTS):
        made.path(slot).write_bytes(bytes([slot + 1]) * PAGE_BYTES)
    yield made
    made.close()


@contextmanager
def holder(path: Path, kind: str) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a lock on an image until it is killed."""
    code = (
        "import sys, signal, pathlib\n"
        "from holdfast.wire.slots import ImageLock\n"
        f"lock = ImageLock(pathlib.Path({str(path)!r}), is_writable={kind == 'writer'})\n"
        "print(lock.take(), flush=True)\n"
        "signal.pause()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "True\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_seat_is_kept_when_it_is_opened_again(seat: Seat) -> None:
    assert seat.get("whole") == -1 and seat.sealed() == {}
    seat.write(1, SEALED)
    seat.put(whole=7)
    seat.count("taken")
    for again in (Seat.create(seat.directory), Seat.open(seat.directory)):
        assert again.record(0) == EMPTY and again.record(1) == SEALED and again.sealed() == {1: SEALED}
        assert (again.get("whole"), again.get("taken"), SEALED.parts) == (7, 1, 4)
        again.close()


def test_what_is_no_seat_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        Seat.open(tmp_path)
    (tmp_path / "control").write_bytes(b"")
    with pytest.raises(ValueError):
        Seat.open(tmp_path)
    (tmp_path / "control").write_bytes(bytes(PAGE_BYTES))
    with pytest.raises(ValueError, match="is not a page of slots"):
        Seat.open(tmp_path)


def test_a_record_torn_at_any_byte_counts_as_empty(seat: Seat) -> None:
    """Whatever was there before: nothing, or the record of another step. The old one, untouched, still counts."""
    later = SEALED._replace(step=9, view=4, created_ns=999_999_999_999, size_bytes=2 * PAGE_BYTES)
    at, size = slots._record_at(0), slots._RECORD.size
    seat.write(0, later)
    new = bytes(seat._page[at : at + size])
    for old in (bytes(size), packed(seat, SEALED), packed(seat, SEALED._replace(status=Status.WRITING))):
        before, said = read(seat, old), slots._WORDS.size + 4  # what follows is padding
        for cut in range(size):
            torn = new[:cut] + old[cut:]
            wanted = {old[:said]: before, new[:said]: later}.get(torn[:said], EMPTY)
            assert read(seat, torn) == wanted


def test_a_record_with_any_flipped_bit_counts_as_empty(seat: Seat) -> None:
    good = packed(seat, SEALED)
    for bit in range((slots._WORDS.size + 4) * 8):
        flipped = bytearray(good)
        flipped[bit // 8] ^= 1 << bit % 8
        assert read(seat, bytes(flipped)) == EMPTY


def packed(seat: Seat, record: Record) -> bytes:
    seat.write(0, record)
    at = slots._record_at(0)
    return bytes(seat._page[at : at + slots._RECORD.size])


def read(seat: Seat, content: bytes) -> Record:
    at = slots._record_at(0)
    seat._page[at : at + len(content)] = content
    return seat.record(0)


def test_readers_share_and_writers_do_not(seat: Seat) -> None:
    path = seat.path(0)
    with holder(path, "reader"):
        reader, writer = ImageLock(path, is_writable=False), ImageLock(path, is_writable=True)
        assert reader.take() and not writer.take()
        reader.close()
        assert not writer.take()
        writer.close()
        other = ImageLock(seat.path(1), is_writable=True)
        assert other.take()
        other.close()


def test_the_lock_of_a_killed_writer_is_gone(seat: Seat) -> None:
    seat.write(0, SEALED)
    with holder(seat.path(0), "writer") as process:
        with reading(seat, 0, SEALED) as memory:
            assert memory is None
        process.send_signal(signal.SIGKILL)
        process.wait()
        with reading(seat, 0, SEALED) as memory:
            assert memory is not None and memory[:] == b"\1" * PAGE_BYTES


def test_a_forked_process_holds_no_lock(seat: Seat) -> None:
    """A data loader's process may outlive its worker: it must not keep the worker's slots."""
    lock = ImageLock(seat.path(0), is_writable=True)
    assert lock.take()
    awake, wake = os.pipe()
    child = os.fork()
    if not child:
        os.read(awake, 1)
        os._exit(0)
    lock.close()  # as the worker's death would
    again = ImageLock(seat.path(0), is_writable=True)
    try:
        while not again.take():  # until the child has come so far
            assert os.waitpid(child, os.WNOHANG) == (0, 0)
    finally:
        os.write(wake, b".")
        os.waitpid(child, 0)
        again.close()
        os.close(awake)
        os.close(wake)


def test_what_is_read_is_what_was_expected(seat: Seat) -> None:
    seat.write(0, SEALED)
    with reading(seat, 0, SEALED) as memory:
        assert memory is not None
        writer = ImageLock(seat.path(0), is_writable=True)
        assert not writer.take()
        writer.close()
    for other in (SEALED._replace(step=8), SEALED._replace(view=4), SEALED._replace(status=Status.WRITING)):
        with reading(seat, 0, other) as memory:
            assert memory is None


def test_how_large_an_image_may_be(seat: Seat) -> None:
    assert seat.room_bytes() == PAGE_BYTES
    with seat.path(1).open("ab") as file:
        file.truncate(3 * PAGE_BYTES)
    assert seat.room_bytes() == PAGE_BYTES
    seat.path(0).unlink()
    assert seat.room_bytes() == 0


def test_pages_are_put_in_place_and_what_is_on_them_stays(seat: Seat) -> None:
    memory = map_image(seat.path(1), PAGE_BYTES, is_writable=True)
    slots.populate(memory)
    assert memory[:] == b"\2" * PAGE_BYTES
    memory[:3] = b"new"
    memory.close()
    assert seat.path(1).read_bytes()[:4] == b"new\2"
