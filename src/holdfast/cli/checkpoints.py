"""`holdfast checkpoints`: what lies in a directory or a bucket, and what to do with it.

Needs no torch, but for `export`, which a process of its own does.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from holdfast.cli import exit_codes
from holdfast.cli.checkpoint_tables import (
    CheckpointRow,
    DamagedRow,
    PruneReport,
    Verdict,
    listing_table,
    manifest_text,
    verifying,
)
from holdfast.cli.status import Format, Output, Screen
from holdfast.errors import CheckpointError, HoldfastError, UsageError
from holdfast.observe.words import plain
from holdfast.storage.catalogue import Catalogue, Damaged, Found
from holdfast.storage.retention import parse_policy
from holdfast.storage.shelves import GRACE_S
from holdfast.storage.stores import open_store

PATIENCE_S = 15.0
"""Somebody is waiting: shorter than a job's."""
LATEST = "latest"
TAG_DEFAULT = "keep"

Place = Annotated[str, typer.Argument(metavar="DIR_OR_URL", help="A directory, s3://, gs://, az://, or fsspec's.")]
StepWord = Annotated[str, typer.Argument(metavar="STEP", help="A step, or `latest`: the newest that is not damaged.")]


def register(app: typer.Typer) -> None:
    """Make them commands of the program."""
    group = typer.Typer(help="List, verify, export and remove checkpoints.", no_args_is_help=True)
    for command in (ls, show, verify, export, rm, prune, pin):
        group.command()(command)
    app.add_typer(group, name="checkpoints")


def ls(place: Place, output: Output = Format.TEXT) -> None:
    """List checkpoints, newest first, the damaged and unfinished ones too."""
    listing = _catalogue(place).list()
    if output is Format.JSON:
        _print_json(
            {
                "checkpoints": [CheckpointRow.of(found) for found in listing.found],
                "damaged": [DamagedRow(item.step, item.folder, item.why) for item in listing.damaged],
                "unfinished": listing.unfinished,
            }
        )
        return
    Screen().print(listing_table(listing))


def show(place: Place, step: StepWord = LATEST, output: Output = Format.TEXT) -> None:
    """Show what a checkpoint is of: its manifest."""
    catalogue = _catalogue(place)
    found = _found(catalogue, step)
    if output is Format.JSON:
        _print_json({"url": found.url, "tags": found.tags, "manifest": found.manifest})
    else:
        Screen().print(manifest_text(found))


def verify(
    place: Place,
    steps: Annotated[list[str] | None, typer.Argument(metavar="STEP...", help="All, if none is given.")] = None,
    output: Output = Format.TEXT,
) -> None:
    """Read every byte and compare it with its checksum. Exit code 1 if something is damaged."""
    catalogue = _catalogue(place)
    verdicts = [_verify(catalogue, item) for item in _to_verify(catalogue, steps or [])]
    if output is Format.JSON:
        _print_json({"sound": all(verdict.sound for verdict in verdicts), "checkpoints": verdicts})
    else:
        for verdict in verdicts:
            Screen().print(plain(verdict.text), soft_wrap=True)
    if not all(verdict.sound for verdict in verdicts):
        raise typer.Exit(exit_codes.WORKER_FAILED)


def export(
    place: Place,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="A file NAME.safetensors, or a directory for a set of files.")
    ],
    step: Annotated[str, typer.Option("--step", metavar="STEP", help="A step, or `latest`.")] = LATEST,
    model_only: Annotated[
        bool, typer.Option("--model-only", help="Parameters and buffers alone, by the model's own names.")
    ] = False,
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="As it was tracked, if several models were.")
    ] = "",
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="Cast floating-point tensors: bfloat16, float16, float32.")
    ] = "",
    shard_bytes: Annotated[
        int, typer.Option("--shard-bytes", metavar="N", help="The most one file of a set has.")
    ] = 5_000_000_000,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
) -> None:
    """Write a checkpoint as one safetensors file, or as a set with an index as Hugging Face has it. Needs torch."""
    flags = ["--step", step, "--dtype", dtype, "--shard-bytes", str(shard_bytes), "--model", model]
    flags += ["--model-only"] * (model_only or bool(model)) + ["--force"] * force
    command = [sys.executable, "-m", "holdfast.state.export", place, str(target), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1].removeprefix("holdfast: ")
        kind = UsageError if done.returncode == exit_codes.USAGE else CheckpointError
        raise kind(reason)
    print(plain(done.stdout.strip()))


def rm(
    place: Place,
    steps: Annotated[list[int], typer.Argument(metavar="STEP...", help="The checkpoints to remove.")],
    force: Annotated[bool, typer.Option("--force", help="Pinned ones and the only good one too.")] = False,
) -> None:
    """Remove checkpoints. What is being read is not removed."""
    catalogue = _catalogue(place)
    failures = 0
    for step in steps:
        try:
            catalogue.remove(step, force)
        except HoldfastError as error:
            failures += 1
            print(f"holdfast: {plain(str(error))}", file=sys.stderr)
        else:
            print(f"removed step {step}")
    if failures:
        raise typer.Exit(exit_codes.WORKER_FAILED)


def prune(
    place: Place,
    keep: Annotated[
        str, typer.Option("--keep", metavar="POLICY", help="For example last:3,every:1000,best:loss:min:2")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be removed.")] = False,
    grace_s: Annotated[
        float, typer.Option("--grace", metavar="SECONDS", help="Unfinished ones that lay still for longer are removed.")
    ] = GRACE_S,
    output: Output = Format.TEXT,
) -> None:
    """Remove what the policy does not keep; never pinned ones, the last good one, or what is in use."""
    policy = parse_policy(keep)
    catalogue = _catalogue(place)
    done = catalogue.prune(policy, is_dry=dry_run, grace_s=grace_s, on_damage=_warn)
    report = PruneReport.of(done, dry_run)
    if output is Format.JSON:
        _print_json(report)
    else:
        for line in report.lines():
            Screen().print(plain(line), soft_wrap=True)


def pin(
    place: Place,
    step: StepWord,
    tag: Annotated[str, typer.Option("--tag", metavar="WORD", help="Why it is kept.")] = TAG_DEFAULT,
    remove: Annotated[bool, typer.Option("--remove", help="Take the tag away.")] = False,
) -> None:
    """Keep a checkpoint for ever, whatever policy prunes."""
    catalogue = _catalogue(place)
    found = _found(catalogue, step)
    (catalogue.unpin if remove else catalogue.pin)(found.step, tag)
    print(f"step {found.step} is {'no longer ' if remove else ''}pinned as {tag}")


def _catalogue(place: str) -> Catalogue:
    return Catalogue(open_store(place, PATIENCE_S))


def _found(catalogue: Catalogue, step: str) -> Found:
    if step != LATEST:
        return catalogue.open(_number(step))
    found = catalogue.latest(is_deep=False, on_damage=_warn)
    if found is None:
        raise CheckpointError(f"{catalogue.store.url} has no checkpoint that could be used")
    return found


def _number(step: str) -> int:
    if not (step.isascii() and step.isdigit()):
        raise UsageError(f"{step!r:.40} is no step: give a number, or {LATEST}")
    return int(step)


def _to_verify(catalogue: Catalogue, steps: list[str]) -> list[Found | Damaged]:
    if not steps:
        listing = catalogue.list()
        everything: list[Found | Damaged] = [*listing.found, *listing.damaged]
        if not everything:
            raise CheckpointError(f"{catalogue.store.url} has no checkpoints")
        return sorted(everything, key=lambda item: -item.step)
    return [_found(catalogue, step) for step in steps]


def _verify(catalogue: Catalogue, item: Found | Damaged) -> Verdict:
    if isinstance(item, Damaged):
        return Verdict(step=item.step, sound=False, damage=[item.why])
    with verifying(item) as on_progress:
        findings = catalogue.inspect(item, on_progress)
    damage = [finding.text for finding in findings]
    return Verdict(step=item.step, sound=not damage, damage=damage, size_bytes=item.size_bytes)


def _warn(text: str) -> None:
    print(f"holdfast: {plain(text)}", file=sys.stderr)


def _print_json(value: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())
