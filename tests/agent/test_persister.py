"""Snapshots that become checkpoints: by one agent, by several that do not speak, on storage that fails."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.agent.memory import persister as persisting
from holdfast.agent.memory import pieces
from holdfast.agent.memory.persister import Persister
from holdfast.agent.memory.pieces import Piece, guest, own
from holdfast.agent.memory.vault import Vault
from holdfast.agent.memory.vault_images import VaultImages
from holdfast.agent.replicas.blocks import checksums_of
from holdfast.agent.replicas.guests import Guests
from holdfast.state.parts import FilePart, load_parts, write_image
from holdfast.state.tracked import Tracked
from holdfast.storage.catalogue import Catalogue
from holdfast.storage.directory import DirectoryStore
from holdfast.storage.stores import open_store
from holdfast.wire.bulk import Label
from holdfast.wire.session import Sealed
from holdfast.wire.slots import ImageLock, Record, Status, Wanted


class Node:
    """An agent's vault and persister, with seats that hold parts of a small model's state."""

    def __init__(self, directory: Path, name: str, url: Path | str, keep: str = "all", run: str = "") -> None:
        self.vault = Vault(directory / "memory", name)
        self.vault.open("job/7")
        self.published: list[tuple[int, str]] = []
        self.persister = Persister(self.vault, keep, lambda step, where: self.published.append((step, where)))
        self.persister.open("job/7", str(url), run)

    async def put(self, seat: int, slot: int, step: int, part: int, shares: int, **changes: Any) -> None:
        """The image of a share, as a worker would leave it."""
        image = write_image(Tracked(model=model(step)).state(), shares, part)
        room = await self.vault.grant(seat, len(image))
        assert not room.why
        page = self.vault._seats.get(seat)
        assert page is not None
        record = Record(Status.SEALED, step, 1, part, 1, shares, len(image), 3, 0, Wanted.YES, step + 1)
        lock = ImageLock(page.path(slot), is_writable=True)
        while not lock.take():
            await asyncio.sleep(0.001)  # while the last one is being read
        page.write(slot, record._replace(status=Status.WRITING))
        with page.path(slot).open("r+b") as file:
            file.write(image)
        page.write(slot, record._replace(**changes))
        lock.close()

    async def close(self) -> None:
        await self.persister.close()
        self.vault.close()


def model(step: int) -> torch.nn.Module:
    return _linear(step)


def _linear(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(64, 64)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60.0))


def checkpoints(url: Path) -> list[int]:
    """The steps, each of which is verified and loads as what it was."""
    catalogue = Catalogue(open_store(str(url)))
    for found in catalogue.list().found:
        catalogue.verify(found)
        fresh = Tracked(model=model(999))
        parts = {part.number: FilePart(url / found.name(part)) for part in found.manifest.parts}
        load_parts(parts, found.about.shards, found.about.shares, fresh)
        for mine, its in zip(fresh.state().tensors, Tracked(model=model(found.step)).state().tensors, strict=True):
            assert torch.equal(mine, its)
        for part in parts.values():
            part.close()
    return sorted(found.step for found in catalogue.list().found)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persisting, "RESCUE_WAIT_S", 0.5)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for less than two parts."""
    if os.getuid() != 0:
        pytest.skip("mounts a file system")
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", place], check=True)
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def test_the_parts_of_a_node_become_a_checkpoint(tmp_path: Path) -> None:
    async def work() -> None:
        node, told = Node(tmp_path, "a", tmp_path / "store"), []
        for seat in range(3):
            await node.put(seat, 0, 8, seat, 3)
        for seat in range(3):
            node.persister.wanted(seat, Sealed(8, True, {"loss": 0.5}, {"data": "24"}), told.append)
        await node.persister.drain()
        assert told == ["", "", ""] and [step for step, _ in node.published] == [8] and node.persister.lost == -1
        assert {kept.record.wanted for kept in node.vault.kept()} == {Wanted.TAKEN}
        assert all(held.checksums for held in node.vault.held())
        await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [8]
    about = Catalogue(open_store(str(tmp_path / "store"))).open(8).about
    assert about.metrics == {"loss": 0.5} and about.notes["data"] == "24"
    assert (about.job_id, about.seed, about.shares) == ("job/7", 3, 3)


def test_a_part_that_comes_late_on_the_same_node_is_published_without_another_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's look for the others is answered by the node itself, not by the clock."""
    monkeypatch.setattr(persisting, "RETRY_S_MIN", 3_600.0)

    async def work() -> None:
        node, told = Node(tmp_path, "a", tmp_path / "store"), []
        for seat in range(2):
            await node.put(seat, 0, 8, seat, 2)
        node.persister.wanted(0, Sealed(8, True), told.append)
        while not node.persister._publishing:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # it has looked, and found one part of two
        node.persister.wanted(1, Sealed(8, True), told.append)
        while len(told) < 2:
            await asyncio.sleep(0.01)
        assert told == ["", ""]
        await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [8]


def test_two_agents_race_to_publish(tmp_path: Path) -> None:
    """Many times, and each pair publishes once, whoever is last."""

    async def work() -> None:
        nodes = [Node(tmp_path, name, tmp_path / "store") for name in "ab"]
        for step in range(1, 11):
            for part, node in enumerate(nodes):
                await node.put(0, step % 2, step, part, 2)
                node.persister.wanted(0, Sealed(step, True))
        await asyncio.gather(*(node.persister.drain() for node in nodes))
        for node in nodes:
            assert node.persister.newest is not None and node.persister.newest.step == 10
            await node.close()

    run(work())
    assert 10 in checkpoints(tmp_path / "store")
    assert not Catalogue(open_store(str(tmp_path / "store"))).list().damaged


def test_old_ones_go_as_the_policy_says(tmp_path: Path) -> None:
    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "store", keep="last:2")
        for step in range(1, 6):
            await node.put(0, step % 2, step, 0, 1)
            node.persister.wanted(0, Sealed(step, True))
            while len(node.published) < step:
                await asyncio.sleep(0.01)
        await node.persister.drain()
        await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [4, 5]


def test_a_snapshot_that_was_overwritten_is_not_written(tmp_path: Path) -> None:
    async def work() -> None:
        node, told = Node(tmp_path, "a", tmp_path / "store"), []
        await node.put(0, 0, 8, 0, 1)
        (kept,) = node.vault.kept()
        await node.put(0, 0, 10, 0, 1)
        await node.persister._persist(own(node.vault, kept), Sealed(8, True), told.append)
        assert "overwritten before it was read" in told[0]
        node.persister.wanted(0, Sealed(8, True), told.append)
        assert "not there any more" in told[1]
        await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == []
    assert not list((tmp_path / "store").glob(".step-8*")), "what will never be complete stays"


def test_a_node_whose_partner_is_gone_does_not_wait_for_it(tmp_path: Path) -> None:
    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "store")
        await node.put(0, 0, 8, 0, 2)
        node.persister.wanted(0, Sealed(8, True))
        await asyncio.wait_for(node.persister.drain(), 10.0)
        assert node.published == [] and node.persister.lost == -1, "its part is on storage: nothing of it is lost"
        late = Node(tmp_path, "b", tmp_path / "store")
        await late.put(0, 0, 8, 1, 2)
        late.persister.wanted(0, Sealed(8, True))
        await late.persister.drain()
        assert [step for step, _ in late.published] == [8], "the last one publishes, however late"
        await node.close()
        await late.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [8]


# --- others read the same images


def test_copying_and_persisting_an_image_are_not_in_each_others_way(tmp_path: Path) -> None:
    """Whoever comes first, and while the other is still at it."""

    async def work() -> None:
        node, told = Node(tmp_path, "a", tmp_path / "store"), []
        images = VaultImages(node.vault)
        await node.put(0, 0, 8, 0, 1)
        with images.newest(0).pinned() as content:
            assert content is not None
            assert [kept.record.wanted for kept in node.vault.kept()] == [Wanted.YES], "still not to be overwritten"
        node.persister.wanted(0, Sealed(8, True), told.append)
        while len(told) < 1:
            await asyncio.sleep(0.01)
        await node.put(0, 1, 9, 0, 1)
        image = images.newest(0)
        node.persister.wanted(0, Sealed(9, True), told.append)
        while len(told) < 2:
            await asyncio.sleep(0.01)
        with image.pinned() as content:
            assert content is not None, "what is on storage may still be copied"
            await node.put(0, 0, 10, 0, 1)
            node.persister.wanted(0, Sealed(10, True), told.append)
        while len(told) < 3:
            await asyncio.sleep(0.01)
        assert told == ["", "", ""]
        await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [8, 9, 10]


def test_an_image_whose_storage_cannot_be_opened_does_not_keep_its_slot_for_ever(tmp_path: Path) -> None:
    async def work() -> None:
        node, told = Node(tmp_path, "a", "nowhere://bucket"), []
        await node.put(0, 0, 8, 0, 1)
        node.persister.wanted(0, Sealed(8, True), told.append)
        await node.persister.drain()
        assert told[0] and [kept.record.wanted for kept in node.vault.kept()] == [Wanted.TAKEN]
        await node.close()

    run(work())


def test_another_run_of_the_same_name_shares_no_part_with_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first died between its two parts of a step; the second, whose views count from one again, saves it too."""

    async def work() -> None:
        for name, seats, first in (("one", [0], 999), ("two", [0, 1], 8)):
            monkeypatch.setitem(globals(), "model", lambda step, seed=first: _linear(seed if step == 8 else step))
            node = Node(tmp_path / name, "a", tmp_path / "store", run=name)
            for seat in range(2):
                await node.put(seat, 0, 8, seat, 2)
            for seat in seats:
                node.persister.wanted(seat, Sealed(8, True))
            await node.persister.drain()
            await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [8], "all of it is of the second"
    assert Catalogue(open_store(str(tmp_path / "store"))).open(8).about.run == "two"


# --- rescue


def hold(guests: Guests, node_id: str, step: int, part: int, shares: int) -> None:
    """A copy of another node's image."""
    image = bytes(write_image(Tracked(model=model(step)).state(), shares, part))
    label = Label(
        node_id=node_id, seat=0, part=part, shards=1, shares=shares, view=1, step=step, size_bytes=len(image), seed=3
    )
    incoming = guests.adopt(label)
    assert incoming is not None
    incoming.content[:] = image
    incoming.seal(checksums_of(memoryview(image)))
    incoming.abandon()


@pytest.mark.parametrize("is_alone", [False, True])
def test_what_a_lost_node_had_is_rescued_by_who_holds_it(tmp_path: Path, is_alone: bool) -> None:
    async def work() -> None:
        node, guests = Node(tmp_path, "a", tmp_path / "store"), Guests(tmp_path / "guests")
        for slot, step in enumerate((38, 39)):
            await node.put(0, slot, step, 0, 2)
            hold(guests, "b", step, 1, 2)
        await node.put(0, 0, 40, 0, 2)  # not copied by b in time

        async def others() -> list[Piece]:
            return [guest(guests, held) for held in guests.held()]

        found = await node.persister.rescue(is_alone, others)
        assert found is not None and found.step == 39 and node.persister.lost == -1
        await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [39]


def test_what_was_whole_and_cannot_be_brought_to_storage_is_not_given_up(tmp_path: Path) -> None:
    """The other node is gone, and nobody has a copy: it may come back with what it has."""

    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "store")
        await node.put(0, 0, 38, 0, 2)
        await node.put(0, 1, 39, 0, 2)
        node.vault._seats[0].put(whole=38)
        assert await node.persister.rescue(is_alone=False) is None and node.persister.lost == 38
        await node.close()

    run(work())


def test_the_newest_that_is_whole_is_rescued(tmp_path: Path) -> None:
    """Of two steps in memory, the newer one is torn on one seat."""

    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "store")
        for seat in range(2):
            await node.put(seat, 0, 8, seat, 2)
            await node.put(seat, 1, 9, seat, 2, **({"status": Status.WRITING} if seat else {}))
        found = await node.persister.rescue(is_alone=True)
        assert found is not None and found.step == 8 and node.persister.lost == -1
        await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [8]


def test_several_nodes_rescue_what_is_whole_on_all(tmp_path: Path) -> None:
    """One has both steps, of another the newer one is torn: it has only the older to offer, and need not wait for the
    first to find out."""

    async def work() -> None:
        nodes = [Node(tmp_path, name, tmp_path / "store") for name in "ab"]
        for part, node in enumerate(nodes):
            await node.put(0, 0, 8, part, 2)
        await nodes[0].put(0, 1, 9, 0, 2)
        await nodes[1].put(0, 1, 9, 1, 2, status=Status.WRITING)
        await asyncio.gather(*(node.persister.rescue(is_alone=False) for node in nodes))
        assert nodes[0].persister.newest is not None and nodes[0].persister.newest.step == 8
        for node in nodes:
            await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [8]


def test_what_is_on_storage_is_not_written_again(tmp_path: Path) -> None:
    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "store")
        await node.put(0, 0, 8, 0, 1)
        await node.put(0, 1, 9, 0, 1)
        node.persister.wanted(0, Sealed(9, True))
        await node.persister.drain()
        await node.persister.rescue(is_alone=True)
        assert [step for step, _ in node.published] == [9]
        await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [9]


def test_nothing_whole_is_nothing_rescued_and_nothing_lost(tmp_path: Path) -> None:
    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "store")
        await node.put(0, 0, 8, 0, 2)
        assert await node.persister.rescue(is_alone=True) is None and node.persister.lost == -1
        await node.close()

    run(work())
    assert not (tmp_path / "store").exists()


# --- storage that fails


def test_a_full_disk_is_said_and_freed_and_the_state_is_not_given_up(tmp_path: Path, small_disk: Path) -> None:
    async def work() -> None:
        node, told = Node(tmp_path, "a", small_disk / "store"), []
        for seat in range(4):
            await node.put(seat, 0, 8, seat, 4)
        for seat in range(4):
            node.persister.wanted(seat, Sealed(8, True), told.append)
        await node.persister.drain()
        assert len(told) == 4 and all(told) and any("No space left" in why for why in told)
        assert node.published == [] and node.persister.lost == 8
        space = os.statvfs(small_disk)
        assert space.f_bfree > space.f_blocks // 2, "the parts that could be written still fill the disk"
        await node.close()

    run(work())


def test_a_place_that_may_not_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def work() -> None:
        node, told = Node(tmp_path, "a", tmp_path / "file" / "store"), []
        await node.put(0, 0, 8, 0, 1)
        node.persister.wanted(0, Sealed(8, True), told.append)
        assert await node.persister.rescue(is_alone=True) is None
        assert "is not written" in told[0] and node.persister.lost == 8
        await node.close()

    run(work())


def test_whatever_a_file_system_raises_is_told_to_who_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some raise what is neither ours nor the operating system's: in writing, in publishing, in tidying up."""

    def raise_something(*arguments: object, **more: object) -> None:
        raise RuntimeError("the client has lost its session")

    async def work() -> None:
        for step, name in enumerate(("write_part", "publish", "abandon"), 1):
            node, told = Node(tmp_path / name, "a", tmp_path / "store"), []
            await node.put(0, 0, step, 0, 1)
            with monkeypatch.context() as patch:
                patch.setattr(persisting.Writing, name, raise_something)
                if name == "abandon":
                    patch.setattr(persisting.Writing, "write_part", raise_something)
                node.persister.wanted(0, Sealed(step, True), told.append)
                await node.persister.drain()
            assert len(told) == 1 and "the client has lost its session" in told[0] and node.persister.lost == step
            await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == []


def test_a_slow_upload_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most every so often, however many blocks there are."""
    said: list[str] = []
    monkeypatch.setattr(pieces, "SAY_PROGRESS_S", 0.05)
    monkeypatch.setattr(pieces.log, "info", said.append, raising=False)
    put = DirectoryStore.put

    def slow_put(self: DirectoryStore, name: str, blocks: Any, size_bytes: int, on_progress: Any = None) -> None:
        put(self, name, blocks, size_bytes, on_progress)
        for percent in range(0, 101, 10):
            time.sleep(0.03)
            on_progress(size_bytes * percent // 100, size_bytes)

    monkeypatch.setattr(DirectoryStore, "put", slow_put)

    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "store")
        await node.put(0, 0, 8, 0, 1)
        node.persister.wanted(0, Sealed(8, True))
        await node.persister.drain()
        await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [8]
    assert 1 <= len(said) <= 7 and all("% of" in one and "MB/s" in one for one in said)


def test_two_threads_open_one_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both writers of the pool come to a new attempt at the same time."""
    together, opened = threading.Barrier(2), []
    begin = Persister._begin

    def slow_begin(self: Persister, *arguments: Any) -> Any:
        opened.append(arguments[0])
        return begin(self, *arguments)

    write = Persister._write

    def both_write(self: Persister, *arguments: Any) -> str:
        together.wait(10.0)
        return write(self, *arguments)

    monkeypatch.setattr(Persister, "_begin", slow_begin)
    monkeypatch.setattr(Persister, "_write", both_write)

    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "store")
        for seat in range(2):
            await node.put(seat, 0, 8, seat, 2)
            node.persister.wanted(seat, Sealed(8, True))
        await node.persister.drain()
        await node.close()

    run(work())
    assert len(opened) == 1 and checkpoints(tmp_path / "store") == [8]
