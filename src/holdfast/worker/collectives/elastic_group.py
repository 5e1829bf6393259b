"""The process group that stays while what it communicates through is swapped.

torch takes an object of a Python subclass of `ProcessGroup` for the group itself: DistributedDataParallel, meshes and
DTensors keep it for their whole life. C++ asks it by the names that its trampolines know (`allreduce`,
`all_gather_single_coalesced`, ...), Python callers by old spellings too; both lead to the methods of torch's `Backend`,
on an inner communicator that belongs to one view.

Nothing here keeps the inner one in a local variable: a traceback would keep it, with its sockets, for as long as
somebody looks at the error.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroup, Store, Work

from holdfast.errors import HoldfastError, ViewOverError
from holdfast.worker.collectives.realm import Realm

DEFAULT_NAME = "default"
NO_VIEW = -1


class State:
    """What there is once a process."""

    def __init__(self) -> None:
        self.realm: Realm | None = None
        self.revoked = (NO_VIEW, "")
        """The newest view that is known to be over, and why."""
        self.groups: weakref.WeakSet[ElasticGroup] = weakref.WeakSet()
        self.on_collective: Callable[[], None] | None = None


state = State()


class ElasticGroup(ProcessGroup):
    def __init__(self, members: Sequence[int], rank: int, timeout: timedelta, name: str) -> None:
        super().__init__(rank, len(members))  # type: ignore[call-arg]
        self.members = tuple(members)
        self.name_in_store = name
        self._rank = rank
        self._timeout = timeout
        self._name = name
        self._description = ""
        self._lock = threading.RLock()
        self._realm: Realm | None = None
        self._inners: dict[str, Any] = {}
        self._unusable = ""
        state.groups.add(self)

    # What it is

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return len(self.members)

    def getBackendName(self) -> str:
        return "holdfast"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        self._description = desc

    def getGroupDesc(self) -> str:
        return self._description

    getRank, getSize, name, _get_backend_name = rank, size, getBackendName, getBackendName
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        from holdfast.worker.collectives.communicators import available

        return [torch.device(device) for device in available()]

    def _get_backend(self, device: torch.device) -> Any:
        return self._through(torch.device(device).type)

    def _has_hooks(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        for inner in self._inners.values():
            inner.set_timeout(timeout)

    def get_group_store(self) -> Store:
        store = None if state.realm is None else state.realm.store
        if store is None:
            raise HoldfastError("a process that has not joined the job yet has no store")
        return PrefixStore(self.name_in_store, store)

    def abort(self) -> None:
        if state.realm is not None:
            state.realm.end("the process group was aborted")

    def shutdown(self) -> None:
        """Called for each group when the script destroys them."""
        self._inners = {}
        self._unusable = "this process group was destroyed"

    def new_group(
        self, ranks: Sequence[int], *, timeout: timedelta, group_name: str, group_desc: str | None = None, **_: object
    ) -> ElasticGroup | None:
        """torch asks the default group for subgroups, and then keeps the books itself."""
        if self._rank not in ranks:
            return None
        group = ElasticGroup(ranks, list(ranks).index(self._rank), timeout, group_name)
        group.setGroupDesc(group_desc or "undefined")
        return group

    # What it communicates through

    def follow(self, old: Realm, new: Realm) -> None:
        """Belong to a new view from now on; connect when first used."""
        if self.members == tuple(range(old.world_size)):
            self.members = tuple(range(new.world_size))
            self._rank = new.rank
        elif (old.world_size, old.rank) != (new.world_size, new.rank):
            self._unusable = self._unusable or (
                f"process group {self._name} of ranks {list(self.members)} was made when this process was rank "
                f"{old.rank} of {old.world_size}; it is rank {new.rank} of {new.world_size} now. Only groups of all "
                "ranks follow such a change: make the others, and what is built on them, anew"
            )
        self.connect_anew(new, {})

    def connect_anew(self, realm: Realm, inners: dict[str, Any]) -> None:
        with self._lock:
            self._realm, self._inners = realm, inners

    def _through(self, device: str) -> Any:
        """The inner communicator for the next collective on this type of device."""
        if state.on_collective is not None:
            state.on_collective()
        realm = state.realm
        if realm is None:
            raise ViewOverError("this process has left the job")
        realm.check()
        if self._realm is not realm or device not in self._inners:
            self._connect(realm, device)
        return self._inners[device]

    def _connect(self, realm: Realm, device: str) -> None:
        if self._unusable:
            raise HoldfastError(self._unusable)
        with self._lock:
            if self._realm is not realm:
                self.connect_anew(realm, {})
            if device not in self._inners:
                self._inners[device] = realm.make(self.name_in_store, device, self._rank, self.size(), self._timeout)

    # What it does

    def barrier(self, opts: Any = None, **options: Any) -> Any:  # type: ignore[override]
        device = "cpu" if opts is None or opts.device is None else opts.device.type
        inner_arguments = () if opts is None else (opts,)
        return self._through(device).barrier(*inner_arguments, **options)

    def monitored_barrier(self, *arguments: Any, **options: Any) -> None:
        self._through("cpu").monitored_barrier(*arguments, **options)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Any:
        return self._through(device_of(tensors)).recv_anysource(tensors, tag)

    def all_gather_single_coalesced(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[Tensor], *options: Any, **named: Any
    ) -> Work:
        return together(
            self._through(device_of(inputs))._allgather_base(output, value, *options, **named)
            for output, value in zip(outputs, inputs, strict=True)
        )

    def reduce_scatter_single_coalesced(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[Tensor], *options: Any, **named: Any
    ) -> Work:
        return together(
            self._through(device_of(inputs))._reduce_scatter_base(output, value, *options, **named)
            for output, value in zip(outputs, inputs, strict=True)
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _start_coalescing(self, device: torch.device) -> None:
        self._through(device.type)._start_coalescing()

    def _end_coalescing(self, device: torch.device) -> Any:
        return self._through(device.type)._end_coalescing()

    def _get_sequence_number_for_group(self) -> int:
        return int(next(iter(self._inners.values()))._get_sequence_number_for_group()) if self._inners else 0

    def _set_sequence_number_for_group(self) -> None:
        return None

    def __repr__(self) -> str:
        return f"ElasticGroup({self._name!r}, rank {self._rank} of {self.size()})"


SAME_NAME = (
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)
OTHER_NAMES = {
    "_allgather_base": "_allgather_base",
    "all_gather_single": "_allgather_base",
    "_reduce_scatter_base": "_reduce_scatter_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "alltoall_base": "alltoall_base",
    "all_to_all_single": "alltoall_base",
}


def collective(inner_name: str) -> Callable[..., Any]:
    def call(self: ElasticGroup, *arguments: Any, **named: Any) -> Any:
        return getattr(self._through(device_of((arguments, *named.values()))), inner_name)(*arguments, **named)

    return call


for method, inner_name in {**{name: name for name in SAME_NAME}, **OTHER_NAMES}.items():
    setattr(ElasticGroup, method, collective(inner_name))


def device_of(arguments: object) -> str:
    """Of the first tensor among the arguments, lists of lists included."""
    return find_device(arguments) or "cpu"


def find_device(arguments: object) -> str | None:
    if isinstance(arguments, Tensor):
        return arguments.device.type
    if isinstance(arguments, list | tuple):
        for argument in arguments:
            if (found := find_device(argument)) is not None:
                return found
    return None


class Together(Work):
    """Several collectives as one: gloo's Python face has no coalesced gathers."""

    def __init__(self, works: list[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, *timeout: Any) -> bool:
        return all(work.wait(*timeout) for work in self._works)

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.collect_all([work.get_future() for work in self._works])

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def together(works: Any) -> Work:
    every = list(works)
    return every[0] if len(every) == 1 else Together(every)
