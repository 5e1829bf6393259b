"""Copies of a tensor in several shards are compared byte for byte, however each is divided into parts."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.errors import StateError
from holdfast.state import partition
from holdfast.state.partition import MemoryPart, PartSource, load_parts, write_image
from holdfast.state.plain_copies import StoredRows, have_same_bytes
from holdfast.state.reshard import needed, reshard
from holdfast.state.tracked import Tracked
from holdfast.state.tree import FlatTree


class Expert(nn.Module):
    """A gate that all ranks share, and an expert that each has for itself."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate, self.norm = nn.Linear(3, 2), nn.BatchNorm1d(3)
        self.expert = nn.Linear(3, 40)
        with torch.no_grad():
            self.expert.weight[39, 2] = number
        for statistics in self.norm.buffers():
            statistics.fill_(number)  # of this rank's own batches


def saved_by(*models: nn.Module) -> list[FlatTree]:
    return [Tracked(model=model).state() for model in models]


def parts(flats: list[FlatTree], shares: int = 1) -> dict[int, PartSource]:
    images = [write_image(flat, shares, share) for share in range(shares) for flat in flats]
    return {number: MemoryPart(memoryview(image)) for number, image in enumerate(images)}


def rows_of(sources: dict[int, PartSource], name: str) -> list[StoredRows]:
    found = [(one, entry) for one in sources.values() for entry in one.layout.entries if entry.name == name]
    return [StoredRows(*pair) for pair in sorted(found, key=lambda pair: pair[1].offsets)]


def test_each_byte_counts_however_it_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "CHUNK_BYTES_MIN", 64)
    first, again, other = (parts(saved_by(Expert(number)), shares) for number, shares in ((0, 1), (0, 3), (1, 2)))
    name = "model.expert.weight"
    assert len(rows_of(again, name)) > 1
    assert have_same_bytes(rows_of(first, name), rows_of(again, name))
    assert not have_same_bytes(rows_of(first, name), rows_of(other, name))
    assert not have_same_bytes(rows_of(again, name), rows_of(other, name))
    assert not have_same_bytes(rows_of(first, name), rows_of(first, "model.expert.bias"))


def test_experts_go_back_by_their_number_and_nowhere_else() -> None:
    flats = saved_by(Expert(0), Expert(1))
    live = Expert(7)
    load_parts(parts(flats), 2, 1, Tracked(model=live), shard=1)
    assert live.expert.weight[39, 2] == 1
    before = Expert(8)
    with pytest.raises(StateError, match=r"model\.expert\.weight is another tensor on shard 0 than on shard 1"):
        load_parts(parts(flats), 2, 1, Tracked(model=before))
    assert before.expert.weight[39, 2] == 8, "nothing is loaded of what is refused"
    skeletons, fetched = [flat.skeleton for flat in flats], list[tuple[int, int]]()

    def fetch(shard: int, index: int) -> torch.Tensor:
        fetched.append((shard, index))
        return flats[shard].tensors[index]

    with pytest.raises(StateError, match=r"model\.expert\.weight is another tensor"):
        reshard(skeletons, fetch, Tracked(model=before))
    foreseen = needed(skeletons, Tracked(model=before))
    assert foreseen[: len(fetched)] == fetched, "what is compared is fetched in the order that was foreseen"


def test_shards_of_other_shapes_under_one_name_are_refused() -> None:
    flats = saved_by(nn.Linear(3, 4), nn.Linear(3, 5))
    with pytest.raises(StateError, match=r"model\.weight is another tensor on shard 0"):
        load_parts(parts(flats), 2, 1, Tracked(model=nn.Linear(3, 9)))


def test_equal_copies_and_statistics_of_each_rank_are_loaded() -> None:
    one, other = Expert(0), Expert(1)
    with torch.no_grad():
        other.expert.weight.copy_(one.expert.weight)
    live = Expert(5)
    load_parts(parts(saved_by(one, other)), 2, 1, Tracked(model=live))
    assert all(torch.equal(value, one.state_dict()[name]) for name, value in live.state_dict().items())
