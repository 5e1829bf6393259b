"""How a state travels from one rank's memory to another's: a header, the structure, and a few stretches of bytes.

The structure is msgpack of plain values (state/tree.py), the bytes are the tensors: nothing that is received is ever
executed. The receiver allocates what the structure asks for, within bounds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from holdfast.errors import StateError
from holdfast.state.snapshot import Snapshot
from holdfast.state.tree import SKELETON_BYTES_MAX

_TAG_HEADER, _TAG_SKELETON, _TAG_PARTS = 9001, 9002, 9003


class Sending(NamedTuple):
    """What is on its way, and the memory it comes from."""

    works: list[Any]
    kept: list[torch.Tensor]

    def wait(self) -> None:
        """Until everything has left."""
        for work in self.works:
            work.wait()


def send_snapshot(snapshot: Snapshot, to: int) -> Sending:
    """Begin to send. The snapshot must not be overwritten before the sending is through."""
    skeleton = torch.frombuffer(bytearray(snapshot.skeleton), dtype=torch.uint8)
    header = torch.tensor([snapshot.step, skeleton.numel()])
    pieces = [(header, _TAG_HEADER), (skeleton, _TAG_SKELETON)]
    pieces += [(part, _TAG_PARTS + index) for index, part in enumerate(snapshot.parts())]
    return Sending([dist.isend(piece, to, tag=tag) for piece, tag in pieces], [header, skeleton])


def receive_snapshot(of: int, room: Snapshot | None = None) -> Snapshot:
    """A snapshot from a rank; in the room of an older one where it fits."""
    snapshot = room or Snapshot()
    header = torch.empty(2, dtype=torch.int64)
    dist.recv(header, of, tag=_TAG_HEADER)
    step, skeleton_bytes = (int(number) for number in header)
    if not 0 < skeleton_bytes <= SKELETON_BYTES_MAX:
        raise StateError(f"rank {of} announced a structure of {skeleton_bytes} bytes, which cannot be")
    skeleton = torch.empty(skeleton_bytes, dtype=torch.uint8)
    dist.recv(skeleton, of, tag=_TAG_SKELETON)
    for index, part in enumerate(snapshot.receive(bytes(skeleton.tolist()), step)):
        dist.recv(part, of, tag=_TAG_PARTS + index)
    snapshot.seal()
    return snapshot
