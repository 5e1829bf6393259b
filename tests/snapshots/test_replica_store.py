"""What an agent holds for others: a complete image stays, whichever process dies; what is not assigned is refused."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.image_info import BLOCK_BYTES
from holdfast.errors import ReplicaError
from holdfast.snapshots import replica_store
from holdfast.snapshots.replica_store import ReplicaStore
from holdfast.util.blocks import block_count
from holdfast.util.cgroups import Headroom
from support.bulk_process import started, tell, word
from support.bulks import label, noise
from support.slot_records import checksums_of

PROCESS = Path(__file__).parents[1] / "support" / "bulk_process.py"


def store(replicas: ReplicaStore, step: int, content: bytes, complete: int = -1, **changes: Any) -> None:
    described = label(step, content, **changes)
    sink = replicas.offer(described, complete)
    assert sink is not None
    for index in range(block_count(len(content))):
        sink.buffer(index)[:] = content[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
        sink.accept(index)
    sink.seal(described.checksums)
    sink.close()


def opened(root: Path, **promised: int) -> ReplicaStore:
    replicas = ReplicaStore(root)
    replicas.assign(promised or {"a": 2})
    return replicas


def steps(replicas: ReplicaStore) -> list[int]:
    return sorted(held.info.step for held in replicas.images())


def content(replicas: ReplicaStore, step: int, view: int = 1) -> bytes:
    with replicas.reading("a", 0, view, step) as found:
        return bytes(found)


def test_a_complete_step_stays_until_a_later_one_is_complete(tmp_path: Path) -> None:
    replicas = opened(tmp_path)
    for step, view, complete in ((1, 1, -1), (2, 1, 1), (4, 2, 1), (5, 3, 1)):
        store(replicas, step, b"content of step %d" % step, complete, view=view)
        assert 1 in steps(replicas), "others may have overwritten step 2: a view ended before they all knew of it"
    assert steps(replicas) == [1, 5]
    store(replicas, 6, b"content of step 6", 5, view=3)
    assert steps(replicas) == [5, 6]
    store(replicas, 5, b"of a later history", 5, view=4)
    store(replicas, 6, b"of a later history", 5, view=4)
    assert content(replicas, 5, view=4) == content(replicas, 6, view=4) == b"of a later history"


def test_the_two_newest_are_held_and_found_by_the_next_agent(tmp_path: Path) -> None:
    replicas = opened(tmp_path)
    for step in (1, 2, 3):
        store(replicas, step, b"content of step %d" % step)
    store(replicas, 3, b"of another rank", local_rank=1)
    again = ReplicaStore(tmp_path)
    assert steps(again) == [2, 3, 3]
    assert content(again, 2) == b"content of step 2" and content(again, 3) == b"content of step 3"
    assert {held.path.read_bytes() for held in again.images() if held.info.local_rank == 1} == {b"of another rank"}
    assert {held.path: held.info for held in again.images()} == {held.path: held.info for held in replicas.images()}


def test_while_one_is_written_the_other_is_complete(tmp_path: Path) -> None:
    replicas = opened(tmp_path)
    store(replicas, 1, b"one")
    store(replicas, 2, b"two")
    sink = replicas.offer(label(3, b"three"))
    assert sink is not None
    sink.buffer(0)[:2] = b"th"
    assert steps(replicas) == steps(ReplicaStore(tmp_path)) == [2] and content(replicas, 2) == b"two"
    sink.close()
    assert steps(replicas) == [2]
    store(replicas, 4, b"four")
    assert steps(replicas) == [2, 4]


def test_a_later_view_counts_more_than_a_later_step(tmp_path: Path) -> None:
    """The job went back to a checkpoint."""
    replicas = opened(tmp_path)
    store(replicas, 8, b"eight")
    store(replicas, 9, b"nine")
    store(replicas, 5, b"five", view=2)
    assert steps(replicas) == [5, 9]
    with pytest.raises(ReplicaError, match="older than what is here"):
        replicas.offer(label(10, b"ten"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"node_id": "b"}, "no images of b are assigned to this node"),
        ({"local_rank": 2}, "a has 2 workers, and this is number 2"),
        ({"checksums": b"1234567"}, "the number of checksums is not the number of blocks"),
    ],
)
def test_what_is_not_assigned_is_refused(tmp_path: Path, changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ReplicaError, match=sentence):
        opened(tmp_path).offer(label(1, b"x", **changes))
    assert not list(tmp_path.iterdir())


def test_without_room_it_is_refused_and_the_old_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = opened(tmp_path)
    store(replicas, 1, b"one")
    monkeypatch.setattr(replica_store, "headroom", lambda *_: Headroom(100_000, "here"))
    with pytest.raises(ReplicaError, match=r"no room for 1 MiB more .* give this node more shared memory"):
        replicas.offer(label(2, size_bytes=2**20))
    assert steps(replicas) == [1]
    store(replicas, 2, b"small enough")
    assert steps(replicas) == [1, 2]


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_a_full_file_system_is_a_refusal_and_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", tmp_path], check=True)
    try:
        monkeypatch.setattr(
            replica_store, "headroom", lambda *_: Headroom(2**40, "here")
        )  # as if it filled up just afterwards
        replicas = opened(tmp_path)
        store(replicas, 1, noise(4 * 2**20))
        with pytest.raises(ReplicaError, match="no room"):
            replicas.offer(label(2, size_bytes=20 * 2**20))
        assert steps(replicas) == [1]
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_memory_for_assigned_nodes_is_taken_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = opened(tmp_path)
    store(replicas, 1, b"one")
    replicas.assign({"b": 1})
    assert steps(replicas) == [1], "it may be all that is left of a"
    free = iter([0, 0, 2**40])
    monkeypatch.setattr(replica_store, "headroom", lambda *_: Headroom(next(free, 2**40), "here"))
    store(replicas, 2, b"of b", node_id="b")
    assert {held.info.node_id for held in replicas.images()} == {"b"}


def test_dropped_images_are_removed(tmp_path: Path) -> None:
    replicas = opened(tmp_path, a=1, b=1, c=1)
    for node_id, step in (("a", 4), ("b", 5), ("c", 4)):
        store(replicas, step, b"x", node_id=node_id)
    replicas.drop("a")
    assert {held.info.node_id for held in replicas.images()} == {"b", "c"} and not (tmp_path / "a").exists()
    replicas.drop("b")
    assert {held.info.node_id for held in ReplicaStore(tmp_path).images()} == {"c"}
    replicas.clear()
    assert not tmp_path.exists() and not replicas.images()


def test_an_image_that_is_dropped_while_it_comes_in_is_not_held(tmp_path: Path) -> None:
    replicas = opened(tmp_path)
    sink = replicas.offer(label(1, b"x"))
    assert sink is not None
    replicas.drop("a")
    sink.buffer(0)[:] = b"x"
    with pytest.raises(ReplicaError, match="dropped"):
        sink.seal(checksums_of(b"x"))
    sink.close()
    assert not replicas.images() and not ReplicaStore(tmp_path).images()


def test_a_newer_connection_takes_the_place_of_one_that_hangs(tmp_path: Path) -> None:
    replicas = opened(tmp_path)
    store(replicas, 1, b"one")
    hanging = replicas.offer(label(2, b"two"))
    assert hanging is not None
    store(replicas, 3, b"three")
    hanging.buffer(0)[:] = b"tw?"
    assert content(replicas, 3) == b"three" and steps(replicas) == [1, 3]
    with pytest.raises(ReplicaError):
        hanging.seal(b"")
    hanging.close()
    store(replicas, 4, b"four")
    assert steps(replicas) == [3, 4]


def test_what_is_read_is_not_overwritten(tmp_path: Path) -> None:
    replicas = opened(tmp_path)
    store(replicas, 1, b"one")
    store(replicas, 2, b"two")
    with replicas.reading("a", 0, 1, 1) as found:
        with pytest.raises(ReplicaError, match="being read"):
            replicas.offer(label(3, b"three"))
        assert bytes(found) == b"one"
    store(replicas, 3, b"three")


@pytest.mark.parametrize("node_id", ["..", ".", "a/b", "../../etc", "ü", "a b", "%2E"])
def test_a_nodes_id_is_one_name_in_a_directory(tmp_path: Path, node_id: str) -> None:
    root = tmp_path / "replicas"
    replicas = ReplicaStore(root)
    replicas.assign({node_id: 1})
    store(replicas, 1, b"x", node_id=node_id)
    assert [path.parent for path in root.iterdir()] == [root] and [p.name for p in tmp_path.iterdir()] == ["replicas"]
    assert [held.info.node_id for held in ReplicaStore(root).images()] == [node_id]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_in_the_details_is_noticed(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        store(opened(root), 1, b"one")
        details = root / "a" / "rank-0" / "details-0"
        content = bytearray(details.read_bytes())
        bit = data.draw(st.integers(0, len(content) * 8 - 1))
        content[bit // 8] ^= 1 << bit % 8
        details.write_bytes(content)
        assert ReplicaStore(root).images() == []


def test_a_truncated_image_is_not_taken_for_complete(tmp_path: Path) -> None:
    store(opened(tmp_path), 1, b"one")
    os.truncate(tmp_path / "a" / "rank-0" / "image-0", 2)
    assert ReplicaStore(tmp_path).images() == []


# --- kill -9


def go(server: subprocess.Popen[str], blocks: int) -> None:
    """Let it take so many more."""
    tell(server, *[""] * blocks)


BLOCKS = 5


@pytest.mark.parametrize("killed_after", [0, 4])
def test_a_receiver_that_is_killed_leaves_the_old_image_complete(tmp_path: Path, killed_after: int) -> None:
    root, image = tmp_path / "replicas", noise(BLOCKS * BLOCK_BYTES)
    replicas = opened(root)
    store(replicas, 1, b"one")
    store(replicas, 2, image)
    (tmp_path / "image").write_bytes(noise(BLOCKS * BLOCK_BYTES))
    with (
        started(PROCESS, "serve", str(root)) as server,
        started(PROCESS, "send", word(server, "port"), str(tmp_path / "image"), "3") as sender,
    ):
        go(server, killed_after)
        while int(word(server, "took")) < killed_after:
            pass
        server.send_signal(signal.SIGKILL)
        assert sender.wait() != 0
    found = ReplicaStore(root)
    assert steps(found) == [2] and content(found, 2) == image
    found.assign({"a": 1})
    store(found, 4, b"four")
    assert steps(found) == [2, 4]


@pytest.mark.parametrize("killed_after", [0, 3])
def test_a_sender_that_is_killed_leaves_the_old_image_complete(tmp_path: Path, killed_after: int) -> None:
    root, image = tmp_path / "replicas", noise(BLOCKS * BLOCK_BYTES)
    store(opened(root), 2, image)
    file = tmp_path / "image"
    file.write_bytes(noise(BLOCKS * BLOCK_BYTES))
    with started(PROCESS, "serve", str(root)) as server:
        port = word(server, "port")
        with started(PROCESS, "send", port, str(file), "3") as sender:
            go(server, killed_after)
            while int(word(server, "took")) < killed_after:
                pass
            sender.send_signal(signal.SIGKILL)
            sender.wait()
        go(server, 2 * BLOCKS + 2)
        found = ReplicaStore(root)  # as another process sees it
        assert steps(found) in ([2], [2, 3]) and content(found, 2) == image
        with started(PROCESS, "send", port, str(file), "4") as last:
            word(last, "sent")
        assert content(ReplicaStore(root), 4) == file.read_bytes()
