"""What an agent holds for others: a whole image stays whole, whoever dies; what was not promised is not taken in."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.bulk_process import started, tell, word
from agent.bulks import label, noise
from holdfast.agent.replicas import slots
from holdfast.agent.replicas.blocks import block_count, checksums_of
from holdfast.agent.replicas.guests import Guests
from holdfast.errors import ReplicaError
from holdfast.wire.bulk import BLOCK_BYTES

PROCESS = Path(__file__).with_name("bulk_process.py")


def keep(guests: Guests, step: int, content: bytes, whole: int = -1, **changes: object) -> None:
    described = label(step, content, **changes)
    sink = guests.offer(described, whole)
    assert sink is not None
    for index in range(block_count(len(content))):
        sink.buffer(index)[:] = content[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
        sink.take(index)
    sink.seal(described.checksums)
    sink.abandon()


def opened(root: Path, **promised: int) -> Guests:
    guests = Guests(root)
    guests.promise(promised or {"a": 2})
    return guests


def steps(guests: Guests) -> list[int]:
    return sorted(held.label.step for held in guests.held())


def content(guests: Guests, step: int, view: int = 1) -> bytes:
    with guests.reading("a", 0, view, step) as found:
        return bytes(found)


def test_what_is_whole_everywhere_stays_until_a_later_step_is(tmp_path: Path) -> None:
    guests = opened(tmp_path)
    for step, view, whole in ((1, 1, -1), (2, 1, 1), (4, 2, 1), (5, 3, 1)):
        keep(guests, step, b"content of step %d" % step, whole, view=view)
        assert 1 in steps(guests), "others may have overwritten step 2: a view ended before they all knew of it"
    assert steps(guests) == [1, 5]
    keep(guests, 6, b"content of step 6", 5, view=3)
    assert steps(guests) == [5, 6]
    keep(guests, 5, b"of a later history", 5, view=4)
    keep(guests, 6, b"of a later history", 5, view=4)
    assert content(guests, 5, view=4) == content(guests, 6, view=4) == b"of a later history"


def test_the_two_newest_are_kept_and_found_again_by_the_next_life(tmp_path: Path) -> None:
    guests = opened(tmp_path)
    for step in (1, 2, 3):
        keep(guests, step, b"content of step %d" % step)
    keep(guests, 3, b"of another seat", seat=1)
    again = Guests(tmp_path)
    assert steps(again) == [2, 3, 3]
    assert content(again, 2) == b"content of step 2" and content(again, 3) == b"content of step 3"
    assert {held.path.read_bytes() for held in again.held() if held.label.seat == 1} == {b"of another seat"}
    assert {held.path: held.label for held in again.held()} == {held.path: held.label for held in guests.held()}


def test_while_one_is_written_the_other_is_whole(tmp_path: Path) -> None:
    guests = opened(tmp_path)
    keep(guests, 1, b"one")
    keep(guests, 2, b"two")
    sink = guests.offer(label(3, b"three"))
    assert sink is not None
    sink.buffer(0)[:2] = b"th"
    assert steps(guests) == steps(Guests(tmp_path)) == [2] and content(guests, 2) == b"two"
    sink.abandon()
    assert steps(guests) == [2]
    keep(guests, 4, b"four")
    assert steps(guests) == [2, 4]


def test_a_later_view_counts_more_than_a_later_step(tmp_path: Path) -> None:
    """The job went back to a checkpoint."""
    guests = opened(tmp_path)
    keep(guests, 8, b"eight")
    keep(guests, 9, b"nine")
    keep(guests, 5, b"five", view=2)
    assert steps(guests) == [5, 9]
    with pytest.raises(ReplicaError, match="older than what is here"):
        guests.offer(label(10, b"ten"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"node_id": "b"}, "was not told to hold anything for b"),
        ({"seat": 2}, "a has 2 workers, and this is number 2"),
        ({"checksums": b"1234567"}, "not as many checksums as blocks"),
    ],
)
def test_what_was_not_promised_is_refused(tmp_path: Path, changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ReplicaError, match=sentence):
        opened(tmp_path).offer(label(1, b"x", **changes))
    assert not list(tmp_path.iterdir())


def test_without_room_it_is_refused_and_the_old_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guests = opened(tmp_path)
    keep(guests, 1, b"one")
    monkeypatch.setattr(slots, "free_bytes", lambda path: slots.RESERVE_BYTES + 100_000)
    with pytest.raises(ReplicaError, match=r"no room for 1 MiB more .* give this node more shared memory"):
        guests.offer(label(2, size_bytes=2**20))
    assert steps(guests) == [1]
    keep(guests, 2, b"small enough")
    assert steps(guests) == [1, 2]


@pytest.mark.skipif(os.getuid() != 0, reason="mounting needs root")
def test_a_full_file_system_is_a_refusal_and_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", tmp_path], check=True)
    try:
        monkeypatch.setattr(slots, "free_bytes", lambda path: 2**40)  # as if it filled up just afterwards
        guests = opened(tmp_path)
        keep(guests, 1, noise(4 * 2**20))
        with pytest.raises(ReplicaError, match="no room"):
            guests.offer(label(2, size_bytes=20 * 2**20))
        assert steps(guests) == [1]
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_memory_for_what_is_promised_is_taken_from_what_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guests = opened(tmp_path)
    keep(guests, 1, b"one")
    guests.promise({"b": 1})
    assert steps(guests) == [1], "it may be all that is left of a"
    room = iter([0, 2**40])
    monkeypatch.setattr(slots, "free_bytes", lambda path: next(room, 2**40))
    keep(guests, 2, b"of b", node_id="b")
    assert {held.label.node_id for held in guests.held()} == {"b"}


def test_what_is_told_to_go_goes(tmp_path: Path) -> None:
    guests = opened(tmp_path, a=1, b=1, c=1)
    for node_id, step in (("a", 4), ("b", 5), ("c", 4)):
        keep(guests, step, b"x", node_id=node_id)
    guests.drop("a")
    assert {held.label.node_id for held in guests.held()} == {"b", "c"} and not (tmp_path / "a").exists()
    guests.drop("b")
    assert {held.label.node_id for held in Guests(tmp_path).held()} == {"c"}
    guests.clear()
    assert not tmp_path.exists() and not guests.held()


def test_what_is_told_to_go_while_it_comes_in_is_not_kept(tmp_path: Path) -> None:
    guests = opened(tmp_path)
    sink = guests.offer(label(1, b"x"))
    assert sink is not None
    guests.drop("a")
    sink.buffer(0)[:] = b"x"
    with pytest.raises(ReplicaError, match="told to go"):
        sink.seal(checksums_of(memoryview(b"x")))
    sink.abandon()
    assert not guests.held() and not Guests(tmp_path).held()


def test_a_newer_connection_takes_the_place_of_one_that_hangs(tmp_path: Path) -> None:
    guests = opened(tmp_path)
    keep(guests, 1, b"one")
    hanging = guests.offer(label(2, b"two"))
    assert hanging is not None
    keep(guests, 3, b"three")
    hanging.buffer(0)[:] = b"tw?"
    assert content(guests, 3) == b"three" and steps(guests) == [1, 3]
    with pytest.raises(ReplicaError):
        hanging.seal(b"")
    hanging.abandon()
    keep(guests, 4, b"four")
    assert steps(guests) == [3, 4]


def test_what_is_read_is_not_overwritten(tmp_path: Path) -> None:
    guests = opened(tmp_path)
    keep(guests, 1, b"one")
    keep(guests, 2, b"two")
    with guests.reading("a", 0, 1, 1) as found:
        with pytest.raises(ReplicaError, match="being read"):
            guests.offer(label(3, b"three"))
        assert found == b"one"
    keep(guests, 3, b"three")


@pytest.mark.parametrize("node_id", ["..", ".", "a/b", "../../etc", "ü", "a b", "%2E"])
def test_a_nodes_id_is_one_name_in_a_directory(tmp_path: Path, node_id: str) -> None:
    root = tmp_path / "guests"
    guests = Guests(root)
    guests.promise({node_id: 1})
    keep(guests, 1, b"x", node_id=node_id)
    assert [path.parent for path in root.iterdir()] == [root] and [p.name for p in tmp_path.iterdir()] == ["guests"]
    assert [held.label.node_id for held in Guests(root).held()] == [node_id]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_flipped_bit_in_a_head_is_noticed(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        keep(opened(root), 1, b"one")
        head = root / "a" / "seat-0" / "slot-0.head"
        content = bytearray(head.read_bytes())
        bit = data.draw(st.integers(0, len(content) * 8 - 1))
        content[bit // 8] ^= 1 << bit % 8
        head.write_bytes(content)
        assert Guests(root).held() == []


def test_an_image_that_was_cut_short_is_not_taken_for_whole(tmp_path: Path) -> None:
    keep(opened(tmp_path), 1, b"one")
    os.truncate(tmp_path / "a" / "seat-0" / "slot-0.image", 2)
    assert Guests(tmp_path).held() == []


# --- kill -9


def go(server: subprocess.Popen[str], blocks: int) -> None:
    """Let it take so many more."""
    tell(server, *[""] * blocks)


BLOCKS = 5


@pytest.mark.parametrize("killed_after", [0, 4])
def test_a_receiver_that_is_killed_leaves_the_old_image_whole(tmp_path: Path, killed_after: int) -> None:
    root, image = tmp_path / "guests", noise(BLOCKS * BLOCK_BYTES)
    guests = opened(root)
    keep(guests, 1, b"one")
    keep(guests, 2, image)
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
    found = Guests(root)
    assert steps(found) == [2] and content(found, 2) == image
    found.promise({"a": 1})
    keep(found, 4, b"four")
    assert steps(found) == [2, 4]


@pytest.mark.parametrize("killed_after", [0, 3])
def test_a_sender_that_is_killed_leaves_the_old_image_whole(tmp_path: Path, killed_after: int) -> None:
    root, image = tmp_path / "guests", noise(BLOCKS * BLOCK_BYTES)
    keep(opened(root), 2, image)
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
        found = Guests(root)  # as another process sees it
        assert steps(found) in ([2], [2, 3]) and content(found, 2) == image
        with started(PROCESS, "send", port, str(file), "4") as last:
            word(last, "sent")
        assert content(Guests(root), 4) == file.read_bytes()
