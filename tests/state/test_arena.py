"""A snapshot is one run of bytes; a torn one is known."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.errors import StateError
from holdfast.state.arena import ALIGNMENT_BYTES, Arena, ArenaStatus, plan_of
from holdfast.state.tracked import Tracked
from holdfast.state.tree import FlatTree, flatten

DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn, torch.complex64, torch.uint8]


def trained(seed: int) -> Tracked:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    return Tracked(model=model, optimizer=optimizer, scheduler=scheduler)


def assert_same(a: FlatTree, b: FlatTree) -> None:
    assert a.skeleton == b.skeleton
    assert all(torch.equal(left, right) for left, right in zip(a.tensors, b.tensors, strict=True))


def test_a_snapshot_is_restored_bit_for_bit() -> None:
    tracked = trained(0)
    snapshot = Arena(tracked.state())
    snapshot.take(tracked.state(), 7)
    other = trained(1)
    assert snapshot.restore_into(other) == 7
    assert_same(other.state(), tracked.state())


def test_an_update_that_communicates_is_undone(tmp_path: Path, leak_guard: str) -> None:
    """ZeRO-1's ranks have each a part of the state, and hand one another the parameters."""
    script = Path(__file__).parent / "scripts" / "zero.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-6_000:]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=8))
@settings(max_examples=60, deadline=None)
def test_an_arena_is_the_state(shapes: list[Any]) -> None:
    flat = flatten([torch.ones(shape).to(dtype) for dtype, shape in shapes])
    snapshot = Arena()
    snapshot.take(flat, 0)
    sent = [part.clone() for part in snapshot.parts()]
    assert len(sent) <= 1
    arena = sent[0] if sent else torch.empty(0, dtype=torch.uint8)
    received = plan_of(snapshot.skeleton).views(arena)
    for mine, theirs in zip(flat.tensors, received, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
        assert mine.tolist() == theirs.tolist()
        offset = theirs.data_ptr() - arena.data_ptr()
        assert not theirs.numel() or offset % ALIGNMENT_BYTES == 0


def test_the_arena_is_reused_while_shapes_stay_and_rebuilt_when_they_change() -> None:
    snapshot = Arena()
    snapshot.take(flatten({"a": torch.zeros(1000), "step": 1}), 1)
    (before,) = snapshot.parts()
    snapshot.take(flatten({"a": torch.ones(1000), "step": 2}), 2)
    (after,) = snapshot.parts()
    assert after.data_ptr() == before.data_ptr()
    snapshot.take(flatten({"a": torch.ones(10, 20), "b": torch.full((3000,), 2.0), "step": 3}), 3)
    assert [tensor.shape for tensor in snapshot.flat().tensors] == [(10, 20), (3000,)]
    assert torch.equal(snapshot.flat().tensors[1], torch.full((3000,), 2.0))
    snapshot.take(flatten({"a": torch.ones(2)}), 4)
    assert snapshot.parts()[0].numel() == 8


def test_a_snapshot_travels() -> None:
    tracked = trained(0)
    mine, theirs = Arena(), Arena()
    mine.take(tracked.state(), 5)
    parts = theirs.receive(mine.skeleton, mine.step)
    with pytest.raises(StateError, match="writing, not complete"):
        theirs.flat()
    for target, source in zip(parts, mine.parts(), strict=True):
        target.copy_(source)
    theirs.seal()
    other = trained(1)
    assert theirs.restore_into(other) == 5
    assert_same(other.state(), tracked.state())


def test_what_is_received_is_bounded_and_its_size_checked() -> None:
    skeleton = flatten([torch.zeros(100)]).skeleton
    with pytest.raises(StateError, match="more than the 100 allowed"):
        Arena().receive(skeleton, 0, bytes_max=100)
    with pytest.raises(StateError, match="400 bytes are needed"):
        plan_of(skeleton).views(torch.empty(399, dtype=torch.uint8))


class Torn(RuntimeError):
    pass


class Breaking(list[Any]):
    """Tensors that cannot all be read."""

    def __iter__(self) -> Any:
        yield self[0]
        raise Torn


def test_a_torn_snapshot_is_not_restored_from() -> None:
    snapshot, tensor = Arena(), torch.zeros(4)
    snapshot.take(flatten({"a": tensor}), 3)
    torn = flatten({"a": tensor})
    with pytest.raises(Torn):
        snapshot.take(FlatTree(torn.skeleton, Breaking(torn.tensors)), 4)
    assert snapshot.status is ArenaStatus.WRITING
    with pytest.raises(StateError, match="writing, not complete"):
        snapshot.flat()
