"""The canonical reduction: the same bits on any number of ranks, with the gradients there when the loop ends."""

from __future__ import annotations

import hashlib
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import holdfast as hf
from holdfast.data.step_plan import make_plan
from holdfast.worker.parallel.canonical import Reduction
from holdfast.worker.parallel.flat_gradients import FlatLayout
from support.crowd import together
from support.nest import TORCHRUN, Nest, run_python, write

SAMPLES = [(torch.randn(8, generator=torch.Generator().manual_seed(n)), n % 3) for n in range(37)]


class Net(nn.Module):
    """The last layer of `sides` is used by some samples only, `never` by none."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last, self.never = nn.Linear(8, 32), nn.Linear(32, 3), nn.Linear(4, 4)
        self.side = nn.Linear(8, 3)
        self.table: torch.Tensor
        self.register_buffer("table", torch.arange(32.0))
        self.to(dtype)
        self.scale = nn.Parameter(torch.ones(()))  # of another type than the others, if those are not float32

    def forward(self, x: torch.Tensor, aside: bool) -> torch.Tensor:
        hidden = torch.dropout(torch.relu(self.first(x) + 0.01 * self.table), 0.3, train=True)
        out = self.last(hidden) * self.scale.to(x.dtype)
        return out + self.side(x) if aside else out


def train(
    member: Any,
    rank: int,
    size: int,
    dtype: Any = torch.float32,
    slots: int = 6,
    wrap: bool = True,
    weights: Any = None,
    steps: int = 7,
) -> Any:
    member.start(rank, size)
    calls = count_all_reduces()
    job = hf.init(seed=3, reduction="canonical")
    torch.manual_seed(0)
    net = Net(dtype)
    model = DistributedDataParallel(net) if wrap else net
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = hf.Loader(SAMPLES, global_batch_size=12, slots=slots, seed=1, weights=weights)
    job.track(model=model, optimizer=optimizer, data=data)
    calls.clear()
    seen = hashlib.sha256()
    losses = {}
    for step in job.steps(steps):
        with step:
            for x, y in step.batches(data):
                loss = nn.functional.cross_entropy(model(x.to(dtype), bool(data.slot == 1)), y)
                step.backward(loss)
                if data.loss_scale:
                    losses[step.number, data.slot] = float(loss.detach())
            assert net.never.weight.grad is None and net.first.weight.grad is not None
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            noise = torch.rand(2)
            for tensor in (*(p.grad for p in model.parameters() if p.grad is not None), noise):
                add(seen, tensor)
            optimizer.step()
            if step.number % 2:  # every other update is of two steps' gradients
                optimizer.zero_grad()
    for tensor in model.state_dict().values():
        add(seen, tensor)
    assert not calls, "DDP has reduced too"
    return seen.hexdigest(), losses


def add(seen: Any, tensor: Any) -> None:
    seen.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def count_all_reduces() -> Any:
    from holdfast.worker.collectives.elastic_group import ElasticGroup

    calls, plain = [], ElasticGroup.allreduce

    def counting(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return plain(*arguments, **named)

    ElasticGroup.allreduce = counting  # type: ignore[method-assign]
    return calls


def merged(results: Any) -> Any:
    """One digest for all ranks, and every slot's loss once."""
    digests = {digest for digest, _ in results}
    assert len(digests) == 1, "ranks have different gradients"
    losses: dict[Any, Any] = {}
    for _, mine in results:
        assert not losses.keys() & mine.keys()
        losses |= mine
    return digests.pop(), losses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_bits_do_not_depend_on_the_number_of_ranks(dtype: Any) -> None:
    alone = merged(together(train, 1, dtype))
    for size in (2, 3, 4):
        assert merged(together(train, size, dtype)) == alone, f"{size} ranks"


def test_nor_on_weights_wrapper_or_ranks_without_slots() -> None:
    alone = merged(together(train, 1, torch.float32, 3))
    assert merged(together(train, 2, torch.float32, 3, False)) == alone
    assert merged(together(train, 2, torch.float32, 3, True, [0.2, 1.0])) == alone
    assert merged(together(train, 4, torch.float32, 3)) == alone


def test_the_last_step_of_an_epoch_may_have_less_samples_than_slots() -> None:
    """37 samples: the fourth step has one, and twelve slots."""
    alone = merged(together(train, 1, torch.float32, 12))
    assert merged(together(train, 3, torch.float32, 12)) == alone


def compare(member: Any, rank: int, size: int) -> Any:
    """The gradient without rounding differences: that of all samples at once."""
    member.start(rank, size)
    job = hf.init(reduction="canonical")
    torch.manual_seed(0)
    model = nn.Linear(8, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = hf.Loader(SAMPLES, global_batch_size=12, slots=5, shuffle=False)
    job.track(model=model, optimizer=optimizer, data=data)
    for step in job.steps(1):
        with step:
            for x, y in step.batches(data):
                step.backward(nn.functional.cross_entropy(model(x.double()), y))
            assert model.weight.grad is not None
            reduced = model.weight.grad.clone()
            optimizer.step()
    x, y = torch.stack([x for x, _ in SAMPLES[:12]]).double(), torch.tensor([y for _, y in SAMPLES[:12]])
    (plain,) = torch.autograd.grad(nn.functional.cross_entropy(model(x), y), model.weight)
    dist.barrier()
    return float((reduced - plain).abs().max())


def test_it_is_the_mean_over_the_global_batch() -> None:
    assert max(together(compare, 3)) < 1e-15


HEAD = """
import torch
import holdfast as hf

job = hf.init(seed=5, reduction="canonical")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
samples = [torch.full((4,), float(i)) for i in range(20)]
data = hf.Loader(samples, global_batch_size=6, slots=6)

def go(model, data, leave=False, taken=lambda step, data: step.batches(data), **others):
    optimizer = torch.optim.Adam(model.parameters())
    job.track(model=model, optimizer=optimizer, data=data, **others)
    for step in job.steps(4):
        with step:
            for x in taken(step, data):
                loss = model(x).mean()
                step.backward(loss)
                if leave:
                    break
            optimizer.step()
            optimizer.zero_grad()
"""


def written(code: str, directory: Path) -> list[str]:
    write(directory / "script.py", HEAD + textwrap.dedent(code))
    return ["script.py"]


def test_alone_and_under_torchrun(tmp_path: Path) -> None:
    code = "go(model, data)\nimport os\nbits = [v.item().hex() for p in model.parameters() for v in p.flatten()]\n"
    code += "os.write(1, (' '.join(bits) + '\\n').encode())"  # in one go: two ranks write to the same pipe
    script = written(code, tmp_path)
    alone = run_python(script, tmp_path)
    assert alone.code == 0, alone.stderr
    two = run_python([*TORCHRUN, *script], tmp_path)
    assert two.code == 0, two.stderr
    assert two.stdout.splitlines() == alone.stdout.splitlines() * 2


NORMED = "torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8{}), torch.nn.Linear(8, 1))"
PAIRS = "hf.Loader(samples[:18], global_batch_size=6, slots=3)"


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("hf.init(reduction='tree')", "reduction is 'tree'; it can be average or canonical"),
        ("for step in job.steps(1): pass", "call job.track before job.steps"),
        ("go(model, hf.Loader(samples, global_batch_size=6))", "use an hf.Loader with slots"),
        ("go(model, data, taken=lambda step, data: step.batches(samples))", "use an hf.Loader with slots"),
        ("go(model, data, taken=lambda step, data: iter(samples[:1]))", "the gradients are not reduced yet"),
        ("go(model, data, leave=True)", "must be left at its end"),
        ("go(model, data, taken=lambda s, d: (x for x, _ in zip(s.batches(d), s.batches(d))))", "is not over"),
        (f"go({NORMED.format('')}, {PAIRS})", "BatchNorm1d keeps running statistics"),
        ("go(torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 1)), data)", "the buffer _u changes"),
        ("from torch.distributed.fsdp import fully_shard\ngo(fully_shard(model), data)", "is for replicated models"),
        (
            "go(torch.nn.parallel.DistributedDataParallel(model, static_graph=True), data)",
            "build DDP without static_graph",
        ),
        (
            "embedding = torch.nn.Embedding(9, 1, sparse=True)\ngo(embedding, hf.Loader(range(9), global_batch_size=3,"
            " slots=3))",
            "sparse gradients",
        ),
    ],
)
def test_what_cannot_be_reduced_so_gets_a_sentence(warm: Nest, tmp_path: Path, code: str, sentence: str) -> None:
    done = warm.run(written(code, tmp_path), tmp_path)
    *_, last = done.stderr.strip().splitlines()
    kind = last.partition(": holdfast.errors.")[2].partition(":")[0]
    assert done.code == 1 and kind in ("UsageError", "ScriptError"), done.stderr
    assert sentence in last, done.stderr


def test_norms_without_running_statistics_and_several_loops_are_fine(warm: Nest, tmp_path: Path) -> None:
    code = f"""
    more = {PAIRS}
    def taken(step, data):
        yield from step.batches(data)
        yield from step.batches(more)
    go({NORMED.format(", track_running_stats=False")}, {PAIRS}, taken=taken, more=more)
    """
    done = warm.run(written(code, tmp_path), tmp_path)
    assert done.code == 0, done.stderr


def reduced(rank: int, size: int, slots: list[int], kept: Reduction | None, known: list[int]) -> Reduction:
    """A reduction that has taken the gradients of some slots, and those of others from another. Six samples, so that
    six of sixteen slots have one."""
    weight = nn.Parameter(torch.zeros(3))
    data = SimpleNamespace(plan=SHORT, step=1, rank=rank, world_size=size, weights=None)
    found = Reduction(FlatLayout([weight], size), data, kept.sums_of(known) if kept is not None else [])
    for slot in slots:
        weight.grad = torch.full((3,), 0.1 * slot + 1e-3)
        found.take(slot)
    return found


SHORT = make_plan(22, global_batch_size=16, seed=0, slots=16)
"""Its second step has six samples."""
FILLED = [slot for slot in range(16) if len(SHORT.slot_share(1, range(slot, slot + 1)))]


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (0, 3), (1, 3), (0, 4), (1, 4)])
@pytest.mark.parametrize("done", range(4))
def test_sums_that_are_kept_are_those_of_all_slots(rank: int, size: int, done: int) -> None:
    """Of another attempt with as many ranks, and with two."""
    before = reduced(0, 2, own := [slot for slot in FILLED if slot < 8][:done], None, [])
    own_now = [slot for slot in FILLED if 16 * rank // size <= slot < 16 * (rank + 1) // size]
    plain = reduced(rank, size, own_now, None, [])
    later = reduced(rank, size, [], before, own)
    covered = [slot for slot in own_now if later.covers(slot)]
    assert size != 2 or covered == ([] if rank else own)
    later = reduced(rank, size, own_now, before, own)  # what is covered is computed again, and counts once
    for one in (plain, later):
        one._pass_over(16 * (rank + 1) // size)
    (mine, theirs) = (one._tree.sums() for one in (plain, later))
    assert [node for node, _ in mine] == [node for node, _ in theirs]
    assert all(torch.equal(a[0], b[0]) for (_, a), (_, b) in zip(mine, theirs, strict=True))  # type: ignore[arg-type]
