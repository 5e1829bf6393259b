"""A node's memory of its workers' states: room for it, who owns it, what is found again, what is cleared away."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agent.crews import agent_config, serve
from holdfast.agent.memory import vault as vaults
from holdfast.agent.memory.directories import directory_name
from holdfast.agent.memory.vault import ORPHAN_AFTER_S, Vault, clear_orphans
from holdfast.agent.replicas.replication import NoImages, Replication
from holdfast.core.orders import Peer
from holdfast.storage.image import block_checksums
from holdfast.wire.bulk import Label
from holdfast.wire.cgroups import Headroom
from holdfast.wire.slots import ImageLock, Record, Status, Wanted

PAGE = 4_096


def opened(root: Path, node_id: str = "node-0", job_id: str = "job") -> Vault:
    vault = Vault(root, node_id)
    vault.open(job_id)
    return vault


def put(vault: Vault, seat: int, slot: int, step: int, **changes: int) -> Record:
    """An image of one page, as a worker would leave it."""
    room = asyncio.run(vault.grant(seat, PAGE))
    assert not room.why
    page = vault._seats.get(seat)
    assert page is not None
    page.path(slot).write_bytes(bytes([step]) * PAGE)
    record = Record(Status.SEALED, step, 1, seat, 1, 2, PAGE, 7, 0, Wanted.NO, step)._replace(**changes)
    page.write(slot, record)
    return record


def test_room_for_two_images(tmp_path: Path) -> None:
    vault = opened(tmp_path)
    room = asyncio.run(vault.grant(3, PAGE + 1))
    assert (room.size_bytes, room.why) == (2 * PAGE, "")
    files = {path.name: path.stat() for path in Path(room.directory).iterdir()}
    sizes = {name: stat.st_size for name, stat in files.items()}
    assert sizes == {"control": PAGE, "image-0": 2 * PAGE, "image-1": 2 * PAGE}
    assert all(stat.st_mode & 0o77 == 0 for stat in files.values()), "others can read the state"
    assert files["image-0"].st_blocks * 512 >= 2 * PAGE, "its pages are not there yet"
    record = put(vault, 3, 0, 5)
    larger = asyncio.run(vault.grant(3, 3 * PAGE))
    assert larger.size_bytes == 3 * PAGE and [kept.record for kept in vault.kept()] == [record], "what it held is gone"
    assert asyncio.run(vault.grant(3, PAGE)).size_bytes == 3 * PAGE, "room is not taken back"
    vault.close()


def test_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vault = opened(tmp_path)
    left = Headroom(vaults.MEMORY_SPARED_BYTES + 4 * PAGE, "within the limit of cgroup /pod, 4096 MiB")
    monkeypatch.setattr(vaults, "memory_headroom", lambda: left)
    assert not asyncio.run(vault.grant(0, 2 * PAGE)).why
    refused = asyncio.run(vault.grant(1, 2 * PAGE + 1))
    assert refused.directory == "" and "--snapshots off" in refused.why
    assert "0 MiB are free within the limit of cgroup /pod, 4096 MiB" in refused.why
    assert not list((tmp_path / "job" / "node-0").glob("seat-1/image-*"))
    vault.close()
    closed = asyncio.run(Vault(tmp_path, "other").grant(0, PAGE))
    assert closed.why == "this agent has no place for snapshots"


@pytest.mark.skipif(os.getuid() != 0, reason="mounts a file system")
def test_a_file_system_that_is_full(tmp_path: Path) -> None:
    root = tmp_path / "small"
    root.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", root], check=True)
    try:
        vault = opened(root)
        assert "MiB are free" in asyncio.run(vault.grant(0, 64 * PAGE)).why
        assert not asyncio.run(vault.grant(0, 2 * PAGE)).why
        vault.remove()
    finally:
        subprocess.run(["umount", root], check=True)


def test_a_place_that_cannot_be_made_is_said_and_done_without(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    vault = opened(tmp_path / "file")
    assert not vault.is_open and asyncio.run(vault.grant(0, PAGE)).why
    assert vault.kept() == [] and vault.held() == ()
    vault.remove()


def test_the_next_life_of_an_agent_finds_what_the_last_one_left(tmp_path: Path) -> None:
    first = opened(tmp_path)
    torn = Status.WRITING
    records = [put(first, 0, 0, 8), put(first, 0, 1, 9), put(first, 1, 0, 9, status=torn), put(first, 1, 1, 8)]
    first.close()
    second = opened(tmp_path)
    assert [(k.seat, k.slot, k.record) for k in second.kept()] == [
        (0, 1, records[1]),
        (0, 0, records[0]),
        (1, 1, records[3]),
    ]
    assert [(h.step, h.part, h.view, h.size_bytes, h.seed) for h in second.held()] == [
        (9, 0, 1, PAGE, 7),
        (8, 0, 1, PAGE, 7),
        (8, 1, 1, PAGE, 7),
    ]
    assert Path(second.held()[0].path).read_bytes() == bytes([9]) * PAGE
    second.close()
    for other in (opened(tmp_path, node_id="node-1"), opened(tmp_path, job_id="another")):
        assert other.kept() == []
        other.remove()
    assert len(list(tmp_path.rglob("image-*"))) == 4


def test_an_agent_that_lives_is_not_robbed(tmp_path: Path) -> None:
    code = (
        "import pathlib, signal\n"
        "from holdfast.agent.memory.vault import Vault\n"
        f"vault = Vault(pathlib.Path({str(tmp_path)!r}), 'node-0')\n"
        "vault.open('job')\n"
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
    vault = opened(tmp_path)
    put(vault, 0, 0, 8, wanted=Wanted.YES)
    (kept,) = vault.kept()
    with vault.reading(kept) as memory:
        assert memory is not None and vault.kept() == [kept], "who only reads it leaves it wanted"
    with vault.taking(kept) as memory, vault.reading(kept) as same:
        assert same is not None and same[:] == bytes([8]) * PAGE
        assert memory is not None and memory[:] == bytes([8]) * PAGE
        seat = vault._seats.get(0)
        assert seat is not None and seat.record(0).wanted == Wanted.TAKEN
        writer = ImageLock(seat.path(0), is_writable=True)
        assert not writer.take()
        writer.close()
    with vault.reading(kept) as memory:
        assert memory is not None, "it is the same image, whatever is wanted of it"
    put(vault, 0, 0, 9)
    with vault.reading(kept) as memory:
        assert memory is None, "it is not what was expected any more"
    vault.close()


def test_two_who_have_read_an_image_note_its_checksums_at_once(tmp_path: Path) -> None:
    vault = opened(tmp_path)
    put(vault, 0, 0, 8)
    (kept,) = vault.kept()
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: vault.note_checksums(kept, [7]), range(500)))
    assert vault.checksums(kept) == [7]
    assert not list(tmp_path.rglob("sums-0.*")), "nothing is left over"
    vault.close()


def test_checksums_go_with_the_image_they_are_of(tmp_path: Path) -> None:
    vault = opened(tmp_path)
    put(vault, 0, 0, 8)
    (kept,) = vault.kept()
    checksums = block_checksums(memoryview(bytes([8]) * PAGE))
    vault.note_checksums(kept, checksums)
    assert vault.held()[0].checksums == tuple(checksums)
    put(vault, 0, 0, 9)
    assert vault.held()[0].checksums == ()
    vault.close()


def test_removing_leaves_nothing_but_what_others_own(tmp_path: Path) -> None:
    root = tmp_path / "root"
    mine, other = opened(root), opened(root, node_id="node-1")
    put(mine, 0, 0, 8)
    put(other, 0, 0, 8)
    mine.remove()
    assert not (root / "job" / "node-0").exists() and len(other.kept()) == 1
    other.remove()
    assert not root.exists()


def age(directory: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(directory / "owner", (then, then))


def test_orphans_are_cleared_when_they_are_old_and_nobodys(tmp_path: Path) -> None:
    for name in ("young", "old", "owned"):
        vault = opened(tmp_path, node_id=name)
        put(vault, 0, 0, 8)
        if name != "owned":
            vault.close()
        if name != "young":
            age(tmp_path / "job" / name, 2 * ORPHAN_AFTER_S)
    clear_orphans(tmp_path)
    assert sorted(path.name for path in (tmp_path / "job").iterdir()) == ["owned", "young"]
    clear_orphans(tmp_path / "not there")


def test_an_agent_that_has_run_for_long_leaves_no_orphan_behind(tmp_path: Path) -> None:
    """It was killed a moment ago: what counts is when it was last seen, not when it began."""
    vault = opened(tmp_path)
    put(vault, 0, 0, 8)
    age(tmp_path / "job" / "node-0", 2 * ORPHAN_AFTER_S)
    vault.note_life()
    vault.close()
    clear_orphans(tmp_path)
    assert len(list(tmp_path.rglob("image-*"))) == 2


@pytest.mark.parametrize(
    ("job_id", "node_id"), [("job/7", "a.b:c"), (".hidden", ".."), ("é" * 100, "n" * 300), ("", "")]
)
def test_what_a_dead_agent_held_for_others_is_found_with_its_own(tmp_path: Path, job_id: str, node_id: str) -> None:
    config = agent_config(tmp_path, node_id=node_id, snapshot_dir=str(tmp_path / "memory"))
    vault = opened(tmp_path / "memory", node_id, job_id)
    put(vault, 0, 0, 8)
    other = Peer(node_id="other", address="127.0.0.1", bulk_port=1, workers=1)

    async def hold() -> None:
        replication = Replication(config, NoImages(), lambda *_: None)
        replication.serve(serve(1, job_id=job_id, guests=(other,)))
        assert replication.guests is not None and replication.guests.offer(label) is not None

    label = Label(
        node_id="other", seat=0, view=1, step=3, part=0, shards=2, shares=1, size_bytes=1, seed=0, first_step=0
    )
    asyncio.run(hold())
    vault.close()
    (found,) = (tmp_path / "memory").glob("*/*")
    assert {"seat-0", "guests"} <= {path.name for path in found.iterdir()}
    age(found, 2 * ORPHAN_AFTER_S)
    clear_orphans(tmp_path / "memory")
    assert not (tmp_path / "memory").exists()


def test_no_two_ids_share_a_directory() -> None:
    ids = ["a/b", "a_b", "a%2Fb", "", "_", "%", ".", "..", "%2E", "a" * 300, "a" * 301, "ü", "\udc80"]
    names = [directory_name(one) for one in ids]
    assert len(set(names)) == len(ids)
    assert all("/" not in name and not name.startswith(".") and 0 < len(name.encode()) <= 255 for name in names)


def test_names_of_jobs_and_nodes_cannot_lead_elsewhere(tmp_path: Path) -> None:
    root = tmp_path / "a" / "b"
    vault = opened(root, node_id="..", job_id="../../etc")
    put(vault, 0, 0, 8)
    assert all(path.is_relative_to(root) for path in tmp_path.rglob("image-*"))
    vault.remove()
