"""Removing checkpoints. The only legal order:

1. What is kept: by the policy, by pins, and what was written a moment ago where another run has newer ones: a policy
   for both would take it away at once. All else may go.
2. One that is kept must be good, every block of it read; if none is, the newest good one that might go is kept as well.
   If none at all is good, nothing is removed. It is held as by a reader until the end: of two who remove at once,
   neither takes what the other relies on.
3. Each that goes: certain that nobody reads it, then no checkpoint any longer, then its bytes.
4. What dead attempts and broken-off removals left behind.

Damaged checkpoints are never removed here: `remove` them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.errors import BusyError, CheckpointError, MissingError, StorageError, UsageError
from holdfast.storage.retention import Policy, Tagged
from holdfast.storage.shelves import Unfinished

if TYPE_CHECKING:
    from holdfast.storage.catalogue import Catalogue, Found


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a prune did, or would do."""

    removed: list[int] = field(default_factory=list)
    kept: dict[int, str] = field(default_factory=dict)
    """With the reason."""
    damaged: dict[int, str] = field(default_factory=dict)
    swept: list[Unfinished] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Candidate:
    step: int
    tags: tuple[str, ...]
    metrics: dict[str, float | None]


def prune(
    catalogue: Catalogue,
    policy: Policy,
    trusted: Collection[int],
    is_dry: bool,
    grace_s: float,
    on_damage: Callable[[str], None],
) -> Pruned:
    """As Catalogue.prune says."""
    listing = catalogue.list()
    result = Pruned(damaged={item.step: item.why for item in listing.damaged})
    candidates = [_Candidate(found.step, found.tags, found.about.metrics) for found in listing.found]
    result.kept.update((policy | Tagged()).keeps(candidates))
    result.kept.update(_beside_another_run(listing.found, result, trusted, on_damage))
    going = [found for found in listing.found if found.step not in result.kept]
    good = _good_one(catalogue, listing.found, result, trusted, on_damage) if going else None
    if good is not None:
        with catalogue.reading(good):
            for found in going:
                _remove(catalogue, found, result, is_dry)
    _sweep(catalogue, listing.unfinished, result, is_dry, grace_s)
    return result


def remove(catalogue: Catalogue, step: int, is_forced: bool) -> None:
    """As Catalogue.remove says."""
    try:
        found = catalogue.open(step)
    except (MissingError, StorageError):
        raise
    except CheckpointError:
        catalogue.shelf.withdraw(step, None)
        return
    with nullcontext() if is_forced else catalogue.reading(_another_good_one(catalogue, found)):
        catalogue.shelf.withdraw(step, found.manifest)


def _another_good_one(catalogue: Catalogue, found: Found) -> Found:
    if found.tags:
        raise UsageError(f"{found.url} is pinned as {', '.join(found.tags)}: unpin it, or use --force")
    for item in catalogue.list().found:
        if item.step != found.step and _is_good(catalogue, item, lambda _: None):
            return item
    raise UsageError(f"{found.url} is the only good checkpoint there is: use --force to remove it all the same")


def _beside_another_run(
    found: Sequence[Found], result: Pruned, trusted: Collection[int], on_damage: Callable[[str], None]
) -> dict[int, str]:
    kept: dict[int, str] = {}
    for item in found:
        others = [other.step for other in found if other.step > item.step and _run(other) != _run(item)]
        if item.step in trusted and item.step not in result.kept and others:
            kept[item.step] = "written a moment ago"
            on_damage(
                f"{item.url} is older than step {max(others)}, which another run has left here and which a start would"
                " take: give each run a directory of its own"
            )
    return kept


def _run(found: Found) -> str:
    """Who wrote it: the views of a job are one run."""
    nonce = found.manifest.nonce
    return nonce.rpartition("-v")[0] or nonce


def _good_one(
    catalogue: Catalogue,
    found: Sequence[Found],
    result: Pruned,
    trusted: Collection[int],
    on_damage: Callable[[str], None],
) -> Found | None:
    """One that stays, without which nothing may be removed. Those that are kept are looked at first, newest first."""
    kept = [item for item in found if item.step in result.kept]
    for item in kept:
        if item.step in trusted:
            return item
    for item in (*kept, *(item for item in found if item.step not in result.kept)):
        if _is_good(catalogue, item, on_damage):
            result.kept.setdefault(item.step, "the last good one: those that the policy keeps are damaged")
            return item
        result.kept.setdefault(item.step, "damaged: never removed unasked")
    return None


def _is_good(catalogue: Catalogue, found: Found, on_damage: Callable[[str], None]) -> bool:
    try:
        catalogue.verify(found)
    except StorageError:
        raise
    except CheckpointError as error:
        on_damage(str(error))
        return False
    return True


def _remove(catalogue: Catalogue, found: Found, result: Pruned, is_dry: bool) -> None:
    if found.step in result.kept:
        return
    try:
        if not is_dry:
            catalogue.shelf.withdraw(found.step, found.manifest)
    except BusyError as error:
        result.kept[found.step] = str(error)
    except MissingError:
        pass  # somebody else was quicker
    else:
        result.removed.append(found.step)


def _sweep(
    catalogue: Catalogue, unfinished: Sequence[Unfinished], result: Pruned, is_dry: bool, grace_s: float
) -> None:
    for left in unfinished:
        try:
            if not is_dry and catalogue.shelf.sweep(left, grace_s):
                result.swept.append(left)
        except MissingError:
            pass
    if not is_dry:
        catalogue.shelf.sweep_temporaries(grace_s)
