"""`holdfast data verify`: whether every committed step used the samples it should have used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from holdfast import exit_codes
from holdfast.cli.options import Format, JobTarget, Output, job_command
from holdfast.cli.terminal import Screen, print_json, run_to_end
from holdfast.core.sentences import stretches
from holdfast.journal import read_entries
from holdfast.observe.formatting import printable
from holdfast.observe.jobs import find_journal
from holdfast.observe.sample_audit_report import (
    AuditFinding,
    SampleAuditReport,
    SampleHistory,
    compare,
    judge,
    read_audits,
)
from holdfast.observe.source import JobSource, read
from holdfast.util.state_directory import state_directory


class SourceReport(msgspec.Struct, frozen=True):
    """The audit of one source of data, since all workers started."""

    source: str
    since_view: int
    first_step: int
    last_step: int
    samples: int
    chain: str
    skipped: list[tuple[int, int]]
    unaudited: list[tuple[int, int]]


class DataReport(msgspec.Struct, frozen=True):
    """The result for programs."""

    job_id: str
    is_over: bool
    exact: bool
    sources: list[SourceReport]
    findings: list[AuditFinding]
    against: str = ""


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    data = typer.Typer(help="Check which samples the steps of a job used.", no_args_is_help=True)
    data.command()(verify)
    app.add_typer(data, name="data")

    @data.callback()
    def _group() -> None:
        """Check which samples the steps of a job used."""


@job_command()
def verify(
    target: JobTarget,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="JOB", help="Compare with another job, by its id or its journal's path."),
    ] = None,
    output: Output = Format.TEXT,
) -> None:
    """Prove from a job's journal that its committed steps used every sample exactly once. If not, name the first step
    that is wrong and end with exit code 1."""
    source = target.open_source()
    other = find_journal(state_directory(target.state_dir), against) if against else None
    run_to_end(_verify(source, other, output))


async def _verify(source: JobSource, other: Path | None, output: Format) -> None:
    audits = read_audits(await read(source))
    findings = judge(audits)
    name = ""
    if other is not None:
        others = read_audits(read_entries(other))
        name = others.job_id
        findings += [*(_of_other(finding, name) for finding in judge(others)), *compare(audits, others)]
    findings += [] if audits.histories else [_nothing()]
    report = DataReport(
        job_id=audits.job_id,
        is_over=audits.is_over,
        exact=not findings,
        sources=[_source(history) for history in audits.histories],
        findings=findings,
        against=name,
    )
    if output is Format.JSON:
        print_json(report)
    else:
        _print(audits, report)
    if findings:
        raise typer.Exit(exit_codes.WORKER_FAILED)


def _nothing() -> AuditFinding:
    why = "the journal has no audit: that takes a session, and batches from step.batches of a tracked hf.Loader"
    return AuditFinding("", "missing", 0, 0, why)


def _of_other(finding: AuditFinding, job_id: str) -> AuditFinding:
    return msgspec.structs.replace(finding, text=f"in job {job_id}: {finding.text}")


def _source(history: SampleHistory) -> SourceReport:
    return SourceReport(
        source=history.source,
        since_view=history.since_view,
        first_step=history.first_step,
        last_step=history.last_step,
        samples=history.samples,
        chain=history.audits[-1].chain,
        skipped=history.skipped,
        unaudited=history.unaudited,
    )


def _print(audits: SampleAuditReport, report: DataReport) -> None:
    screen = Screen()
    over = "" if report.is_over else ", which is not over"
    screen.print(f"job {printable(report.job_id)}{over}")
    for history in audits.histories:
        screen.print(printable(_line(history)))
    for finding in report.findings:
        screen.print(printable(f"WRONG ({finding.kind}): {finding.text}"), soft_wrap=True)
    if report.exact:
        same = f", and the same ones as job {report.against}" if report.against else ""
        screen.print(printable(f"exact: every step used the samples it should have used, each once{same}"))


def _line(history: SampleHistory) -> str:
    start = f" since view {history.since_view}" if history.since_view > 1 else ""
    skipped = f", skipped {stretches(history.skipped)}" if history.skipped else ""
    span = f"steps {history.first_step} to {history.last_step}"
    return f"  {history.source}{start}: {span}, {history.samples:,} samples, chain {history.audits[-1].chain}{skipped}"
