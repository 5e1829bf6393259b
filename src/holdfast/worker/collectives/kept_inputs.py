"""What is kept of a collective so that this rank can take part in it once more.

An operation of a group is in one of these conditions on a rank:

    under way    its inputs are the caller's tensors, which a caller must leave alone until it has waited. If the
                 collective writes over them (all-reduce, reduce), a copy is made before it begins
    succeeded    the caller may do with its tensors what it likes. Only copies count
    given up     there is no copy: this rank cannot take part once more

So a copy is made of what is written over, and of inputs so small that it costs nothing (KEPT_SMALL_BYTES): the others
are read again from the caller's tensors while the operation is under way.

A copy is of use until every rank has succeeded with the operation. Nothing says so, but this comes near: an operation
that needs all ranks (an all-reduce, not a broadcast) was begun here when all earlier ones had succeeded here, and has
succeeded. An SPMD program then stood at the same point on the other ranks. Where that is wrong the ranks find it out
when they compare what they have kept (collective_retries.py), and there is no retry.

The copies of one group take KEPT_BYTES_MAX at most, the oldest go first. For DistributedDataParallel this is the last
five of its buckets of 25 MB; with small models all of them. Memory of copies is used again: fresh pages cost several
times the copying.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

KEPT_BYTES_MAX = 128 << 20
KEPT_SMALL_BYTES = 1 << 20
OPERATIONS_MAX = 256
"""Of a program that never waits for all of its collectives, so that no moment says that the old ones have succeeded."""

IN_PLACE = ("allreduce", "allreduce_coalesced", "reduce", "broadcast")
"""Their first argument is input and output; in a broadcast it is the input of its root, and the others' output."""
OUT_OF_PLACE = (
    *("allgather", "allgather_coalesced", "_allgather_base", "gather", "scatter"),
    *("reduce_scatter", "_reduce_scatter_base", "alltoall", "alltoall_base"),
)
"""Their first argument is the output, the second the input."""
REPEATABLE = frozenset((*IN_PLACE, *OUT_OF_PLACE, "barrier"))
PARTIAL = ("reduce", "broadcast", "gather", "scatter")
"""They may succeed on one rank before another has begun."""
SAME_BYTES = ("allgather", "allgather_coalesced", "_allgather_base")
"""An input that is a part of the output is overwritten with itself."""


class CopyPool:
    """Memory of copies that are not needed any more, by size. Not for several threads at once."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}
        self.bytes_in_use = 0
        self._bytes_free = 0

    def copy(self, tensor: Tensor) -> Tensor:
        """Return the bytes of a contiguous tensor's values."""
        size = tensor.numel() * tensor.element_size()
        free = self._free.get(size)
        if free:
            memory = free.pop()
            self._bytes_free -= size
        else:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        self.bytes_in_use += size
        memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return memory

    def give_back(self, memory: Tensor) -> None:
        """Keep the memory for the next copy of this size, unless there is much already."""
        size = memory.numel()
        self.bytes_in_use -= size
        if self.bytes_in_use + self._bytes_free + size <= KEPT_BYTES_MAX:
            self._free.setdefault(size, []).append(memory)
            self._bytes_free += size


class Operation:
    """One collective of a group on this rank."""

    def __init__(self, number: int, name: str, arguments: tuple[Any, ...], named: dict[str, Any], rank: int) -> None:
        """`rank` is ours, in the group."""
        self.number, self.name = number, name
        self._arguments, self._named = arguments, named
        self.is_complete = False
        self.is_quiet = False
        """Whether all earlier ones had succeeded when it began."""
        self._copies: dict[int, Tensor] | None = None
        """By id() of the input; None: not copied."""
        self._is_given_up = next(tensors_in(list(named.values())), None) is not None or len(
            arguments
        ) < arguments_needed(name)
        self.inputs = [] if self._is_given_up else inputs_of(name, arguments, rank)
        self.attempt: Any = None
        """The newest run of it, and the promise of its outcome; None once it has succeeded: they hold the caller's
        tensors, which must be freed when the caller lets go of them."""
        self.promise: Any = None
        self.served: Any = None
        """The newest run of it for others, after it has succeeded here."""

    @property
    def needs_all(self) -> bool:
        """Return whether it succeeds nowhere before all have begun it."""
        return self.name not in PARTIAL

    @property
    def can_repeat(self) -> bool:
        """Return whether this rank can take part once more."""
        if self._is_given_up:
            return False
        if self._copies is not None or not self.inputs:
            return True
        return not self.is_complete and not self._is_overwritten

    @property
    def _is_overwritten(self) -> bool:
        if not self.inputs or self.name in SAME_BYTES or self.name == "broadcast":
            return False
        if self.name in IN_PLACE:
            return True
        outputs = {storage_of(tensor) for tensor in tensors_in(self._arguments[0])}
        return any(storage_of(tensor) in outputs for tensor in self.inputs)

    def keep(self, pool: CopyPool) -> None:
        """Copy the inputs, if that is of use and they are not too many."""
        if self._is_given_up or not self.inputs:
            return
        size = sum(tensor.numel() * tensor.element_size() for tensor in self.inputs)
        if size > KEPT_BYTES_MAX or (size > KEPT_SMALL_BYTES and not self._is_overwritten):
            return
        if all(is_plain(tensor) for tensor in self.inputs):
            with torch.inference_mode():
                self._copies = {key: pool.copy(tensor) for key, tensor in {id(one): one for one in self.inputs}.items()}

    def drop(self, pool: CopyPool) -> None:
        """Give the copies up."""
        for memory in (self._copies or {}).values():
            pool.give_back(memory)
        if self._copies is not None and self.is_complete:
            self._give_up()
        self._copies = None

    def _give_up(self) -> None:
        self._is_given_up = True
        self._arguments, self.inputs = (), []

    def complete(self) -> None:
        """Record that it has succeeded: the caller's tensors are the caller's again."""
        if self.is_complete:
            return
        if self._is_given_up or (self.inputs and self._copies is None):
            self._give_up()
        else:
            self._arguments = self._without_memory()
            self.inputs = []
        self.is_complete = True

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return what to call it with once more: with the caller's tensors, as they were, or with our own if it has
        succeeded."""
        if self.is_complete:
            return with_memory(self._arguments), self._named
        if self._copies is not None and self._is_overwritten:
            with torch.inference_mode():
                for tensor in self.inputs:
                    memory = self._copies[id(tensor)]
                    tensor.data.copy_(memory.view(tensor.dtype).view(tensor.shape))
        return self._arguments, self._named

    def _without_memory(self) -> tuple[Any, ...]:
        """Return the arguments with each input's copy in its place, and with nothing but their shapes of outputs."""
        copies = self._copies or {}

        def replace(value: Any) -> Any:
            if isinstance(value, Tensor):
                if id(value) in copies:
                    return KeptTensor(copies[id(value)], value.dtype, tuple(value.shape))
                return torch.empty_like(value, device="meta")
            return [replace(one) for one in value] if isinstance(value, list | tuple) else value

        return tuple(replace(value) for value in self._arguments)


class KeptTensor:
    """A copy, and what it is a copy of."""

    def __init__(self, memory: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._memory, self._dtype, self._shape = memory, dtype, shape

    def fresh(self) -> Tensor:
        """Return a tensor that the collective may write over."""
        return self._memory.view(self._dtype).view(self._shape).clone()


def with_memory(value: Any) -> Any:
    """Return the arguments with tensors again."""
    if isinstance(value, KeptTensor):
        return value.fresh()
    if isinstance(value, Tensor):
        return torch.empty_like(value, device="cpu")
    if isinstance(value, tuple):
        return tuple(with_memory(one) for one in value)
    return [with_memory(one) for one in value] if isinstance(value, list) else value


def arguments_needed(name: str) -> int:
    """Return how many arguments say what the collective reads and writes."""
    return 0 if name == "barrier" else 1 if name in IN_PLACE else 2


def inputs_of(name: str, arguments: tuple[Any, ...], rank: int) -> list[Tensor]:
    """Return the tensors that the collective reads."""
    if name == "barrier":
        return []
    if name == "broadcast" and rank != (arguments[1].rootRank if len(arguments) > 1 else 0):
        return []
    return list(tensors_in(arguments[0] if name in IN_PLACE else arguments[1]))


def tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)


def storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def is_plain(tensor: Tensor) -> bool:
    """Return whether its values can be copied as bytes."""
    return tensor.layout == torch.strided and tensor.is_contiguous() and tensor.device.type == "cpu"


class OperationLog:
    """The operations of one group that may have to be repeated, oldest first."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._operations: deque[Operation] = deque()
        self._pool = CopyPool()
        self.begun = 0

    def begin(self, name: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Operation:
        """Return the operation that begins now, with its inputs kept."""
        operation = Operation(self.begun, name, arguments, named, self._rank)
        operation.is_quiet = all(one.is_complete for one in self._operations)
        operation.keep(self._pool)
        self.begun += 1
        self._operations.append(operation)
        self._keep_bounds(operation)
        return operation

    def _keep_bounds(self, newest: Operation) -> None:
        for one in self._operations:
            if self._pool.bytes_in_use <= KEPT_BYTES_MAX or one is newest:
                break
            one.drop(self._pool)
        while len(self._operations) > OPERATIONS_MAX and self._operations[0].is_complete:
            self._operations.popleft().drop(self._pool)

    def withdraw(self, operation: Operation) -> None:
        """Forget the newest one: gloo did not begin it."""
        operation.drop(self._pool)
        self._operations.remove(operation)
        self.begun -= 1

    def complete(self, operation: Operation) -> None:
        """Record a success, and forget what cannot be asked for any more."""
        operation.complete()
        if operation.needs_all and operation.is_quiet:
            while self._operations and self._operations[0].number < operation.number:
                self._operations.popleft().drop(self._pool)

    def __iter__(self) -> Iterator[Operation]:
        return iter(list(self._operations))

    def from_number(self, number: int) -> Sequence[Operation]:
        return [one for one in self._operations if one.number >= number]

    @property
    def first(self) -> int:
        """Return the number of the first that has not succeeded."""
        return next((one.number for one in self._operations if not one.is_complete), self.begun)

    @property
    def oldest(self) -> int:
        """Return the number from which on each can be repeated here."""
        oldest = self.begun
        for one in reversed(self._operations):
            if not one.can_repeat:
                break
            oldest = one.number
        return oldest
