"""Writes the state of the only rank that still has it into the slots of all ranks of the node.

A replicated model is split into as many shares as there are ranks, and each rank's slots have its share alone
(taker.py). When one rank is left, its last committed step is newer than the last snapshot that is complete, by as many
steps as lie between two snapshots. Until a new rank has received the state, the death of that rank would cost these
steps. So before it waits for new ranks, it writes every share itself: into its own slots and into those of the ranks
that died, which are large enough, and whose locks the kernel has released.

The rule of the slots holds: of each local rank's two slots, the one with the newest complete snapshot is not touched.
All shares are written before one is sealed, and all are sealed before the pages say that the step is complete. A rank
that is killed in between leaves slots with the status WRITING, which no process reads, and the snapshot before.

The images carry the number of the view that is about to be joined, which no other image has: shares of two histories
are never taken for parts of one state.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import msgspec

from holdfast.core.image_info import ImageInfo, StateKey
from holdfast.snapshots.slot_file import SLOTS, ImageLock, SlotPage, SlotRecord, SlotStatus, find_ranks, map_image
from holdfast.state.partition import PartPlan, fill_image
from holdfast.state.per_rank_state import LOCAL
from holdfast.state.tensor_specs import FlatTree
from holdfast.state.tree import describe

LOCK_PATIENCE_S = 2.0
"""How long to wait for slots that are being read: to be sent to storage, or to have their checksums computed."""


@dataclass
class _Target:
    """A slot that may be overwritten."""

    page: SlotPage
    slot: int
    capacity_bytes: int


def save_every_share(
    directory: Path, flat: FlatTree, shares: int, image: ImageInfo, of_one_rank: Collection[int]
) -> str:
    """Write all shares of a state into the slots beside those of a rank, unless that step is complete there already.
    Return why that failed, or nothing. `image`: what is known of every share. `of_one_rank`: the tensors that are all
    in the first share."""
    if any(spec.path[0] == LOCAL for spec in describe(flat)):
        return "other ranks had state of their own (track_local), which is lost with them"
    with ExitStack() as stack:
        found = find_ranks(directory.parent).values()
        pages = [SlotPage.open(path) for path in found if (path / "control").exists()]
        for page in pages:
            stack.callback(page.close)
        newest = _newest_complete(record for page in pages for record in page.sealed().values())
        if newest is not None and newest.step >= image.step:
            return ""
        about = {"shards": "1", "shares": str(shares)}
        plans = [PartPlan(flat, shares, part, {"part": str(part), **about}, of_one_rank) for part in range(shares)]
        targets = _assign([plan.layout.size_bytes for plan in plans], _free(pages, newest), stack)
        if targets is None:
            return "there is not enough room for it in the node's memory, or it is being read"
        _write(targets, plans, flat, shares, image)
    return ""


def _newest_complete(records: Iterable[SlotRecord]) -> StateKey | None:
    found: dict[StateKey, set[int]] = {}
    for one in records:
        found.setdefault(one.image.state, set()).add(one.image.part)
    return max((state for state, parts in found.items() if len(parts) == state.parts), default=None)


def _free(pages: Iterable[SlotPage], newest: StateKey | None) -> list[_Target]:
    """Return the slots that hold no part of the newest complete state, nor of one that other nodes may have the rest
    of."""
    found: list[_Target] = []
    for page in pages:
        complete = page.complete()
        for slot in range(SLOTS):
            record = page.record(slot)
            is_newest = record.image.state == newest
            is_elsewhere = record.is_image(complete) and (newest is None or record.image.step > newest.step)
            if record.status is SlotStatus.SEALED and (is_newest or is_elsewhere):
                continue
            try:
                found.append(_Target(page, slot, page.path(slot).stat().st_size))
            except OSError:
                continue
    return found


def _assign(sizes: list[int], free: list[_Target], stack: ExitStack) -> list[_Target] | None:
    """Give each part a slot that it fits into, locked until the stack is left; the largest part first, each the
    smallest slot that is large enough. None if there are not enough. Each part is with another local rank: the other
    slot of each must be free for the next snapshot."""
    give_up_at = time.monotonic() + LOCK_PATIENCE_S
    left, chosen = sorted(free, key=lambda one: one.capacity_bytes), dict[int, _Target]()
    for part in sorted(range(len(sizes)), key=lambda part: -sizes[part]):
        fitting = [one for one in left if one.capacity_bytes >= sizes[part]]
        found = _lock_one(fitting, give_up_at, stack)
        if found is None:
            return None
        left = [one for one in left if one.page is not found.page]
        chosen[part] = found
    return [chosen[part] for part in range(len(sizes))]


def _lock_one(fitting: list[_Target], give_up_at: float, stack: ExitStack) -> _Target | None:
    while fitting:
        for target in fitting:
            lock = ImageLock(target.page.path(target.slot), is_writable=True)
            if lock.acquire():
                stack.callback(lock.close)
                return target
            lock.close()
        if time.monotonic() > give_up_at:
            return None
        time.sleep(0.005)  # no process tells when it lets go of a lock
    return None


def _write(targets: list[_Target], plans: list[PartPlan], flat: FlatTree, shares: int, image: ImageInfo) -> None:
    created_ns = time.time_ns()
    images = [
        msgspec.structs.replace(
            image, part=part, shards=1, shares=shares, size_bytes=plan.layout.size_bytes, created_ns=created_ns
        )
        for part, plan in enumerate(plans)
    ]
    for target, plan, one in zip(targets, plans, images, strict=True):
        target.page.write(target.slot, SlotRecord(SlotStatus.WRITING, one))
        memory = map_image(target.page.path(target.slot), plan.layout.size_bytes, is_writable=True)
        fill_image(memory, plan, flat)
    for target, one in zip(targets, images, strict=True):
        target.page.write(target.slot, SlotRecord(SlotStatus.SEALED, one))
    for target in targets:
        target.page.put(complete=image.step, restored=0)
