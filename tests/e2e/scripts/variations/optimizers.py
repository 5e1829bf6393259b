"""Optimizers, schedulers, averages, and when they step."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import holdfast as hf

from .bench import DDP, Bench, Net, Training, variation


@variation()
def two_optimizers(bench: Bench) -> Training:
    """A fault `after` comes between them, too: see `middle`."""
    model = DDP(Net())
    parameters = list(model.parameters())
    first = torch.optim.Adam(parameters[:2], lr=1e-2)
    second = torch.optim.SGD(parameters[2:], lr=1e-2, momentum=0.9)

    def update(step: hf.Step) -> None:
        first.step()
        bench.hurt("middle")
        second.step()
        first.zero_grad()
        second.zero_grad()

    return Training(model, first, tracked={"second": second}, update=update)


@variation()
def muon(bench: Bench) -> Training:
    model = DDP(Net())
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    others = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.ndim != 2], lr=1e-2)

    def update(step: hf.Step) -> None:
        for optimizer in (training.optimizer, others):
            optimizer.step()
            bench.hurt("middle")
            optimizer.zero_grad()

    training = Training(model, torch.optim.Muon(matrices, lr=1e-2), tracked={"others": others}, update=update)
    return training


class SharpnessAware(torch.optim.Optimizer):
    """SAM, as it is mostly written: an optimizer inside that shares the groups, and an update in two halves."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.05, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def climb(self) -> None:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
        for parameter in parameters:
            self.state[parameter]["old"] = parameter.data.clone()
            parameter.add_(parameter.grad, alpha=0.05 / float(norm))
        self.zero_grad()

    @torch.no_grad()
    def descend(self) -> None:
        for parameter, state in self.state.items():
            parameter.data = state["old"]
        self.base_optimizer.step()
        self.zero_grad()


@variation()
def sharpness_aware(bench: Bench) -> Training:
    """From step 1 on: parameters that change before an update are copied when that was seen for the first time. A
    scheduler sets the outer optimizer's learning rate, which the inner one takes."""
    model = DDP(Net())
    optimizer = SharpnessAware(model.parameters())

    def compute(step: hf.Step) -> torch.Tensor:
        for x, y in bench.batches(step):
            loss = bench.mean_loss(x, y)
            step.backward(loss)
            if step.number:
                optimizer.climb()
                step.backward(bench.mean_loss(x, y))
        return loss

    def update(step: hf.Step) -> None:
        optimizer.descend()
        scheduler.step()

    scheduler = lr_scheduler.StepLR(optimizer, 3, 0.9)
    tracked = {"base": optimizer.base_optimizer, "scheduler": scheduler}
    return Training(model, optimizer, tracked=tracked, compute=compute, update=update)


def lbfgs_training(bench: Bench, *, is_loss_averaged: bool) -> Training:
    """The update computes: each of its iterations is a forward, a backward and a reduction."""
    model = DDP(Net())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    batch: list[torch.Tensor] = []

    def compute(step: hf.Step) -> torch.Tensor:
        batch[:] = next(iter(bench.batches(step)))
        return bench.mean_loss(*batch)

    def update(step: hf.Step) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = bench.mean_loss(*batch)
            step.backward(loss)
            loss = loss.detach()
            if is_loss_averaged:
                dist.all_reduce(loss)
                loss /= bench.job.world_size
            return loss

        optimizer.step(closure)

    return Training(model, optimizer, compute=compute, update=update)


@variation()
def lbfgs(bench: Bench) -> Training:
    return lbfgs_training(bench, is_loss_averaged=True)


@variation(refused="optimizer is not the same on ranks")
def lbfgs_of_each_rank(bench: Bench) -> Training:
    """It decides by the loss whether to go on, and keeps it: each rank its own."""
    return lbfgs_training(bench, is_loss_averaged=False)


@variation()
def fused_adamw(bench: Bench) -> Training:
    model = DDP(Net())
    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))


@variation()
def learning_rate_tensor(bench: Bench) -> Training:
    model = DDP(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-2))

    def then(step: hf.Step) -> None:
        optimizer.param_groups[0]["lr"].mul_(0.95)

    return Training(model, optimizer, then=then)


@variation()
def clipped_gradients(bench: Bench) -> Training:
    model = DDP(Net())

    def update(step: hf.Step) -> None:
        clip_grad_norm_(model.parameters(), 0.1)
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=False)

    training = Training(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), update=update)
    return training


@variation()
def grad_scaler(bench: Bench) -> Training:
    model = DDP(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)

    def compute(step: hf.Step) -> torch.Tensor:
        for x, y in bench.batches(step):
            loss = bench.mean_loss(x, y)
            scaler.scale(step.scale(loss)).backward()
        return loss

    def update(step: hf.Step) -> None:
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return Training(model, optimizer, tracked={"scaler": scaler}, compute=compute, update=update)


# --- schedulers


@variation()
def one_cycle(bench: Bench) -> Training:
    training = Training(DDP(Net()))
    scheduler = lr_scheduler.OneCycleLR(training.optimizer, 0.05, total_steps=bench.steps + 1)
    training.tracked["scheduler"] = scheduler
    training.then = lambda step: scheduler.step()
    return training


@variation()
def plateau(bench: Bench) -> Training:
    """A scheduler that looks at the mean loss, so something communicates after the update."""
    training = Training(DDP(Net()))
    scheduler = lr_scheduler.ReduceLROnPlateau(training.optimizer, patience=1)

    def then(step: hf.Step) -> None:
        loss = bench.loss.clone()
        dist.all_reduce(loss)
        scheduler.step(loss)

    training.tracked["scheduler"], training.then = scheduler, then
    return training


@variation()
def scheduler_outside(bench: Bench) -> Training:
    """Stepped after the `with`, so once per attempt."""
    training = Training(DDP(Net()))
    scheduler = lr_scheduler.StepLR(training.optimizer, 3, 0.9)
    training.tracked["scheduler"] = scheduler
    training.outside = lambda step: scheduler.step()
    return training


# --- averages


@variation()
def ema(bench: Bench) -> Training:
    training = Training(DDP(Net()))
    averaged = AveragedModel(training.model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    training.tracked["averaged"] = averaged
    training.then = lambda step: averaged.update_parameters(training.model.module)
    return training


@variation()
def averaged_batch_norm(bench: Bench) -> Training:
    """Averaged from step 6 on, with buffers that DDP would give all ranks rank 0's of at the next forward only; and the
    steps communicate after the update, so that they are committed at their end."""
    training = Training(DDP(Net(norm=nn.BatchNorm1d)))
    averaged = AveragedModel(training.model.module)
    training.tracked["averaged"] = averaged

    def then(step: hf.Step) -> None:
        dist.all_reduce(torch.ones(()))
        if step.number >= 6:
            averaged.update_parameters(training.model.module)

    training.then = then
    return training


@variation()
def ema_by_hand(bench: Bench) -> Training:
    net = Net()
    shadow = copy.deepcopy(net)

    @torch.no_grad()
    def follow(step: hf.Step) -> None:
        for old, new in zip(shadow.parameters(), net.parameters(), strict=True):
            old.mul_(0.9).add_(new, alpha=0.1)

    return Training(DDP(net), tracked={"shadow": shadow}, then=follow)


@variation()
def ema_before_the_update(bench: Bench) -> Training:
    training = Training(DDP(Net()))
    averaged = AveragedModel(training.model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def update(step: hf.Step) -> None:
        averaged.update_parameters(training.model.module)
        training.optimizer.step()
        training.optimizer.zero_grad()

    training.tracked["averaged"], training.update = averaged, update
    return training


@variation()
def ema_outside(bench: Bench) -> Training:
    """Averaged after the `with`, so once per attempt."""
    training = Training(DDP(Net()))
    averaged = AveragedModel(training.model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    training.tracked["averaged"] = averaged
    training.outside = lambda step: averaged.update_parameters(training.model.module)
    return training


# --- parameters that come and go


@variation()
def group_added(bench: Bench) -> Training:
    """The last layer is trained from step 3 on, by a group of its own."""
    model = DDP(Net(), find_unused_parameters=True)
    parameters = list(model.parameters())
    optimizer = torch.optim.Adam(parameters[:4], lr=1e-2)

    def update(step: hf.Step) -> None:
        if step.number >= 3 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": parameters[4:], "lr": 1e-3})
        optimizer.step()
        model.zero_grad()

    return Training(model, optimizer, update=update)


@variation()
def group_of_another_module(bench: Bench) -> Training:
    """From step 3 on a second model is trained too, which nothing updated before."""
    model, other = DDP(Net()), DDP(Net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def compute(step: hf.Step) -> torch.Tensor:
        if step.number == 3:
            optimizer.add_param_group({"params": list(other.parameters()), "lr": 1e-3})
            bench.hurt("added")
        for x, y in bench.batches(step):
            loss = cross_entropy(model(x), y) + cross_entropy(other(x), y)
            step.backward(loss)
        return loss

    def update(step: hf.Step) -> None:
        optimizer.step()
        model.zero_grad()
        other.zero_grad()

    return Training(model, optimizer, tracked={"other": other}, compute=compute, update=update)


@variation()
def unfrozen(bench: Bench) -> Training:
    """The first layer is trained from step 3 on."""
    model = DDP(Net(), find_unused_parameters=True)
    model.module.first.requires_grad_(False)

    def compute(step: hf.Step) -> torch.Tensor:
        if step.number == 3:
            model.module.first.requires_grad_(True)
        for x, y in bench.batches(step):
            loss = bench.mean_loss(x, y)
            step.backward(loss)
        return loss

    return Training(model, compute=compute)


# --- accumulation


@variation()
def accumulated_in_a_step(bench: Bench) -> Training:
    """Two backward passes, each of them reduced."""

    def compute(step: hf.Step) -> torch.Tensor:
        total = torch.zeros(())
        for x, y in bench.batches(step):
            for half in range(2):
                loss = bench.mean_loss(x[half::2], y[half::2]) / 2
                step.backward(loss)
                total += loss.detach()
        return total

    return Training(DDP(Net()), compute=compute)


@variation()
def no_sync_in_a_step(bench: Bench) -> Training:
    model = DDP(Net())

    def compute(step: hf.Step) -> torch.Tensor:
        for x, y in bench.batches(step):
            with model.no_sync():
                step.backward(bench.mean_loss(x[::2], y[::2]) / 2)
            loss = bench.mean_loss(x[1::2], y[1::2]) / 2
            step.backward(loss)
        return loss

    return Training(model, compute=compute)


@variation()
def accumulated_over_steps(bench: Bench) -> Training:
    """An update every third step; the gradients are reduced in each."""

    def update(step: hf.Step) -> None:
        if step.number % 3 == 2:
            training.optimizer.step()
            training.optimizer.zero_grad()

    training = Training(DDP(Net()), update=update)
    return training


@variation()
def no_sync_over_steps(bench: Bench) -> Training:
    """An update every third step; the gradients are reduced in that one only."""
    model = DDP(Net())

    def compute(step: hf.Step) -> torch.Tensor:
        for x, y in bench.batches(step):
            if step.number % 3 == 2:
                loss = bench.mean_loss(x, y)
                step.backward(loss)
                continue
            with model.no_sync():
                loss = bench.mean_loss(x, y)
                step.backward(loss)
        return loss

    def update(step: hf.Step) -> None:
        if step.number % 3 == 2:
            training.optimizer.step()
            training.optimizer.zero_grad()

    training = Training(model, compute=compute, update=update)
    return training
