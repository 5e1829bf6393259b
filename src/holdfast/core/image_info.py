"""What is known of an image of a rank's state, wherever it is: in a worker's buffers, at another node, on its way to
storage. Pure.

The state before a step is split into `shards` (of FSDP), and each shard into `shares`, so that what several ranks hold
alike is written once. A `part` is one of shards × shares: part % shards is its shard, part // shards its share. An
image is the file of one part.

The order of images. A job that went back to a checkpoint is in a newer view at an earlier step, and what it had of
later steps is of a history that is no more. So of two images of one rank the later is the one with the larger
`version`, (view, step), and never the one with the larger step alone.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

BLOCK_BYTES = 8 * 2**20
"""The unit of checksums, of transfers and of storage: large enough that a header costs nothing, small enough to be sent
again."""
IMAGE_BYTES_MAX = 2**40
STEP_BITS = 40
STEP_MAX = 2**STEP_BITS - 1
"""The largest step, as a packed version has it."""

Count = Annotated[int, Meta(ge=0, le=2**31)]
StepNumber = Annotated[int, Meta(ge=-1, le=2**62)]

Version = tuple[int, int]
"""(view, step): the later image is the larger."""


class StateKey(NamedTuple):
    """What all parts of one state have in common. Compared as tuples, the state of the later step is larger."""

    step: int
    view: int
    shards: int
    shares: int

    @property
    def parts(self) -> int:
        """How many parts the state has."""
        return self.shards * self.shares


class ImagePart(msgspec.Struct, frozen=True):
    """Which part of which state an image is."""

    step: StepNumber
    """The next step to run: as many are done."""
    part: Count
    shards: Count
    shares: Count
    view: Count = 0
    """The view in which it was copied. Parts of one step that were copied in two views do not belong together: a step
    that was undone is run again, and need not come out the same."""

    @property
    def version(self) -> Version:
        """(view, step): of two images of one rank the later has the larger version."""
        return self.view, self.step

    @property
    def parts(self) -> int:
        """How many parts the state has."""
        return self.shards * self.shares

    @property
    def state(self) -> StateKey:
        """What it has in common with the other parts of its state."""
        return StateKey(self.step, self.view, self.shards, self.shares)


class ImageInfo(ImagePart, frozen=True, kw_only=True):
    """All that is known of one image."""

    size_bytes: Annotated[int, Meta(ge=0, le=IMAGE_BYTES_MAX)] = 0
    seed: int = 0
    """The job's seed of random numbers, and the step that its data order begins with."""
    first_step: int = 0
    created_ns: int = 0
    """When the copy began: tells two copies of one step apart."""
    node_id: Annotated[str, Meta(max_length=512)] = ""
    """The node whose worker made it; empty where that is clear."""
    local_rank: Count = 0
    """The number of its worker's buffers on that node: the local rank which that worker had when it got them."""
    checksums: bytes = b""
    """The crc32c of each block, four bytes each, big-endian; empty while they are not known."""


def pack_version(view: int, step: int) -> int:
    """Return a version as one integer, for a counter or an all-reduce: the later is larger. -1 stands for none."""
    return view << STEP_BITS | step


def is_complete(images: dict[int, int]) -> bool:
    """Return whether there is every part of a state. `images`: how many parts the state has, by part."""
    return bool(images) and images.keys() == set(range(max(images.values())))
