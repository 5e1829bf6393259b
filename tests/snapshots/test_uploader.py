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

from holdfast.core.image_info import ImageInfo
from holdfast.snapshots import uploader
from holdfast.snapshots.replica_store import ReplicaStore
from holdfast.snapshots.slot_file import ImageLock, SlotImage, SlotStatus, WantedSnapshot
from holdfast.snapshots.snapshot_store import SnapshotStore
from holdfast.snapshots.uploader import CheckpointUploader
from holdfast.state.partition import FilePart, load_parts, write_image
from holdfast.state.tracked import Tracked
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue
from holdfast.storage.checkpoint_writer import CheckpointWriter
from holdfast.storage.directory import DirectoryStore
from holdfast.storage.stores import open_store
from holdfast.wire.worker_messages import SnapshotSealed
from support.slot_records import checksums_of, slot_record


class Node:
    """An agent's snapshot store and uploader, with ranks that hold parts of a small model's state."""

    def __init__(self, directory: Path, name: str, url: Path | str, keep: str = "all", run: str = "") -> None:
        self.snapshot_store = SnapshotStore(directory / "memory", name)
        self.snapshot_store.open("job/7")
        self.published: list[tuple[int, str]] = []
        self.uploader = CheckpointUploader(
            self.snapshot_store, keep, lambda step, where: self.published.append((step, where))
        )
        self.uploader.open("job/7", str(url), run)

    async def put(self, local_rank: int, slot: int, step: int, part: int, shares: int, **changes: Any) -> None:
        """The image of a share, as a worker would leave it."""
        image = write_image(Tracked(model=model(step)).state(), shares, part)
        ready = await self.snapshot_store.allocate(local_rank, len(image))
        assert not ready.why
        page = self.snapshot_store._pages.get(local_rank)
        assert page is not None
        record = slot_record(
            SlotStatus.SEALED, step, 1, part, 1, shares, len(image), 3, 0, WantedSnapshot.YES, step + 1
        )
        lock = ImageLock(page.path(slot), is_writable=True)
        while not lock.acquire():
            await asyncio.sleep(0.001)  # while the last one is being read
        page.write(slot, record._replace(status=SlotStatus.WRITING))
        with page.path(slot).open("r+b") as file:
            file.write(image)
        page.write(slot, record._replace(**changes))
        lock.close()

    async def close(self) -> None:
        await self.uploader.close()
        self.snapshot_store.close()


def model(step: int) -> torch.nn.Module:
    return _linear(step)


def _linear(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Linear(64, 64)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60.0))


def checkpoints(url: Path) -> list[int]:
    """The steps, each of which is verified and loads as what it was."""
    catalogue = CheckpointCatalogue(open_store(str(url)))
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
    monkeypatch.setattr(uploader, "RESCUE_WAIT_S", 0.5)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for less than two parts."""
    if os.getuid() != 0:
        pytest.skip("mounts a file system")
    assignment = tmp_path / "small"
    assignment.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", assignment], check=True)
    yield assignment
    subprocess.run(["umount", "--lazy", assignment], check=True)


def test_the_parts_of_a_node_become_a_checkpoint(tmp_path: Path) -> None:
    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "store")
        told: list[Any] = []
        for local_rank in range(3):
            await node.put(local_rank, 0, 8, local_rank, 3)
        for local_rank in range(3):
            node.uploader.upload(local_rank, SnapshotSealed(8, True, {"loss": 0.5}, {"data": "24"}), told.append)
        await node.uploader.drain()
        assert told == ["", "", ""] and [step for step, _ in node.published] == [8] and node.uploader.lost == -1
        assert {kept.record.wanted for kept in node.snapshot_store.images()} == {WantedSnapshot.UPLOADING}
        assert all(image.checksums for image in node.snapshot_store.images())
        await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [8]
    about = CheckpointCatalogue(open_store(str(tmp_path / "store"))).open(8).about
    assert about.metrics == {"loss": 0.5} and about.notes["data"] == "24"
    assert (about.job_id, about.seed, about.shares) == ("job/7", 3, 3)


def test_a_part_that_comes_late_on_the_same_node_is_published_without_another_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one's look for the others is answered by the node itself, not by the clock."""
    monkeypatch.setattr(uploader, "RETRY_S_MIN", 3_600.0)

    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "store")
        told: list[Any] = []
        for local_rank in range(2):
            await node.put(local_rank, 0, 8, local_rank, 2)
        node.uploader.upload(0, SnapshotSealed(8, True), told.append)
        while not node.uploader._publishing:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)  # it has looked, and found one part of two
        node.uploader.upload(1, SnapshotSealed(8, True), told.append)
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
                node.uploader.upload(0, SnapshotSealed(step, True))
        await asyncio.gather(*(node.uploader.drain() for node in nodes))
        for node in nodes:
            assert node.uploader.newest is not None and node.uploader.newest.step == 10
            await node.close()

    run(work())
    assert 10 in checkpoints(tmp_path / "store")
    assert not CheckpointCatalogue(open_store(str(tmp_path / "store"))).list().damaged


def test_old_ones_go_as_the_policy_says(tmp_path: Path) -> None:
    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "store", keep="last:2")
        for step in range(1, 6):
            await node.put(0, step % 2, step, 0, 1)
            node.uploader.upload(0, SnapshotSealed(step, True))
            while len(node.published) < step:
                await asyncio.sleep(0.01)
        await node.uploader.drain()
        await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [4, 5]


def test_a_snapshot_that_was_overwritten_is_not_written(tmp_path: Path) -> None:
    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "store")
        told: list[Any] = []
        await node.put(0, 0, 8, 0, 1)
        (kept,) = node.snapshot_store.images()
        await node.put(0, 0, 10, 0, 1)
        await node.uploader._upload(kept, SnapshotSealed(8, True), told.append)
        assert "overwritten before it was read" in told[0]
        node.uploader.upload(0, SnapshotSealed(8, True), told.append)
        assert "overwritten before it was read" in told[1]
        await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == []
    assert not list((tmp_path / "store").glob(".step-8*")), "what will never be complete stays"


def test_a_node_whose_partner_is_gone_does_not_wait_for_it(tmp_path: Path) -> None:
    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "store")
        await node.put(0, 0, 8, 0, 2)
        node.uploader.upload(0, SnapshotSealed(8, True))
        await asyncio.wait_for(node.uploader.drain(), 10.0)
        assert node.published == [] and node.uploader.lost == -1, "its part is on storage: nothing of it is lost"
        late = Node(tmp_path, "b", tmp_path / "store")
        await late.put(0, 0, 8, 1, 2)
        late.uploader.upload(0, SnapshotSealed(8, True))
        await late.uploader.drain()
        assert [step for step, _ in late.published] == [8], "the last one publishes, however late"
        await node.close()
        await late.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [8]


# --- others read the same images


def test_copying_and_uploader_an_image_are_not_in_each_others_way(tmp_path: Path) -> None:
    """Whoever comes first, and while the other is still at it."""

    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "store")
        told: list[Any] = []
        await node.put(0, 0, 8, 0, 1)
        with node.snapshot_store.images()[0].reading() as content:
            assert content is not None
            assert [kept.record.wanted for kept in node.snapshot_store.images()] == [WantedSnapshot.YES], (
                "still not to be overwritten"
            )
        node.uploader.upload(0, SnapshotSealed(8, True), told.append)
        while len(told) < 1:
            await asyncio.sleep(0.01)
        await node.put(0, 1, 9, 0, 1)
        image = node.snapshot_store.images()[0]
        node.uploader.upload(0, SnapshotSealed(9, True), told.append)
        while len(told) < 2:
            await asyncio.sleep(0.01)
        with image.reading() as content:
            assert content is not None, "what is on storage may still be copied"
            await node.put(0, 0, 10, 0, 1)
            node.uploader.upload(0, SnapshotSealed(10, True), told.append)
        while len(told) < 3:
            await asyncio.sleep(0.01)
        assert told == ["", "", ""]
        await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [8, 9, 10]


def test_an_image_whose_storage_cannot_be_opened_does_not_keep_its_slot_for_ever(tmp_path: Path) -> None:
    async def work() -> None:
        node = Node(tmp_path, "a", "nowhere://bucket")
        told: list[Any] = []
        await node.put(0, 0, 8, 0, 1)
        node.uploader.upload(0, SnapshotSealed(8, True), told.append)
        await node.uploader.drain()
        assert told[0] and [kept.record.wanted for kept in node.snapshot_store.images()] == [WantedSnapshot.UPLOADING]
        await node.close()

    run(work())


def test_another_run_of_the_same_name_shares_no_part_with_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first died between its two parts of a step; the second, whose views count from one again, saves it too."""

    async def work() -> None:
        for name, ranks, first in (("one", [0], 999), ("two", [0, 1], 8)):
            monkeypatch.setitem(globals(), "model", lambda step, seed=first: _linear(seed if step == 8 else step))
            node = Node(tmp_path / name, "a", tmp_path / "store", run=name)
            for local_rank in range(2):
                await node.put(local_rank, 0, 8, local_rank, 2)
            for local_rank in ranks:
                node.uploader.upload(local_rank, SnapshotSealed(8, True))
            await node.uploader.drain()
            await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [8], "all of it is of the second"
    assert CheckpointCatalogue(open_store(str(tmp_path / "store"))).open(8).about.run == "two"


# --- rescue


def hold(replicas: ReplicaStore, node_id: str, step: int, part: int, shares: int) -> None:
    """A copy of another node's image."""
    image = bytes(write_image(Tracked(model=model(step)).state(), shares, part))
    label = ImageInfo(
        node_id=node_id,
        local_rank=0,
        part=part,
        shards=1,
        shares=shares,
        view=1,
        step=step,
        size_bytes=len(image),
        seed=3,
    )
    incoming = replicas.adopt(label)
    assert incoming is not None
    incoming.content[:] = image
    incoming.seal(checksums_of(image))
    incoming.close()


@pytest.mark.parametrize("is_alone", [False, True])
def test_what_a_lost_node_had_is_rescued_by_who_holds_it(tmp_path: Path, is_alone: bool) -> None:
    async def work() -> None:
        node, replicas = Node(tmp_path, "a", tmp_path / "store"), ReplicaStore(tmp_path / "replicas")
        for slot, step in enumerate((38, 39)):
            await node.put(0, slot, step, 0, 2)
            hold(replicas, "b", step, 1, 2)
        await node.put(0, 0, 40, 0, 2)  # not copied by b in time

        async def others() -> list[SlotImage]:
            return replicas.images()

        found = await node.uploader.rescue(is_alone, others)
        assert found is not None and found.step == 39 and node.uploader.lost == -1
        await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [39]


def test_what_was_whole_and_cannot_be_brought_to_storage_is_not_given_up(tmp_path: Path) -> None:
    """The other node is gone, and nobody has a copy: it may come back with what it has."""

    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "store")
        await node.put(0, 0, 38, 0, 2)
        await node.put(0, 1, 39, 0, 2)
        node.snapshot_store._pages[0].put(complete=38)
        assert await node.uploader.rescue(is_alone=False) is None and node.uploader.lost == 38
        await node.close()

    run(work())


@pytest.mark.parametrize(("dumped_by", "dumped", "lost"), [("now", 40, -1), ("now", 38, 39), ("before", 40, 39)])
def test_what_the_survivors_have_dumped_is_not_lost(tmp_path: Path, dumped_by: str, dumped: int, lost: int) -> None:
    """Workers write a dump themselves. An older one, or one of an earlier run, does not have this run's last steps."""

    async def work() -> None:
        survivor = Node(tmp_path / "dump", "a", tmp_path / "store", run=dumped_by)
        await survivor.put(0, 0, dumped, 0, 1)
        survivor.uploader.upload(0, SnapshotSealed(dumped, True))
        await survivor.uploader.drain()
        await survivor.close()
        node = Node(tmp_path, "a", tmp_path / "store", run="now")
        await node.put(0, 0, 39, 0, 2)  # the other part was of the lost node
        node.snapshot_store._pages[0].put(complete=39)
        found = await node.uploader.rescue(is_alone=True)
        assert (found.step if found else None) == (dumped if dumped_by == "now" else None)
        assert node.uploader.lost == lost
        await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [dumped]


def test_the_newest_that_is_whole_is_rescued(tmp_path: Path) -> None:
    """Of two steps in memory, the newer one is torn on one local_rank."""

    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "store")
        for local_rank in range(2):
            await node.put(local_rank, 0, 8, local_rank, 2)
            await node.put(local_rank, 1, 9, local_rank, 2, **({"status": SlotStatus.WRITING} if local_rank else {}))
        found = await node.uploader.rescue(is_alone=True)
        assert found is not None and found.step == 8 and node.uploader.lost == -1
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
        await nodes[1].put(0, 1, 9, 1, 2, status=SlotStatus.WRITING)
        await asyncio.gather(*(node.uploader.rescue(is_alone=False) for node in nodes))
        assert nodes[0].uploader.newest is not None and nodes[0].uploader.newest.step == 8
        for node in nodes:
            await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [8]


def test_what_is_on_storage_is_not_written_again(tmp_path: Path) -> None:
    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "store")
        await node.put(0, 0, 8, 0, 1)
        await node.put(0, 1, 9, 0, 1)
        node.uploader.upload(0, SnapshotSealed(9, True))
        await node.uploader.drain()
        await node.uploader.rescue(is_alone=True)
        assert [step for step, _ in node.published] == [9]
        await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [9]


def test_nothing_whole_is_nothing_rescued_and_nothing_lost(tmp_path: Path) -> None:
    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "store")
        await node.put(0, 0, 8, 0, 2)
        assert await node.uploader.rescue(is_alone=True) is None and node.uploader.lost == -1
        await node.close()

    run(work())
    assert not (tmp_path / "store").exists()


# --- storage that fails


def test_a_full_disk_is_said_and_freed_and_the_state_is_not_given_up(tmp_path: Path, small_disk: Path) -> None:
    async def work() -> None:
        node = Node(tmp_path, "a", small_disk / "store")
        told: list[Any] = []
        for local_rank in range(4):
            await node.put(local_rank, 0, 8, local_rank, 4)
        for local_rank in range(4):
            node.uploader.upload(local_rank, SnapshotSealed(8, True), told.append)
        await node.uploader.drain()
        assert len(told) == 4 and all(told) and any("No space left" in why for why in told)
        assert node.published == [] and node.uploader.lost == 8
        space = os.statvfs(small_disk)
        assert space.f_bfree > space.f_blocks // 2, "the parts that could be written still fill the disk"
        await node.close()

    run(work())


def test_a_place_that_may_not_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "file" / "store")
        told: list[Any] = []
        await node.put(0, 0, 8, 0, 1)
        node.uploader.upload(0, SnapshotSealed(8, True), told.append)
        assert await node.uploader.rescue(is_alone=True) is None
        assert "is not written" in told[0] and node.uploader.lost == 8
        await node.close()

    run(work())


def test_whatever_a_file_system_raises_is_told_to_who_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some raise what is neither ours nor the operating system's: in writing, in publishing, in tidying up."""

    def raise_something(*arguments: object, **more: Any) -> None:
        raise RuntimeError("the client has lost its session")

    async def work() -> None:
        for step, name in enumerate(("write_part", "publish", "abandon"), 1):
            node = Node(tmp_path / name, "a", tmp_path / "store")
            told: list[Any] = []
            await node.put(0, 0, step, 0, 1)
            with monkeypatch.context() as patch:
                patch.setattr(CheckpointWriter, name, raise_something)
                if name == "abandon":
                    patch.setattr(CheckpointWriter, "write_part", raise_something)
                node.uploader.upload(0, SnapshotSealed(step, True), told.append)
                await node.uploader.drain()
            assert len(told) == 1 and "the client has lost its session" in told[0] and node.uploader.lost == step
            await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == []


def test_a_slow_upload_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most every so often, however many blocks there are."""
    said: list[str] = []
    monkeypatch.setattr(uploader, "PROGRESS_EVERY_S", 0.05)
    log = lambda event, text: said.append(text) if event == "upload-progress" else None  # noqa: E731
    monkeypatch.setattr(uploader.log, "info", log, raising=False)
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
        node.uploader.upload(0, SnapshotSealed(8, True))
        await node.uploader.drain()
        await node.close()

    run(work())
    assert checkpoints(tmp_path / "store") == [8]
    assert 1 <= len(said) <= 7 and all("% of" in one and "MB/s" in one for one in said)


def test_two_threads_open_one_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both writers of the pool come to a new attempt at the same time."""
    together, opened = threading.Barrier(2), []
    begin = CheckpointUploader._begin

    def slow_begin(self: CheckpointUploader, *arguments: Any) -> Any:
        opened.append(arguments[0])
        return begin(self, *arguments)

    write = CheckpointUploader._write

    def both_write(self: CheckpointUploader, *arguments: Any) -> str:
        together.wait(10.0)
        return write(self, *arguments)

    monkeypatch.setattr(CheckpointUploader, "_begin", slow_begin)
    monkeypatch.setattr(CheckpointUploader, "_write", both_write)

    async def work() -> None:
        node = Node(tmp_path, "a", tmp_path / "store")
        for local_rank in range(2):
            await node.put(local_rank, 0, 8, local_rank, 2)
            node.uploader.upload(local_rank, SnapshotSealed(8, True))
        await node.uploader.drain()
        await node.close()

    run(work())
    assert len(opened) == 1 and checkpoints(tmp_path / "store") == [8]
