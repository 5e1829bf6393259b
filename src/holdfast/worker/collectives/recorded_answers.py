"""What the script's collectives answered before the first step, for workers that build when the others train already.

Scripts and frameworks talk while they build: rank 0 broadcasts the name of the run, all gather the sizes of their
datasets. A replacement builds alone, so these collectives cannot be made again. At a fresh start each worker records
what they answered, in order, and tells it its agent with `Ready`; the replacement of a rank is given that rank's
record with its place, and its collectives answer from it:

    by group and number     the n-th collective of a group, not counting DistributedDataParallel's own and barriers
    operation, shapes       must be those of the record: else the script builds otherwise than at its start, and is told

A replacement on a node that has no record of its rank (another node's) takes what the survivors put into the store of
the view: the answers that are the same on all ranks (broadcast, all-reduce, all-gather).

Large answers are not kept. Where one is missing, what a broadcast or an all-reduce leaves in place is taken as it is,
if the tensor turns out to be a part of the tracked state, which is handed over anyway; else the script is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from holdfast.errors import HoldfastError, UsageError
from holdfast.torch_compat import completed_work, group_or_default

ANSWER_BYTES_MAX = 128 * 2**10
"""Of one collective. What is learnt while building is small; parameters are not, and come with the state."""
TOTAL_BYTES_MAX = 512 * 2**10
"""Of all: they travel in one message to the agent, and in one to each replacement."""
SAME_EVERYWHERE = frozenset({"broadcast", "allreduce", "allreduce_coalesced", "allgather", "_allgather_base"})
KEPT_IN_PLACE = frozenset({"broadcast", "allreduce", "allreduce_coalesced"})
"""Operations after which a tensor without an answer still has the value it came with."""
RECORDED = SAME_EVERYWHERE | {
    "allgather_coalesced",
    "gather",
    "scatter",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "alltoall",
    "alltoall_base",
}


class RecordedAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What one collective left in its outputs."""

    group: str
    number: int
    operation: str
    shapes: tuple[str, ...]
    content: bytes
    is_kept: bool
    """False: it was too large."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[RecordedAnswer, ...])


class AnswerRecorder:
    """The answers of a worker that starts together with all others."""

    def __init__(self) -> None:
        self._answers: list[RecordedAnswer] = []
        self._numbers: dict[str, int] = {}
        self._bytes = 0

    def take(self, group: str, operation: str, arguments: Sequence[Any], work: Any) -> None:
        """Record what a collective answers. Waits for it, as its outputs may be changed as soon as it is over."""
        if operation not in RECORDED:
            return
        number = self._numbers[group] = self._numbers.get(group, -1) + 1
        outputs = outputs_of(arguments)
        size = sum(output.numel() * output.element_size() for output in outputs)
        is_kept = size <= ANSWER_BYTES_MAX and self._bytes + size <= TOTAL_BYTES_MAX
        if is_kept:
            work.wait()
            self._bytes += size
        content = b"".join(map(to_bytes, outputs)) if is_kept else b""
        self._answers.append(RecordedAnswer(group, number, operation, shapes_of(outputs), content, is_kept))

    def encoded(self) -> bytes:
        """Return the record; empty if no collective was made."""
        return _encoder.encode(self._answers) if self._answers else b""


class AnswerReplayer:
    """The answers of a worker that builds alone. `fetch` is asked once for what the others know, if nothing is known of
    this rank."""

    def __init__(self, record: bytes, fetch: Callable[[], bytes]) -> None:
        self._fetch: Callable[[], bytes] | None = None if record else fetch
        self._answers = _indexed(record)
        self.record = record
        """What is known; for those who come after."""
        self._numbers: dict[str, int] = {}
        self._unanswered: list[tuple[str, Tensor]] = []

    @property
    def has_unanswered(self) -> bool:
        return bool(self._unanswered)

    def answer(self, group: str, operation: str, arguments: Sequence[Any]) -> Any:
        """Fill the outputs of a collective, and return its work; None: it keeps what it has (`check`)."""
        if operation not in RECORDED:
            return None
        number = self._numbers[group] = self._numbers.get(group, -1) + 1
        outputs = outputs_of(arguments)
        if self._fetch is not None:
            known, self._fetch = _indexed(self._fetch()), None
            self._answers = {key: one for key, one in known.items() if one.operation in SAME_EVERYWHERE}
            self.record = _encoder.encode(list(self._answers.values())) if self._answers else b""
        if not outputs:
            return completed_work([])  # of a gather, for all but its destination
        found = self._answers.get((group, number))
        what = f"{operation} number {number + 1} on process group {group} before the first step"
        if found is not None and (found.operation, found.shapes) != (operation, shapes_of(outputs)):
            raise HoldfastError(
                f"{what} has other tensors ({', '.join(shapes_of(outputs))}) than when the job started"
                f" ({found.operation} of {', '.join(found.shapes)}): a replacement must make the same collectives in"
                " the same order while it builds; make this one inside `with step:`"
            )
        if found is not None and found.is_kept:
            fill(outputs, found.content)
            return completed_work(outputs)
        if operation not in KEPT_IN_PLACE:
            raise HoldfastError(
                f"{what} cannot be answered to a replacement, as the other ranks train already and"
                f" {'its answer was too large to be kept' if found else 'no record of it is left'}:"
                " make it inside `with step:`, or build without it"
            )
        self._unanswered += [(what, output) for output in outputs]
        return None

    def check(self, tracked: Iterable[Tensor]) -> None:
        """Raise UsageError if a collective was not answered and its tensor is no part of the state."""
        memory = {tensor.untyped_storage().data_ptr() for tensor in tracked}
        for what, tensor in self._unanswered:
            if tensor.untyped_storage().data_ptr() not in memory:
                raise UsageError(
                    f"{what} ({', '.join(shapes_of([tensor]))}) cannot be answered to a replacement, and its tensor is"
                    " not tracked: track what holds it, or make the collective inside `with step:`"
                )
        self._unanswered.clear()


def _indexed(record: bytes) -> dict[tuple[str, int], RecordedAnswer]:
    try:
        answers = _decoder.decode(record) if record else ()
    except msgspec.MsgspecError as error:
        raise HoldfastError(f"the record of the collectives made while building is damaged: {error}") from error
    return {(answer.group, answer.number): answer for answer in answers}


# --- tensors


def outputs_of(arguments: Sequence[Any]) -> list[Tensor]:
    """Return the tensors that a collective fills: always its first argument."""
    return list(_flat(arguments[0]))


def _flat(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for item in value:
            yield from _flat(item)


def shapes_of(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """Return what they look like, for comparison and for people."""
    return tuple(f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}" for tensor in tensors)


def to_bytes(tensor: Tensor) -> bytes:
    """Return the bits of a tensor."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return bytes(flat.untyped_storage())[flat.storage_offset() : flat.storage_offset() + flat.numel()]


def fill(tensors: Sequence[Tensor], content: bytes) -> None:
    """Put the bits back."""
    start = 0
    with torch.no_grad():
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            if size:
                bits = torch.frombuffer(bytearray(content[start : start + size]), dtype=torch.uint8)
                tensor.copy_(bits.view(tensor.dtype).view(tensor.shape))
            start += size


# --- objects


@functools.cache
def let_sources_receive() -> None:
    """Make `broadcast_object_list` give the source, too, what is broadcast, in a process that builds alone.

    torch leaves the source's list as it is. A new rank 0 must have what the old one has told the others, not what it
    would tell them now. So while it replays, the source takes the way of a receiver.
    """
    from torch.distributed import distributed_c10d

    from holdfast.worker.collectives.elastic_group import state

    original = distributed_c10d.broadcast_object_list

    @functools.wraps(original)
    def broadcast_object_list(
        object_list: Any, src: Any = None, group: Any = None, device: Any = None, group_src: Any = None
    ) -> None:
        chosen = group_or_default(group)
        if isinstance(state.answers, AnswerReplayer) and chosen.size() > 1:
            src, group_src = None, (chosen.rank() + 1) % chosen.size()
        original(object_list, src=src, group=group, device=device, group_src=group_src)

    for module in (distributed_c10d, dist):
        module.broadcast_object_list = broadcast_object_list  # type: ignore[attr-defined]
