"""What agents say to one another on their bulk ports (bulk_connection.py): images of snapshots, block by block, and
probes of the link between them."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from holdfast.core.image_info import BLOCK_BYTES as BLOCK_BYTES
from holdfast.core.image_info import Count, ImageInfo, StepNumber, Version

Name = Annotated[str, Meta(min_length=1, max_length=512)]
ReplicaKind = Literal["own", "replica", "parity"]
PROBE_BYTES_MAX = 2**20


class OfferImage(msgspec.Struct, frozen=True, tag="offer-image"):
    """Client: keep this image. The blocks follow once the server says Go."""

    image: ImageInfo
    complete_step: StepNumber = -1
    """The last step that the image's rank knows to be complete on all ranks, and on their partners; -1: none. What is
    held of it stays until a later step is complete."""


class Contribute(msgspec.Struct, frozen=True, tag="contribute", kw_only=True):
    """Client: take this piece of an image into the parity of its group. See snapshots/parity/arithmetic.py."""

    image: ImageInfo
    group: tuple[Name, ...]
    size_bytes: Count
    """The size of the piece."""
    complete_step: StepNumber = -1
    """As in OfferImage."""


class Block(msgspec.Struct, frozen=True, tag="block"):
    """Followed by as many raw bytes."""

    index: Count
    size_bytes: Annotated[int, Meta(ge=0, le=BLOCK_BYTES)]
    checksum: Annotated[int, Meta(ge=0, lt=2**32)]


class SendBlocks(msgspec.Struct, frozen=True, tag="send-blocks"):
    """Server: send."""


class BlockReceived(msgspec.Struct, frozen=True, tag="block-received"):
    """Server: the block is here, and is what was sent."""

    index: Count


class ResendBlock(msgspec.Struct, frozen=True, tag="resend-block"):
    """Server: the block is not what was sent."""

    index: Count


class ReplicaSealed(msgspec.Struct, frozen=True, tag="replica-sealed"):
    """Server: all of it is here, or was already."""


class TransferRefused(msgspec.Struct, frozen=True, tag="transfer-refused"):
    """Server: no, in a sentence."""

    why: str


class ListReplicas(msgspec.Struct, frozen=True, tag="list-replicas"):
    """Client: what have you got?"""


class StoredReplica(msgspec.Struct, frozen=True, kw_only=True, tag="stored-replica"):
    """One thing that a node has: an image of its own, one of another node's, or the parity of its group."""

    kind: ReplicaKind
    image: ImageInfo
    """For parity: the step and view it is of, and its own size."""
    group: tuple[Name, ...] = ()
    members: tuple[ImageInfo, ...] = ()
    """For parity: the images that it is of."""

    @property
    def version(self) -> Version:
        """The version of the image."""
        return self.image.version


class Inventory(msgspec.Struct, frozen=True, tag="inventory"):
    """Server: this."""

    replicas: tuple[StoredReplica, ...]


class ReadBlocks(msgspec.Struct, frozen=True, kw_only=True, tag="read-blocks"):
    """Client: give me one block of it."""

    kind: ReplicaKind
    node_id: Name
    local_rank: Count
    view: Count
    step: StepNumber
    index: Count


class ProbeLink(msgspec.Struct, frozen=True, tag="probe-link"):
    """Client: receive as many raw bytes, which follow, and say so: how long that takes is how good the link is."""

    size_bytes: Annotated[int, Meta(ge=0, le=PROBE_BYTES_MAX)]


class LinkProbed(msgspec.Struct, frozen=True, tag="link-probed"):
    """Server: all bytes of the probe are here."""


BulkRequest = OfferImage | Contribute | Block | ListReplicas | ReadBlocks | ProbeLink
BulkReply = SendBlocks | BlockReceived | ResendBlock | ReplicaSealed | TransferRefused | Inventory | Block | LinkProbed
