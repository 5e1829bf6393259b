"""A communicator without others: every collective answers at once from local data.

A newcomer builds its model before it is connected to any rank: with the right rank and world size, so that shapes and
shards are right, and with collectives that keep what is there. What it learns this way is replaced by its peers' state
when it joins. A group of one member communicates so too, and then the answers are true.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from holdfast.errors import HoldfastError
from holdfast.torch_compat import Work, completed_work


def keep(tensors: Sequence[Tensor], *_: object, **__: object) -> Work:
    return completed_work(list(tensors))


class LocalOnly:
    """The methods of torch's `Backend` that elastic groups call."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    broadcast = allreduce = allreduce_coalesced = reduce = staticmethod(keep)

    def barrier(self, *_: object, **__: object) -> Work:
        return completed_work([])

    def monitored_barrier(self, *_: object, **__: object) -> None:
        return None

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *_: object, **__: object) -> Work:
        with torch.no_grad():
            for filled, value in zip(outputs, inputs, strict=True):
                for output in filled:
                    output.copy_(value)
        return completed_work([output for filled in outputs for output in filled])

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], *_: object, **__: object) -> Work:
        return self.allgather([[filled[at] for filled in outputs] for at in range(len(inputs))], inputs)

    def _allgather_base(self, output: Tensor, value: Tensor, *_: object, **__: object) -> Work:
        with torch.no_grad():
            output.view(self._size, -1).copy_(value.reshape(1, -1).expand(self._size, -1))
        return completed_work([output])

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], *_: object, **__: object) -> Work:
        return self.allgather(outputs, inputs) if outputs else completed_work([])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], *_: object, **__: object) -> Work:
        return self._copy(outputs, [chunks[self._rank] for chunks in inputs])

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], *_: object, **__: object) -> Work:
        return self._copy(outputs, [chunks[self._rank] for chunks in inputs]) if inputs else completed_work(outputs)

    def _reduce_scatter_base(self, output: Tensor, value: Tensor, *_: object, **__: object) -> Work:
        return self._copy([output], [value.reshape(self._size, -1)[self._rank].view_as(output)])

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], *_: object, **__: object) -> Work:
        return self._copy([outputs[self._rank]], [inputs[self._rank]])

    def alltoall_base(
        self, output: Tensor, value: Tensor, output_sizes: list[int], input_sizes: list[int], *_: object, **__: object
    ) -> Work:
        receiving = chunks_of(output, output_sizes, self._size)[self._rank]
        return self._copy([receiving], [chunks_of(value, input_sizes, self._size)[self._rank]])

    def send(self, *_: object, **__: object) -> Work:
        raise HoldfastError(
            "a process that has not joined the job yet cannot send to or receive from another rank: "
            "do it inside `with step:`, or in a collective"
        )

    recv = recv_anysource = send

    @staticmethod
    def _copy(outputs: list[Tensor], inputs: list[Tensor]) -> Work:
        with torch.no_grad():
            for output, value in zip(outputs, inputs, strict=True):
                output.copy_(value)
        return completed_work(outputs)

    def _set_sequence_number_for_group(self) -> None:
        return None

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def set_timeout(self, *_: object) -> None:
        return None


def chunks_of(tensor: Tensor, sizes: list[int], count: int) -> Sequence[Tensor]:
    return torch.split(tensor, sizes) if sizes else tensor.chunk(count)
