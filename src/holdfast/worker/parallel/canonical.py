"""`hf.init(reduction="canonical")`: the gradient of a step has the same bits whatever the number of ranks.

The usual reduction adds up what each rank has, so another number of ranks rounds otherwise. Here the gradient of each
*slot* is taken out after its backward, and the slots' gradients are added in one fixed binary tree
(worker/parallel/tree_sum.py):

    each rank       the largest subtrees that lie in its slots, while the batches come; mostly one, at most 2·log2(V)
    all to all      the gradient is cut into a piece a rank; every rank gets its piece of everybody's subtrees …
    each rank       … and adds them in the order of the tree
    all gather      everybody gets all pieces

With one subtree a rank (slots = ranks · 2^n) that moves the bytes of a ring; each further one as many as half of it.

The reduced gradient is in `.grad` when the loop over `step.batches` ends, so it can be clipped as usual. DDP's own
reduction never runs. A fault in the exchange is one in the body of a step: the step is repeated.

What else it takes for equal bits: a slot's batch and generators are functions of the step and the slot already; outside
of slots all ranks draw the same numbers; the scale of a slot's loss, n/N, knows nothing of ranks; and buffers that a
forward changes are refused, as each rank would have its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import SyncBatchNorm

from holdfast.data.batch_source import Weight
from holdfast.data.data_coordinates import DataCoordinates
from holdfast.data.randomness import set_generators, slot_key
from holdfast.data.slots import slots_of
from holdfast.errors import UsageError
from holdfast.state.modules import unwrapped
from holdfast.state.optimizers import parameters_of
from holdfast.state.step_backup import find_slots
from holdfast.state.tracked import Tracked
from holdfast.torch_compat import BATCH_NORMS, version_of
from holdfast.worker.collectives import groups
from holdfast.worker.parallel.flat_gradients import FlatLayout, FlatRange, Loose, add, give_gradients, take_gradients
from holdfast.worker.parallel.models import leave_reduction, refuse_other_reductions
from holdfast.worker.parallel.tree_sum import SumNode, TreeSum, largest_nodes

if TYPE_CHECKING:
    from holdfast.worker.micro_batches import MicroBatchLoop
    from holdfast.worker.step import Step

NO_SLOT = -1
"""Stands for a slot in the key of what is drawn outside of them."""


class CanonicalReduction:
    """The reductions of one set of tracked objects."""

    def __init__(self, tracked: Tracked) -> None:
        refuse_other_reductions(tracked.modules().values())
        self._tracked = tracked
        self._modules = trained_modules(tracked)
        self._buffers = find_slots(self._modules)
        self._norms = [part for module in self._modules for part in module.modules() if isinstance(part, BATCH_NORMS)]
        self._layout: FlatLayout | None = None
        self._reduction: Reduction | None = None
        """The last one, if its subtrees may be kept."""
        self._number = -1
        """The step that is, or was, under way."""
        self._is_under_way = False
        self._is_reduced = False
        leave_reduction(self._modules)

    def begin_step(self, number: int, seed: int) -> None:
        """Begin a step, also after one that broke: what it left in the hands of a collective is not used again."""
        if self._is_under_way:
            self._layout = None
        if number != self._number:
            self._number, self._reduction = number, None
        self._is_under_way = self._is_reduced = False
        leave_reduction(self._modules)
        set_generators(slot_key(seed, number, NO_SLOT))

    def before_update(self) -> None:
        if self._is_under_way or not self._is_reduced:
            raise UsageError(
                "the gradients are not reduced yet: with reduction='canonical' an optimizer's step comes after a loop"
                " over step.batches(loader), which must be left at its end and not before"
            )

    def batches(self, step: Step, data: Any, seed: int, weight: Weight | None, loop: MicroBatchLoop) -> Iterator[Any]:
        """Yield the batches of this rank's slots; at the end every rank has the gradient of all slots."""
        self._check_world(data)
        self._is_under_way = True
        versions = self._versions()
        kept: list[tuple[SumNode, Loose]] = []
        if loop.found is not None and self._reduction is not None:
            kept = self._reduction.sums_of(loop.found.slots)
        reduction = Reduction(self._layout_for(data.world_size), data, kept)
        self._reduction = reduction if loop.is_keeping else None
        for batch in data.step_batches(weight=weight):
            slot, is_ghost = data.slot, data.is_ghost
            if not loop.begins(is_covered=reduction.covers(slot)):
                continue
            step._uses(data.share)
            set_generators(slot_key(seed, step.number, slot))
            yield batch
            reduction.take(None if is_ghost else slot)
        self._check_buffers(versions)
        loop.ends()
        reduction.finish()
        set_generators(slot_key(seed, step.number, NO_SLOT))
        self._is_under_way, self._is_reduced = False, True

    def _layout_for(self, ranks: int) -> FlatLayout:
        parameters = trained_parameters(self._tracked, self._modules)
        if self._layout is None or not self._layout.fits(parameters, ranks):
            self._layout = FlatLayout(parameters, ranks)
        return self._layout

    def check(self, data: Any) -> None:
        """Raise UsageError for batches whose gradients cannot be told apart, or got mixed."""
        if self._is_under_way:
            raise UsageError("one loop over step.batches is not over: take one loader's batches after the other's")
        if not getattr(data, "has_slots", False):
            raise UsageError("reduction='canonical' adds gradients by slot: use an hf.Loader with slots=…")

    def check_coordinates(self, coordinates: DataCoordinates | None) -> None:
        """Raise UsageError for data that several ranks are given alike: their gradients would count several times."""
        if coordinates is not None and not coordinates.are_ranks:
            ranks = len(coordinates.by_rank)
            raise UsageError(
                "reduction='canonical' adds gradients of batches that each rank has for itself, in the order of ranks,"
                f" and the loader's mesh has {coordinates.count} data coordinates for {ranks} ranks: use"
                " reduction='average', or leave out mesh= if every rank has all of the model"
            )

    def _check_world(self, data: Any) -> None:
        if (data.rank, data.world_size) != (dist.get_rank(), dist.get_world_size()):
            raise UsageError("reduction='canonical' is over all ranks: leave out the loader's rank and world_size")
        for norm in self._norms:
            if norm.training and (norm.running_mean is not None or isinstance(norm, SyncBatchNorm)):
                raise UsageError(
                    f"{type(norm).__name__} keeps running statistics, which depend on the number of ranks: with"
                    " reduction='canonical' use another norm, track_running_stats=False, or eval() for this module"
                )

    def _versions(self) -> list[tuple[Tensor | None, int]]:
        found = [owner.get(name) for owner, name in self._buffers]
        return [(buffer, -1 if buffer is None or buffer.is_inference() else version_of(buffer)) for buffer in found]

    def _check_buffers(self, before: list[tuple[Tensor | None, int]]) -> None:
        changes = zip(self._buffers, before, self._versions(), strict=True)
        changed = [name for (_, name), was, now in changes if was[0] is not now[0] or was[1] != now[1]]
        if changed:
            raise UsageError(
                f"the buffer {changed[0]} changes in a forward pass, on each rank by its own batches: such a model"
                " cannot be reduced canonically"
            )


class Reduction:
    """From the slots' gradients of one step to everybody's."""

    def __init__(self, layout: FlatLayout, data: Any, kept: Iterable[tuple[SumNode, Loose]] = ()) -> None:
        """`kept` are subtrees of an attempt before."""
        self._layout, self._plan, self._step = layout, data.plan, data.step
        self._total = self._plan.slots
        self._rank, self._ranks = data.rank, data.world_size
        ranks = range(self._ranks)
        self._slots = [slots_of(rank, self._ranks, self._total, data.weights) for rank in ranks]
        self._next = self._slots[self._rank].start
        self._tree: TreeSum[Loose] = TreeSum(self._total, add)
        self._kept = {
            node.slots(self._total).start: (node, gradients)
            for node, gradients in kept
            if set(node.slots(self._total)) <= set(self._slots[self._rank])
        }
        """Subtrees that are still to be pushed, by their first slot."""
        self._before = take_gradients(layout.parameters)

    def covers(self, slot: int) -> bool:
        """Return whether there is a gradient of this slot, which is yet to come."""
        return any(slot in node.slots(self._total) for node, _ in self._kept.values())

    def sums_of(self, slots: Collection[int]) -> list[tuple[SumNode, Loose]]:
        """Return the subtrees of these slots and of such as have no samples. This reduction must add no more."""

        def is_among(node: SumNode) -> bool:
            own = node.slots(self._total)
            return all(slot in slots or not self._samples(range(slot, slot + 1)) for slot in own)

        return [(node, sums) for node, sums in (*self._tree.sums(), *self._kept.values()) if is_among(node)]

    def take(self, slot: int | None) -> None:
        """Take the gradients of a slot, whose backward is through; or, without a slot, of a ghost, which are
        nothing."""
        gradients = take_gradients(self._layout.parameters)
        if slot is not None and not self.covers(slot):
            self._pass_over(slot)
            self._tree.push(SumNode(0, slot), gradients)
            self._next = slot + 1

    def finish(self) -> None:
        """Everybody has the gradient of all slots, on top of what there was before."""
        self._pass_over(self._slots[self._rank].stop)
        total = self._tree.total() if self._ranks == 1 else self._exchange()
        give_gradients(self._layout.parameters, add(self._before, total))

    def _exchange(self) -> Loose:
        nodes = [largest_nodes(slots, self._total) for slots in self._slots]
        given = [[node for node in own if self._samples(node.slots(self._total))] for own in nodes]
        mine = self._tree.sums()
        assert [node for node, _ in mine] == given[self._rank], "the tree is not what others think it is"
        total: Loose = [None] * len(self._layout.parameters)
        for at, stretch in enumerate(self._layout.stretches):
            flat, own = self._layout.borrow(at), self._layout.borrow(at)
            into = [self._layout.borrow(at) for _ in range(max(map(len, given)))]
            pieces = self._scatter(stretch, [gradients for _, gradients in mine], given, own, into)
            rest: TreeSum[Tensor] = TreeSum(self._total, Tensor.add_)
            for node in chain.from_iterable(nodes):
                rest.push(node, pieces.get(node))
            all_gather(rest.total(), flat)
            self._layout.give_back(at, [own, *into])
            for number, gradient in zip(stretch.numbers, stretch.unpack(flat), strict=True):
                total[number] = gradient
        return total

    def _scatter(
        self, stretch: FlatRange, mine: list[Loose], given: list[list[SumNode]], own: Tensor, received: list[Tensor]
    ) -> dict[SumNode, Tensor]:
        """Return this rank's piece of each subtree; in turns: every rank's first, every rank's second, …"""
        pieces: dict[SumNode, Tensor] = {}
        for turn, into in enumerate(received):
            if turn < len(mine):
                stretch.pack(own, mine[turn])
            senders = [rank for rank, theirs in enumerate(given) if turn < len(theirs)]
            found = all_to_all(own if turn < len(mine) else None, into, senders, stretch.piece, self._ranks)
            pieces |= {given[rank][turn]: piece for rank, piece in zip(senders, found, strict=True)}
        return pieces

    def _pass_over(self, slot: int) -> None:
        """Push what there is of the slots before this one; some had no samples."""
        while self._next < slot:
            if (kept := self._kept.pop(self._next, None)) is not None:
                self._tree.push(*kept)
                self._next = kept[0].slots(self._total).stop
            else:
                self._tree.push(SumNode(0, self._next), None)
                self._next += 1

    def _samples(self, slots: range) -> int:
        return len(self._plan.slot_share(self._step, slots))


def all_to_all(own: Tensor | None, into: Tensor, senders: list[int], piece: int, ranks: int) -> list[Tensor]:
    """Return this rank's piece of what each of the senders has, in their order."""
    piece_bytes = piece * into.element_size()
    output, given = into[: piece * len(senders)], into[:0] if own is None else own
    sizes_out = [piece_bytes if rank in senders else 0 for rank in range(ranks)]
    sizes_in = [0 if own is None else piece_bytes] * ranks
    groups.default_group().alltoall_base(groups.as_bytes(output), groups.as_bytes(given), sizes_out, sizes_in).wait()
    return list(torch.split(output, piece))


def all_gather(piece: Tensor, into: Tensor) -> None:
    """Everybody's pieces, by rank."""
    groups.default_group()._allgather_base(groups.as_bytes(into), groups.as_bytes(piece)).wait()


def trained_modules(tracked: Tracked) -> list[torch.nn.Module]:
    """Return the modules that a tracked optimizer has a part of: not an average of a model, for one. All, if there is
    none."""
    owned = {id(p) for optimizer in tracked.optimizers().values() for p in parameters_of(optimizer)}
    modules = list(tracked.modules().values())
    return [m for m in modules if not owned or any(id(p) in owned for p in unwrapped(m).parameters())]


def trained_parameters(tracked: Tracked, modules: list[torch.nn.Module]) -> list[Tensor]:
    """Return the trained parameters in an order that is the same on all ranks."""
    found: dict[int, Tensor] = {id(p): p for module in modules for p in unwrapped(module).parameters()}
    found |= {id(p): p for optimizer in tracked.optimizers().values() for p in parameters_of(optimizer)}
    return [parameter for parameter in found.values() if parameter.requires_grad]
