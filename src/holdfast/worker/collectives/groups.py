"""Elastic process groups: `torch.distributed` whose connections are swapped per view while all group objects stay.

The life of a process, in the words of this file:

    start      join a view, or make believe (no store yet): torch.distributed is ready
    revoke     from a side thread: the view is over. Who hangs in a collective, or in start or switch, raises within
               milliseconds; every further collective raises ViewOverError at once
    switch     from the main thread: belong to another view. The default group is connected when it returns, subgroups
               when they are first used, under their own name, which all members share

A revoke names the view it means, as it may come late: it does nothing once a newer view has begun.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, HashStore, PrefixStore, ReduceOp, Store
from torch.distributed import distributed_c10d

from holdfast.core.faults import COLLATERAL_TEXTS
from holdfast.errors import HoldfastError, ViewOverError
from holdfast.worker.collectives import communicators
from holdfast.worker.collectives.barrier import wait_for_all
from holdfast.worker.collectives.elastic_group import DEFAULT_NAME, NO_VIEW, ElasticGroup, state
from holdfast.worker.collectives.realm import Realm

BACKEND = "holdfast"
CLOSE_TIMEOUT_S = 2.0
CAUSES_MAX = 10


def start(rank: int, world_size: int, store: Store | None, *, view: int, timeout: timedelta) -> None:
    """Raises, with torch.distributed as if nothing had been called, if the others cannot be reached."""
    register()
    realm = Realm(view, store, rank, world_size)
    state.realm = realm
    try:
        check_not_revoked(realm)
        inner = realm.make(DEFAULT_NAME, "cpu", rank, world_size, timeout)
    except BaseException:
        state.realm = None
        realm.retire()
        raise
    # Only now torch is told: a failed init_process_group would leave its counter of groups raised, and so change the
    # names of all later ones.
    dist.init_process_group(BACKEND, store=books_store(realm), rank=rank, world_size=world_size, timeout=timeout)
    default_group().connect_anew(realm, {"cpu": inner})


def register() -> None:
    if BACKEND not in dist.Backend.backend_list:
        devices = list(communicators.available())
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=devices)
        os.register_at_fork(after_in_child=leave_to_parent)


def create(options: Any, _: object) -> ElasticGroup:
    """Called by torch for the default group, and by versions that do not ask it for subgroups for those too."""
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    name = options.group_id if options.global_ranks_in_group else DEFAULT_NAME
    return ElasticGroup(members, options.group_rank, options.timeout, name)


def books_store(realm: Realm) -> Store:
    """What torch remembers as a group's store."""
    return HashStore() if realm.store is None else PrefixStore(f"view/{realm.view}/torch", realm.store)


def switch(store: Store | None, rank: int, world_size: int, *, view: int) -> None:
    """The store belongs to the view from now on: a revoke before all are there breaks its connection."""
    old = current_realm()
    new = Realm(view, store, rank, world_size)
    old.wait_until_shut()
    _tensors.clear()  # one may be in the hands of a hung collective
    state.realm = new
    for group in list(state.groups):
        group.follow(old, new)
    keep_books(new)
    try:
        check_not_revoked(new)
        default_group()._connect(new, "cpu")
    finally:
        # Not before: until all have come, somebody may still be finishing the last collective of the old view.
        old.retire()


def keep_books(realm: Realm) -> None:
    """torch's own tables say which ranks a group has, and where its store is."""
    world = distributed_c10d._world
    for group in list(state.groups):
        if group in world.pg_map:
            world.pg_map[group] = (world.pg_map[group][0], books_store(realm))
            world.pg_group_ranks[group] = {member: at for at, member in enumerate(group.members)}


def revoke(why: str, view: int | None = None) -> None:
    """End the current view if it is not newer than `view`. From any thread, any number of times."""
    if view is not None and view > state.revoked[0]:
        state.revoked = (view, why)  # before it is looked which view there is: it may just be beginning
    realm = state.realm
    if realm is not None and (view is None or realm.view <= view):
        realm.end(why)


def check_not_revoked(realm: Realm) -> None:
    """A view can be over before this process has begun it."""
    view, why = state.revoked
    if realm.view <= view:
        realm.end(why)
        realm.check()


def is_revoked() -> bool:
    return state.realm is not None and state.realm.over is not None


def current_view() -> int:
    return NO_VIEW if state.realm is None else state.realm.view


def on_collective(callback: Callable[[], None] | None) -> None:
    """Called at the start of each collective, so it must be quick."""
    state.on_collective = callback


def is_communication_error(error: BaseException) -> bool:
    """Whether this is what a healthy rank gets when a peer, a link or the view has gone."""
    for _ in range(CAUSES_MAX):
        if is_communication_error_itself(error):
            return True
        if error.__cause__ is None:
            return False
        error = error.__cause__
    return False


def is_communication_error_itself(error: BaseException) -> bool:
    if isinstance(error, ViewOverError | dist.DistError | ConnectionError):
        return True
    if type(error) is not RuntimeError:
        return False
    if any(text in str(error) for text in (*COLLATERAL_TEXTS, ViewOverError.__name__)):
        return True
    return is_revoked() or (state.realm is not None and state.realm.mesh.is_broken())


def close() -> None:
    """The process has no more use for its groups."""
    realm, state.realm = state.realm, None
    if dist.is_initialized():
        dist.destroy_process_group()
    if realm is not None:
        realm.retire().join(CLOSE_TIMEOUT_S)


def leave_to_parent() -> None:
    if state.realm is not None:
        state.realm.mesh.leave_to_parent()


def current_realm() -> Realm:
    if state.realm is None:
        raise HoldfastError("no view has begun: call start() first")
    return state.realm


def default_group() -> ElasticGroup:
    return cast(ElasticGroup, distributed_c10d._get_default_group())


# The session's own small exchanges, on the default group.

_tensors: dict[int, Tensor] = {}
_maximum = AllreduceOptions()
_maximum.reduceOp = ReduceOp(ReduceOp.MAX)


def agree(values: Sequence[int]) -> list[int]:
    """The element-wise maximum over all ranks."""
    if default_group().size() == 1:
        current_realm().check()
        return list(values)
    if len(values) not in _tensors:
        _tensors[len(values)] = torch.zeros(len(values), dtype=torch.int64)
    tensor = _tensors[len(values)]
    for at, value in enumerate(values):
        tensor[at] = value
    default_group().allreduce([tensor], _maximum).wait()
    return cast(list[int], tensor.tolist())


def barrier(name: str, timeout_s: float) -> None:
    """Until all ranks of the view have come to the barrier of this name. See barrier.py."""
    realm = current_realm()
    if realm.store is None or realm.world_size == 1:
        realm.check()
        return
    store = PrefixStore(f"view/{realm.view}/{name}", realm.store)
    wait_for_all(store, realm.rank, realm.world_size, timeout_s, realm.check)


def gather(values: Sequence[int]) -> list[list[int]]:
    """Every rank's values, by rank."""
    size = default_group().size()
    if size == 1:
        current_realm().check()
        return [list(values)]
    output = torch.zeros(size * len(values), dtype=torch.int64)
    default_group()._allgather_base(output, torch.tensor(list(values), dtype=torch.int64)).wait()
    return cast(list[list[int]], output.view(size, -1).tolist())


def send(tensor: Tensor, to_rank: int, tag: int = 0) -> None:
    data = as_bytes(tensor.detach().contiguous())
    if data.numel():
        default_group().send([data], to_rank, tag).wait()


def recv(tensor: Tensor, from_rank: int, tag: int = 0) -> None:
    into = tensor.detach()
    whole = into if into.is_contiguous() else torch.empty_like(into, memory_format=torch.contiguous_format)
    if whole.numel():
        default_group().recv([as_bytes(whole)], from_rank, tag).wait()
    if whole is not into:
        into.copy_(whole)


def broadcast(tensor: Tensor, from_rank: int) -> None:
    options = BroadcastOptions()
    options.rootRank = from_rank
    into = tensor.detach()
    whole = into.contiguous()
    if whole.numel():
        default_group().broadcast([as_bytes(whole)], options).wait()
    if whole is not into:
        into.copy_(whole)


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: gloo does not know every type."""
    return tensor.reshape(-1).view(torch.uint8)
