"""Elastic process groups: `torch.distributed` whose connections are swapped per view while all group objects stay.

What a process does with them, in order:

    start      join a view, or answer collectives locally (no store yet): torch.distributed is ready
    revoke     from a side thread: the view is over. A thread that hangs in a collective, start or switch raises within
               milliseconds; every further collective raises ViewOverError at once
    switch     from the main thread: belong to another view. The default group is connected when it returns (in a large
               world a tree instead, agreement_tree.py), subgroups when they are first used, under their own name,
               which all members share
    reconnect  from the main thread of all ranks: what was connected on devices before is so again

A revoke names the view it means, as it may come late: it does nothing once a newer view has begun.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import AllreduceOptions, BroadcastOptions, ReduceOp

from holdfast import torch_compat
from holdfast.core.faults import device_errors
from holdfast.core.faults.failures import COLLATERAL_TEXTS
from holdfast.core.stacks import ranks_text
from holdfast.errors import HoldfastError, MissingRanksError, ViewOverError
from holdfast.torch_compat import HashStore, PrefixStore, Store
from holdfast.util.logs import get_logger
from holdfast.worker.collectives import agreement_tree, communicators
from holdfast.worker.collectives.agreement_tree import AgreementTree
from holdfast.worker.collectives.elastic_group import DEFAULT_NAME, ElasticGroup, state
from holdfast.worker.collectives.reconnect_groups import connect_groups
from holdfast.worker.collectives.recorded_answers import AnswerRecorder, AnswerReplayer, let_sources_receive
from holdfast.worker.collectives.view_connections import ViewConnections
from holdfast.worker.collectives.waits import waits

BACKEND = "holdfast"
CLOSE_TIMEOUT_S = 2.0
CAUSES_MAX = 10
RETIRE_TIMEOUT_S = 30.0
"""Of a thread that lets go of communicators: a vendor's library may take seconds for each."""

log = get_logger(__name__)


def start(rank: int, world_size: int, store: Store | None, *, view: int, timeout: timedelta) -> None:
    """Join a view, or begin with local answers if there is no store. Raises, with torch.distributed as if nothing had
    been called, if the others cannot be reached."""
    register()
    connections = ViewConnections(view, store, rank, world_size, tell_stuck)
    state.connections = connections
    inners: dict[str, Any] = {}
    try:
        check_not_revoked(connections)
        with waits:
            if not grow_tree(connections, timeout):
                inners["cpu"] = connections.make(DEFAULT_NAME, "cpu", rank, world_size, timeout)
    except BaseException:
        state.connections = None
        connections.retire()
        raise
    # Only now torch is told: a failed init_process_group would leave its counter of groups raised, and so change the
    # names of all later ones.
    dist.init_process_group(BACKEND, store=books_store(connections), rank=rank, world_size=world_size, timeout=timeout)
    default_group().reconnect(connections, inners)


def start_without_rank(world_size: int, *, view: int, timeout: timedelta, need_rank: Callable[[], None]) -> None:
    """Make torch.distributed ready in a process that has no rank yet. `need_rank` is called before anything is answered
    that depends on it, and returns when `assume_rank` was called."""
    excepthook = sys.excepthook  # torch puts the rank into what it wraps around it
    start(0, world_size, None, view=view, timeout=timeout)
    sys.excepthook = excepthook
    state.need_rank = need_rank


def assume_rank(rank: int, world_size: int) -> None:
    """Have this rank from now on, in a world that is still local."""
    state.need_rank = None
    old = current_connections()
    new = ViewConnections(old.view, None, rank, world_size)
    state.connections = new
    state.tree = None
    for group in list(state.groups):
        group.follow(old, new)
    keep_books(new)


def record_answers() -> None:
    """Record what the script's collectives answer from now on, until `end_answers`."""
    state.answers = AnswerRecorder()


def replay_answers(record: bytes, fetch: Callable[[], bytes]) -> None:
    """Answer the script's collectives from a record, or from what `fetch` finds, until `end_answers`."""
    let_sources_receive()
    state.answers = AnswerReplayer(record, fetch)


def has_unanswered() -> bool:
    """Return whether a collective had no answer, so that `end_answers` needs to know the tracked state."""
    return isinstance(state.answers, AnswerReplayer) and state.answers.has_unanswered


def end_answers(tracked: Sequence[Tensor]) -> bytes:
    """Return what was recorded, or replayed. Raises UsageError if a collective had no answer and what it left is not
    tracked."""
    answers, state.answers = state.answers, None
    if isinstance(answers, AnswerReplayer):
        answers.check(tracked)
        return answers.record
    return answers.encoded() if answers is not None else b""


def register() -> None:
    if BACKEND not in dist.Backend.backend_list:
        devices = list(communicators.available())
        dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=devices)
        os.register_at_fork(after_in_child=leave_to_parent)
        torch_compat.ask_groups_for_batches()


def create(options: Any, _: object) -> ElasticGroup:
    """Make a group, for torch: the default group, and in versions that do not ask it for subgroups those too."""
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    name = options.group_id if options.global_ranks_in_group else DEFAULT_NAME
    return ElasticGroup(members, options.group_rank, options.timeout, name)


def books_store(connections: ViewConnections) -> Store:
    """Return what torch is told to be a group's store."""
    return (
        HashStore() if connections.store is None else PrefixStore(f"view/{connections.view}/torch", connections.store)
    )


def switch(store: Store | None, rank: int, world_size: int, *, view: int) -> None:
    """Belong to another view. The store belongs to that view from now on: a revoke before all are there breaks its
    connection."""
    old = current_connections()
    new = ViewConnections(view, store, rank, world_size, tell_stuck)
    with waits:
        old.wait_until_freed()
    _tensors.clear()  # one may be in the hands of a hung collective
    if state.coalescing_on:
        tell_stuck(
            f"the view ended while operations on {state.coalescing_on} were being told, to be begun together: whatever"
            " this thread tells the device's library from now on would wait for the end of that, which is lost"
        )
    state.connections = new
    for group in list(state.groups):
        group.follow(old, new)
    keep_books(new)
    try:
        check_not_revoked(new)
        with waits:
            is_tree = grow_tree(new, default_group().timeout)
        if not is_tree:
            default_group()._connect(new, "cpu")
    finally:
        # Not before: until all have come, a rank may still be finishing the last collective of the old view.
        state.retiring = old.retire()


def grow_tree(connections: ViewConnections, timeout: timedelta) -> bool:
    """Connect the ranks of a large view by a tree (agreement_tree.py), with all others; return False for a small one,
    whose default group is connected instead."""
    state.tree = None
    if connections.store is None or connections.world_size <= agreement_tree.FLAT_RANKS_MAX:
        return False
    state.tree = AgreementTree(connections, timeout)
    return True


def has_device_groups() -> bool:
    """Return whether a group was ever connected on a device that runs behind the host."""
    return any(group.devices_used for group in list(state.groups))


def reconnect(timeout: timedelta) -> None:
    """Connect the groups on devices, as they were in the last view. All ranks of the view must come. The old ones go
    first: each takes hundreds of megabytes of a device that may be full."""
    if state.retiring is not None:
        state.retiring.join(RETIRE_TIMEOUT_S)
        if state.retiring.is_alive():
            text = f"communicators of the last view are not gone after {RETIRE_TIMEOUT_S:.0f} s: connecting beside them"
            log.warning("communicators-not-dropped", text)
    connect_groups(current_connections(), list(state.groups), timeout)


def connected_with(rank: int) -> tuple[ElasticGroup, str] | None:
    """Return a group that this view has connected on a device with another rank, and the type of the device; right
    after `reconnect` both ranks find the same. Only one that begins several transfers together: NCCL makes single ones
    through a communicator for the two ranks alone, which connects when it is first used."""
    found = {
        (group.name_in_store, group.members, device): group
        for group in list(state.groups)
        for device in group.connected_devices()
        if rank in group.members
    }
    return (found[first], first[2]) if (first := min(found, default=None)) is not None else None


def keep_books(connections: ViewConnections) -> None:
    """Tell torch's own tables which ranks a group has, and where its store is."""
    groups = [(group, group.members) for group in list(state.groups)]
    torch_compat.update_group_tables(groups, lambda: books_store(connections))


def revoke(why: str, view: int | None = None) -> None:
    """End the current view if it is not newer than `view`. From any thread, any number of times."""
    if view is not None and view > state.revoked[0]:
        state.revoked = (view, why)  # before it is looked which view there is: it may just be beginning
    connections = state.connections
    if connections is not None and (view is None or connections.view <= view):
        connections.end(why)


def check_not_revoked(connections: ViewConnections) -> None:
    """Raise if the view was over before this process has begun it."""
    view, why = state.revoked
    if connections.view <= view:
        connections.end(why)
        connections.check()


def is_revoked() -> bool:
    return state.connections is not None and state.connections.over is not None


def check() -> None:
    """Raise ViewOverError if the view is over."""
    current_connections().check()


def check_communicators() -> None:
    """Raise if the view is over, or one of its communicators is broken without any collective having said so."""
    current_connections().check_communicators()


def wait_until_freed() -> None:
    """Wait, if the view was ended, until its communicators are freed or have had their time."""
    current_connections().wait_until_freed()


def tell_stuck(text: str) -> None:
    """Report that communicators of a view that is over cannot be freed; on a side thread."""
    if state.on_stuck is not None:
        state.on_stuck(text)


def on_stuck(callback: Callable[[str], None] | None) -> None:
    """Have a function called, on a side thread, with a sentence about communicators that cannot be freed."""
    state.on_stuck = callback


def on_collective(callback: Callable[[], None] | None) -> None:
    """Have a function called at the start of each collective; it must be quick."""
    state.on_collective = callback


def answer_locally(is_so: bool) -> None:
    """Have collectives answered at once from local data, or not any more: after an aborted step, for code of the loop
    whose effects will be undone. Replacements do not run it, so the others would wait for one another."""
    state.answers_locally = is_so


def is_communication_error(error: BaseException) -> bool:
    """Return whether this is what a healthy rank gets when a peer, a link or the view has gone. Never so if the device
    itself has failed."""
    if any(map(is_device_error, chain_of(error))):
        return False
    # What a script's own handler raises, or a bug in it, hides the error that it dealt with, which counts if the view
    # is over. While the view lives a script may deal with a lost connection of its own, and then fail for good.
    return any(map(is_communication_error_itself, chain_of(error, contexts=is_revoked())))


def is_device_error(error: BaseException) -> bool:
    """Return whether it says that this process cannot use its device any more (core/faults/device_errors.py)."""
    return device_errors.is_device_error(type(error).__name__, str(error))


def chain_of(error: BaseException, *, contexts: bool = True) -> list[BaseException]:
    """Return the error and what caused it; with `contexts` also what was being handled when it was raised, even if it
    was raised `from None`."""
    chain = [error]
    while len(chain) < CAUSES_MAX:
        before = chain[-1].__cause__ or (chain[-1].__context__ if contexts else None)
        if before is None:
            break
        chain.append(before)
    return chain


def is_communication_error_itself(error: BaseException) -> bool:
    if isinstance(error, ViewOverError | dist.DistError | ConnectionError):
        return True
    if type(error) is not RuntimeError:
        return False
    if any(text in str(error) for text in COLLATERAL_TEXTS):
        return True
    return is_revoked() or (state.connections is not None and state.connections.mesh.is_broken())


def close() -> None:
    """Close all groups: the process has no more use for them."""
    connections, state.connections = state.connections, None
    state.tree = None
    if dist.is_initialized():
        dist.destroy_process_group()
    if connections is not None:
        connections.retire().join(CLOSE_TIMEOUT_S)


def leave_to_parent() -> None:
    if state.connections is not None:
        state.connections.mesh.leave_to_parent()


def rank() -> int:
    """Return the rank of this process. A spare waits here for its own."""
    return dist.get_rank()


def world_size() -> int:
    """Return the number of ranks in the view. A spare waits here for its rank."""
    return dist.get_world_size()


def current_connections() -> ViewConnections:
    if state.connections is None:
        raise HoldfastError("no view has begun: call start() first")
    return state.connections


def default_group() -> ElasticGroup:
    return cast(ElasticGroup, torch_compat.default_group())


# The session's own small exchanges, on the default group.

_tensors: dict[int, Tensor] = {}
_maximum = AllreduceOptions()
_maximum.reduceOp = ReduceOp(ReduceOp.MAX)


def agree(values: Sequence[int]) -> list[int]:
    """Return the element-wise maximum over all ranks."""
    if default_group().size() == 1:
        current_connections().check()
        return list(values)
    if (tree := default_group().tree_for_collective()) is not None:
        return tree.agree(values)
    if len(values) not in _tensors:
        _tensors[len(values)] = torch.zeros(len(values), dtype=torch.int64, device="cpu")
    tensor = _tensors[len(values)]
    for at, value in enumerate(values):
        tensor[at] = value
    default_group().allreduce([tensor], _maximum).wait()
    return cast(list[int], tensor.tolist())


def barrier(name: str, timeout_s: float) -> None:
    """Wait until all ranks of the view have come to the barrier of this name."""
    connections = current_connections()
    if connections.store is None or connections.world_size == 1:
        connections.check()
        return
    store = PrefixStore(f"view/{connections.view}/{name}", connections.store)
    with waits:
        wait_for_all(store, connections.rank, connections.world_size, timeout_s, connections.check)


def gather(values: Sequence[int]) -> list[list[int]]:
    """Return every rank's values, by rank."""
    size = default_group().size()
    if size == 1:
        current_connections().check()
        return [list(values)]
    if (tree := default_group().tree_for_collective()) is not None:
        return tree.gather(values)
    output = torch.zeros(size * len(values), dtype=torch.int64, device="cpu")
    default_group()._allgather_base(output, torch.tensor(list(values), dtype=torch.int64, device="cpu")).wait()
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
    """Return the same memory as bytes: gloo does not know every type."""
    return tensor.reshape(-1).view(torch.uint8)


# --- job.barrier(timeout): a barrier that names the ranks that are missing
#
# It is on the view's store, not on its connections: each rank that comes leaves a key and counts itself, and the last
# one opens it. The others ask whether it is open, ever more rarely; when the time is up, the keys are read one by one.
# They do not wait at the store: torch prints two lines whenever such a wait ends without success.

PAUSE_SHARE = 0.1
"""Of the time that it has taken so far, between two looks: who waits long can wait a little longer."""
PAUSE_S_MIN = 0.001
PAUSE_S_MAX = 0.1
"""Also between two looks at whether the view is over: the store itself does not say so."""


def wait_for_all(
    store: Store, rank: int, size: int, timeout_s: float, check: Callable[[], None] = lambda: None
) -> None:
    """Return when all ranks have come. MissingRanksError names who has not when the time is up; `check` raises what
    ends the wait before."""
    try:
        _wait_for_all(store, rank, size, timeout_s, check)
    except dist.DistError:
        check()  # a view that ends breaks the connections to its store: that is what happened, not a broken store
        raise


def _wait_for_all(store: Store, rank: int, size: int, timeout_s: float, check: Callable[[], None]) -> None:
    began_at = time.monotonic()
    store.set(f"came/{rank}", "1")
    if store.add("count", 1) == size:
        store.set("open", "1")
    while True:
        check()
        if store.check(["open"]):
            return
        waited_s = time.monotonic() - began_at
        if waited_s < timeout_s:
            pause_s = min(max(waited_s * PAUSE_SHARE, PAUSE_S_MIN), PAUSE_S_MAX)
            time.sleep(min(pause_s, timeout_s - waited_s))
            continue
        missing = tuple(other for other in range(size) if not store.check([f"came/{other}"]))
        if not missing:
            continue  # the last one came a moment ago, and is about to open
        text = f"{ranks_text(missing)} of {size} did not come to the barrier in {timeout_s:g} s"
        raise MissingRanksError(text, missing)
