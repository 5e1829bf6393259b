"""The state is the same, bit for bit, however the world that holds it is cut."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from holdfast.errors import StateError
from holdfast.state import checkpoint
from holdfast.state.reshard import fetch_from, needed, reshard
from holdfast.state.sharded import Layout, Sharded, region
from holdfast.state.tracked import Tracked
from holdfast.state.tree import Flat, flatten

SCRIPT = Path(__file__).parent / "scripts" / "reshard_worlds.py"


def test_through_worlds_of_other_sizes_and_kinds_and_back(tmp_path: Path, leak_guard: str) -> None:
    """FSDP2 of 2 → FSDP2 of 3 → DDP → FSDP2 of 2 → HSDP of 2 × 2 → FSDP2 of 3, from half of the HSDP ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, SCRIPT, tmp_path], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr[-6_000:]
    digests = {path.read_text() for path in tmp_path.glob("digest-*")}
    assert len(list(tmp_path.glob("digest-*"))) == 2 + 3 + 2 + 2 + 4 + 3 and len(digests) == 1
    first, same_cut = (checkpoint.open_checkpoint(tmp_path / "checkpoints" / f"step-{step}") for step in (0, 3))
    for shard in range(2):
        one, other = checkpoint.read(first, shard), checkpoint.read(same_cut, shard)
        assert one.skeleton == other.skeleton
        assert all(torch.equal(left, right) for left, right in zip(one.tensors, other.tensors, strict=True))


@pytest.mark.parametrize("size", range(1, 7))
@pytest.mark.parametrize("rows", range(9))
def test_regions_are_those_of_torch_chunk(rows: int, size: int) -> None:
    whole = torch.arange(rows)
    chunks = [*torch.chunk(whole, size), *[whole[:0]] * size]
    for place in range(size):
        (part,) = region(Layout((rows,), ("S0",), (), (size,), (place,)))
        assert torch.equal(whole[part], chunks[place])


def cut(tensor: torch.Tensor, size: int, place: int) -> Sharded:
    layout = Layout(tuple(tensor.shape), ("S0",), (), (size,), (place,))
    return Sharded(tensor[region(layout)].clone(), layout)


def shards_of(model: nn.Module, size: int) -> list[Flat]:
    return [
        flatten({"model": {name: cut(value, size, place) for name, value in model.state_dict().items()}})
        for place in range(size)
    ]


def test_only_what_is_needed_is_fetched_one_at_a_time() -> None:
    saved, live = nn.Linear(3, 5), nn.Linear(3, 5)
    flats = shards_of(saved, 3)
    asked: list[tuple[int, int]] = []

    def fetch(shard: int, index: int) -> torch.Tensor:
        asked.append((shard, index))
        return flats[shard].tensors[index]

    skeletons, before = [flat.skeleton for flat in flats], live.weight.clone()
    foreseen = needed(skeletons, Tracked(model=live))
    assert torch.equal(live.weight, before), "nothing is loaded to find out what is needed"
    reshard(skeletons, fetch, Tracked(model=live))
    assert torch.equal(live.weight, saved.weight) and torch.equal(live.bias, saved.bias)
    assert len(asked) == len(set(asked)) == 6 and asked == foreseen


def test_a_missing_shard_is_noticed() -> None:
    flats = shards_of(nn.Linear(3, 5), 3)
    known = {shard: flats[shard].skeleton for shard in (0, 2)}
    with pytest.raises(StateError, match=r"model\.weight is not whole"):
        reshard(known, fetch_from(flats), Tracked(model=nn.Linear(3, 5)))


def test_shards_of_other_models_are_refused() -> None:
    flats = shards_of(nn.Linear(3, 5), 2)
    with pytest.raises(StateError, match=r"model\.weight is torch.float32 \[4, 3\], saved was"):
        reshard([flat.skeleton for flat in flats], fetch_from(flats), Tracked(model=nn.Linear(3, 4)))
    mixed = [flats[0], shards_of(nn.Linear(3, 7), 2)[1]]
    with pytest.raises(StateError, match="not the same tensor in every shard"):
        reshard([flat.skeleton for flat in mixed], fetch_from(mixed), Tracked(model=nn.Linear(3, 5)))
    with pytest.raises(StateError, match="no shard"):
        reshard([], fetch_from([]), Tracked(model=nn.Linear(3, 5)))
    wrong = [Flat(flat.skeleton, [tensor[:1] for tensor in flat.tensors]) for flat in flats]
    with pytest.raises(StateError, match="was fetched as"):
        reshard([flat.skeleton for flat in wrong], fetch_from(wrong), Tracked(model=nn.Linear(3, 5)))
