"""Every image in memory gets checksums, by a process that nobody waits for."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.agent.memory.vault import Kept, Vault
from holdfast.agent.memory.verifier import STARTS_MAX, Reader, Verifier
from holdfast.storage.image import block_checksums
from holdfast.wire.slots import Record, Seat, Status, Wanted

SIZE = 20 * 2**20
"""Three blocks, the last one short."""


@pytest.fixture
def vault(tmp_path: Path) -> Iterator[Vault]:
    made = Vault(tmp_path, "node-0")
    made.open("job")
    yield made
    made.close()


@pytest.fixture
def verifier() -> Iterator[Verifier]:
    made = Verifier()
    yield made
    made.close()


def put(vault: Vault, slot: int, step: int, created_ns: int) -> Kept:
    room = asyncio.run(vault.grant(0, SIZE))
    assert not room.why
    seat = vault._seats[0]
    content = os.urandom(SIZE)
    seat.write(slot, Record(Status.WRITING, step, created_ns=created_ns))
    with seat.path(slot).open("r+b") as file:
        file.write(content)
    record = Record(Status.SEALED, step, 1, 0, 1, 1, SIZE, 7, 0, Wanted.NO, created_ns)
    seat.write(slot, record)
    return Kept(0, slot, record)


def right(vault: Vault, kept: Kept) -> list[int]:
    return block_checksums(memoryview(vault.path(kept).read_bytes()[:SIZE]))


def until(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 60.0
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_images_get_checksums_and_so_does_what_overwrites_them(vault: Vault, verifier: Verifier) -> None:
    images = [put(vault, slot, slot, 100 + slot) for slot in range(2)]
    assert vault.directory is not None and vault.checksums(images[0]) is None
    verifier.note(vault.directory)
    until(lambda: all(vault.checksums(image) is not None for image in images))
    assert [vault.checksums(image) for image in images] == [right(vault, image) for image in images]
    later = put(vault, 0, 2, 102)
    assert vault.checksums(later) is None, "those of another image"
    verifier.note(vault.directory)
    until(lambda: vault.checksums(later) is not None)
    assert vault.checksums(later) == right(vault, later)
    again = Vault(vault._root, "node-0")
    vault.close()
    again.open("job")
    assert [one.checksums for one in again.held()] == [tuple(right(again, kept)) for kept in again.kept()]
    again.close()


def test_an_image_that_is_overwritten_meanwhile_gets_none(vault: Vault, monkeypatch: pytest.MonkeyPatch) -> None:
    image = put(vault, 0, 1, 100)
    seat, looks = vault._seats[0], [0]
    looking = Seat.record

    def look(self: Seat, slot: int) -> Record:
        looks[0] += 1
        if looks[0] == 5:  # in the midst of it: the worker begins the next one
            seat.write(0, image.record._replace(status=Status.WRITING))
        return looking(self, slot)

    monkeypatch.setattr(Seat, "record", look)
    assert vault.directory is not None
    Reader(vault.directory).work_off()
    assert looks[0] >= 5 and vault.checksums(image) is None


def test_torn_checksums_are_none(vault: Vault) -> None:
    image = put(vault, 0, 1, 100)
    vault.note_checksums(image, right(vault, image))
    assert vault.checksums(image) == right(vault, image)
    path = vault.path(image).with_name("sums-0")
    whole = path.read_bytes()
    for damaged in (b"", whole[:-1], whole[:8], whole[:-4] + b"\0\0\0\0", bytes([whole[0] ^ 1]) + whole[1:]):
        path.write_bytes(damaged)
        assert vault.checksums(image) is None


def test_the_process_ends_with_who_started_it_and_its_end_hurts_nobody(vault: Vault, verifier: Verifier) -> None:
    put(vault, 0, 1, 100)
    assert vault.directory is not None
    verifier.note(vault.directory)
    process = verifier._process
    assert process is not None and process.stdin is not None
    until(lambda: vault.checksums(vault.kept()[0]) is not None)
    process.send_signal(signal.SIGSTOP)
    for _ in range(100_000):  # more than a pipe holds
        verifier.note(vault.directory)
    verifier.close()
    verifier.note(vault.directory)
    process = verifier._process
    assert process is not None and process.stdin is not None
    process.stdin.close()  # as the kernel does it for an agent that was killed
    assert process.wait(60.0) == 0


def test_one_that_is_killed_is_started_again_but_not_for_ever(vault: Vault, verifier: Verifier) -> None:
    assert vault.directory is not None
    for step in range(STARTS_MAX):
        image = put(vault, 0, step, 100 + step)
        verifier.note(vault.directory)
        until(lambda image=image: vault.checksums(image) is not None)  # type: ignore[misc]
        assert vault.checksums(image) == right(vault, image)
        assert verifier._process is not None
        verifier._process.kill()
        verifier._process.wait()
    verifier.note(vault.directory)
    assert verifier._process is None


def test_an_image_that_cannot_be_read_is_left_out_and_the_others_are_not(vault: Vault, verifier: Verifier) -> None:
    older, newer = (put(vault, slot, slot, 100 + slot) for slot in range(2))
    assert vault.directory is not None
    os.truncate(vault.path(newer), 0)
    (vault.directory / "seat-7").mkdir()
    (vault.directory / "seat-7" / "control").write_bytes(b"no page")
    verifier.note(vault.directory)
    until(lambda: vault.checksums(older) is not None)
    again = put(vault, 1, 2, 102)
    verifier.note(vault.directory)
    until(lambda: vault.checksums(again) is not None)
    assert vault.checksums(again) == right(vault, again)
