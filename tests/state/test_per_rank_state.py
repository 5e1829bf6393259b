"""What each rank has for itself: kept in its own image, given back to that rank alone."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from holdfast.errors import StateError
from holdfast.state import partition
from holdfast.state.cached_state import CachedState
from holdfast.state.partition import FilePart, MemoryPart, PartPlan, load_parts, write_image
from holdfast.state.per_rank_state import LOCAL, StatePart
from holdfast.state.tracked import Tracked
from holdfast.state.tree import unflatten
from holdfast.storage.pickles import dcp_metadata


class Meter:
    """A rank's own sums."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


def rank_of(rank: int, world_size: int, seed: int = 0, **values: Any) -> Tracked:
    torch.manual_seed(seed)
    model = nn.Linear(30, 20)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model(torch.ones(4, 30)).square().sum().backward()
    optimizer.step()
    tracked = Tracked()
    tracked.add("meter", Meter(**values), is_local=True)  # named first, and the last branch all the same
    tracked.add("model", model)
    tracked.add("optimizer", optimizer)
    tracked.owner = (rank, world_size)
    return tracked


def meter_of(tracked: Tracked) -> dict[str, Any]:
    return tracked.objects()["meter"].values


def images_of(world: list[Tracked]) -> dict[int, MemoryPart]:
    images = [write_image(tracked.state(), len(world), rank) for rank, tracked in enumerate(world)]
    return {rank: MemoryPart(memoryview(image)) for rank, image in enumerate(images)}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "CHUNK_BYTES_MIN", 16)


def world_of_three() -> list[Tracked]:
    return [rank_of(rank, 3, seen=rank, sums=torch.full((2 + rank, 4), float(rank))) for rank in range(3)]


def test_the_parts_of_a_state() -> None:
    tracked = rank_of(1, 2, seen=3)
    assert list(tracked.tree()) == ["model", "optimizer", LOCAL]
    assert list(tracked.tree(StatePart.SHARED)) == ["model", "optimizer"]
    assert tracked.tree(StatePart.LOCAL) == {LOCAL: {"rank1-of-2": {"meter": {"seen": 3}}}}
    assert tracked.local_names() == ["meter"] and tracked.has_local


def test_each_rank_gets_its_own_back_from_images_though_they_have_other_shapes() -> None:
    saved = world_of_three()
    sources = images_of(saved)
    for rank, one in enumerate(saved):
        live = rank_of(rank, 3, seed=9, seen=-1)
        load_parts(sources, 1, 3, live, shard=0)
        assert meter_of(live)["seen"] == rank and torch.equal(meter_of(live)["sums"], meter_of(one)["sums"])
        assert live.state().skeleton == one.state().skeleton
        assert all(torch.equal(*pair) for pair in zip(live.state().tensors, one.state().tensors, strict=True))


def test_stock_torch_sees_each_ranks_own_under_its_own_name(tmp_path: Path) -> None:
    saved, files = world_of_three(), []
    for rank, tracked in enumerate(saved):
        path = tmp_path / f"part-{rank}.safetensors"
        path.write_bytes(bytes(write_image(tracked.state(), 3, rank)))
        files.append((path.name, FilePart(path).layout))
    (tmp_path / ".metadata").write_bytes(dcp_metadata(files))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(tmp_path, tmp_path / "one.pt")
    found = torch.load(tmp_path / "one.pt", weights_only=False)
    assert torch.equal(found["model"]["weight"], saved[0].modules()["model"].get_parameter("weight"))
    for rank in range(3):
        assert torch.equal(found[LOCAL][f"rank{rank}-of-3"]["meter"]["sums"], meter_of(saved[rank])["sums"])


@pytest.mark.parametrize("owner", [(0, 2), (3, 4), (2, 2)])
def test_a_world_of_another_size_is_refused(owner: tuple[int, int]) -> None:
    live = rank_of(*owner, seen=-1)
    with pytest.raises(StateError, match=r"each rank has state of its own .*start with as many workers"):
        load_parts(images_of(world_of_three()), 1, 3, live, shard=0)
    assert meter_of(live) == {"seen": -1}


def test_a_state_without_it_is_refused() -> None:
    plain = Tracked(**{name: thing for name, thing in rank_of(0, 1).objects().items() if name != "meter"})
    with pytest.raises(StateError, match="nothing was saved of this rank's own meter"):
        load_parts({0: MemoryPart(memoryview(write_image(plain.state(), 1, 0)))}, 1, 1, rank_of(0, 1), shard=0)
    with pytest.raises(StateError, match=r"of its own .*not of rank0-of-1|meter was saved and is not tracked"):
        load_parts(images_of([rank_of(0, 1, seen=1)]), 1, 1, plain, shard=0)


def test_gradients_that_differ_between_ranks_belong_to_the_rank() -> None:
    one = rank_of(0, 2)
    one.is_accumulating = one.gradients_are_local = True
    assert set(one.tree(StatePart.LOCAL)[LOCAL]["rank0-of-2"]) == {"meter", "@gradients"}
    assert "@gradients" not in one.tree(StatePart.SHARED)
    flat = one.state()
    other = rank_of(0, 2, seed=5)
    other.load_tree(unflatten(flat.skeleton, flat.tensors))
    assert other.gradients_are_local and other.is_accumulating
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None and its.grad is not None and torch.equal(mine.grad, its.grad)


def test_how_the_shared_part_is_shared_out_does_not_depend_on_a_ranks_own() -> None:
    small, large = rank_of(0, 2), rank_of(1, 2, sums=torch.zeros(1000, 100))
    entries = [
        {entry.name for entry in PartPlan(one.state(), 2, 1).layout.entries if entry.path[0] != LOCAL}
        for one in (small, large)
    ]
    assert entries[0] == entries[1]


@pytest.mark.parametrize("values", [{"seen": 1}, {"seen": 1, "sums": torch.ones(3)}])
def test_a_roll_sees_what_changed_in_it(values: dict[str, Any]) -> None:
    tracked = rank_of(0, 2, **values)
    cached_state = CachedState(tracked)
    assert cached_state.state().skeleton == tracked.state().skeleton
    tracked.objects()["meter"].values["seen"] = 2
    assert cached_state.state().skeleton == tracked.state().skeleton
    assert len(cached_state.state().tensors) == len(tracked.state().tensors)
