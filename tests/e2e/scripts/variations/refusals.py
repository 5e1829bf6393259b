"""Scripts for which the promises cannot be kept: each ends in its first steps, and is told what to change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import holdfast as hf

from .bench import DDP, FEATURES, GLOBAL_BATCH, Bench, Meter, Net, Samples, Training, variation


@variation(refused="is not the same on ranks")
def meter_of_each_rank_tracked(bench: Bench) -> Training:
    """Per-rank state where all ranks' is expected."""
    meter = Meter()
    return Training(DDP(Net()), tracked={"meter": meter}, then=lambda step: meter.add(float(bench.loss)))


@variation(refused="keeps state of its own on each rank")
def power_sgd(bench: Bench) -> Training:
    model = DDP(Net())
    state = powerSGD_hook.PowerSGDState(process_group=None, matrix_approximation_rank=1, start_powerSGD_iter=3)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Training(model)


@variation(refused="is not the same on ranks")
def local_experts(bench: Bench) -> Training:
    """A part of the model that is reduced by nobody: equal names and shapes, other numbers."""
    net = Net()
    model = DDP(net)
    with torch.random.fork_rng():
        torch.manual_seed(100 + bench.job.rank)
        expert = nn.Linear(FEATURES, FEATURES)
    parameters = [*model.parameters(), *expert.parameters()]
    return Training(
        model,
        torch.optim.Adam(parameters, lr=1e-2),
        tracked={"expert": expert},
        loss=lambda x, y: nn.functional.cross_entropy(model(x + expert(x)), y),
    )


@variation(refused="is not the same on ranks")
def pipeline_by_hand(bench: Bench) -> Training:
    """Two stages of the same shape."""
    rank, last = bench.job.rank, bench.job.world_size - 1
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())

    def compute(step: hf.Step) -> torch.Tensor:
        x = torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(step.number))
        if rank == 0:
            y = stage(x)
            dist.send(y.detach(), last)
            gradient = torch.empty_like(y)
            dist.recv(gradient, last)
            y.backward(gradient)
            return y.mean()
        received = torch.empty(4, FEATURES)
        dist.recv(received, 0)
        received.requires_grad_()
        loss = (stage(received) - x).square().mean()
        loss.backward()
        dist.send(received.grad, 0)
        return loss

    return Training(stage, torch.optim.SGD(stage.parameters(), lr=0.1), compute=compute)


@variation(refused="is not the same on ranks")
def local_sgd(bench: Bench) -> Training:
    """The ranks' parameters are averaged every fourth step only."""
    model = Net()

    @torch.no_grad()
    def then(step: hf.Step) -> None:
        if step.number % 4 == 3:
            for parameter in model.parameters():
                dist.all_reduce(parameter)
                parameter /= bench.job.world_size

    return Training(model, then=then)


@variation(refused="not tracked")
def optimizer_not_tracked(bench: Bench) -> Training:
    return Training(DDP(Net()), untracked=("optimizer",))


@variation(refused="not tracked")
def second_optimizer_not_tracked(bench: Bench) -> Training:
    model = DDP(Net())
    second = torch.optim.Adam(model.module.last.parameters(), lr=1e-2)

    def update(step: hf.Step) -> None:
        training.optimizer.step()
        second.step()
        model.zero_grad()

    others = [*model.module.first.parameters(), *model.module.middle.parameters()]
    training = Training(model, torch.optim.Adam(others, lr=1e-2), update=update)
    return training


@variation(refused="not tracked")
def model_not_tracked(bench: Bench) -> Training:
    return Training(DDP(Net()), untracked=("model",))


@variation(refused="not tracked")
def scheduler_not_tracked(bench: Bench) -> Training:
    training = Training(DDP(Net()))
    scheduler = lr_scheduler.StepLR(training.optimizer, 3, 0.9)
    training.then = lambda step: scheduler.step()
    return training


@variation(refused="has a copy of the parameters of a tracked model")
def average_in_a_dictionary(bench: Bench) -> Training:
    net = Net()
    model = DDP(net)
    shadow = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}

    @torch.no_grad()
    def then(step: hf.Step) -> None:
        for name, parameter in net.named_parameters():
            shadow[name].lerp_(parameter, 0.1)

    return Training(model, then=then)


@variation(refused="track")
def nothing_tracked(bench: Bench) -> Training:
    model = DDP(Net())

    def compute(step: hf.Step) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step.number * 100 + bench.job.rank)
        loss = model(torch.randn(8, FEATURES, generator=generator)).square().mean()
        loss.backward()
        return loss

    return Training(model, untracked=("model", "optimizer", "data"), compute=compute)


@variation(refused="step.batches")
def loader_by_hand(bench: Bench) -> Training:
    """One iterator for all steps, which a newcomer begins from the start."""
    from .samples import torch_loader

    loader = torch_loader(bench)
    batches = iter(loader)

    def compute(step: hf.Step) -> torch.Tensor:
        x, y, samples = next(batches)
        bench.record(samples)
        loss = bench.mean_loss(x, y)
        step.backward(loss)
        return loss

    return Training(DDP(Net()), data=loader, compute=compute)


@variation(refused="step.batches")
def own_loader_by_hand(bench: Bench) -> Training:
    """`for x, y in data` instead of `step.batches(data)`."""
    data = hf.Loader(Samples(), global_batch_size=GLOBAL_BATCH, seed=3)

    def compute(step: hf.Step) -> torch.Tensor:
        for x, y, samples in data:
            bench.record(samples)
            loss = bench.mean_loss(x, y)
            step.backward(loss)
            break
        return loss

    return Training(DDP(Net()), data=data, compute=compute)


@variation(refused="makes a collective while it hands out a batch")
def loader_that_communicates(bench: Bench) -> Training:
    """As one that accelerate has prepared: at the beginning of a pass all ranks take rank 0's generator."""

    class Agreeing(DataLoader):
        def __iter__(self) -> Iterator[Any]:
            state = torch.get_rng_state()
            dist.broadcast(state, 0)
            self.sampler.generator.set_state(state)
            yield from super().__iter__()

    loader = Agreeing(Samples(), batch_size=8, shuffle=True, generator=torch.Generator())
    return Training(DDP(Net()), data=loader)


@variation(refused="a job has one loop of steps")
def epoch_loop(bench: Bench) -> Training:
    """The steps of a run, once for each epoch. The first is short: its second would come after many steps."""

    def loop() -> None:
        for _ in range(3):
            for step in bench.job.steps(1):
                bench.run_step(step)

    return Training(DDP(Net()), loop=loop)


@variation(refused="does not average its gradient")
def unfrozen_behind_ddp(bench: Bench) -> Training:
    """A layer that DDP was built without: its gradients are each rank's own."""
    net = Net()
    net.first.requires_grad_(False)
    model = DDP(net)

    def compute(step: hf.Step) -> torch.Tensor:
        if step.number == 1:
            net.first.requires_grad_(True)
        for x, y in bench.batches(step):
            loss = bench.mean_loss(x, y)
            step.backward(loss)
        return loss

    return Training(model, compute=compute)


@variation(refused="has other submodules or parameters")
def submodule_replaced(bench: Bench) -> Training:
    """A layer without dropout takes the place of one with, in the loop."""
    model = DDP(Net())

    def then(step: hf.Step) -> None:
        if step.number == 0:
            model.module.dropout = torch.nn.Identity()

    return Training(model, then=then)


@variation(refused="belong to no tracked module")
def group_of_an_untracked_module(bench: Bench) -> Training:
    """An optimizer is given a parameter in the loop that a replacement would not find."""
    model = DDP(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    extra = nn.Parameter(torch.zeros(()))

    def then(step: hf.Step) -> None:
        if step.number == 0:
            optimizer.add_param_group({"params": [extra]})

    return Training(model, optimizer, then=then)
