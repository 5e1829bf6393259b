"""Checkpoints as tables and text for people and as rows for programs; the progress of reading them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from holdfast.observe.formatting import format_size, format_time, printable
from holdfast.storage.checkpoint_catalogue import CheckpointListing, FoundCheckpoint
from holdfast.storage.prune import PruneResult
from holdfast.storage.publish import UnfinishedAttempt
from holdfast.storage.stores import Progress as OnProgress

PARTS_SHOWN_MAX = 16
NOTE_CHARS_MAX = 200


class CheckpointRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `ls`."""

    step: int
    url: str
    created_unix_s: float
    size_bytes: int
    parts: int
    world_size: int
    shards: int
    shares: int
    view: int
    job_id: str
    metrics: dict[str, float | None]
    tags: tuple[str, ...]

    @staticmethod
    def of(found: FoundCheckpoint) -> CheckpointRow:
        about = found.about
        return CheckpointRow(
            step=found.step,
            url=found.url,
            created_unix_s=about.created_unix_s,
            size_bytes=found.size_bytes,
            parts=about.parts,
            world_size=about.world_size,
            shards=about.shards,
            shares=about.shares,
            view=about.view,
            job_id=about.job_id,
            metrics=about.metrics,
            tags=found.tags,
        )


class DamagedRow(msgspec.Struct, frozen=True):
    """A checkpoint that cannot be used."""

    step: int
    folder: str
    why: str


class VerifyVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `verify` for one checkpoint."""

    step: int
    sound: bool
    damage: list[str]
    size_bytes: int = 0

    @property
    def text(self) -> str:
        if self.sound:
            return f"step {self.step}: sound, {format_size(self.size_bytes)} read"
        return "\n".join([f"step {self.step}: DAMAGED", *(f"  {line}" for line in self.damage)])


class PruneReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `prune`, or of its dry run."""

    dry_run: bool
    removed: list[int]
    kept: dict[int, str]
    damaged: dict[int, str]
    swept: list[UnfinishedAttempt]

    @staticmethod
    def of(done: PruneResult, dry_run: bool) -> PruneReport:
        kept = dict(sorted(done.kept.items(), reverse=True))
        return PruneReport(dry_run=dry_run, removed=done.removed, kept=kept, damaged=done.damaged, swept=done.swept)

    def lines(self) -> Iterator[str]:
        yield from (f"kept step {step}: {why}" for step, why in self.kept.items())
        yield from (f"left step {step}, which is damaged: {why}" for step, why in self.damaged.items())
        verb = "would remove" if self.dry_run else "removed"
        yield from (f"{verb} step {step}" for step in self.removed)
        yield from (f"removed the files of an unfinished checkpoint of step {left.step}" for left in self.swept)
        if not self.removed:
            yield "nothing to remove"


def listing_table(listing: CheckpointListing) -> RenderableType:
    """Return a table of all checkpoints, then lines about damaged and unfinished ones."""
    if not listing.found and not listing.damaged and not listing.unfinished:
        return Text("no checkpoints")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in (("STEP", "right"), ("CREATED", "left"), ("SIZE", "right"), ("PARTS", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ("WORLD", "VIEW", "JOB", "METRICS", "TAGS"):
        table.add_column(name)
    for found in listing.found:
        table.add_row(*_cells(found))
    lines = [f"step {item.step} is DAMAGED: {item.why}" for item in listing.damaged]
    lines += [_unfinished(item) for item in listing.unfinished]
    return Group(table, *(Text(printable(line)) for line in lines))


def manifest_text(found: FoundCheckpoint) -> RenderableType:
    """Return a checkpoint on one page."""
    about = found.about
    rows: list[tuple[str, Any]] = [
        ("checkpoint", found.url),
        ("step", found.step),
        ("created", format_time(about.created_unix_s)),
        ("job", f"{about.job_id or '-'}, view {about.view}, seed {about.seed}"),
        ("world", f"{about.world_size} ranks: {about.shards} shards × {about.shares} shares"),
        ("size", f"{format_size(found.size_bytes)} in {about.parts} parts"),
        ("written by", ", ".join(f"{name} {version}" for name, version in about.versions.items()) or "-"),
        ("metrics", _metrics(about.metrics) or "-"),
        ("pinned as", ", ".join(found.tags) or "-"),
    ]
    rows += [(f"note {name}", _short(value)) for name, value in about.notes.items()]
    grid = Table(box=None, show_header=False, pad_edge=False)
    for name, value in rows:
        grid.add_row(Text(printable(name)), Text(printable(str(value))))
    parts = Table(box=None, pad_edge=False, header_style="bold")
    parts.add_column("PART", justify="right")
    parts.add_column("FILE")
    parts.add_column("SIZE", justify="right")
    for part in found.manifest.parts[:PARTS_SHOWN_MAX]:
        parts.add_row(str(part.number), Text(printable(part.file)), format_size(part.size_bytes))
    more = len(found.manifest.parts) - PARTS_SHOWN_MAX
    return Group(grid, Text(""), parts, *([Text(f"and {more} more")] if more > 0 else []))


@contextmanager
def verifying(found: FoundCheckpoint) -> Iterator[OnProgress | None]:
    """Show the progress of reading, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"step {found.step}", total=found.size_bytes)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _cells(found: FoundCheckpoint) -> tuple[Text, ...]:
    about = found.about
    world = f"{about.world_size} = {about.shards} × {about.shares}"
    created = format_time(about.created_unix_s)[:19]
    words = (str(found.step), created, format_size(found.size_bytes), str(about.parts), world, str(about.view))
    return tuple(
        Text(printable(word)) for word in (*words, about.job_id, _metrics(about.metrics), ", ".join(found.tags))
    )


def _metrics(metrics: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {'?' if value is None else format(value, 'g')}" for name, value in metrics.items())


def _unfinished(item: UnfinishedAttempt) -> str:
    if item.is_removal:
        return (
            f"step {item.step}: its removal was interrupted, {format_size(item.size_bytes)} are left in {item.folder}"
        )
    since = format_time(item.modified_unix_s)[:19] if item.modified_unix_s < 1e12 else "an unknown time"
    return f"step {item.step} is unfinished: {format_size(item.size_bytes)} in {item.folder}, unchanged since {since}"


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= NOTE_CHARS_MAX else text[:NOTE_CHARS_MAX] + "…"
