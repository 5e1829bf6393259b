"""A rank that alone has the state writes every share of it, and is killed at every point of that: a complete state is
always there, the one before or the new one, never a mixture."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.core.image_info import ImageInfo
from holdfast.snapshots.slot_file import SLOTS, ImageLock, SlotPage, SlotStatus
from holdfast.state.partition import FilePart, load_parts
from holdfast.state.tracked import Tracked
from holdfast.worker.snapshot import last_holder
from holdfast.worker.snapshot.last_holder import save_every_share

RANKS = 3
BUFFER_BYTES = 64 * 1024


def model(value: float) -> Tracked:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 4))
    with torch.no_grad():
        for one in (*net.parameters(), *net.buffers()):
            one.fill_(value)
    return Tracked(model=net)


def buffers(root: Path, buffer_bytes: int = BUFFER_BYTES) -> list[SlotPage]:
    pages = [SlotPage.create(root / f"rank-{number}") for number in range(RANKS)]
    for page in pages:
        for slot in range(SLOTS):
            page.path(slot).write_bytes(bytes(buffer_bytes))
    return pages


def save(root: Path, step: int, view: int, shares: int = RANKS) -> str:
    return save_every_share(root / "rank-0", model(step).state(), shares, ImageInfo(step, 0, 1, 1, view, seed=7), ())


def complete(pages: list[SlotPage]) -> dict[int, float]:
    """The steps that can be restored, each with the one value that everything in it has."""
    found: dict[tuple[int, int], dict[int, tuple[Path, ImageInfo]]] = {}
    for page in pages:
        for slot, record in page.sealed().items():
            image = record.image
            found.setdefault((image.step, image.view), {})[image.part] = (page.path(slot), image)
    values = {}
    for (step, _), parts in found.items():
        if len(parts) == RANKS:
            tracked = model(-1.0)
            sources = {part: FilePart(path, None, image.size_bytes) for part, (path, image) in parts.items()}
            load_parts(sources, 1, RANKS, tracked)
            (value,) = {float(one) for tensor in tracked.state().tensors for one in tensor.flatten()}
            values[step] = value
            for source in sources.values():
                source.close()
    return values


def test_every_share_is_written_and_the_pages_say_so(tmp_path: Path) -> None:
    pages = buffers(tmp_path)
    assert not save(tmp_path, 5, 1)
    assert complete(pages) == {5: 5.0}
    assert [page.get("complete") for page in pages] == [5] * RANKS
    assert not save(tmp_path, 9, 2)
    assert complete(pages) == {5: 5.0, 9: 9.0}
    assert not save(tmp_path, 12, 3)
    assert complete(pages) == {9: 9.0, 12: 12.0}


def test_a_step_that_is_complete_already_is_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffers(tmp_path)
    assert not save(tmp_path, 5, 1)
    monkeypatch.setattr(last_holder, "_write", lambda *_: pytest.fail("it was written again"))
    assert not save(tmp_path, 5, 2)


def test_without_enough_room_it_is_said_and_nothing_is_touched(tmp_path: Path) -> None:
    pages = buffers(tmp_path, buffer_bytes=4_096)
    assert "not enough room" in save(tmp_path, 5, 1)
    assert all(page.record(slot).status is SlotStatus.EMPTY for page in pages for slot in range(SLOTS))


def test_a_slot_that_is_being_read_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(last_holder, "LOCK_PATIENCE_S", 0.02)
    pages = buffers(tmp_path)
    assert not save(tmp_path, 5, 1) and not save(tmp_path, 9, 2)
    (old,) = [slot for slot, record in pages[1].sealed().items() if record.image.step == 5]
    lock = ImageLock(pages[1].path(old), is_writable=False)
    assert lock.acquire()
    assert "is being read" in save(tmp_path, 12, 3)
    lock.close()
    assert complete(pages) == {5: 5.0, 9: 9.0}


def test_state_of_the_dead_ranks_own_cannot_be_saved_by_another(tmp_path: Path) -> None:
    buffers(tmp_path)
    tracked = model(1.0)
    flat = tracked.state()
    local = torch.ones(3)
    from holdfast.state.per_rank_state import LOCAL
    from holdfast.state.tree import flatten

    mixed = flatten({"model": {"weight": flat.tensors[0]}, LOCAL: {"meter": local}})
    assert "track_local" in save_every_share(tmp_path / "rank-0", mixed, RANKS, ImageInfo(5, 0, 1, 1, 1), ())


def _counted(target: Any, name: str, reach: Callable[[], None], is_tensor_copy: bool = False) -> None:
    original = getattr(target, name)

    def wrapped(*args: Any, **choices: Any) -> Any:
        reach()
        if is_tensor_copy:
            destinations, sources = args
            for destination, source in zip(destinations, sources, strict=True):
                destination.copy_(source)
                reach()
            return None
        result = original(*args, **choices)
        reach()
        return result

    setattr(target, name, wrapped)


def _die_at(point: int, root: Path) -> bool:
    """Save step 9 in a process of its own that kills itself at this point; whether it got to the end before."""
    child = os.fork()
    if not child:
        reached = 0

        def reach() -> None:
            nonlocal reached
            reached += 1
            if reached == point:
                os.kill(os.getpid(), signal.SIGKILL)

        _counted(SlotPage, "write", reach)
        _counted(SlotPage, "put", reach)
        _counted(torch, "_foreach_copy_", reach, is_tensor_copy=True)
        try:
            os._exit(3 if save(root, 9, 2) else 0)
        except BaseException:
            os._exit(4)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL)
    return code == 0


def test_killed_at_any_point_a_complete_state_is_left(tmp_path: Path) -> None:
    outcomes = []
    for point in range(1, 500):
        root = tmp_path / str(point)
        pages = buffers(root)
        assert not save(root, 5, 1)
        is_through = _die_at(point, root)
        found = complete(pages)
        assert found in ({5: 5.0}, {5: 5.0, 9: 9.0})
        outcomes.append(9 in found)
        assert not save(root, 10, 3), "the slots of a process that was killed can be written again"
        assert complete(pages)[10] == 10.0 and max(found) in complete(pages)
        if is_through:
            break
    assert is_through and outcomes == sorted(outcomes) and len(outcomes) > 20 and outcomes.count(False) > 10
