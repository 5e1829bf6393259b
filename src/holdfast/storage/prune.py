"""Removing checkpoints. The only legal order:

1. What is kept: by the policy, by pins, and what was written a moment ago where another run has newer ones: a policy
   for both would take it away at once. All else may go.
2. One that is kept must be good, every block of it read; if none is, the newest good one that might go is kept as well.
   If none at all is good, nothing is removed. It is held as by a reader until the end: of two who remove at once,
   neither takes what the other relies on.
3. Each that goes: first it is certain that it is not read, then it is unpublished, then its bytes are removed.
4. What dead attempts and broken-off removals left behind.

Damaged checkpoints are never removed here: `remove` them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from holdfast.errors import BusyError, CheckpointError, MissingError, StorageError, UsageError
from holdfast.storage.publish import UnfinishedAttempt
from holdfast.storage.retention import Policy, Tagged

if TYPE_CHECKING:
    from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue, FoundCheckpoint


@dataclass(frozen=True, slots=True)
class PruneResult:
    """The outcome of a prune, or of its dry run."""

    removed: list[int] = field(default_factory=list)
    kept: dict[int, str] = field(default_factory=dict)
    """The steps that stay, with the reason."""
    damaged: dict[int, str] = field(default_factory=dict)
    swept: list[UnfinishedAttempt] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Candidate:
    step: int
    tags: tuple[str, ...]
    metrics: dict[str, float | None]


def prune(
    catalogue: CheckpointCatalogue,
    policy: Policy,
    trusted: Collection[int],
    is_dry: bool,
    grace_s: float,
    on_damage: Callable[[str], None],
) -> PruneResult:
    """Remove checkpoints as CheckpointCatalogue.prune describes."""
    listing = catalogue.list()
    result = PruneResult(damaged={item.step: item.why for item in listing.damaged})
    candidates = [_Candidate(found.step, found.tags, found.about.metrics) for found in listing.found]
    result.kept.update((policy | Tagged()).keeps(candidates))
    result.kept.update(_beside_another_run(listing.found, result, trusted, on_damage))
    to_remove = [found for found in listing.found if found.step not in result.kept]
    good = _good_checkpoint(catalogue, listing.found, result, trusted, on_damage) if to_remove else None
    if good is not None:
        with catalogue.reading(good):
            for found in to_remove:
                _remove(catalogue, found, result, is_dry)
    _sweep(catalogue, listing.unfinished, result, is_dry, grace_s)
    return result


def remove(catalogue: CheckpointCatalogue, step: int, is_forced: bool) -> None:
    """Remove one checkpoint as CheckpointCatalogue.remove describes."""
    try:
        found = catalogue.open(step)
    except (MissingError, StorageError):
        raise
    except CheckpointError:
        catalogue.publisher.withdraw(step, None)
        return
    with nullcontext() if is_forced else catalogue.reading(_next_good_checkpoint(catalogue, found)):
        catalogue.publisher.withdraw(step, found.manifest)


def _next_good_checkpoint(catalogue: CheckpointCatalogue, found: FoundCheckpoint) -> FoundCheckpoint:
    if found.tags:
        raise UsageError(f"{found.url} is pinned as {', '.join(found.tags)}: unpin it, or use --force")
    for item in catalogue.list().found:
        if item.step != found.step and _is_good(catalogue, item, lambda _: None):
            return item
    raise UsageError(f"{found.url} is the only good checkpoint there is: use --force to remove it all the same")


def _beside_another_run(
    found: Sequence[FoundCheckpoint], result: PruneResult, trusted: Collection[int], on_damage: Callable[[str], None]
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


def _run(found: FoundCheckpoint) -> str:
    """Return which run wrote a checkpoint: all views of a job are one run."""
    nonce = found.manifest.nonce
    return nonce.rpartition("-v")[0] or nonce


def _good_checkpoint(
    catalogue: CheckpointCatalogue,
    found: Sequence[FoundCheckpoint],
    result: PruneResult,
    trusted: Collection[int],
    on_damage: Callable[[str], None],
) -> FoundCheckpoint | None:
    """Return a good checkpoint that stays; without one, nothing may be removed. Those that are kept are read first,
    newest first."""
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


def _is_good(catalogue: CheckpointCatalogue, found: FoundCheckpoint, on_damage: Callable[[str], None]) -> bool:
    try:
        catalogue.verify(found)
    except StorageError:
        raise
    except CheckpointError as error:
        on_damage(str(error))
        return False
    return True


def _remove(catalogue: CheckpointCatalogue, found: FoundCheckpoint, result: PruneResult, is_dry: bool) -> None:
    if found.step in result.kept:
        return
    try:
        if not is_dry:
            catalogue.publisher.withdraw(found.step, found.manifest)
    except BusyError as error:
        result.kept[found.step] = str(error)
    except MissingError:
        pass  # another process was quicker
    else:
        result.removed.append(found.step)


def _sweep(
    catalogue: CheckpointCatalogue,
    unfinished: Sequence[UnfinishedAttempt],
    result: PruneResult,
    is_dry: bool,
    grace_s: float,
) -> None:
    for left in unfinished:
        try:
            if not is_dry and catalogue.publisher.sweep(left, grace_s):
                result.swept.append(left)
        except MissingError:
            pass
    if not is_dry:
        catalogue.publisher.sweep_temporaries(grace_s)
