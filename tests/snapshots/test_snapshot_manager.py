"""Snapshot buffers belong to workers, not to local ranks: a worker that closes up stays where its images are."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.agent.reports import Reports
from holdfast.core.durability import SnapshotStats
from holdfast.snapshots import snapshot_manager
from holdfast.snapshots.slot_file import SlotPage, SlotStatus, WantedSnapshot
from holdfast.snapshots.snapshot_manager import SnapshotManager
from holdfast.state.partition import write_image
from holdfast.state.tracked import Tracked
from holdfast.wire.worker_messages import BuffersReady, CheckpointNotice, SnapshotSealed, SnapshotSettings
from support.slot_records import slot_record
from support.worker_groups import agent_config


class FakeWorker:
    """A worker, as far as its state goes."""

    def __init__(self, local_rank: int) -> None:
        self.local_rank: int | None = local_rank
        self.ended = self.dismissed = False
        self.told: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, message: Any) -> None:
        self.told.put_nowait(message)


async def buffers_for(manager: SnapshotManager, worker: FakeWorker) -> str:
    manager.allocate(worker, 64 * 1_024)
    ready = await worker.told.get()
    assert isinstance(ready, BuffersReady) and not ready.why
    return Path(ready.directory).name


def manager_in(directory: Path, say: Callable[[Any], None] = lambda event: None) -> SnapshotManager:
    manager = SnapshotManager(
        agent_config(directory, snapshot_dir=str(directory / "memory"), snapshots=SnapshotSettings(every=1)),
        Reports("node-0", lambda: "life", say),
    )
    manager.open("job", str(directory / "checkpoints"))
    return manager


def test_a_worker_that_closes_up_keeps_its_buffers_and_a_newcomer_gets_others(tmp_path: Path) -> None:
    async def shrink_and_grow() -> None:
        manager = manager_in(tmp_path)
        first, lost, last = workers = [FakeWorker(local_rank) for local_rank in range(3)]
        assert [await buffers_for(manager, one) for one in workers] == ["rank-0", "rank-1", "rank-2"]
        lost.ended = True
        last.local_rank = 1
        assert [await buffers_for(manager, one) for one in (first, last)] == ["rank-0", "rank-2"]
        newcomer = FakeWorker(2)
        assert await buffers_for(manager, newcomer) == "rank-1"
        newcomer.dismissed, newcomer.local_rank = True, None
        assert await buffers_for(manager, FakeWorker(2)) == "rank-1"
        await manager.close()

    asyncio.run(asyncio.wait_for(shrink_and_grow(), 60.0))


def test_a_checkpoint_is_made_of_the_image_in_the_workers_own_slot_file(tmp_path: Path) -> None:
    async def seal() -> None:
        manager = manager_in(tmp_path)
        lost, closing_up = FakeWorker(0), FakeWorker(1)
        for one in (lost, closing_up):
            await buffers_for(manager, one)
        lost.ended, closing_up.local_rank = True, 0
        page = dict(manager.snapshot_store.pages())[1]
        image = write_image(Tracked(model=torch.nn.Linear(2, 2)).state(), 1, 0)
        with page.path(0).open("r+b") as file:
            file.write(image)
        page.write(0, slot_record(SlotStatus.SEALED, 7, view=2, size_bytes=len(image)))
        manager.sealed(closing_up, SnapshotSealed(7, True, {}, {}, url=str(tmp_path / "elsewhere")))
        written = await closing_up.told.get()
        assert isinstance(written, CheckpointNotice) and not written.why
        assert (tmp_path / "elsewhere" / "step-7").is_dir()
        await manager.close()

    asyncio.run(asyncio.wait_for(seal(), 60.0))


def test_what_a_dead_worker_knew_is_known_to_its_agent(tmp_path: Path) -> None:
    async def look() -> None:
        manager = manager_in(tmp_path)
        for local_rank in range(2):
            await buffers_for(manager, FakeWorker(local_rank))
        pages: list[SlotPage] = [page for _, page in manager.snapshot_store.pages()]
        assert manager.snapshot_store.complete_version() == -1
        for page, step in zip(pages, (4, 3), strict=True):
            page.write(0, slot_record(SlotStatus.SEALED, step, view=2, size_bytes=1))
            page.put(complete=step)
        assert manager.snapshot_store.complete_version() == pages[0].complete_version() > pages[1].complete_version()
        await manager.close()

    asyncio.run(asyncio.wait_for(look(), 60.0))


def test_a_partner_that_does_not_get_on_is_waited_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again when it has got on."""
    monkeypatch.setattr(snapshot_manager, "COPIES_PATIENCE_S", 100.0)

    class Copies:
        partners = 1
        safe: tuple[int, int] | None = None

        def images(self) -> list[Any]:
            return []

        def safe_version(self, local_rank: int) -> tuple[int, int] | None:
            return self.safe

        def rebuildable(self) -> list[Any]:
            return []

        async def close(self, is_preserved: bool = False) -> None: ...

    async def work() -> None:
        manager, copies = manager_in(tmp_path), Copies()
        manager.replication = copies  # type: ignore[assignment]
        await buffers_for(manager, FakeWorker(0))
        page = manager.snapshot_store._pages[0]

        def waits_for(step: int, age_s: float) -> bool:
            created_ns = time.time_ns() - int(age_s * 1e9)
            page.write(step % 2, slot_record(SlotStatus.SEALED, step, 1, size_bytes=8, created_ns=created_ns))
            manager.report()
            return bool(page.get("partners"))

        copies.partners = 0
        assert not waits_for(1, 200.0), "there is nobody to wait for"
        copies.partners = 1
        assert waits_for(1, 0.0), "a new one is waited for"
        assert not waits_for(1, 200.0), "but not for ever"
        assert not waits_for(2, 0.0) and not waits_for(3, 0.0), "nor the next ones at all"
        copies.safe = (1, 2)
        assert waits_for(4, 0.0), "it gets on again"
        assert not waits_for(4, 200.0) and not waits_for(5, 0.0)
        copies.safe = (1, 5)
        assert waits_for(6, 0.0)
        await manager.close()

    asyncio.run(work())


def test_two_images_of_one_step_have_an_answer_each(tmp_path: Path) -> None:
    """Or who waits for the second waits for ever, and its slot is never free again."""

    async def seal_twice() -> None:
        manager, saving = manager_in(tmp_path), FakeWorker(0)
        await buffers_for(manager, saving)
        page = dict(manager.snapshot_store.pages())[0]
        image = write_image(Tracked(model=torch.nn.Linear(2, 2)).state(), 1, 0)
        for slot in range(2):
            with page.path(slot).open("r+b") as file:
                file.write(image)
            record = slot_record(
                SlotStatus.SEALED, 5, view=1, size_bytes=len(image), wanted=WantedSnapshot.YES, created_ns=100 + slot
            )
            page.write(slot, record)
            told = SnapshotSealed(5, True, url=str(tmp_path / "elsewhere"), created_ns=100 + slot)
            manager.sealed(saving, told)
        answers = {(written.created_ns, written.why) for written in [await saving.told.get() for _ in range(2)]}
        assert answers == {(100, ""), (101, "")}
        assert {record.wanted for record in page.sealed().values()} == {WantedSnapshot.UPLOADING}
        await manager.close()

    asyncio.run(asyncio.wait_for(seal_twice(), 60.0))


def test_the_master_hears_how_snapshots_are_made(tmp_path: Path) -> None:
    async def say() -> None:
        said: list[Any] = []
        manager = manager_in(tmp_path, said.append)
        for local_rank in range(2):
            await buffers_for(manager, FakeWorker(local_rank))
        for number, page in manager.snapshot_store.pages():
            page.write(0, slot_record(SlotStatus.SEALED, 9, size_bytes=1))
            cost_ns = 20_000_000 * (1 + number)
            page.put(every=3, cost_ns=cost_ns, step_ns=500_000_000, taken=5, skipped=number, spoiled=1)
        manager.report()
        (event,) = said
        assert event.snapshot_stats == SnapshotStats(3, True, 0.5, 0.04, 10, 1, 2)
        await manager.close()

    asyncio.run(asyncio.wait_for(say(), 60.0))


@pytest.mark.parametrize("is_success", [True, False])
def test_an_agent_that_waits_for_storage_at_the_end_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_success: bool
) -> None:
    """Nothing ends a process that writes to a disk that does not answer, and its workers are gone."""
    monkeypatch.setattr(snapshot_manager, "WAIT_TOLD_EVERY_S", 0.01)
    caplog.set_level("INFO", logger="holdfast")

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if vars(record)["holdfast_event"] == "storage-slow"]

    async def wait_for_storage(*_: object) -> None:
        while len(told()) < 2:
            await asyncio.sleep(0)

    async def end() -> None:
        manager = manager_in(tmp_path)
        monkeypatch.setattr(manager.uploader, "drain" if is_success else "rescue", wait_for_storage)
        await manager.finish(is_success=is_success, is_alone=True)
        before = len(told())
        await asyncio.sleep(0.05)
        assert len(told()) == before
        await manager.close()

    asyncio.run(asyncio.wait_for(end(), 60.0))
    assert str(tmp_path / "checkpoints") in told()[0]
