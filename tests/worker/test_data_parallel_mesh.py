"""A session's ranks on a mesh: shared batches and random numbers, gradients of the mean, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.data.formats import Shard
from holdfast.errors import UsageError
from support.crowd import Member, together

SAMPLES = [torch.randn(4, generator=torch.Generator().manual_seed(number)).double() for number in range(20)]
BATCH, STEPS = 7, 3


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1).double()


def train(member: Member, rank: int, size: int, slots: int | None, weights: Any) -> dict[str, Any]:
    """Rank r of 2 × 2 × 2 has stage r // 4, data coordinate r // 2 % 2, tensor coordinate r % 2."""
    member.start(rank, size)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    job = hf.init(seed=3)
    job._engine.stage = rank // 4
    model = DistributedDataParallel(build(), process_group=mesh["dp"].get_group())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = hf.Loader(SAMPLES, global_batch_size=BATCH, slots=slots, shuffle=False, mesh=mesh["dp"], weights=weights)
    assert (data.rank, data.world_size) == (rank // 2 % 2, 2)
    job.track(model=model, optimizer=optimizer, data=data)
    found: dict[str, Any] = {"outside": [], "inside": [], "batches": [], "difference": 0.0, "scales": []}
    for step in job.steps(STEPS):
        with step:
            found["outside"].append(torch.rand(()).item())
            for batch in step.batches(data):
                found["inside"].append(torch.rand(()).item())
                found["batches"].append(batch.tolist())
                found["scales"].append(step.loss_scale)
                (model(batch).square().mean() * step.loss_scale).backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            optimizer.step()
            alone = build()
            alone(torch.stack(SAMPLES[step.number * BATCH : (step.number + 1) * BATCH])).square().mean().backward()
            differences = [(a - b.grad).abs().max() for a, b in zip(gradients, alone.parameters(), strict=True)]  # type: ignore[operator]
            found["difference"] = max(found["difference"], *map(float, differences))
            optimizer.zero_grad()
    dist.barrier()
    return found


@pytest.mark.parametrize("slots", [None, 5])
def test_ranks_of_a_data_coordinate_share_batches_and_those_of_a_stage_random_numbers(slots: int | None) -> None:
    found = together(train, 8, slots, None)
    for rank, one in enumerate(found):
        twin, stage, coordinate = found[rank ^ 1], found[rank ^ 4], found[rank ^ 2]
        assert one["difference"] < 1e-12
        assert twin == one, "tensor parallel ranks have everything alike"
        assert (stage["batches"], stage["scales"]) == (one["batches"], one["scales"])
        for where in ("outside", "inside"):
            assert one[where] and not set(one[where]) & {*coordinate[where], *stage[where]}
    samples = sorted(sample for one in (found[0], found[2]) for batch in one["batches"] for sample in batch)
    assert samples == sorted(sample.tolist() for sample in SAMPLES), "each once"


def test_a_coordinate_has_the_share_of_its_slowest_rank() -> None:
    found = together(train, 8, 5, [1.0, 1.0, 1.0, 0.25, 1.0, 1.0, 1.0, 1.0])
    assert all(one["difference"] < 1e-12 for one in found)
    assert [len(one["batches"]) for one in found] == [len(found[0]["batches"])] * 2 + [
        len(found[2]["batches"]),
        len(found[2]["batches"]),
    ] + [len(one["batches"]) for one in found[:4]]
    assert len(found[2]["batches"]) < len(found[0]["batches"])


def read_stream(member: Member, rank: int, size: int, directory: str) -> list[Any]:
    """Rank 1 cannot read beyond record 3 of a shard that the other rank of its coordinate could read to its end."""

    def read(shard: Shard, first: int) -> Iterator[torch.Tensor]:
        number = int(shard.path.rpartition("-")[2])
        for record in range(first, 8):
            if rank == 1 and number == 0 and record >= 3:
                raise OSError("stale file handle")
            yield torch.tensor(number * 100 + record)

    member.start(rank, size)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    paths = [f"{directory}/shard-{number}" for number in range(6)]
    data = hf.Stream(
        paths, format=read, global_batch_size=4, slots=2, epochs=1, shuffle=False, mesh=mesh["dp"], threads=0
    )
    batches = []
    for batch in data:
        batches.append([] if data.is_ghost else batch.tolist())
        data.commit()
    leases, problems = data.take_news()
    dist.barrier()
    return [batches, len(leases), len(problems), data.state_dict(), data.quarantined]


@pytest.mark.filterwarnings("ignore")
def test_ranks_of_a_coordinate_read_the_same_records_also_where_one_of_them_cannot(tmp_path: Path) -> None:
    for number in range(6):
        (tmp_path / f"shard-{number}").touch()
    found = together(read_stream, 4, str(tmp_path))
    assert found[0][0] == found[1][0] and found[2][0] == found[3][0]
    assert all(one[3] == found[0][3] for one in found)
    assert found[1][1:3] == found[3][1:3] == [0, 0] and found[0][1] and found[2][1], "one rank reports each lease"
    assert (found[0][2], found[2][2], found[0][4]) == (1, 0, []), "the other coordinate has read the rest"
    seen = sorted(number for one in (found[0], found[2]) for batch in one[0] for number in batch)
    assert seen == [number * 100 + record for number in range(6) for record in range(8)], "each once"


def refused(member: Member, rank: int, size: int) -> list[str]:
    member.start(rank, size)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "dp"))
    sentences = []
    with pytest.raises(UsageError) as caught:
        hf.Loader(SAMPLES, global_batch_size=BATCH, mesh=mesh["dp"], rank=0, world_size=1)
    sentences.append(str(caught.value))
    data = hf.Loader(SAMPLES, global_batch_size=BATCH, slots=7, mesh=mesh["dp"])
    assert (data.rank, data.world_size) == (0, 1)
    with pytest.raises(UsageError) as caught:
        data.set_assignment(0, 3)
    sentences.append(str(caught.value))
    job = hf.init(reduction="canonical")
    with pytest.raises(UsageError) as caught:
        job.track(model=build(), data=data)
    sentences.append(str(caught.value))
    return sentences


def test_what_cannot_be_is_refused() -> None:
    for one in together(refused, 2):
        both, world, canonical = one
        assert "give either mesh=, or rank= and world_size=" in both
        assert "has 2 ranks, and there are 3" in world
        assert "the loader's mesh has 1 data coordinates for 2 ranks" in canonical


def two_meshes(member: Member, rank: int, size: int) -> str:
    member.start(rank, size)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    one, other = (hf.Loader(SAMPLES, global_batch_size=BATCH, mesh=each) for each in (mesh, None))
    with pytest.raises(UsageError) as caught:
        hf.init().track(first=one, second=other)
    return str(caught.value)


def test_loaders_that_divide_the_data_differently_are_refused() -> None:
    for sentence in together(two_meshes, 2):
        assert "the loaders 'first' and 'second' divide their batches along different dimensions" in sentence


# --- the snippet of the documentation


def snippet() -> str:
    text = (Path(__file__).resolve().parents[2] / "docs/data.md").read_text()
    section = text.split("## Tensor and pipeline parallel", 1)[1]
    return section.split("```python\n", 1)[1].split("```", 1)[0]


def run_snippet(member: Member, rank: int, size: int) -> list[Any]:
    member.start(rank, size)
    samples = [(sample.float(), torch.tensor(number % 2)) for number, sample in enumerate(SAMPLES)]
    names = {
        "hf": hf,
        "torch": torch,
        "DistributedDataParallel": DistributedDataParallel,
        "cross_entropy": nn.functional.cross_entropy,
        "dataset": samples,
        "build_model": lambda: nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5)),
    }
    torch.manual_seed(0)
    exec(snippet(), names)
    job, model = names["job"], names["model"]
    dist.barrier()
    return [job.step, [parameter.tolist() for parameter in model.parameters()]]  # type: ignore[attr-defined]


def test_the_snippet_of_the_documentation_runs() -> None:
    found = together(run_snippet, 4)
    assert all(one == found[0] and one[0] == 3 for one in found)
