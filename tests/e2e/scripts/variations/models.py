"""Models: layers with state of their own, ways to wrap them, ways their gradients are reduced."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from .bench import CLASSES, DDP, FEATURES, WIDTH, Bench, Net, Training, variation


@variation()
def plain(bench: Bench) -> Training:
    return Training(DDP(Net()))


@variation()
def batch_norm(bench: Bench) -> Training:
    return Training(DDP(Net(norm=nn.BatchNorm1d)))


@variation(refused="leave broadcast_buffers on")
def batch_norm_of_each_rank(bench: Bench) -> Training:
    """Buffers that DDP does not broadcast: another mean on each rank."""
    return Training(DDP(Net(norm=nn.BatchNorm1d), broadcast_buffers=False))


class SynchronisedNorm(nn.Module):
    """Batch norm over all ranks' samples, as torch's SyncBatchNorm, which is for GPUs only: forward and backward
    communicate."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed.nn.functional import all_reduce

        moments = all_reduce(torch.cat([x.mean(0), x.square().mean(0)])) / dist.get_world_size()
        mean, square = moments.chunk(2)
        with torch.no_grad():
            self.running_mean.lerp_(mean, 0.1)
        return (x - mean) * (square - mean.square() + 1e-5).rsqrt() * self.weight + self.bias


@variation()
def sync_batch_norm(bench: Bench) -> Training:
    return Training(DDP(Net(norm=SynchronisedNorm)))


@variation()
def counting_buffer(bench: Bench) -> Training:
    """A buffer that forward changes and that is not saved."""

    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += len(x)
            return super().forward(x) * (1 + self.seen.sin() / 10)

    return Training(DDP(Counting()))


@variation()
def activation_checkpointing(bench: Bench) -> Training:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(lambda x: self.dropout(torch.relu(self.first(x))), x, use_reentrant=False)
            return self.last(checkpoint(self.middle, x, use_reentrant=False))

    return Training(DDP(Checkpointed()))


@variation()
def autocast_bf16(bench: Bench) -> Training:
    model = DDP(Net())

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return cross_entropy(model(x), y)

    return Training(model, loss=loss)


@variation()
def static_graph(bench: Bench) -> Training:
    return Training(DDP(Net(), static_graph=True))


@variation()
def find_unused_parameters(bench: Bench) -> Training:
    """A second head that every other step uses."""

    class TwoHeads(Net):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.middle(torch.relu(self.first(x))))
            return (self.other if bench.job.step % 2 else self.last)(x)

    return Training(DDP(TwoHeads(), find_unused_parameters=True))


@variation()
def gradients_in_small_buckets(bench: Bench) -> Training:
    return Training(DDP(Net(), gradient_as_bucket_view=True, bucket_cap_mb=0.0005))


@variation()
def tied_weights(bench: Bench) -> Training:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__()
            self.back = nn.Linear(FEATURES, WIDTH, bias=False)
            self.back.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.back(x)[:, :CLASSES]

    return Training(DDP(Tied()))


@variation()
def weight_norm(bench: Bench) -> Training:
    net = Net()
    nn.utils.parametrizations.weight_norm(net.middle)
    return Training(DDP(net))


@variation()
def sparse_embedding(bench: Bench) -> Training:
    class Embedded(Net):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(50, FEATURES, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.embedding((x[:, 0].abs() * 20).long().clamp(max=49)))

    model = DDP(Embedded())
    dense = [parameter for name, parameter in model.named_parameters() if "embedding" not in name]
    sparse = torch.optim.SparseAdam([model.module.embedding.weight], lr=1e-2)

    def update(step: object) -> None:
        for optimizer in (training.optimizer, sparse):
            optimizer.step()
            optimizer.zero_grad()

    training = Training(model, torch.optim.Adam(dense, lr=1e-2), tracked={"sparse": sparse}, update=update)
    return training


@variation()
def compiled(bench: Bench) -> Training:
    return Training(DDP(torch.compile(Net(), backend="aot_eager")))


@variation()
def compiled_outside(bench: Bench) -> Training:
    """The wrapper is compiled, not what it wraps."""
    return Training(torch.compile(DDP(Net()), backend="aot_eager"))


@variation()
def inner_module_tracked(bench: Bench) -> Training:
    net = Net()
    model = DDP(net)
    return Training(net, loss=lambda x, y: cross_entropy(model(x), y))


@variation()
def group_of_its_own(bench: Bench) -> Training:
    return Training(DDP(Net(), process_group=dist.new_group(list(range(bench.job.world_size)))))


@variation()
def reduced_by_hand(bench: Bench) -> Training:
    """No wrapper: the script averages the gradients."""
    model = Net()

    def compute(step: object) -> torch.Tensor:
        for x, y in bench.batches(step):
            loss = bench.mean_loss(x, y)
            step.backward(loss)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= bench.job.world_size
        return loss

    return Training(model, compute=compute)


@variation()
def communication_hook(bench: Bench) -> Training:
    """Without a state of its own."""
    model = DDP(Net())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return Training(model)
