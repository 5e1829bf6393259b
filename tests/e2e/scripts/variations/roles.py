"""What depends on the rank: the set-up by one of them, groups, objects that ranks exchange, state of each rank."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist

import holdfast as hf

from .bench import DDP, Bench, Meter, Net, Training, variation

Events = list[dict[str, Any]]


def notes(events: Events, name: str) -> Events:
    return [event for event in events if event["what"] == "note" and event["name"] == name]


def verify_set_up(events: Events, reference: Events) -> None:
    """Once in each process that has been rank 0, and in no other."""
    first = Counter(event["pid"] for event in events if event["what"] == "begin" and event["rank"] == 0)
    assert Counter(event["pid"] for event in notes(events, "set up")) == dict.fromkeys(first, 1)


@variation(verify=verify_set_up)
def set_up_by_rank_0(bench: Bench) -> Training:
    """As a script that makes its output directory."""
    if bench.job.rank == 0:
        bench.note("set up")
    return Training(DDP(Net()))


@variation(verify=verify_set_up)
def set_up_by_rank_0_at_the_end(bench: Bench) -> Training:
    """The rank is read when everything else is built, from torch."""
    model = DDP(Net())
    if dist.get_rank() == 0:
        bench.note("set up")
    return Training(model)


@variation()
def subgroup(bench: Bench) -> Training:
    """A group of its own and object collectives in the body."""
    group = dist.new_group([0, bench.job.world_size - 1])

    def then(step: hf.Step) -> None:
        number = bench.loss.new_full((2,), step.number)
        dist.all_reduce(number, group=group)
        assert number.tolist() == [2 * step.number] * 2
        found: list[Any] = [None] * bench.job.world_size
        dist.all_gather_object(found, (bench.job.rank, step.number))
        assert found == [(rank, step.number) for rank in range(bench.job.world_size)]

    return Training(DDP(Net()), then=then)


@variation()
def objects_in_the_body(bench: Bench) -> Training:
    """Before the update."""
    model = DDP(Net())

    def loss(x: Any, y: Any) -> Any:
        found = [("a", bench.job.step) if bench.job.rank == 0 else None]
        dist.broadcast_object_list(found, src=0)
        assert found == [("a", bench.job.step)]
        return model(x).square().mean()

    return Training(model, loss=loss)


def exchanged(bench: Bench) -> tuple[Any, ...]:
    """What frameworks exchange before the first step: a name, everyone's settings, a share each."""
    size = bench.job.world_size
    name: list[Any] = [{"run": "seven"} if bench.job.rank == 0 else None]
    dist.broadcast_object_list(name, src=0)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, f"rank {bench.job.rank}")
    share: list[Any] = [None]
    dist.scatter_object_list(share, [f"share {rank}" for rank in range(size)] if bench.job.rank == 0 else None, src=0)
    return name, everyone, share


@variation()
def objects_before_the_steps(bench: Bench) -> Training:
    name, everyone, share = exchanged(bench)
    assert name == [{"run": "seven"}]
    assert everyone == [f"rank {rank}" for rank in range(bench.job.world_size)]
    assert share == [f"share {bench.job.rank}"]
    return Training(DDP(Net()))


@variation()
def local_meter(bench: Bench) -> Training:
    """Each rank has its own mean loss."""
    meter = Meter()
    return Training(DDP(Net()), local={"meter": meter}, then=lambda step: meter.add(float(bench.loss)))


@variation()
def common_meter(bench: Bench) -> Training:
    """All ranks have the same."""
    meter = Meter()

    def then(step: hf.Step) -> None:
        loss = bench.loss.clone()
        dist.all_reduce(loss)
        meter.add(float(loss))

    return Training(DDP(Net()), tracked={"meter": meter}, then=then)


def verify_once(events: Events, reference: Events) -> None:
    """Each committed step is told once by each rank; one that a process died of right after, not at all."""
    died = {(event["step"], event["rank"]) for event in events if event["what"] == "fault"}
    for name in ("committed", "after commit"):
        told = Counter((event["value"], event["rank"]) for event in notes(events, name))
        wanted = {(event["value"], event["rank"]) for event in notes(reference, name)}
        assert max(told.values()) == 1, [key for key, count in told.items() if count > 1]
        assert wanted - set(told) <= died and not set(told) - wanted


@variation(verify=verify_once)
def told_once(bench: Bench) -> Training:
    """Side effects of committed steps, in the two ways there are."""

    def then(step: hf.Step) -> None:
        step.after_commit(lambda: bench.note("after commit", step.number))

    def outside(step: hf.Step) -> None:
        if step.is_committed:
            bench.note("committed", step.number)

    return Training(DDP(Net()), then=then, outside=outside)
