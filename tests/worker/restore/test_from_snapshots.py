"""What is in memory is taken by all ranks or by none, and damage costs as few steps as there are whole states."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from holdfast.core.image_info import ImageInfo
from holdfast.core.shard_map import ShardMap
from holdfast.errors import CheckpointError, StorageError
from holdfast.snapshots.slot_file import SlotPage, SlotRecord, SlotStatus
from holdfast.state.partition import write_image
from holdfast.state.tracked import Tracked
from holdfast.storage import stores
from holdfast.storage.checkpoint_writer import CheckpointWriter
from holdfast.storage.manifest import CheckpointInfo
from holdfast.storage.stores import open_store
from holdfast.wire.worker_messages import StoredImage
from holdfast.worker.collectives import small_collectives
from holdfast.worker.restore import from_checkpoints
from holdfast.worker.restore.from_snapshots import SnapshotRestore
from holdfast.worker.restore.restore_source import RestorePoint, find_start
from support.crowd import Member, together
from support.slot_records import checksums_of

FLOATS = 3_000_000
"""More than one block."""


def state(value: float, size: int = 16) -> Tracked:
    model = torch.nn.Linear(size, 1, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return Tracked(model=model)


def value_of(tracked: Tracked) -> float:
    (tensor,) = tracked.state().tensors
    assert bool((tensor == tensor[0, 0]).all()), "a mixture"
    return float(tensor[0, 0])


def image(directory: Path, step: int, value: float, part: int = 0, shards: int = 1, size: int = 16) -> StoredImage:
    content = bytes(write_image(state(value, size).state(), 1, 0))
    page = SlotPage.create(directory / f"step-{step}-part-{part}")
    page.path(0).write_bytes(content)
    info = ImageInfo(step, part, shards, 1, size_bytes=len(content), seed=7)
    page.write(0, SlotRecord(SlotStatus.SEALED, info))
    page.close()
    return StoredImage(path=str(page.path(0)), info=msgspec.structs.replace(info, checksums=checksums_of(content)))


def damage(path: str | Path) -> None:
    """One bit, near the end: of a tensor."""
    content = bytearray(Path(path).read_bytes())
    content[-7] ^= 1
    Path(path).write_bytes(content)


# --- parts that come from another rank


def recall_together(member: Member, rank: int, size: int, held: Sequence[StoredImage]) -> tuple[int, float]:
    """All is on the node of rank 0."""
    member.start(rank, size)
    tracked = state(0.0, FLOATS)
    memory = SnapshotRestore(held if rank == 0 else (), 0, 1, ShardMap(size), tracked, small_collectives.in_session())
    choice = memory.load(0)
    return (choice.step if choice is not None else -1), value_of(tracked)


def test_a_part_that_was_damaged_where_it_was_kept_is_refused_by_all(tmp_path: Path) -> None:
    """Rank 0 does not need part 1 and does not look at it: rank 1, which gets it, does."""
    held = [image(tmp_path, step, 10.0 * step + part, part, 2, FLOATS) for step in (8, 9) for part in (0, 1)]
    assert together(recall_together, 2, held) == [(9, 90.0), (9, 91.0)]
    damage(tmp_path / "step-9-part-1" / "image-0")
    assert together(recall_together, 2, held) == [(8, 80.0), (8, 81.0)]


# --- memory and storage


def store(directory: Path, step: int, value: float) -> None:
    with CheckpointWriter(
        open_store(str(directory)), CheckpointInfo(step=step, world_size=1, created_unix_s=1.0), "a"
    ) as writing:
        writing.write_part(0, memoryview(write_image(state(value).state(), 1, 0)))
        assert writing.publish() is not None


def begin(url: str | Path, *held: StoredImage) -> tuple[RestorePoint | None, float]:
    tracked = state(0.0)
    found = find_start(str(url), held, (0, 1), tracked, ShardMap(), small_collectives.outside())
    return found, value_of(tracked)


M, S = 1_000.0, 2_000.0
"""Added to the step: of a state in memory, on storage."""


@pytest.mark.parametrize(
    ("memory", "storage", "damaged", "begins_with"),
    [
        pytest.param([10], [5, 10], [], M + 10, id="of the same step memory is nearer"),
        pytest.param([8, 9], [5, 10], [], S + 10, id="storage is newer"),
        pytest.param([9, 10], [5], [M + 10], M + 9, id="the one before is in memory"),
        pytest.param([10], [5, 10], [M + 10], S + 10, id="storage has it too"),
        pytest.param([10], [5, 10], [S + 10], M + 10, id="memory has it too"),
        pytest.param([8, 10], [5, 10], [M + 10, S + 10], M + 8, id="memory has a later one than the checkpoint before"),
        pytest.param([8], [9], [S + 9], M + 8, id="and there is no checkpoint before"),
        pytest.param([3, 4], [5, 6], [S + 6], S + 5, id="the checkpoint before is later than memory"),
        pytest.param([], [5, 6], [S + 6], S + 5, id="nothing in memory"),
    ],
)
def test_the_newest_state_that_can_be_loaded_is_begun_with(
    tmp_path: Path, memory: list[int], storage: list[int], damaged: list[float], begins_with: float
) -> None:
    runs = tmp_path / "runs"
    held = [image(tmp_path, step, M + step) for step in memory]
    for step in storage:
        store(runs, step, S + step)
    for value in damaged:
        step = int(value % 1_000)
        damage(
            tmp_path / f"step-{step}-part-0" / "image-0" if value < S else runs / f"step-{step}" / "part-0.safetensors"
        )
    found, value = begin(runs, *held)
    assert found is not None and value == begins_with
    assert (found.step, found.is_recalled) == (begins_with % 1_000, begins_with < S)
    assert (found.checkpoint is not None) is not found.is_recalled


def test_who_cannot_load_what_there_is_does_not_begin_anew(tmp_path: Path) -> None:
    assert begin(tmp_path / "runs") == (None, 0.0)
    held = image(tmp_path, 9, 1.0)
    damage(held.path)
    with pytest.raises(CheckpointError, match=r"step 9 in memory: .* is damaged"):
        begin(tmp_path / "runs", held)


@pytest.fixture(params=["refuses", "never answers"])
def away(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A bucket that is away."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if request.param == "never answers":
            server.listen()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_REGION"):
            monkeypatch.setenv(name, "us-east-1")
        yield


@pytest.mark.usefixtures("away")
def test_storage_that_is_away_is_waited_for_only_without_a_state_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than a test may take, unless it is asked with less patience than that of writers."""
    monkeypatch.setattr(from_checkpoints, "ASKING_PATIENCE_S", 0.5)
    found, value = begin("s3://bucket/run", image(tmp_path, 9, 3.0))
    assert found is not None and (found.step, value) == (9, 3.0)
    given: list[float] = []

    def asked(url: str, retry_for_s: float = stores.RETRY_FOR_S) -> stores.Store:
        given.append(retry_for_s)
        return open_store(url, 0.5)

    monkeypatch.setattr(from_checkpoints, "open_store", asked)
    with pytest.raises(StorageError, match="given up after"):
        begin("s3://bucket/run")
    assert given == [stores.RETRY_FOR_S], "there is nothing else: storage is worth the wait"
