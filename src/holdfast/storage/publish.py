"""How a checkpoint becomes visible in a store, and ceases to be: in one atomic move each.

    a directory       .step-120.<nonce>.partial/   →  rename  →   step-120/         →  rename  →  .step-120.<…>.removed/
    an object store   step-120/<nonce>/…           →  put of step-120/manifest.json →  delete of it

In both, what is written is invisible until its manifest is in place, and the manifest comes last. In both, a
removal first makes the checkpoint no checkpoint, then takes its bytes.

Readers and writers announce themselves: by a lock of the operating system in a directory (it ends with its process), by
a lease with an expiry in an object store (it is renewed while it is needed, and forgotten soon after its process). A
removal first makes sure that none is in use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from msgspec import Struct

from holdfast.storage.manifest import Manifest
from holdfast.storage.stores import Store

GRACE_S = 3600.0
"""How long an attempt may lie still before it counts as given up: longer than any pause between two of its writers."""


class UnfinishedAttempt(Struct, frozen=True, kw_only=True):
    """An attempt or a removal that did not finish, or has yet to."""

    step: int
    nonce: str
    folder: str
    size_bytes: int
    modified_unix_s: float
    is_removal: bool = False


class Publisher(Protocol):
    """The protocol by which a store's checkpoints appear and disappear."""

    @property
    def store(self) -> Store:
        """Return the store with the bytes."""

    def partial(self, step: int, nonce: str) -> str:
        """Return the folder in which an attempt writes."""

    def file_prefix(self, nonce: str) -> str:
        """Return the path from the manifest's folder to the files of an attempt, once it is published."""

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, sound or not, newest first."""

    def is_published(self, step: int) -> bool:
        """Return whether something is published as the checkpoint of this step."""

    def publish(self, step: int, nonce: str, manifest: bytes) -> bool:
        """Make an attempt the checkpoint of its step. False if the step has one, or the attempt is no longer there."""

    def move_aside(self, step: int, nonce: str, manifest: bytes | None) -> None:
        """Make room for an attempt where a damaged checkpoint is, which is kept under another name. `manifest`: what
        its manifest was when it was found damaged; if that has changed, nothing happens."""

    def withdraw(self, step: int, manifest: Manifest | None) -> None:
        """Remove a checkpoint. Raise BusyError if it is being read."""

    def unfinished(self) -> list[UnfinishedAttempt]:
        """Return the attempts and removals that did not finish yet."""

    def forget(self, step: int, nonce: str) -> None:
        """Remove what is left of an attempt without files."""

    def sweep_temporaries(self, grace_s: float) -> None:
        """Remove files that never got their name."""

    def sweep(self, left: UnfinishedAttempt, grace_s: float) -> bool:
        """Remove what an attempt left behind; return False if a writer may still be active."""

    def reading(self, step: int, manifest: Manifest) -> AbstractContextManager[None]:
        """Protect a checkpoint from removal while this context lasts. Raise MissingError if it was removed already."""

    def writing(self, step: int, nonce: str) -> AbstractContextManager[None]:
        """Protect an attempt from being swept while this context lasts."""


Clock = Callable[[], float]


def publisher_of(store: Store, clock: Clock = time.time) -> Publisher:
    """Return the publish protocol of a store."""
    from holdfast.storage.directory_publisher import DirectoryPublisher
    from holdfast.storage.object_publisher import ObjectPublisher

    return DirectoryPublisher(store, clock) if store.local is not None else ObjectPublisher(store, clock)
