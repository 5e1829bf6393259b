"""Another user of the machine, and a full /dev/shm: neither reads, changes or ends anything of ours."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from holdfast.core.orders import Peer
from holdfast.snapshots.directories import default_root, remove_orphans
from holdfast.snapshots.replication import Replication
from holdfast.snapshots.replicator import NoImages
from holdfast.snapshots.slot_file import SlotImage
from holdfast.snapshots.snapshot_store import SnapshotStore
from snapshots.test_snapshot_store import PAGE, opened, put
from support.processes import environment
from support.strangers import STRANGER, as_stranger, world_writable
from support.worker_groups import agent_config, serve

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A directory that is to all users what /dev/shm is."""
    return world_writable(tmp_path / "shm")


@pytest.fixture
def precious(tmp_path: Path) -> Iterator[Path]:
    """A file of ours that must not change."""
    path = tmp_path / "precious"
    path.mkdir()
    (path / "control").write_bytes(b"thesis" * 1_000)
    yield path
    assert (path / "control").read_bytes() == b"thesis" * 1_000
    assert [entry.name for entry in path.iterdir()] == ["control"]


def test_the_default_name_is_random_recorded_and_changed_when_another_user_has_taken_it(
    memory: Path, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    state.mkdir()
    first = default_root(state, memory)
    assert first == default_root(state, memory) and first.parent == memory
    assert str(os.getuid()) != first.name.removeprefix("holdfast-") and len(first.name) > 20
    assert (state / "shared-memory").stat().st_mode & 0o077 == 0
    assert as_stranger(lambda: first.mkdir(0o777))
    second = default_root(state, memory)
    assert second != first and second == default_root(state, memory)
    opened(second).remove()
    (state / "shared-memory").write_bytes(b"../../etc\xff")
    assert default_root(state, memory).parent == memory


def test_other_users_can_neither_list_nor_read_what_is_stored(memory: Path) -> None:
    store = opened(memory / "holdfast-0123456789abcdef")
    put(store, 0, 0, 5)
    image = store.images()[0].path
    assert store.directory is not None
    directory = store.directory
    for path in (directory, directory.parent, image.parent):
        assert not as_stranger(partial(os.listdir, path))
    assert not as_stranger(image.read_bytes)
    assert not as_stranger(lambda: os.truncate(image, 0))
    assert not as_stranger(lambda: directory.parent.rename(memory / "other"))
    store.remove()


def test_a_directory_that_another_user_made_first_is_not_used_nor_read(
    memory: Path, precious: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = memory / "guessed"

    def trap() -> None:
        (root / "job" / "node-0").mkdir(parents=True)
        (root / "job" / "node-0" / "rank-0").symlink_to(precious)
        (root / "job" / "node-0" / "owner").symlink_to(precious / "control")
        for path in (root, root / "job", root / "job" / "node-0"):
            path.chmod(0o777)

    assert as_stranger(trap)
    store = opened(root)
    assert not store.is_open and store.images() == []
    assert asyncio.run(store.allocate(0, PAGE)).why
    assert f"belongs to user {STRANGER}" in caplog.text
    remove_orphans(root)


@pytest.mark.parametrize("level", ["root", "job"])
def test_a_link_in_the_place_of_a_directory_is_not_followed(memory: Path, precious: Path, level: str) -> None:
    root = memory / "guessed"
    if level == "root":
        assert as_stranger(lambda: root.symlink_to(precious.parent))
    else:
        root.mkdir()
        root.chmod(0o1777)
        assert as_stranger(lambda: (root / "job").symlink_to(precious))
    store = SnapshotStore(root, "node-0")
    store.open("job" if level == "job" else "precious")
    assert not store.is_open
    remove_orphans(root)


def test_a_directory_that_every_user_can_replace_is_not_used(memory: Path) -> None:
    root = memory / "open" / "ours"
    root.mkdir(parents=True)
    root.parent.chmod(0o777)
    assert not opened(root).is_open
    root.parent.chmod(0o755)
    store = opened(root)
    assert store.is_open
    store.remove()


def test_replicas_are_not_held_in_another_users_directory(memory: Path, caplog: pytest.LogCaptureFixture) -> None:
    root = memory / "guessed"
    assert as_stranger(lambda: root.mkdir(0o777))
    assert as_stranger(lambda: root.chmod(0o777))

    async def run() -> None:
        holder = Replication(agent_config(memory, snapshot_dir=str(root)), NoImages())
        owner = Peer(node_id="node-1", address="127.0.0.1", bulk_port=1, workers=1)
        holder.serve(serve(1, replica_owners=(owner,)))
        assert holder.images() == []
        await holder.close()

    asyncio.run(run())
    assert "no images are held for other nodes" in caplog.text
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("damage", ["short", "holes", "gone"])
def test_an_image_that_is_not_all_there_is_not_mapped(tmp_path: Path, damage: str) -> None:
    store = opened(tmp_path / "memory")
    put(store, 0, 0, 5)
    (image,) = store.images()
    if damage == "gone":
        image.path.unlink()
    else:
        os.truncate(image.path, 0)
        os.truncate(image.path, PAGE if damage == "holes" else 100)
    with image.reading() as content:
        assert content is None
    assert isinstance(image, SlotImage)
    store.remove()


FULL = """
import asyncio, os, sys
from pathlib import Path
from holdfast.snapshots.snapshot_store import SnapshotStore
root = Path(sys.argv[1])
store = SnapshotStore(root / "memory", "node-0")
store.open("job")
assert store.is_open
with (root / "other").open("wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)):
            pass
    except OSError:
        pass
print(asyncio.run(store.allocate(0, 4096)).why)
late = SnapshotStore(root / "memory", "node-1", is_resumable=False)
late.open("job")
print("late:", late.is_open, asyncio.run(late.allocate(0, 4096)).why)
"""


def test_full_memory_is_a_sentence_and_no_signal(tmp_path: Path) -> None:
    script = f'mount -t tmpfs -o size=256k tmpfs "$1" && exec {sys.executable} -c "$2" "$1"'
    command = ["unshare", "-m", "sh", "-c", script, "sh", str(tmp_path), FULL]
    run = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert run.returncode == 0, (run.returncode, run.stderr)
    assert "cannot be allocated" in run.stdout and "No space left" in run.stdout
    assert "late: False this agent has no place for snapshots" in run.stdout
