"""Checkpoints of every cut, exported, and opened by the stock readers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from holdfast.errors import CheckpointError, UsageError
from holdfast.state.export import export
from holdfast.state.partition import write_image
from holdfast.state.tracked import Tracked
from holdfast.state.tree import flatten
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue, FoundCheckpoint
from holdfast.storage.checkpoint_writer import CheckpointWriter
from holdfast.storage.image import TensorRegion, plan
from holdfast.storage.manifest import CheckpointInfo
from holdfast.storage.stores import open_store


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(40, 16)
        self.middle = torch.nn.Linear(16, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.head = torch.nn.Linear(16, 40, bias=False)
        self.head.weight = self.embedding.weight


def tracked(**more: Any) -> Tracked:
    torch.manual_seed(3)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    model.head(model.norm(model.middle(model.embedding(torch.arange(8))))).square().mean().backward()
    optimizer.step()
    return Tracked(model=model, optimizer=optimizer, **more)


def saved(root: Path, state: Tracked, shares: int = 3) -> tuple[CheckpointCatalogue, FoundCheckpoint]:
    """As data parallel ranks save it: each a share."""
    store = open_store(str(root))
    flat = state.state()
    with CheckpointWriter(store, CheckpointInfo(step=5, world_size=shares, shares=shares), "a") as writing:
        for share in range(shares):
            writing.write_part(share, memoryview(write_image(flat, shares, share)))
        found = writing.publish()
    assert found is not None
    return CheckpointCatalogue(store), found


def test_one_file_has_every_tensor(tmp_path: Path) -> None:
    state = tracked()
    catalogue, found = saved(tmp_path / "run", state)
    target = tmp_path / "out" / "all.safetensors"
    assert export(catalogue, found, target) == [target]
    loaded = load_file(target)
    model = state.modules()["model"]
    assert torch.equal(loaded["model.middle.weight"], model.get_parameter("middle.weight"))
    assert any(name.startswith("optimizer.state.middle.weight.exp_avg") for name in loaded)
    assert loaded["model.norm.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("shares", [1, 2, 5])
def test_the_model_alone_is_loaded_by_safetensors_own_loader(tmp_path: Path, shares: int) -> None:
    state = tracked()
    catalogue, found = saved(tmp_path / "run", state, shares)
    export(catalogue, found, tmp_path / "model.safetensors", model="")
    fresh = Model()
    load_model(fresh, tmp_path / "model.safetensors")
    for name, value in state.modules()["model"].state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata()["head.weight"] == "embedding.weight"


def test_a_cast_leaves_integers_alone(tmp_path: Path) -> None:
    state = tracked()
    catalogue, found = saved(tmp_path / "run", state)
    export(catalogue, found, tmp_path / "m.safetensors", model="model", dtype=torch.bfloat16)
    loaded = load_file(tmp_path / "m.safetensors")
    expected = state.modules()["model"].state_dict()
    assert torch.equal(loaded["middle.weight"], expected["middle.weight"].to(torch.bfloat16))
    assert loaded["norm.num_batches_tracked"].dtype == torch.int64


def test_a_set_has_an_index_as_hugging_face_has_it(tmp_path: Path) -> None:
    state = tracked()
    catalogue, found = saved(tmp_path / "run", state)
    files = export(catalogue, found, tmp_path / "set", model="", shard_bytes=1500)
    index = json.loads((tmp_path / "set" / "model.safetensors.index.json").read_text())
    assert [path.name for path in files] == sorted(set(index["weight_map"].values()))
    assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
    together = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert set(together) == set(index["weight_map"])
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in together.values())
    expected = state.modules()["model"].state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in together.items())
    assert {path.name for path in tmp_path.iterdir()} == {"run", "set"}


def test_a_small_set_is_one_file_without_an_index(tmp_path: Path) -> None:
    catalogue, found = saved(tmp_path / "run", tracked())
    assert export(catalogue, found, tmp_path / "set", model="") == [tmp_path / "set" / "model.safetensors"]
    assert [path.name for path in (tmp_path / "set").iterdir()] == ["model.safetensors"]


def test_what_is_there_is_replaced_by_force_only_and_never_what_is_no_export(tmp_path: Path) -> None:
    catalogue, found = saved(tmp_path / "run", tracked())
    export(catalogue, found, tmp_path / "set")
    with pytest.raises(UsageError, match="--force"):
        export(catalogue, found, tmp_path / "set")
    export(catalogue, found, tmp_path / "set", model="", is_forced=True)
    (tmp_path / "set" / "thesis.tex").write_text("")
    with pytest.raises(UsageError, match="other things"):
        export(catalogue, found, tmp_path / "set", is_forced=True)
    assert (tmp_path / "set" / "thesis.tex").exists()


def test_which_of_several_models_must_be_given(tmp_path: Path) -> None:
    catalogue, found = saved(tmp_path / "run", Tracked(teacher=torch.nn.Linear(2, 2), student=torch.nn.Linear(3, 3)))
    with pytest.raises(UsageError, match="teacher, student"):
        export(catalogue, found, tmp_path / "m.safetensors", model="")
    with pytest.raises(UsageError, match="no model nobody"):
        export(catalogue, found, tmp_path / "m.safetensors", model="nobody")
    export(catalogue, found, tmp_path / "m.safetensors", model="student")
    assert load_file(tmp_path / "m.safetensors")["weight"].shape == (3, 3)


def test_shards_of_rows_and_columns_become_the_full_tensor_again(tmp_path: Path) -> None:
    whole = torch.arange(60, dtype=torch.float32).view(10, 6)
    regions = [(slice(0, 7), slice(0, 4)), (slice(7, 10), slice(0, 4)), (slice(0, 10), slice(4, 6))]
    catalogue, found = in_regions(tmp_path / "run", whole, regions)
    export(catalogue, found, tmp_path / "m.safetensors", model="")
    assert torch.equal(load_file(tmp_path / "m.safetensors")["weight"], whole)


def in_regions(
    root: Path, whole: torch.Tensor, regions: Sequence[tuple[slice, slice]], shards: int | None = None
) -> tuple[CheckpointCatalogue, FoundCheckpoint]:
    """A checkpoint in which each part has one region of a weight."""
    store = open_store(str(root))
    cut = shards or len(regions)
    with CheckpointWriter(
        store, CheckpointInfo(step=5, world_size=3, shards=cut, shares=len(regions) // cut), "a"
    ) as writing:
        for number, region in enumerate(regions):
            local = whole[region].contiguous()
            layout = plan([_piece(region, whole)], 4096, {})
            buffer = memoryview(bytearray(layout.size_bytes))
            layout.frame(buffer)
            layout.put_skeleton(buffer, flatten({"model": {"weight": local}}).skeleton)
            start = layout.entries[0].start
            buffer[start : start + local.nbytes] = local.numpy().tobytes()
            writing.write_part(number, buffer)
        found = writing.publish()
    assert found is not None
    return CheckpointCatalogue(store), found


def test_overlapping_parts_that_add_up_to_the_right_count_but_lack_rows_are_refused(tmp_path: Path) -> None:
    whole = torch.arange(60, dtype=torch.float32).view(10, 6)
    regions = [(slice(0, 6), slice(0, 6)), (slice(4, 8), slice(0, 6))]  # 10 rows in all, and rows 8 and 9 are in none
    catalogue, found = in_regions(tmp_path / "run", whole, regions)
    with pytest.raises(CheckpointError, match=r"weight is not complete: .* rows 8 to 9 of 10"):
        export(catalogue, found, tmp_path / "m.safetensors", model="")
    assert not (tmp_path / "m.safetensors").exists()
    with pytest.raises(CheckpointError, match=r"rows 8 to 9 of 10 of model\.weight"):
        catalogue.verify(found)
    assert [finding.matters for finding in catalogue.inspect(found)] == [True]
    assert catalogue.latest(on_damage=lambda _: None) is None


def test_what_each_of_two_shards_has_in_shares_of_its_own_is_exported(tmp_path: Path) -> None:
    """A tensor that is not sharded, of HSDP: both shards have it, each cut into shares by what else the shard holds."""
    whole = torch.arange(60, dtype=torch.float32).view(10, 6)
    rows = [slice(0, 6), slice(0, 5), slice(6, 10), slice(5, 10)]  # shard 0 and 1 of share 0, then of share 1
    catalogue, found = in_regions(tmp_path / "run", whole, [(one, slice(0, 6)) for one in rows], shards=2)
    export(catalogue, found, tmp_path / "m.safetensors", model="")
    assert torch.equal(load_file(tmp_path / "m.safetensors")["weight"], whole)
    catalogue.verify(found)


spans = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda pair: slice(min(pair), max(pair)))


@settings(max_examples=60, deadline=None)
@given(regions=st.lists(st.tuples(spans, spans), min_size=1, max_size=7))
def test_any_regions_are_exported_exactly_or_refused(
    tmp_path_factory: pytest.TempPathFactory, regions: list[tuple[slice, slice]]
) -> None:
    whole = torch.arange(1, 26, dtype=torch.float32).view(5, 5)
    is_there = torch.zeros(5, 5, dtype=torch.bool)
    for region in regions:
        is_there[region] = True
    root = tmp_path_factory.mktemp("export")
    catalogue, found = in_regions(root / "run", whole, regions)
    if is_there.all():
        export(catalogue, found, root / "m.safetensors", model="")
        assert torch.equal(load_file(root / "m.safetensors")["weight"], whole)
        catalogue.verify(found)
        return
    with pytest.raises(CheckpointError, match="weight is not complete"):
        export(catalogue, found, root / "m.safetensors", model="")
    with pytest.raises(CheckpointError, match="no part has"):
        catalogue.verify(found)


def _piece(region: tuple[slice, slice], whole: torch.Tensor) -> TensorRegion:
    return TensorRegion(
        name="model.weight",
        path=("model", "weight"),
        index=0,
        dtype="float32",
        shape=tuple(part.stop - part.start for part in region),
        offsets=tuple(part.start for part in region),
        full_shape=tuple(whole.shape),
    )


def test_a_damaged_part_leaves_no_file(tmp_path: Path) -> None:
    catalogue, found = saved(tmp_path / "run", tracked(), shares=1)
    path = tmp_path / "run" / "step-5" / "part-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-2000] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="part-0"):
        export(catalogue, found, tmp_path / "m.safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"run"}


def of_shards(root: Path, *trees: dict[str, Any]) -> tuple[CheckpointCatalogue, FoundCheckpoint]:
    """A checkpoint of shards with these states."""
    store = open_store(str(root))
    with CheckpointWriter(store, CheckpointInfo(step=5, world_size=len(trees), shards=len(trees)), "a") as writing:
        for shard, tree in enumerate(trees):
            with memoryview(write_image(flatten(tree), 1, 0)) as image:
                writing.write_part(shard, image)
        found = writing.publish()
    assert found is not None
    return CheckpointCatalogue(store), found


def optimizer_of(*names: str) -> dict[str, Any]:
    return {"state": {}, "param_groups": [{"lr": 0.1, "params": list(names)}]}


@pytest.mark.filterwarnings("ignore")  # torch's own, of being used without a group
def test_the_names_of_all_stages_are_one_model(tmp_path: Path) -> None:
    stages = [
        {"model": {name: torch.full((2,), float(at))}, "optimizer": optimizer_of(name)} for at, name in enumerate("ab")
    ]
    catalogue, found = of_shards(tmp_path / "run", *stages)
    catalogue.verify(found)
    export(catalogue, found, tmp_path / "m.safetensors", model="")
    assert {name: value.tolist() for name, value in load_file(tmp_path / "m.safetensors").items()} == {
        "a": [0, 0],
        "b": [1, 1],
    }
    dcp_to_torch_save(str(tmp_path / "run" / "step-5"), str(tmp_path / "all.pt"))
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    assert loaded["optimizer"]["param_groups"] == [{"lr": 0.1, "params": ["a", "b"]}]


def test_parameters_that_differ_between_shards_are_all_written_and_equal_ones_once(tmp_path: Path) -> None:
    def tree(shard: int) -> dict[str, Any]:
        values = {"gate": 0, "expert": shard, "statistics": shard, "cut": 0}
        tensors = {
            name: torch.full((3 + shard if name == "cut" else 3,), float(value)) for name, value in values.items()
        }
        return {"model": tensors, "optimizer": optimizer_of("gate", "expert", "cut")}

    catalogue, found = of_shards(tmp_path / "run", tree(0), tree(1), tree(1))
    catalogue.verify(found)
    export(catalogue, found, tmp_path / "m.safetensors", model="")
    written = {name: value.tolist() for name, value in load_file(tmp_path / "m.safetensors").items()}
    three = [[float(number)] * 3 for number in range(2)]
    assert written == {
        "gate": three[0],
        "statistics": three[0],
        "expert": three[0],
        "expert@1": three[1],
        "expert@2": three[1],
        "cut": three[0],
        "cut@1": [0.0] * 4,
        "cut@2": [0.0] * 4,
    }
