"""What a body may change besides numbers: flags of modules, of parameters and of the process."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

import holdfast as hf

from .bench import DDP, FEATURES, Bench, Net, Training, variation


@variation()
def evaluation(bench: Bench) -> Training:
    """Every third step evaluates, and something communicates there."""
    model = DDP(Net())

    def then(step: hf.Step) -> None:
        if step.number % 3 == 0:
            with bench.job.paused("an evaluation"), torch.no_grad():
                model.eval()
                bench.hurt("evaluating")
                total = model(torch.ones(4, FEATURES)).sum()
                dist.all_reduce(total)
                model.train()

    return Training(model, then=then)


@variation()
def evaluation_first(bench: Bench) -> Training:
    """As in the docs: an evaluation at the beginning of a body, after which dropout must be on again."""
    model = DDP(Net())

    def compute(step: hf.Step) -> torch.Tensor:
        if step.number % 3 == 0:
            model.eval()
            with torch.no_grad():
                total = model(torch.ones(4, FEATURES)).sum()
            dist.all_reduce(total)
            bench.hurt("evaluating")
            model.train()
        for x, y in bench.batches(step):
            loss = bench.mean_loss(x, y)
            step.backward(loss)
        return loss

    return Training(model, compute=compute)


@variation()
def evaluation_to_the_end(bench: Bench) -> Training:
    """The next step puts the model back into training."""
    model = DDP(Net())

    def compute(step: hf.Step) -> torch.Tensor:
        if step.number % 3 == 1:
            model.train()
        for x, y in bench.batches(step):
            loss = bench.mean_loss(x, y)
            step.backward(loss)
        return loss

    def then(step: hf.Step) -> None:
        if step.number % 3 == 0:
            model.eval()

    return Training(model, compute=compute, then=then)


@variation()
def frozen_for_a_moment(bench: Bench) -> Training:
    """As a GAN's discriminator while the generator learns."""
    model = DDP(Net())

    def then(step: hf.Step) -> None:
        model.module.last.requires_grad_(False)
        bench.hurt("frozen")
        dist.all_reduce(bench.loss.clone())
        model.module.last.requires_grad_(True)

    return Training(model, then=then)


@variation()
def partly_in_evaluation(bench: Bench) -> Training:
    """From step 5 on a part of the model is in eval mode for good, and another is frozen."""
    model = DDP(Net(norm=torch.nn.BatchNorm1d), find_unused_parameters=True)

    def then(step: hf.Step) -> None:
        if step.number == 5:
            model.module.norm.eval()
            model.module.last.requires_grad_(False)

    return Training(model, then=then)


@variation()
def hook_for_a_moment(bench: Bench) -> Training:
    """A hook that doubles what a layer gives, while something is measured; and one on a parameter."""
    model = DDP(Net())

    def then(step: hf.Step) -> None:
        hooks = [
            model.module.middle.register_forward_hook(lambda module, inputs, output: 2 * output),
            model.module.last.weight.register_hook(lambda gradient: 2 * gradient),
        ]
        bench.hurt("hooked")
        dist.all_reduce(bench.loss.clone())
        for hook in hooks:
            hook.remove()

    return Training(model, then=then)


@variation()
def default_dtype_changed(bench: Bench) -> Training:
    """Computes something in double precision, and communicates meanwhile. The model could not."""
    model = DDP(Net())

    def then(step: hf.Step) -> None:
        torch.set_default_dtype(torch.float64)
        bench.hurt("changed")
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.dtype == torch.float64
        torch.set_default_dtype(torch.float32)

    return Training(model, then=then, loss=lambda x, y: cross_entropy(model(x + torch.ones(FEATURES)), y))


@variation()
def gradients_turned_off(bench: Bench) -> Training:
    def then(step: hf.Step) -> None:
        torch.set_grad_enabled(False)
        bench.hurt("changed")
        dist.all_reduce(bench.loss.clone())
        torch.set_grad_enabled(True)

    return Training(DDP(Net()), then=then)


@variation()
def deterministic_for_a_moment(bench: Bench) -> Training:
    def then(step: hf.Step) -> None:
        torch.use_deterministic_algorithms(True)
        bench.hurt("changed")
        dist.all_reduce(bench.loss.clone())
        torch.use_deterministic_algorithms(False)

    return Training(DDP(Net()), then=then)


class Cooling(Net):
    """Counts its passes in a plain attribute, on which its output depends, and keeps each rank's last input."""

    def __init__(self) -> None:
        super().__init__()
        self.passes, self.last_input = 0, 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        self.last_input = float(x.sum())
        return super().forward(x) / (1 + 0.1 * self.passes)


class Fading(torch.optim.SGD):
    """Makes smaller updates from step to step, by an attribute that its state_dict() leaves out."""

    updates = 0

    def step(self, closure: Any = None) -> Any:
        self.updates += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / self.updates
        return super().step(closure)


@variation()
def plain_attributes(bench: Bench) -> Training:
    """A temperature, a dropout that grows, an optimizer with a counter: in no state_dict()."""
    net = Cooling()

    def then(step: hf.Step) -> None:
        net.dropout.p += 0.01

    return Training(DDP(net), Fading(net.parameters(), 0.1, momentum=0.9), then=then)


@variation()
def mean_loss_for_the_log(bench: Bench) -> Training:
    """A collective after the update, in some steps only."""

    def then(step: hf.Step) -> None:
        if step.number % 3 == 0:
            loss = bench.loss.clone()
            dist.all_reduce(loss)
            step.log(loss=loss / bench.job.world_size)

    return Training(DDP(Net()), then=then)


@variation()
def epochs(bench: Bench) -> Training:
    """A scheduler that steps once an epoch, after its last step."""
    training = Training(DDP(Net()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(training.optimizer, 0.5)

    def loop() -> None:
        for _, steps in bench.job.epochs(2, bench.steps // 2):
            for step in steps:
                bench.run_step(step)
            scheduler.step()

    training.tracked["scheduler"], training.loop = scheduler, loop
    return training


@variation(warned="a collective runs between two steps")
def collective_between_steps(bench: Bench) -> Training:
    return Training(DDP(Net()), outside=lambda step: dist.all_reduce(bench.loss.clone()))


@variation(warned="a collective runs between two steps")
def collective_after_commit(bench: Bench) -> Training:
    """A rank that dies between the commit and its function does not come to it, and its successor has no such step."""

    def told() -> None:
        bench.hurt("told")
        dist.all_reduce(bench.loss.clone())

    return Training(DDP(Net()), then=lambda step: step.after_commit(told))


@variation()
def noise_drawn_before_the_step(bench: Bench) -> Training:
    """Numbers from the global generators, outside of the `with`."""
    noise = torch.zeros(FEATURES)

    def loop() -> None:
        for step in bench.job.steps(bench.steps):
            noise.copy_(torch.randn(FEATURES) * random.random())
            bench.run_step(step)

    training = Training(DDP(Net()), loop=loop)
    training.loss = lambda x, y: cross_entropy(training.model(x + noise), y)
    return training
