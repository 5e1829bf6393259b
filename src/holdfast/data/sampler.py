"""The exact sampler: DistributedSampler's place in a loop that keeps torch's own DataLoader.

    sampler = hf.Sampler(dataset, batch_size=32, seed=0)
    loader = DataLoader(dataset, batch_sampler=sampler, num_workers=4)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = cross_entropy(model(x), y) * sampler.loss_scale
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            sampler.commit()

It is a *batch* sampler: only a sampler that knows the global batches can divide the last, smaller one of an epoch
exactly. That batch is divided as evenly as possible, so shares differ by one sample. If it has fewer samples than there
are ranks, some ranks have none, and yet must take part in the collectives of the step, or the others hang. Such a rank
is given a **ghost**: one sample of the same step, which its owner trains on, and `loss_scale` 0, so that its gradient
is nothing. Every rank therefore has the same number of batches, always.

`loss_scale` makes DDP's average the mean over the global batch, whatever the shares. It is that of the step being
trained on, not of the step last drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import Sampler as TorchSampler

from holdfast.data.cursor import Cursor, own_assignment, size_of
from holdfast.data.order import Locality
from holdfast.data.step_plan import LastBatch, blocks, make_plan
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BLOCK_SAMPLES = 16_384
"""How many of its samples a rank computes at a time: enough to make the vector operations' fixed costs small."""


class Sampler(Cursor, TorchSampler[list[int]]):
    """A batch sampler that yields this rank's share of each step of an epoch, as lists of sample numbers. For
    `batch_sampler=`."""

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        last_batch: LastBatch = "short",
        locality: Locality | None = None,
        fingerprint: str = "",
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
        weights: Sequence[float] | None = None,
    ) -> None:
        """Make a sampler. `dataset` may be its size. Give `global_batch_size`, or `batch_size`, a rank's share at the
        first start. The global batch belongs to the run: with `batch_size`, a state from another world size brings the
        one it was saved with. `weights`, one a rank, give slow ranks smaller shares. `mesh` is that of `hf.Loader`: a
        share is that of a data coordinate then."""
        if (batch_size is None) == (global_batch_size is None):
            raise UsageError("give either batch_size (of one rank) or global_batch_size (of the step)")
        self._take_mesh(mesh, rank, world_size)
        self._assignment = own_assignment(rank, world_size)
        self._settings: dict[str, Any] = {
            "seed": seed,
            "shuffle": shuffle,
            "last_batch": last_batch,
            "locality": locality,
            "fingerprint": fingerprint,
        }
        self._size = size_of(dataset)
        self._global_batch_is_open = global_batch_size is None
        if batch_size is not None:
            global_batch_size = batch_size * self.world_size
        plan = make_plan(self._size, global_batch_size=global_batch_size or 0, **self._settings)
        Cursor.__init__(self, plan, self._assignment, weights)

    @property
    def loss_scale(self) -> float:
        """Return the factor for this rank's mean loss of the step being trained on; 0 for a ghost."""
        return self.scale_of(self._step, self._share(self._step))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the last committed step, at any world size. A later position takes no longer."""
        saved = state.get("global_batch_size")
        if self._global_batch_is_open and isinstance(saved, int) and saved != self.plan.global_batch_size:
            self.plan = make_plan(self._size, global_batch_size=saved, **self._settings)
        super().load_state_dict(state)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield a pass over what is not committed of the epoch. The pass begins with its first batch, not here: torch's
        DataLoader asks for an iterator twice and uses one."""
        for steps in self.skips.remaining(self._begin_pass()):
            yield from self._shares(steps)

    def skip(self, steps: range | None = None, *, samples: range | None = None, why: str = "") -> range:
        """Skip steps as the loader does, but not in the middle of a pass."""
        if self._drawn > self._step:
            raise UsageError("torch's DataLoader has fetched ahead: call skip before a pass, as after load_state_dict")
        return super().skip(steps, samples=samples, why=why)

    def _shares(self, steps: range) -> Iterator[list[int]]:
        for block in blocks(steps, BLOCK_SAMPLES * self.world_size // self.plan.global_batch_size):
            shares = [self._share(step) or self.plan.span(step)[:1] for step in block]
            for step, samples in zip(block, self.plan.samples_of(shares), strict=True):
                self._drawn = max(self._drawn, step + 1)
                yield samples.tolist()

    def _share(self, step: int) -> range:
        return self.plan.share(step, self.rank, self.world_size, self.weights)
