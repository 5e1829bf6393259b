"""`holdfast data verify`: whether every committed step was made of the samples it should have been made of."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from holdfast.cli import exit_codes
from holdfast.cli.status import (
    STATE_DIR_DEFAULT,
    Endpoint,
    Format,
    JobName,
    Output,
    Screen,
    StateDir,
    TlsCa,
    TlsCert,
    TlsKey,
    TokenFile,
    open_source,
    work,
)
from holdfast.core.sentences import stretches
from holdfast.journal import read_entries
from holdfast.observe.jobs import find_journal
from holdfast.observe.source import Source, read
from holdfast.observe.witnessed import Finding, History, Witnessed, compare, gather, judge
from holdfast.observe.words import plain


class SourceReport(msgspec.Struct, frozen=True):
    """What was witnessed of one source of data, since all workers started."""

    source: str
    since_view: int
    first_step: int
    last_step: int
    samples: int
    chain: str
    skipped: list[tuple[int, int]]
    unwitnessed: list[tuple[int, int]]


class Report(msgspec.Struct, frozen=True):
    """The answer for programs."""

    job_id: str
    is_over: bool
    exact: bool
    sources: list[SourceReport]
    findings: list[Finding]
    against: str = ""


def register(app: typer.Typer) -> None:
    """Make it a command of the program."""
    data = typer.Typer(help="What the steps of a job were made of.", no_args_is_help=True)
    data.command()(verify)
    app.add_typer(data, name="data")

    @data.callback()
    def _group() -> None:
        """What the steps of a job were made of."""


def verify(
    job: JobName = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="JOB", help="Compare with another job, by its id or its journal's path."),
    ] = None,
    output: Output = Format.TEXT,
    state_dir: StateDir = STATE_DIR_DEFAULT,
    endpoint: Endpoint = None,
    token_file: TokenFile = None,
    tls_cert: TlsCert = "",
    tls_key: TlsKey = "",
    tls_ca: TlsCa = "",
) -> None:
    """Prove from a job's journal that its committed steps used every sample exactly once, or name the first step that
    did not. Exit code 1 if so."""
    source = open_source(job, state_dir, endpoint, token_file, (tls_cert, tls_key, tls_ca))
    other = find_journal(state_dir.expanduser(), against) if against else None
    work(_verify(source, other, output))


async def _verify(source: Source, other: Path | None, output: Format) -> None:
    witnessed = gather(await read(source))
    findings = judge(witnessed)
    name = ""
    if other is not None:
        others = gather(read_entries(other))
        name = others.job_id
        findings += [*(_of_other(finding, name) for finding in judge(others)), *compare(witnessed, others)]
    findings += [] if witnessed.histories else [_nothing()]
    report = Report(
        job_id=witnessed.job_id,
        is_over=witnessed.is_over,
        exact=not findings,
        sources=[_source(history) for history in witnessed.histories],
        findings=findings,
        against=name,
    )
    if output is Format.JSON:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _print(witnessed, report)
    if findings:
        raise typer.Exit(exit_codes.WORKER_FAILED)


def _nothing() -> Finding:
    why = "nothing was witnessed: that takes a session, and batches from step.batches of a tracked hf.Loader"
    return Finding("", "missing", 0, 0, why)


def _of_other(finding: Finding, job_id: str) -> Finding:
    return msgspec.structs.replace(finding, text=f"in job {job_id}: {finding.text}")


def _source(history: History) -> SourceReport:
    return SourceReport(
        source=history.source,
        since_view=history.since_view,
        first_step=history.first_step,
        last_step=history.last_step,
        samples=history.samples,
        chain=history.pieces[-1].chain,
        skipped=history.skipped,
        unwitnessed=history.unwitnessed,
    )


def _print(witnessed: Witnessed, report: Report) -> None:
    screen = Screen()
    over = "" if report.is_over else ", which is not over"
    screen.print(f"job {plain(report.job_id)}{over}")
    for history in witnessed.histories:
        screen.print(plain(_line(history)))
    for finding in report.findings:
        screen.print(plain(f"WRONG ({finding.kind}): {finding.text}"), soft_wrap=True)
    if report.exact:
        same = f", and the same ones as job {report.against}" if report.against else ""
        screen.print(plain(f"exact: every step was made of the samples it should be made of, each once{same}"))


def _line(history: History) -> str:
    life = f" since view {history.since_view}" if history.since_view > 1 else ""
    skipped = f", skipped {stretches(history.skipped)}" if history.skipped else ""
    span = f"steps {history.first_step} to {history.last_step}"
    return f"  {history.source}{life}: {span}, {history.samples:,} samples, chain {history.pieces[-1].chain}{skipped}"
