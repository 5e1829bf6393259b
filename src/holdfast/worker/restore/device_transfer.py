"""A newcomer's state from device to device, through a communicator that source and newcomer both have there.

A view connects its groups on devices before any state is handed over (collectives/reconnect_groups.py). Where one of
them has both ranks, what the state has on the device goes through it, out of the source's live tensors into the
newcomer's. Neither makes a copy in host memory, and nothing large goes over gloo:

    over gloo         how many bytes the structure has; the structure; which tensors come by the device; all others
    by the device     those, in order, in batches of at most 256 MB: both ends cut them by the sizes alone
    over gloo         one word from the source, when its device has sent everything

A batch is queued, not done, when its call returns. The newcomer has the state only when its own device has all of it,
the view is not over, no communicator is broken, and the source has said that it sent everything: an abort, or the death
of the source, leaves part of it. Half a state in live tensors is no harm: a newcomer without the state takes it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holdfast.errors import StateConflictError, StateError
from holdfast.state.arena import Arena, ArenaPlan, plan_of
from holdfast.state.tracked import Tracked
from holdfast.state.tree import SKELETON_BYTES_MAX, FlatTree, TensorSpec, describe, specs, unflatten
from holdfast.worker.collectives import groups
from holdfast.worker.collectives.elastic_group import ElasticGroup
from holdfast.worker.collectives.waits import waits
from holdfast.worker.device_wait import fence_of

BATCH_BYTES = 256 * 2**20
"""What a source needs of its device's memory at most, for tensors that are not sent as they lie there."""
_TAG_HEADER, _TAG_SKELETON, _TAG_FLAGS, _TAG_OTHERS, _TAG_SENT = 9101, 9102, 9103, 9104, 9105


class DeviceLink(NamedTuple):
    """What two ranks share on a device."""

    group: ElasticGroup
    device: torch.device

    def transfer(self, tensors: Sequence[torch.Tensor], peer: int, *, is_source: bool) -> None:
        """Queue the sending of tensors to a rank, or the receiving from it, as one batch."""
        begin = self.group.send if is_source else self.group.recv
        at = self.group.members.index(peer)
        with self.group.told_together(self.device) as works:
            works += [begin([tensor], at, 0) for tensor in tensors]

    def wait(self) -> None:
        """Wait until this device has done what it was told, by a communicator that was not broken."""
        fence = fence_of([self.device])
        if fence is not None:
            with waits:
                fence.wait(groups.check, self.group.timeout.total_seconds())
        groups.check_communicators()


def link_to(rank: int) -> DeviceLink | None:
    """Return what the view has connected on a device with another rank: the same on both of them; None if nothing, or
    if it would connect pairs of ranks first, where nothing could free them."""
    found = groups.connected_with(rank)
    if found is None:
        return None
    group, kind = found
    return DeviceLink(group, torch.device(kind, torch.accelerator.current_device_index()))


class Piece(NamedTuple):
    """A range of bytes of one tensor."""

    tensor: int
    start: int
    stop: int


def batches(sizes: Sequence[int], bytes_max: int) -> Iterator[list[Piece]]:
    """Cut tensors of these sizes into batches, all but the last of exactly `bytes_max`."""
    batch: list[Piece] = []
    room = bytes_max
    for index, size in enumerate(sizes):
        start = 0
        while start < size:
            stop = min(size, start + room)
            batch.append(Piece(index, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield batch
                batch, room = [], bytes_max
    if batch:
        yield batch


def is_on(device: torch.device, tensor: torch.Tensor) -> bool:
    return tensor.device.type == device.type


def send_state(link: DeviceLink, flat: FlatTree, live: FlatTree, step: int, to: int) -> None:
    """Send a state to a newcomer, and return when it has left. `live`: this rank's own, which says what is on the
    device; the state that is sent, or of the same structure where that is the copy of another rank's on the host."""
    on_device = {spec.path for spec, one in zip(describe(live), live.tensors, strict=True) if is_on(link.device, one)}
    flags = [spec.path in on_device for spec in describe(flat)]
    others = Arena(is_kept=False)
    others.take(FlatTree(b"", [one for one, flag in zip(flat.tensors, flags, strict=True) if not flag]), step)
    header = torch.tensor([step, len(flat.skeleton)], device="cpu")
    dist.send(header, to, tag=_TAG_HEADER)
    dist.send(torch.frombuffer(bytearray(flat.skeleton), dtype=torch.uint8), to, tag=_TAG_SKELETON)
    if flags:
        dist.send(torch.tensor(flags, dtype=torch.uint8, device="cpu"), to, tag=_TAG_FLAGS)
    for part in others.parts():
        dist.send(part, to, tag=_TAG_OTHERS)
    tensors = [one.detach() for one, flag in zip(flat.tensors, flags, strict=True) if flag]
    for batch in batches([one.nbytes for one in tensors], BATCH_BYTES):
        pieces = [as_bytes(tensors[piece.tensor])[piece.start : piece.stop].to(link.device) for piece in batch]
        link.transfer(pieces, to, is_source=True)
    link.wait()
    dist.send(header, to, tag=_TAG_SENT)


def receive_state(link: DeviceLink, tracked: Tracked, source: int, step: int) -> dict[str, Any]:
    """Receive a state, as a tree. Where the live tensors of modules and optimizers fit they have it already."""
    header = torch.empty(2, dtype=torch.int64, device="cpu")
    dist.recv(header, source, tag=_TAG_HEADER)
    of_step, skeleton_bytes = (int(number) for number in header)
    if not 0 < skeleton_bytes <= SKELETON_BYTES_MAX:
        raise StateError(f"rank {source} announced a structure of {skeleton_bytes} bytes, which cannot be")
    if of_step != step:
        raise StateConflictError(f"rank {source} sent its state of step {of_step}; the settled step is {step}")
    received = torch.empty(skeleton_bytes, dtype=torch.uint8, device="cpu")
    dist.recv(received, source, tag=_TAG_SKELETON)
    skeleton = bytes(received.tolist())
    plan_of(skeleton)  # refuses one that asks for too much
    wanted = specs(skeleton)
    flags = torch.empty(len(wanted), dtype=torch.uint8, device="cpu")
    if wanted:
        dist.recv(flags, source, tag=_TAG_FLAGS)
    is_by_device = [bool(flag) for flag in flags.tolist()]
    others = iter(_receive_others([spec for spec, flag in zip(wanted, is_by_device, strict=True) if not flag], source))
    live = live_tensors(tracked)
    tensors = [
        place_for(spec, live, link.device) if flag else next(others)
        for spec, flag in zip(wanted, is_by_device, strict=True)
    ]
    targets = [tensor for tensor, flag in zip(tensors, is_by_device, strict=True) if flag]
    for batch in batches([one.nbytes for one in targets], BATCH_BYTES):
        pieces = [as_bytes(targets[piece.tensor])[piece.start : piece.stop] for piece in batch]
        link.transfer(pieces, source, is_source=False)
    for target in targets:
        torch.autograd.graph.increment_version(target)  # received into, which torch does not count as a change
    link.wait()
    dist.recv(header, source, tag=_TAG_SENT)
    tree = unflatten(skeleton, tensors)
    if not isinstance(tree, dict):
        raise StateConflictError(f"rank {source} sent something that is no state of tracked objects")
    return tree


def _receive_others(wanted: Sequence[TensorSpec], source: int) -> list[torch.Tensor]:
    """Receive what is not on the device, in one run of bytes."""
    plan = ArenaPlan(tuple((spec.dtype, spec.shape) for spec in wanted))
    memory = torch.empty(plan.size_bytes, dtype=torch.uint8, device="cpu")
    if plan.size_bytes:
        dist.recv(memory, source, tag=_TAG_OTHERS)
    return plan.views(memory)


def live_tensors(tracked: Tracked) -> dict[Any, torch.Tensor]:
    """Return by path the live tensors of modules and optimizers. What else is tracked may give copies."""
    flat = tracked.state()
    names = {*tracked.modules(), *tracked.optimizers()}
    pairs = zip(describe(flat), flat.tensors, strict=True)
    return {spec.path: tensor for spec, tensor in pairs if spec.path[0] in names}


def place_for(spec: TensorSpec, live: dict[Any, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the live tensor that a received one belongs into; new memory where there is none that fits."""
    found = live.get(spec.path)
    fits = (device, spec.dtype, spec.shape, True)
    if found is not None and (found.device, found.dtype, tuple(found.shape), found.is_contiguous()) == fits:
        return found.detach()
    return torch.empty(spec.shape, dtype=spec.dtype, device=device)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
