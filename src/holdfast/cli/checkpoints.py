"""`holdfast checkpoints`: list, verify, export and remove the checkpoints of a directory or a bucket.

Only `export` needs torch; it runs in a process of its own.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Annotated

import typer

from holdfast import exit_codes
from holdfast.cli.checkpoint_tables import (
    CheckpointRow,
    DamagedRow,
    PruneReport,
    VerifyVerdict,
    listing_table,
    manifest_text,
    verifying,
)
from holdfast.cli.options import Format, Output, seconds
from holdfast.cli.terminal import Screen, print_error, print_json
from holdfast.errors import CheckpointError, HoldfastError, UsageError
from holdfast.observe.formatting import printable
from holdfast.storage.checkpoint_catalogue import CheckpointCatalogue, DamagedCheckpoint, FoundCheckpoint
from holdfast.storage.publish import GRACE_S
from holdfast.storage.retention import parse_policy
from holdfast.storage.stores import open_store
from holdfast.util.processes import module_command

PATIENCE_S = 15.0
"""Time for retries: shorter than a job's, because a person is waiting."""
LATEST = "latest"
STEP_DIGITS_MAX = 18
TAG_DEFAULT = "keep"

Location = Annotated[str, typer.Argument(metavar="DIR_OR_URL", help="A directory, s3://, gs://, az://, or fsspec's.")]
StepWord = Annotated[str, typer.Argument(metavar="STEP", help="A step, or `latest`: the newest that is not damaged.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    group = typer.Typer(help="List, verify, export and remove checkpoints.", no_args_is_help=True)
    for command in (ls, show, verify, export, rm, prune, pin):
        group.command()(command)
    app.add_typer(group, name="checkpoints")


def ls(location: Location, output: Output = Format.TEXT) -> None:
    """List checkpoints, the newest first, damaged and unfinished ones included."""
    listing = _catalogue(location).list()
    if output is Format.JSON:
        print_json(
            {
                "checkpoints": [CheckpointRow.of(found) for found in listing.found],
                "damaged": [DamagedRow(item.step, item.folder, item.why) for item in listing.damaged],
                "unfinished": listing.unfinished,
            }
        )
        return
    Screen().print(listing_table(listing))


def show(location: Location, step: StepWord = LATEST, output: Output = Format.TEXT) -> None:
    """Show the manifest of a checkpoint: job, step, world size, parts, metrics."""
    catalogue = _catalogue(location)
    found = _find(catalogue, step)
    if output is Format.JSON:
        print_json({"url": found.url, "tags": found.tags, "manifest": found.manifest})
    else:
        Screen().print(manifest_text(found))


def verify(
    location: Location,
    steps: Annotated[
        list[str] | None, typer.Argument(metavar="STEP...", help="The checkpoints to verify; all if not given.")
    ] = None,
    output: Output = Format.TEXT,
) -> None:
    """Read every byte and compare it with its checksum. Exit code 1 if something is damaged."""
    catalogue = _catalogue(location)
    verdicts = [_verify(catalogue, item) for item in _to_verify(catalogue, steps or [])]
    if output is Format.JSON:
        print_json({"sound": all(verdict.sound for verdict in verdicts), "checkpoints": verdicts})
    else:
        for verdict in verdicts:
            Screen().print(printable(verdict.text), soft_wrap=True)
    if not all(verdict.sound for verdict in verdicts):
        raise typer.Exit(exit_codes.WORKER_FAILED)


def export(
    location: Location,
    target: Annotated[
        Path, typer.Argument(metavar="TARGET", help="A file NAME.safetensors, or a directory for several files.")
    ],
    step: Annotated[str, typer.Option("--step", metavar="STEP", help="A step, or `latest`.")] = LATEST,
    model_only: Annotated[
        bool, typer.Option("--model-only", help="Export only parameters and buffers, under the model's own names.")
    ] = False,
    model: Annotated[
        str,
        typer.Option("--model", metavar="NAME", help="Name under which the model was tracked, if there are several."),
    ] = "",
    dtype: Annotated[
        str, typer.Option("--dtype", metavar="DTYPE", help="Cast floating-point tensors: bfloat16, float16, float32.")
    ] = "",
    shard_bytes: Annotated[
        int, typer.Option("--shard-bytes", metavar="N", help="Maximum size of each file, for several files.")
    ] = 5_000_000_000,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
) -> None:
    """Write a checkpoint as one safetensors file, or as several with an index in Hugging Face's form. Needs torch."""
    flags = ["--step", step, "--dtype", dtype, "--shard-bytes", str(shard_bytes), "--model", model]
    flags += ["--model-only"] * (model_only or bool(model)) + ["--force"] * force
    command = [*module_command("holdfast.state.export"), location, str(target), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1].removeprefix("holdfast: ")
        kind = UsageError if done.returncode == exit_codes.USAGE else CheckpointError
        raise kind(reason)
    print(printable(done.stdout.strip()))


def rm(
    location: Location,
    steps: Annotated[list[int], typer.Argument(metavar="STEP...", help="The checkpoints to remove.")],
    force: Annotated[
        bool, typer.Option("--force", help="Remove pinned checkpoints and the last good one too.")
    ] = False,
) -> None:
    """Remove checkpoints. One that is being read is not removed."""
    catalogue = _catalogue(location)
    failures = 0
    for step in steps:
        try:
            catalogue.remove(step, force)
        except HoldfastError as error:
            failures += 1
            print_error(str(error))
        else:
            print(f"removed step {step}")
    if failures:
        raise typer.Exit(exit_codes.WORKER_FAILED)


def prune(
    location: Location,
    keep: Annotated[
        str, typer.Option("--keep", metavar="POLICY", help="For example last:3,every:1000,best:loss:min:2")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    grace_s: Annotated[
        float,
        typer.Option(
            "--grace",
            metavar="SECONDS",
            parser=seconds,
            help="Remove unfinished checkpoints that have not changed for this long.",
        ),
    ] = GRACE_S,
    output: Output = Format.TEXT,
) -> None:
    """Remove checkpoints that the policy does not keep; never pinned ones, the last good one, or ones in use."""
    policy = parse_policy(keep)
    catalogue = _catalogue(location)
    done = catalogue.prune(policy, is_dry=dry_run, grace_s=grace_s, on_damage=print_error)
    report = PruneReport.of(done, dry_run)
    if output is Format.JSON:
        print_json(report)
    else:
        for line in report.lines():
            Screen().print(printable(line), soft_wrap=True)


def pin(
    location: Location,
    step: StepWord,
    tag: Annotated[str, typer.Option("--tag", metavar="WORD", help="A word that says why it is pinned.")] = TAG_DEFAULT,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the pin.")] = False,
) -> None:
    """Pin a checkpoint: no policy removes it."""
    catalogue = _catalogue(location)
    found = _find(catalogue, step)
    (catalogue.unpin if remove else catalogue.pin)(found.step, tag)
    print(f"step {found.step} is {'no longer ' if remove else ''}pinned as {tag}")


def _catalogue(location: str) -> CheckpointCatalogue:
    store = open_store(location, PATIENCE_S)
    if store.local is not None and not store.local.is_dir():
        raise CheckpointError(f"there is no directory {store.local}")
    return CheckpointCatalogue(store)


def _find(catalogue: CheckpointCatalogue, step: str) -> FoundCheckpoint:
    if step != LATEST:
        return catalogue.open(_number(step))
    found = catalogue.latest(is_deep=False, on_damage=print_error)
    if found is None:
        raise CheckpointError(f"{catalogue.store.url} has no usable checkpoint")
    return found


def _number(step: str) -> int:
    if not (step.isascii() and step.isdigit() and len(step) <= STEP_DIGITS_MAX):
        raise UsageError(f"{step!r:.40} is not a step: give a number, or {LATEST}")
    return int(step)


def _to_verify(catalogue: CheckpointCatalogue, steps: list[str]) -> list[FoundCheckpoint | DamagedCheckpoint]:
    if not steps:
        listing = catalogue.list()
        everything: list[FoundCheckpoint | DamagedCheckpoint] = [*listing.found, *listing.damaged]
        if not everything:
            raise CheckpointError(f"{catalogue.store.url} has no checkpoints")
        return sorted(everything, key=lambda item: -item.step)
    return [_find(catalogue, step) for step in steps]


def _verify(catalogue: CheckpointCatalogue, item: FoundCheckpoint | DamagedCheckpoint) -> VerifyVerdict:
    if isinstance(item, DamagedCheckpoint):
        return VerifyVerdict(step=item.step, sound=False, damage=[item.why])
    with verifying(item) as on_progress:
        findings = catalogue.inspect(item, on_progress)
    damage = [finding.text for finding in findings]
    return VerifyVerdict(step=item.step, sound=not damage, damage=damage, size_bytes=item.size_bytes)
