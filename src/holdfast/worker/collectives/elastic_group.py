"""The process group that stays while what it communicates through is swapped.

torch takes an object of a Python subclass of `ProcessGroup` for the group itself: DistributedDataParallel, meshes and
DTensors keep it for their whole life. C++ asks it by the names that its trampolines know (`allreduce`,
`all_gather_single_coalesced`, ...), Python callers by old spellings too; both lead to the methods of torch's `Backend`,
on an inner communicator that belongs to one view.

Nothing here keeps the inner one in a local variable: a traceback would keep it, with its sockets, for as long as
an error handler looks at the error.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from holdfast.errors import HoldfastError, ViewOverError
from holdfast.torch_compat import PrefixStore, ProcessGroup, Store, Work
from holdfast.worker.collectives.agreement_tree import AgreementTree
from holdfast.worker.collectives.communicators import connects_in_rebuild
from holdfast.worker.collectives.local_only import LocalOnly
from holdfast.worker.collectives.recorded_answers import AnswerRecorder, AnswerReplayer
from holdfast.worker.collectives.view_connections import ViewConnections
from holdfast.worker.collectives.waits import waits

DEFAULT_NAME = "default"
NO_VIEW = -1


class State:
    """What there is once a process."""

    def __init__(self) -> None:
        self.connections: ViewConnections | None = None
        self.tree: AgreementTree | None = None
        """In a large view: what its ranks agree through instead of the default group."""
        self.revoked = (NO_VIEW, "")
        """The newest view that is known to be over, and why."""
        self.groups: weakref.WeakSet[ElasticGroup] = weakref.WeakSet()
        self.on_collective: Callable[[], None] | None = None
        self.answers_locally = False
        """Whether collectives are made without the others, see `groups.answer_locally`."""
        self.retiring: threading.Thread | None = None
        """Lets go of the communicators of the last view."""
        self.need_rank: Callable[[], None] | None = None
        """In a process without a rank: called before anything is answered that depends on it; see parking.py."""
        self.answers: AnswerRecorder | AnswerReplayer | None = None
        """Between the start of this process and its first step; see recorded_answers.py."""
        self.on_stuck: Callable[[str], None] | None = None
        """Told of communicators that cannot be freed."""
        self.coalescing_on = ""
        """The type of device whose library is being told several operations, to be begun together."""


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
        self._connections: ViewConnections | None = None
        self._inners: dict[str, Any] = {}
        self._unusable = ""
        self.devices_used: set[str] = set()
        """Types of devices on which it was connected in some view, and is to be in the next; see rebuild.py."""
        state.groups.add(self)

    # What it is

    def rank(self) -> int:
        """Return the rank, as Python callers ask for it; C++ uses `getRank`, from inside of calls made in Python."""
        if state.need_rank is not None:
            state.need_rank()
        return self._rank

    def size(self) -> int:
        if state.need_rank is not None:
            state.need_rank()
        return len(self.members)

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
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

    name, _get_backend_name = getBackendName, getBackendName
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
        if state.tree is not None and self.name_in_store == DEFAULT_NAME:
            state.tree.timeout = timeout

    def get_group_store(self) -> Store:
        store = None if state.connections is None else state.connections.store
        if store is None:
            raise HoldfastError("a process that has not joined the job yet has no store")
        return PrefixStore(self.name_in_store, store)

    def abort(self) -> None:
        if state.connections is not None:
            state.connections.end("the process group was aborted")

    def shutdown(self) -> None:
        """Do nothing: torch calls it for each group when the script destroys them."""
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

    def _is_answered(self) -> bool:
        """Return whether a collective of this group, made now, is one to record or to replay; see
        recorded_answers.py."""
        return len(self.members) > 1 and is_script(asker())

    # What it communicates through

    def follow(self, old: ViewConnections, new: ViewConnections) -> None:
        """Belong to a new view from now on; connect when first used."""
        if self.members == tuple(range(old.world_size)):
            self.members = tuple(range(new.world_size))
            self._rank = new.rank
        elif (old.world_size, old.rank) != (new.world_size, new.rank):
            self._unusable = self._unusable or (
                f"process group {self._name} of ranks {list(self.members)} was made when this process was rank "
                f"{old.rank} of {old.world_size}; it is rank {new.rank} of {new.world_size} now. Only groups of all "
                "ranks follow such a change: make the others, and what is built on them, again"
            )
        self.reconnect(new, {})

    def reconnect(self, connections: ViewConnections, inners: dict[str, Any]) -> None:
        with self._lock:
            self._connections, self._inners = connections, inners

    def _through(self, device: str) -> Any:
        """Return the inner communicator for the next collective on this type of device."""
        note_collective()
        if state.answers_locally:
            return LocalOnly(self._rank, self.size())
        connections = state.connections
        if connections is None:
            raise ViewOverError("this process has left the job")
        connections.check()
        if self._connections is not connections or device not in self._inners:
            self._connect(connections, device)
        return self._inners[device]

    @property
    def timeout(self) -> timedelta:
        return self._timeout

    def tree_for_collective(self) -> AgreementTree | None:
        """Return what is used instead of this group's communicator for the next exchange, if there is such a thing."""
        if state.tree is None or self.name_in_store != DEFAULT_NAME or state.answers_locally:
            return None
        note_collective()
        return state.tree

    def _connect(self, connections: ViewConnections, device: str) -> None:
        if self._unusable:
            raise HoldfastError(self._unusable)
        with self._lock:
            if self._connections is not connections:
                self.reconnect(connections, {})
            if device not in self._inners:
                assignment = self._rank, len(self.members)
                with waits:  # for the other members
                    self._inners[device] = connections.make(
                        self.name_in_store, device, *assignment, self._timeout, self.members
                    )
                if connections.store is not None and connects_in_rebuild(device):
                    self.devices_used.add(device)

    def connected_devices(self) -> list[str]:
        """Return the types of devices that run behind the host on which it is connected in this view, by what begins
        several transfers together."""
        with self._lock:
            if self._connections is not state.connections:
                return []
            return [
                device
                for device, inner in self._inners.items()
                if device in self.devices_used and getattr(inner, "supports_coalescing", False)
            ]

    @property
    def is_usable(self) -> bool:
        return not self._unusable

    def connect(self, connections: ViewConnections, device: str) -> None:
        """Connect in this view, unless it is so already; blocks until all members do the same."""
        self._connect(connections, device)

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
    ) -> Work | None:
        return together(
            self._through(device_of(inputs))._allgather_base(output, value, *options, **named)
            for output, value in zip(outputs, inputs, strict=True)
        )

    def reduce_scatter_single_coalesced(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[Tensor], *options: Any, **named: Any
    ) -> Work | None:
        return together(
            self._through(device_of(inputs))._reduce_scatter_base(output, value, *options, **named)
            for output, value in zip(outputs, inputs, strict=True)
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def batch_transfers(self, one_by_one: Callable[[list[Any]], list[Work]], operations: list[Any]) -> list[Work]:
        """Begin the transfers of `torch.distributed.batch_isend_irecv` together, if their device's library can. NCCL
        makes those of a communicator in the order in which it was told of them: two ranks that each send before they
        receive would wait for each other for good."""
        device = operations[0].tensor.device
        if device.type == "cpu" or not getattr(self._through(device.type), "supports_coalescing", False):
            return one_by_one(operations)
        self._start_coalescing(device)
        one_by_one(operations)
        work = self._end_coalescing(device)
        return [work] if work is not None else []

    @contextmanager
    def told_together(self, device: torch.device) -> Iterator[list[Any]]:
        """Begin together what the block tells the device's library, and make the current stream wait for it. The block
        adds what it is given to the list: NCCL's memory is kept by that until then."""
        works: list[Any] = []
        self._start_coalescing(device)
        yield works
        together_work = self._end_coalescing(device)
        for work in [together_work] if together_work is not None else works:
            work.wait()

    def _start_coalescing(self, device: torch.device) -> None:
        self._through(device.type)._start_coalescing()
        state.coalescing_on = device.type

    def _end_coalescing(self, device: torch.device) -> Any:
        work = self._through(device.type)._end_coalescing()
        state.coalescing_on = ""
        return work

    def _get_sequence_number_for_group(self) -> int:
        return int(next(iter(self._inners.values()))._get_sequence_number_for_group()) if self._inners else 0

    def _set_sequence_number_for_group(self) -> None:
        return None

    def __repr__(self) -> str:
        return f"ElasticGroup({self._name!r}, rank {self._rank} of {len(self.members)})"


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


TRANSFERS = ("send", "recv")


def note_collective() -> None:
    """Do what precedes each collective."""
    if state.need_rank is not None:
        state.need_rank()
    if state.on_collective is not None:
        state.on_collective()


def collective(inner_name: str) -> Callable[..., Any]:
    def call(self: ElasticGroup, *arguments: Any, **named: Any) -> Any:
        if state.need_rank is not None:
            state.need_rank()  # a spare waits in here, and has its answers afterwards
        device = device_of((arguments, *named.values()))
        answers = state.answers if state.answers is not None and self._is_answered() else None
        if isinstance(answers, AnswerReplayer):
            work = answers.answer(self.name_in_store, inner_name, arguments)
            if work is not None:
                return work
        is_transfer = inner_name in TRANSFERS and device == "cpu"
        if is_transfer and (tree := self.tree_for_collective()) is not None:
            work = tree.transfer(inner_name, *arguments, **named)
        else:
            work = getattr(self._through(device), inner_name)(*arguments, **named)
        if isinstance(answers, AnswerRecorder):
            answers.take(self.name_in_store, inner_name, arguments, work)
        return work

    return call


for method, inner_name in {**{name: name for name in SAME_NAME}, **OTHER_NAMES}.items():
    setattr(ElasticGroup, method, collective(inner_name))


def device_of(arguments: object) -> str:
    """Return the type of device of the first tensor among the arguments, lists of lists included."""
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


def together(works: Iterable[Work | None]) -> Work | None:
    """Return the works as one. A device's library returns none for what it was told to do in order (`asyncOp` false):
    it is queued on the current stream then."""
    every = [work for work in works if work is not None]
    if len(every) > 1:
        return Together(every)
    return every[0] if every else None


# --- the module that made a collective, or asked for a rank

DATA_PARALLEL = "torch.nn.parallel.distributed"
"""DistributedDataParallel. What its constructor asks of other ranks is replaced when a newcomer joins."""
PASSED_OVER = ("torch.distributed.", "holdfast.worker.collectives.", "holdfast.worker.parking.")
"""Modules through which a question comes: who asks is further up."""


def asker() -> str:
    """Return the name of the module that asks."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        name = frame.f_globals.get("__name__", "")
        if not (name + ".").startswith(PASSED_OVER):
            return str(name)
    return ""


def is_script(name: str) -> bool:
    """Return whether this is the script or a library of its own: neither Holdfast nor DistributedDataParallel."""
    return name != DATA_PARALLEL and not (name + ".").startswith("holdfast.")
