"""A state cut into images and back, bit for bit; and what is damaged or missing is named."""

from __future__ import annotations

import copy
import itertools
import math
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from holdfast.errors import CheckpointError, StateError
from holdfast.state import partition
from holdfast.state.dtensors import Sharded, TensorSharding, local_region
from holdfast.state.partition import (
    FilePart,
    MemoryPart,
    PartPlan,
    PartSource,
    RangePart,
    load_parts,
    regions_of,
    write_image,
)
from holdfast.state.tensor_copy import cloned
from holdfast.state.tensor_specs import DTYPES, FlatTree
from holdfast.state.tracked import Tracked
from holdfast.state.tree import flatten, specs
from holdfast.storage.non_tensors import stock_objects
from holdfast.storage.pickles import dcp_metadata
from holdfast.util.blocks import BLOCK_BYTES, block_checksums

KINDS: list[Callable[[bytes, Path], PartSource]] = [
    lambda image, _: MemoryPart(memoryview(image)),
    lambda image, _: MemoryPart(memoryview(image), block_checksums(memoryview(image))),
    lambda image, folder: FilePart(written(folder, image), block_checksums(memoryview(image))),
    lambda image, folder: FilePart(written(folder, image)),
    lambda image, _: RangePart(lambda start, size: image[start : start + size], len(image)),
    lambda image, _: RangePart(
        lambda start, size: image[start : start + size], len(image), block_checksums(memoryview(image))
    ),
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that small tensors are cut too. Half complex numbers make torch warn, which nobody here can help."""
    monkeypatch.setattr(partition, "CHUNK_BYTES_MIN", 16)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf")
        yield


def written(folder: Path, image: bytes) -> Path:
    path = folder / f"part-{len(list(folder.iterdir()))}.safetensors"
    path.write_bytes(image)
    return path


def images_of(flat: FlatTree, shares: int) -> list[bytes]:
    return [bytes(write_image(flat, shares, share)) for share in range(shares)]


class Thing:
    """Anything with a state."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def assert_same(one: FlatTree, other: FlatTree) -> None:
    assert one.skeleton == other.skeleton
    for left, right in zip(one.tensors, other.tensors, strict=True):
        assert (left.dtype, left.shape) == (right.dtype, right.shape)
        assert torch.equal(*(held.contiguous().reshape(-1).view(torch.uint8) for held in (left, right)))


def training(seed: int, steps: int) -> Tracked:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(30, 20), nn.BatchNorm1d(20), nn.Linear(20, 5))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    for _ in range(steps):
        model(torch.randn(4, 30)).square().sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return Tracked(model=model, optimizer=optimizer, scheduler=scheduler)


@pytest.mark.parametrize("kind", range(len(KINDS)))
@pytest.mark.parametrize("shares", [1, 3])
def test_what_was_written_is_loaded_in_place(tmp_path: Path, kind: int, shares: int) -> None:
    saved = training(0, 3)
    images = images_of(saved.state(), shares)
    for steps in (0, 2):  # an optimizer without state, and one with
        live = training(1, steps)
        before = {path: tensor.data_ptr() for path, tensor in live.modules()["model"].state_dict().items()}
        version = next(iter(live.parameters()))._version
        load_parts({number: KINDS[kind](image, tmp_path) for number, image in enumerate(images)}, 1, shares, live)
        assert_same(live.state(), saved.state())
        assert {path: held.data_ptr() for path, held in live.modules()["model"].state_dict().items()} == before
        assert next(iter(live.parameters()))._version > version, "autograd is told"


def test_nothing_is_copied_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live tensors are filled where they are, and a fresh optimizer keeps what was read for it."""
    saved, live = training(0, 2), training(1, 0)
    copies: list[int] = []
    held = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda target, *rest: (copies.append(target.numel()), held(target, *rest))[1]
    )
    monkeypatch.setattr(torch.Tensor, "clone", lambda *_: pytest.fail("a tensor was cloned"))
    load_parts({0: MemoryPart(memoryview(write_image(saved.state(), 1, 0)))}, 1, 1, live)
    monkeypatch.undo()
    assert sum(copies) < 20 and torch.equal(live.parameters()[0], saved.parameters()[0])


def trees() -> st.SearchStrategy[Any]:
    sizes = st.lists(st.integers(0, 9), max_size=3)
    tensor = st.builds(make, st.sampled_from(sorted(DTYPES)), sizes, st.integers(0, 2**31), st.booleans())
    array = st.builds(
        lambda kind, size, seed: np.random.default_rng(seed).integers(0, 2, size).astype(kind),
        st.sampled_from(["<f4", ">i8", "|b1", "<U3", "<c16"]),
        sizes,
        st.integers(0, 99),
    )
    plain = st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=9), st.binary()
    )
    keys = st.one_of(st.text(max_size=5), st.integers(-5, 5))
    return st.recursive(
        st.one_of(tensor, array, plain),
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4)),
        max_leaves=12,
    )


def make(dtype: str, shape: list[int], seed: int, is_turned: bool) -> torch.Tensor:
    size = math.prod(shape) * DTYPES[dtype].itemsize
    content = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, size, dtype=np.uint8)
    made = (
        torch.from_numpy(content).view(DTYPES[dtype]).view(shape) if size else torch.empty(shape, dtype=DTYPES[dtype])
    )
    return made.t() if is_turned and made.dim() == 2 else made


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(trees(), st.integers(1, 5), st.booleans())
def test_any_state_through_images_and_back(value: Any, shares: int, is_shared: bool) -> None:
    tree = {"thing": {"value": value, "again": value} if is_shared else value}
    flat = flatten(tree)
    images = images_of(flat, shares)
    sums = [block_checksums(memoryview(image)) for image in images]
    sources = {at: MemoryPart(memoryview(images[at]), sums[at], f"part {at}") for at in range(shares)}
    live = Tracked(thing=Thing())
    load_parts(sources, 1, shares, live)
    assert_same(live.state(), flatten(cloned(tree)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(st.lists(st.lists(st.integers(0, 40), max_size=3), max_size=12), st.integers(1, 9))
def test_shares_are_balanced_and_together_everything_once(shapes: list[list[int]], shares: int) -> None:
    flat = flatten([torch.zeros(shape) for shape in shapes])
    cuts = [regions_of(flat, shares, share) for share in range(shares)]
    covered = [torch.zeros(shape, dtype=torch.int32) for shape in shapes]
    for one in cuts:
        assert len({item.region.index for item in one}) == len(one), "a share has a tensor's rows together"
        for item in one:
            assert tuple(item.tensor.shape) == item.region.shape
            assert item.region.full_shape == tuple(shapes[item.region.index])
            lies = zip(item.region.offsets, item.region.shape, strict=True)
            covered[item.region.index][tuple(slice(at, at + size) for at, size in lies)] += 1
    assert all(bool((tensor == 1).all()) for tensor in covered)
    assert sorted({item.region.index for one in cuts for item in one}) == list(range(len(shapes)))
    weights = [sum(item.region.size_bytes for item in one) for one in cuts]
    row_bytes_max = max((4 * math.prod(shape[1:]) for shape in shapes if math.prod(shape)), default=0)
    assert max(weights) - min(weights) <= max(sum(weights) // shares // 8, 16) + 2 * row_bytes_max


def test_what_is_of_one_rank_is_in_the_first_share_and_the_rest_makes_up_for_it() -> None:
    flat = flatten([torch.zeros(shape) for shape in ((40, 100), (2_000,), (), (0, 3), (4, 100))])
    plans = [PartPlan(flat, 3, share, first={1, 2, 3}) for share in range(3)]
    assert all({1, 2, 3}.isdisjoint(entry.index for entry in plan.layout.entries) for plan in plans[1:])
    sizes = [sum(entry.size_bytes for entry in plan.layout.entries) for plan in plans]
    assert sum(sizes) == 4 * (4_000 + 2_000 + 1 + 400)
    assert max(sizes) - min(sizes) <= sum(sizes) // 8


def test_rows_count_on_top_of_where_a_shard_lies() -> None:
    layout = TensorSharding((20, 3), ("S0",), (), (2,), (1,))
    flat = flatten({"w": Sharded(torch.arange(30.0).reshape(10, 3), layout)})
    pieces = [item.region for share in range(2) for item in regions_of(flat, 2, share)]
    assert [(item.offsets, item.shape, item.full_shape) for item in pieces] == [
        ((10, 0), (5, 3), (20, 3)),
        ((15, 0), (5, 3), (20, 3)),
    ]


def test_an_interleaved_shard_has_a_name_of_its_own() -> None:
    flat = flatten({"w": Sharded(torch.ones(4, 2), TensorSharding((8, 2), ("X0/4", "S0"), (), (2, 2), (0, 1)))})
    (item,) = regions_of(flat, 1, 0)
    assert item.region.name == "w.@0-1" and item.region.full_shape == (4, 2)


def test_stock_torch_finds_tied_weights_under_both_names(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 6, bias=False)
            self.outer = nn.Linear(4, 6, bias=False)
            self.outer.weight = self.inner.weight

    saved = Tied()
    flat = Tracked(model=saved).state()
    for one in (flat, FlatTree(flat.skeleton, flat.tensors)):  # with and without what is known of it
        files = []
        for share, image in enumerate(images_of(one, 2)):
            path = tmp_path / f"part-{share}.safetensors"
            path.write_bytes(image)
            files.append((path.name, FilePart(path).layout))
        (tmp_path / ".metadata").write_bytes(dcp_metadata(files))
        found = {"model": Tied().state_dict()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
        assert set(found["model"]) == {"inner.weight", "outer.weight"}
        assert all(torch.equal(value, saved.inner.weight) for value in found["model"].values())


def test_stock_torch_finds_what_is_no_tensor_too(tmp_path: Path) -> None:
    """As its own flattening names it: learning rates, counters, odd values; whoever asks gets all of an optimizer."""
    saved, live = training(0, 2), training(1, 1)
    odd = Thing({"big": 2**70, "deep": [[1, (2, b"x")], []], "kind": torch.int8, "at": torch.device("cpu"), "j": 2j})
    saved.add("odd", odd)
    path = written(tmp_path, bytes(write_image(saved.state(), 1, 0)))
    content, stored = stock_objects([saved.state().skeleton])
    (tmp_path / "objects.bin").write_bytes(content)
    files = [("objects.bin", one) for one in stored]
    (tmp_path / ".metadata").write_bytes(dcp_metadata([(path.name, FilePart(path).layout)], files))
    found = {**live.tree(), "odd": dict.fromkeys(odd.state)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=tmp_path, no_dist=True)
        dcp_to_torch_save(tmp_path, tmp_path / "one.pt")
    assert_same(flatten(found), saved.state())
    nested = torch.load(tmp_path / "one.pt", weights_only=False)
    assert nested["optimizer"]["param_groups"] == saved.tree()["optimizer"]["param_groups"]
    assert nested["odd"] == odd.state


def test_names_are_the_same_in_every_share() -> None:
    tree = {"a.b": torch.ones(100), "a": {"b": torch.zeros(100)}, "__pad__": {"0": torch.ones(3)}}
    names = {item.region.index: item.region.name for share in range(3) for item in regions_of(flatten(tree), 3, share)}
    assert names == {0: "a.b", 1: "a.b#2", 2: "state.__pad__.0"}


def test_a_plan_fits_until_the_tensors_change() -> None:
    tracked = training(0, 0)
    before = PartPlan(tracked.state(), 2, 1)
    assert before.fits(tracked.state())
    other = training(3, 1)
    assert not before.fits(other.state()), "the first step makes an optimizer's state"
    after = PartPlan(other.state(), 2, 1)
    assert after.fits(other.state())
    assert [tuple(tensor.shape) for tensor in after.tensors(other.state())] == [
        item.shape for item in after.layout.entries
    ]
    assert after.fits(FlatTree(other.state().skeleton, [])), "also by the skeleton alone"
    other.others()["scheduler"].base_lrs = [0.1] * 10_000
    assert not after.fits(other.state()), "the skeleton has outgrown its room"


def test_what_a_flat_says_of_its_tensors_is_what_its_skeleton_says() -> None:
    flat = flatten(
        {
            "a": torch.ones(2, 3),
            "n": np.ones((2, 2)),
            "s": Sharded(torch.ones(2), TensorSharding((4,), ("S0",), (), (2,), (1,))),
        }
    )
    assert flat.specs == specs(flat.skeleton)


# --- what is wrong


def sharded_state(shards: int, value: float = 1.0) -> list[FlatTree]:
    model = nn.Linear(3, 8)
    nn.init.constant_(model.weight, value)
    flats = []
    for place in range(shards):
        tree = {}
        for name, tensor in model.state_dict().items():
            layout = TensorSharding(tuple(tensor.shape), ("S0",), (), (shards,), (place,))
            rows = -(-8 // shards)
            tree[name] = Sharded(tensor[place * rows : (place + 1) * rows].clone(), layout)
        flats.append(flatten({"model": tree, "thing": {"step": 3, "seen": torch.arange(4)}}))
    return flats


def sources_of(flats: list[FlatTree], shares: int) -> dict[int, PartSource]:
    found: dict[int, PartSource] = {}
    for shard, flat in enumerate(flats):
        for share, image in enumerate(images_of(flat, shares)):
            number = shard + share * len(flats)
            found[number] = MemoryPart(memoryview(image), block_checksums(memoryview(image)), f"part {number}")
    return found


def test_shards_and_shares_become_full_tensors() -> None:
    flats = sharded_state(3, 2.0)
    live = Tracked(model=nn.Linear(3, 8), thing=Thing())
    load_parts(sources_of(flats, 2), 3, 2, live)
    assert live.modules()["model"].get_parameter("weight").unique().tolist() == [2.0]
    assert live.others()["thing"].state["step"] == 3 and live.others()["thing"].state["seen"].tolist() == [0, 1, 2, 3]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    st.tuples(st.integers(1, 12), st.integers(1, 12)),
    st.lists(st.tuples(st.sampled_from(["R", "S0", "S1"]), st.integers(1, 3)), min_size=1, max_size=2),
    st.integers(1, 3),
)
def test_any_sharding_in_rows_and_columns_becomes_full_tensors(
    shape: tuple[int, int], mesh: list[tuple[str, int]], shares: int
) -> None:
    saved, live = nn.Linear(*shape), nn.Linear(*shape)
    placements, sizes = tuple(word for word, _ in mesh), tuple(size for _, size in mesh)
    flats = []
    for place in itertools.product(*(range(size) for size in sizes)):
        layout = TensorSharding(tuple(saved.weight.shape), placements, (), sizes, place)
        weight = saved.weight.detach()[local_region(layout)].clone()
        tree = {"weight": Sharded(weight, layout), "bias": saved.bias.detach()}
        flats.append(flatten({"model": tree}))
    load_parts(sources_of(flats, shares), len(flats), shares, Tracked(model=live))
    assert torch.equal(live.weight, saved.weight) and torch.equal(live.bias, saved.bias)


def test_a_shard_that_is_asked_for_is_loaded_and_only_its_parts_are_opened() -> None:
    sources = sources_of([flatten({"thing": {"own": torch.full((40,), float(shard))}}) for shard in range(3)], 2)
    for shard, wanted in ((1, 1.0), (2, 2.0), (None, 0.0)):
        live = Tracked(thing=Thing())
        mine = {number: part for number, part in sources.items() if number % 3 == (shard or 0)}
        load_parts(mine, 3, 2, live, shard=shard)
        assert live.others()["thing"].state["own"].unique().tolist() == [wanted]


def test_damaged_memory_is_let_go(tmp_path: Path) -> None:
    flat = flatten({"thing": torch.ones(BLOCK_BYTES)})
    image = write_image(flat, 1, 0)
    sums = block_checksums(memoryview(image))
    image[-5000] ^= 1
    with pytest.raises(CheckpointError, match="the image is damaged"), MemoryPart(memoryview(image), sums) as part:
        load_parts({0: part}, 1, 1, Tracked(thing=Thing()))
    del part
    image.close()


def test_a_missing_part_is_named() -> None:
    sources = sources_of(sharded_state(2), 2)
    del sources[3]
    with pytest.raises(CheckpointError, match="part 3 of 4 is missing"):
        load_parts(sources, 2, 2, Tracked(model=nn.Linear(3, 8), thing=Thing()))


@pytest.mark.parametrize("swap", [(0, 1), (1, 2), (0, 3)])
def test_parts_in_the_wrong_place_are_noticed(swap: tuple[int, int]) -> None:
    sources = sources_of(sharded_state(2), 2)
    one, other = swap
    sources[one], sources[other] = sources[other], sources[one]
    with pytest.raises((CheckpointError, StateError)):
        load_parts(sources, 2, 2, Tracked(model=nn.Linear(3, 8), thing=Thing()))


def test_parts_of_another_sharding_are_noticed() -> None:
    with pytest.raises(CheckpointError, match="belong"):
        load_parts(
            dict(enumerate(list(sources_of(sharded_state(1), 3).values())[:2])),
            1,
            2,
            Tracked(model=nn.Linear(3, 8), thing=Thing()),
        )
    mixed = sources_of([flatten({"thing": torch.ones(9)})], 2)
    mixed[1] = sources_of([flatten({"thing": torch.ones(9), "other": torch.ones(2)})], 2)[1]
    with pytest.raises(CheckpointError, match="part 1 and part 0 are not parts of the same state"):
        load_parts(mixed, 1, 2, Tracked(thing=Thing()))


@pytest.mark.parametrize("threads", [1, 2])
def test_damage_in_any_block_is_named(tmp_path: Path, threads: int) -> None:
    size = BLOCK_BYTES // 2
    flat = flatten({"thing": {str(at): torch.full((size,), at, dtype=torch.uint8) for at in range(4)}})
    image = bytes(write_image(flat, 1, 0))
    sums = block_checksums(memoryview(image))
    path = written(tmp_path, image)
    for block in range(len(sums)):
        with path.open("r+b") as file:
            file.seek(min(block * BLOCK_BYTES + 4_000_000, len(image) - 1))
            old = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([old[0] ^ 4]))
        with pytest.raises(CheckpointError, match=rf"part-0.safetensors is damaged: its block {block}"):
            part = FilePart(path, sums)
            with part:
                load_parts({0: part}, 1, 1, Tracked(thing=Thing()), threads=threads)
        path.write_bytes(image)
    with FilePart(path, sums) as part:
        live = Tracked(thing=Thing())
        load_parts({0: part}, 1, 1, live)
        assert_same(live.state(), flat)


def test_damage_is_named_when_the_state_is_resharded(tmp_path: Path) -> None:
    """Opening sees the first block only; what is wrong behind it is seen by whoever needs it."""
    rows = BLOCK_BYTES // 4
    flats = []
    for place in range(2):
        layout = TensorSharding((2 * rows, 2), ("S0",), (), (2,), (place,))
        flats.append(flatten({"model": {"weight": Sharded(torch.full((rows, 2), float(place)), layout)}}))
    sources = {}
    for shard, flat in enumerate(flats):
        image = bytearray(write_image(flat, 1, 0))
        sums = block_checksums(memoryview(image))
        image[BLOCK_BYTES + 5] ^= 16 * shard
        sources[shard] = MemoryPart(memoryview(image), sums, f"part-{shard}")
    with pytest.raises(CheckpointError, match="part-1 is damaged: its block 1"):
        load_parts(sources, 2, 1, Tracked(model=nn.Linear(2, 2 * rows, bias=False)))


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    image = bytes(write_image(flatten({"thing": torch.ones(5000)}), 1, 0))
    with pytest.raises(CheckpointError, match="cannot be opened: No such file"):
        FilePart(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"cannot be (opened|read): Is a directory"):
        FilePart(tmp_path)
    path = written(tmp_path, image)
    with pytest.raises(CheckpointError, match="its checksums are of 7"):
        FilePart(path, [0] * 7)
    with FilePart(path) as part:
        os.truncate(path, len(image) // 2)
        with pytest.raises(CheckpointError, match="truncated"):
            load_parts({0: part}, 1, 1, Tracked(thing=Thing()))
    with pytest.raises(CheckpointError, match="gave 0 bytes"):
        RangePart(lambda start, size: b"", len(image))


def test_one_tensor_alone() -> None:
    flat = flatten({"a": torch.arange(100), "b": torch.arange(7.0)})
    image = write_image(flat, 1, 0)
    part = MemoryPart(memoryview(image), block_checksums(memoryview(image)))
    a, b = part.layout.entries
    assert part.read(a, 80, 16) == flat.tensors[0][10:12].numpy().tobytes()
    assert part.read(b, 0, b.size_bytes) == flat.tensors[1].numpy().tobytes()
    with pytest.raises(CheckpointError, match="b has 28 bytes, not 29"):
        part.read(b, 0, 29)


def test_another_model_is_refused_by_name() -> None:
    image = write_image(Tracked(model=nn.Linear(3, 8)).state(), 1, 0)
    with pytest.raises(StateError, match=r"model\.weight: it is torch.float32 \[9, 3\], saved was"):
        load_parts({0: MemoryPart(memoryview(image))}, 1, 1, Tracked(model=nn.Linear(3, 9)))


def test_tied_and_scattered_tensors() -> None:
    class Odd(nn.Module):
        def __init__(self, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.turned = nn.Parameter(torch.randn(6, 40).t())
            self.tied = self.turned
            self.register_buffer("cache", torch.randn(3), persistent=False)

    saved, live = Tracked(model=Odd(0)), Tracked(model=Odd(1))
    stride = live.modules()["model"].get_parameter("turned").stride()
    images = images_of(saved.state(), 2)
    load_parts({at: MemoryPart(memoryview(image)) for at, image in enumerate(images)}, 1, 2, live)
    assert_same(live.state(), saved.state())
    assert live.modules()["model"].get_parameter("turned").stride() == stride


def test_a_users_arrays_are_not_written_into() -> None:
    """What an object's state_dict() shows may be shared with others: only its load_state_dict() decides."""
    shown: dict[str, Any] = {"a": np.ones(5), "t": torch.ones(5)}
    kept = copy.deepcopy(shown)
    image = write_image(flatten({"thing": {"a": np.zeros(5), "t": torch.zeros(5)}}), 1, 0)
    live = Tracked(thing=Thing(shown))
    load_parts({0: MemoryPart(memoryview(image))}, 1, 1, live)
    assert (shown["a"] == kept["a"]).all() and torch.equal(shown["t"], kept["t"])
    assert live.others()["thing"].state["t"].tolist() == [0.0] * 5
