"""How a checkpoint becomes visible in a store, and ceases to be: in one atomic move each.

    a directory       .step-120.<nonce>.partial/   →  rename  →   step-120/         →  rename  →  .step-120.<…>.removed/
    an object store   step-120/<nonce>/…           →  put of step-120/manifest.json →  delete of it

In both, what is written lies where nobody looks until its manifest is in place, and the manifest comes last. In both, a
removal first makes the checkpoint no checkpoint, then takes its bytes.

Who reads or writes says so: by a lock of the operating system in a directory (it ends with its process), by a lease
with an expiry in an object store (it is renewed while it is needed, and forgotten soon after its process). A removal
first makes sure that nobody does.
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


class Unfinished(Struct, frozen=True, kw_only=True):
    """What an attempt, or a removal, left behind; or is about to finish."""

    step: int
    nonce: str
    folder: str
    size_bytes: int
    modified_unix_s: float
    is_removal: bool = False


class Shelf(Protocol):
    """A store's own way."""

    @property
    def store(self) -> Store:
        """Where the bytes are."""

    def partial(self, step: int, nonce: str) -> str:
        """The folder in which an attempt writes."""

    def file_prefix(self, nonce: str) -> str:
        """From the manifest's folder to the files of an attempt, once it is published."""

    def steps(self) -> list[int]:
        """Of all checkpoints, sound or not, newest first."""

    def is_there(self, step: int) -> bool:
        """Whether something is published as the checkpoint of this step."""

    def publish(self, step: int, nonce: str, manifest: bytes) -> bool:
        """Make an attempt the checkpoint of its step. False if the step has one, or the attempt is no longer there."""

    def put_aside(self, step: int, nonce: str, manifest: bytes | None) -> None:
        """Make room for an attempt where a damaged checkpoint is, which is kept under another name. `manifest`: what
        its manifest was when it was found damaged; if that has changed, nothing happens."""

    def withdraw(self, step: int, manifest: Manifest | None) -> None:
        """Remove a checkpoint. BusyError if somebody reads it."""

    def unfinished(self) -> list[Unfinished]:
        """Attempts and removals that are not over."""

    def forget(self, step: int, nonce: str) -> None:
        """Remove what is left of an attempt without files."""

    def sweep_temporaries(self, grace_s: float) -> None:
        """Remove files that never got their name."""

    def sweep(self, left: Unfinished, grace_s: float) -> bool:
        """Remove what an attempt left behind; False if somebody may still be at it."""

    def reading(self, step: int, manifest: Manifest) -> AbstractContextManager[None]:
        """Meanwhile it is not removed. MissingError if it was."""

    def writing(self, step: int, nonce: str) -> AbstractContextManager[None]:
        """Meanwhile the attempt is not swept."""


Clock = Callable[[], float]


def shelf_of(store: Store, clock: Clock = time.time) -> Shelf:
    """The way of a store."""
    from holdfast.storage.directory_shelf import DirectoryShelf
    from holdfast.storage.object_shelf import ObjectShelf

    return DirectoryShelf(store, clock) if store.local is not None else ObjectShelf(store, clock)
