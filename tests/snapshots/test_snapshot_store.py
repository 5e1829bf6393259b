"""A node's memory of its workers' states: its allocation, its owners, what is found again, what is cleared away."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.core.image_info import ImageInfo
from holdfast.core.orders import Peer
from holdfast.snapshots import slot_file
from holdfast.snapshots import snapshot_store as snapshot_store_module
from holdfast.snapshots.directories import ORPHAN_AFTER_S, directory_name, remove_orphans
from holdfast.snapshots.replication import Replication
from holdfast.snapshots.replicator import NoImages
from holdfast.snapshots.slot_file import ImageLock, SlotRecord, SlotStatus, WantedSnapshot
from holdfast.snapshots.snapshot_store import SnapshotStore
from holdfast.util.blocks import pack_checksums, unpack_checksums
from holdfast.util.cgroups import Headroom
from support.slot_records import changed, checksums_of, slot_record
from support.worker_groups import agent_config, serve

PAGE = 4_096


def opened(root: Path, node_id: str = "node-0", job_id: str = "job", *, is_resumable: bool = True) -> SnapshotStore:
    snapshot_store = SnapshotStore(root, node_id, is_resumable=is_resumable)
    snapshot_store.open(job_id)
    return snapshot_store


def put(snapshot_store: SnapshotStore, local_rank: int, slot: int, step: int, **changes: int) -> SlotRecord:
    """An image of one page, as a worker would leave it."""
    ready = asyncio.run(snapshot_store.allocate(local_rank, PAGE))
    assert not ready.why
    page = snapshot_store._pages.get(local_rank)
    assert page is not None
    page.path(slot).write_bytes(bytes([step]) * PAGE)
    record = slot_record(SlotStatus.SEALED, step, 1, local_rank, 1, 2, PAGE, 7, 0, WantedSnapshot.NO, step)
    status = SlotStatus(changes.pop("status", record.status))
    record = changed(record, **changes)._replace(status=status)
    page.write(slot, record)
    return record


def test_memory_for_two_images(tmp_path: Path) -> None:
    snapshot_store = opened(tmp_path)
    ready = asyncio.run(snapshot_store.allocate(3, PAGE + 1))
    assert (ready.size_bytes, ready.why) == (2 * PAGE, "")
    files = {path.name: path.stat() for path in Path(ready.directory).iterdir()}
    sizes = {name: stat.st_size for name, stat in files.items()}
    assert sizes == {"control": PAGE, "image-0": 2 * PAGE, "image-1": 2 * PAGE}
    assert all(stat.st_mode & 0o77 == 0 for stat in files.values()), "others can read the state"
    assert files["image-0"].st_blocks * 512 >= 2 * PAGE, "its pages are not there yet"
    record = put(snapshot_store, 3, 0, 5)
    larger = asyncio.run(snapshot_store.allocate(3, 3 * PAGE))
    assert larger.size_bytes == 3 * PAGE and [kept.record for kept in snapshot_store.images()] == [record], (
        "what it held is gone"
    )
    assert asyncio.run(snapshot_store.allocate(3, PAGE)).size_bytes == 3 * PAGE, "memory is not taken back"
    snapshot_store.close()


def test_too_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot_store = opened(tmp_path)
    left = Headroom(snapshot_store_module.MEMORY_RESERVE_BYTES + 4 * PAGE, "within the limit of cgroup /pod, 4096 MiB")
    monkeypatch.setattr(slot_file, "memory_headroom", lambda: left)
    assert not asyncio.run(snapshot_store.allocate(0, 2 * PAGE)).why
    refused = asyncio.run(snapshot_store.allocate(1, 2 * PAGE + 1))
    assert refused.directory == "" and "--snapshots off" in refused.why
    assert "0 MiB are free within the limit of cgroup /pod, 4096 MiB" in refused.why
    assert not list((tmp_path / "job" / "node-0").glob("rank-1/image-*"))
    snapshot_store.close()
    closed = asyncio.run(SnapshotStore(tmp_path, "other").allocate(0, PAGE))
    assert closed.why == "this agent has no place for snapshots"


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")
def test_a_file_system_that_is_full(tmp_path: Path) -> None:
    root = tmp_path / "small"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", root], check=True)
    try:
        snapshot_store = opened(root)
        assert "MiB are free" in asyncio.run(snapshot_store.allocate(0, 64 * PAGE)).why
        assert not asyncio.run(snapshot_store.allocate(0, 2 * PAGE)).why
        snapshot_store.remove()
    finally:
        subprocess.run(["umount", root], check=True)


def test_a_place_that_cannot_be_made_is_said_and_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    snapshot_store = opened(tmp_path / "file")
    assert not snapshot_store.is_open and asyncio.run(snapshot_store.allocate(0, PAGE)).why
    assert snapshot_store.images() == []
    snapshot_store.remove()


def test_the_next_life_of_an_agent_finds_what_the_last_one_left(tmp_path: Path) -> None:
    first = opened(tmp_path)
    torn = SlotStatus.WRITING
    records = [put(first, 0, 0, 8), put(first, 0, 1, 9), put(first, 1, 0, 9, status=torn), put(first, 1, 1, 8)]
    first.close()
    second = opened(tmp_path)
    assert [(k.info.local_rank, k.slot, k.record) for k in second.images()] == [
        (0, 1, records[1]),
        (0, 0, records[0]),
        (1, 1, records[3]),
    ]
    assert [(h.info.step, h.info.part, h.info.view, h.info.size_bytes, h.info.seed) for h in second.images()] == [
        (9, 0, 1, PAGE, 7),
        (8, 0, 1, PAGE, 7),
        (8, 1, 1, PAGE, 7),
    ]
    assert second.images()[0].path.read_bytes() == bytes([9]) * PAGE
    second.close()
    for other in (opened(tmp_path, node_id="node-1"), opened(tmp_path, job_id="another")):
        assert other.images() == []
        other.remove()
    assert len(list(tmp_path.rglob("image-*"))) == 4


def test_an_agent_that_lives_is_not_robbed(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal\n"
        "from holdfast.snapshots.snapshot_store import SnapshotStore\n"
        f"store = SnapshotStore(pathlib.Path({str(tmp_path)!r}), 'node-0')\n"
        "store.open('job')\n"
        "print('open', flush=True)\n"
        "signal.pause()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        assert not opened(tmp_path).is_open
    finally:
        process.kill()
        process.communicate()
    after = opened(tmp_path)
    assert after.is_open
    after.remove()
    assert not list(tmp_path.rglob("*"))


def test_what_is_taken_to_storage_is_read_by_others_too_and_nobody_overwrites_it(tmp_path: Path) -> None:
    snapshot_store = opened(tmp_path)
    put(snapshot_store, 0, 0, 8, wanted=WantedSnapshot.YES)
    (kept,) = snapshot_store.images()
    with kept.reading() as memory:
        assert memory is not None and snapshot_store.images() == [kept], "who only reads it leaves it wanted"
    with kept.claimed() as memory, kept.reading() as same:
        assert same is not None and same[:] == bytes([8]) * PAGE
        assert memory is not None and memory[:] == bytes([8]) * PAGE
        local_rank = snapshot_store._pages.get(0)
        assert local_rank is not None and local_rank.record(0).wanted == WantedSnapshot.UPLOADING
        writer = ImageLock(local_rank.path(0), is_writable=True)
        assert not writer.acquire()
        writer.close()
    with kept.reading() as memory:
        assert memory is not None, "it is the same image, whatever is wanted of it"
    put(snapshot_store, 0, 0, 9)
    with kept.reading() as memory:
        assert memory is None, "it is not what was expected any more"
    snapshot_store.close()


def test_two_who_have_read_an_image_note_its_checksums_at_once(tmp_path: Path) -> None:
    snapshot_store = opened(tmp_path)
    put(snapshot_store, 0, 0, 8)
    (kept,) = snapshot_store.images()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: kept.record_checksums([7]), range(500)))
    assert kept.checksums == pack_checksums([7])
    assert not list(tmp_path.rglob("details-0.*")), "nothing is left over"
    snapshot_store.close()


def test_checksums_go_with_the_image_they_are_of(tmp_path: Path) -> None:
    snapshot_store = opened(tmp_path)
    put(snapshot_store, 0, 0, 8)
    (kept,) = snapshot_store.images()
    checksums = checksums_of(bytes([8]) * PAGE)
    kept.record_checksums(unpack_checksums(checksums))
    assert snapshot_store.images()[0].stored.info.checksums == checksums
    put(snapshot_store, 0, 0, 9)
    assert snapshot_store.images()[0].stored.info.checksums == b""
    snapshot_store.close()


def test_removing_leaves_nothing_but_what_others_own(tmp_path: Path) -> None:
    root = tmp_path / "root"
    mine, other = opened(root), opened(root, node_id="node-1")
    put(mine, 0, 0, 8)
    put(other, 0, 0, 8)
    mine.remove()
    assert not (root / "job" / "node-0").exists() and len(other.images()) == 1
    other.remove()
    assert not root.exists()


def age(directory: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(directory / "owner", (then, then))


def test_orphans_are_cleared_when_they_are_old_and_nobodys(tmp_path: Path) -> None:
    for name in ("young", "old", "owned"):
        snapshot_store = opened(tmp_path, node_id=name)
        put(snapshot_store, 0, 0, 8)
        if name != "owned":
            snapshot_store.close()
        if name != "young":
            age(tmp_path / "job" / name, 2 * ORPHAN_AFTER_S)
    remove_orphans(tmp_path)
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == ["owned", "young"]
    remove_orphans(tmp_path / "not there")


def test_what_no_start_can_ask_for_is_removed_at_once_and_logged_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("dead", "alive", "resumable", "kept"):
        snapshot_store = opened(tmp_path, node_id=name, is_resumable=name == "resumable")
        put(snapshot_store, 0, 0, 8)
        if name == "kept":
            snapshot_store.preserve()
        if name != "alive":
            snapshot_store.close()
    with caplog.at_level("INFO", "holdfast"):
        remove_orphans(tmp_path)
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == ["alive", "kept", "resumable"]
    key = "orphaned-snapshots-removed"
    removed = [record for record in caplog.records if getattr(record, "holdfast_event", "") == key]
    (text,) = [record.getMessage() for record in removed]
    assert text.startswith("removed 0 MiB of snapshots") and text.endswith("job/dead")


@pytest.mark.parametrize("level", ["root", "job", "node", "owner"])
def test_links_are_not_followed_when_orphans_are_cleared(tmp_path: Path, level: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    snapshot_store = opened(elsewhere, is_resumable=False)
    put(snapshot_store, 0, 0, 8)
    snapshot_store.close()
    root = tmp_path / "root"
    if level == "root":
        root.symlink_to(elsewhere)
    elif level == "job":
        root.mkdir()
        (root / "job").symlink_to(elsewhere / "job")
    elif level == "node":
        (root / "job").mkdir(parents=True)
        (root / "job" / "node-0").symlink_to(elsewhere / "job" / "node-0")
    else:
        (root / "job" / "node-0").mkdir(parents=True)
        (root / "job" / "node-0" / "owner").symlink_to(elsewhere / "job" / "node-0" / "owner")
    remove_orphans(root)
    assert len(list(elsewhere.rglob("image-*"))) == 2
    assert root.exists()


def test_what_other_users_have_left_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot_store = opened(tmp_path, is_resumable=False)
    put(snapshot_store, 0, 0, 8)
    snapshot_store.close()
    monkeypatch.setattr(os, "getuid", lambda: os.stat(tmp_path).st_uid + 1)
    remove_orphans(tmp_path)
    assert len(list(tmp_path.rglob("image-*"))) == 2


def test_an_agent_that_has_run_for_long_leaves_no_orphan_behind(tmp_path: Path) -> None:
    """It was killed a moment ago: what counts is when it was last seen, not when it began."""
    snapshot_store = opened(tmp_path)
    put(snapshot_store, 0, 0, 8)
    age(tmp_path / "job" / "node-0", 2 * ORPHAN_AFTER_S)
    snapshot_store.touch()
    snapshot_store.close()
    remove_orphans(tmp_path)
    assert len(list(tmp_path.rglob("image-*"))) == 2


@pytest.mark.parametrize(
    ("job_id", "node_id"), [("job/7", "a.b:c"), (".hidden", ".."), ("é" * 100, "n" * 300), ("", "")]
)
def test_what_a_dead_agent_held_for_others_is_found_with_its_own(tmp_path: Path, job_id: str, node_id: str) -> None:
    config = agent_config(tmp_path, node_id=node_id, snapshot_dir=str(tmp_path / "memory"))
    snapshot_store = opened(tmp_path / "memory", node_id, job_id)
    put(snapshot_store, 0, 0, 8)
    other = Peer(node_id="other", address="127.0.0.1", bulk_port=1, workers=1)

    async def hold() -> None:
        replication = Replication(config, NoImages(), lambda *_: None)
        replication.serve(serve(1, job_id=job_id, replica_owners=(other,)))
        assert replication.offer(label, -1) is not None

    label = ImageInfo(
        node_id="other", local_rank=0, view=1, step=3, part=0, shards=2, shares=1, size_bytes=1, seed=0, first_step=0
    )
    asyncio.run(hold())
    snapshot_store.close()
    (found,) = (tmp_path / "memory").glob("*/*")
    assert {"rank-0", "replicas"} <= {path.name for path in found.iterdir()}
    age(found, 2 * ORPHAN_AFTER_S)
    remove_orphans(tmp_path / "memory")
    assert not (tmp_path / "memory").exists()


def test_no_two_ids_share_a_directory() -> None:
    ids = ["a/b", "a_b", "a%2Fb", "", "_", "%", ".", "..", "%2E", "a" * 300, "a" * 301, "ü", "\udc80"]
    names = [directory_name(one) for one in ids]
    assert len(set(names)) == len(ids)
    assert all("/" not in name and not name.startswith(".") and 0 < len(name.encode()) <= 255 for name in names)


def test_names_of_jobs_and_nodes_cannot_lead_elsewhere(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    snapshot_store = opened(root, node_id="..", job_id="../../etc")
    put(snapshot_store, 0, 0, 8)
    assert all(path.is_relative_to(root) for path in tmp_path.rglob("image-*"))
    snapshot_store.remove()
