"""`holdfast nodes`: what is known of machines across jobs, and which of them no job is to have.

A cordon counts for nodes that join from now on; one that is in a running job leaves it by `holdfast drain`.
"""

from __future__ import annotations

import getpass
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from holdfast.cli import exit_codes
from holdfast.cli.status import STATE_DIR_DEFAULT, Format, Output, Screen, StateDir
from holdfast.core.health.reputation import Grade, Kind, Mark, NodeEvent, Repute, add_up, judge, uncleared
from holdfast.journal import BOOK_NAME, NodeBook
from holdfast.observe.words import duration, moment, plain
from holdfast.platforms.base import ENVIRONMENT, LOCAL, Platform, open_platform

STYLES = {Grade.PROBATION: "yellow", Grade.BANNED: "red", Grade.CORDONED: "bold red"}
WHY_CHARS_MAX = 500
NAME_CHARS_MAX = 255
"""As of a host, its domain included."""

MachineName = Annotated[str, typer.Argument(metavar="MACHINE", help="As `holdfast nodes ls` shows it.")]
PlatformName = Annotated[
    str, typer.Option("--platform", metavar="NAME", envvar=ENVIRONMENT, help="Where cordons are kept; see the docs.")
]


class MachineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as `holdfast nodes ls -o json` prints it."""

    machine: str
    grade: Grade
    why: str
    score: float
    """Its faults, each counted half after every two weeks; a ban at 2.5."""
    faults: int
    """Failed checks that count included."""
    last_fault: str
    last_fault_at: float | None
    mark: Mark | None


def register(app: typer.Typer) -> None:
    """Make it a command of the program."""
    nodes = typer.Typer(help="Machines across jobs: what they are known for, and which no job is to have.")
    nodes.command("ls")(list_machines)
    nodes.command()(history)
    nodes.command()(cordon)
    nodes.command()(uncordon)
    app.add_typer(nodes, name="nodes", no_args_is_help=True)


def list_machines(
    output: Output = Format.TEXT, state_dir: StateDir = STATE_DIR_DEFAULT, platform_name: PlatformName = LOCAL
) -> None:
    """List the machines of which anything is known, the doubtful ones first."""
    book, platform = _open(state_dir, platform_name)
    marks, now = platform.unschedulable(), time.time()
    found = [_summary(name, book.history(name), marks.get(name), now) for name in {*book.machines(), *marks}]
    found.sort(key=lambda one: (-list(Grade).index(one.grade), one.machine))
    if output is Format.JSON:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
    elif found:
        Screen().print(_table(found, now))
    else:
        print("nothing is known of any machine yet")


def history(
    machine: Annotated[str | None, typer.Argument(metavar="MACHINE", help="All of them if not given.")] = None,
    output: Output = Format.TEXT,
    state_dir: StateDir = STATE_DIR_DEFAULT,
    platform_name: PlatformName = LOCAL,
) -> None:
    """Show what happened to a machine: faults, repairs, checks, cordons."""
    book, platform = _open(state_dir, platform_name)
    names = [machine] if machine else book.machines()
    if machine and machine not in {*book.machines(), *platform.unschedulable()}:
        _refuse(f"nothing is known of machine {machine}: `holdfast nodes ls` lists those of which something is")
    lines = sorted(((event, name) for name in names for event in book.history(name)), key=lambda line: line[0].at)
    for event, name in lines:
        if output is Format.JSON:
            print(msgspec.json.encode({"machine": name} | msgspec.to_builtins(event)).decode())
        else:
            Screen().print(Text(plain(_line(event, name))), soft_wrap=True)


def cordon(
    machine: MachineName,
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="For whoever finds it cordoned.")] = "",
    state_dir: StateDir = STATE_DIR_DEFAULT,
    platform_name: PlatformName = LOCAL,
) -> None:
    """Keep a machine from jobs until it is let back."""
    if not 1 <= len(machine) <= NAME_CHARS_MAX or not machine.isprintable() or " " in machine:
        _refuse(f"no machine is called {machine!r}: give its host's name, or the name that `--machine` gives it")
    book, platform = _open(state_dir, platform_name)
    why = why[:WHY_CHARS_MAX] or "no reason given"
    if machine not in book.machines():
        print(plain(f"machine {machine} was never seen here: is it the name that its agent gives (--machine)?"))
    platform.mark_unschedulable(Mark(machine=machine, at=time.time(), by=_who(), why=why))
    book.note(machine, NodeEvent(at=time.time(), kind=Kind.CORDONED, why=f"by {_who()}: {why}"))
    print(plain(f"machine {machine} is cordoned: nodes on it that join a job stand by as a last resort"))


def uncordon(
    machine: MachineName,
    why: Annotated[str, typer.Option("--why", metavar="TEXT", help="What was repaired, for its history.")] = "",
    state_dir: StateDir = STATE_DIR_DEFAULT,
    platform_name: PlatformName = LOCAL,
) -> None:
    """Let a machine back: it was repaired. It is on probation for a day, and what a check found is forgotten."""
    book, platform = _open(state_dir, platform_name)
    events, mark = book.history(machine), platform.unschedulable().get(machine)
    record = add_up(events, time.time())
    if not (mark or record.is_lemon or record.failed_check):
        grade = judge(events, time.time()).grade
        _refuse(f"machine {machine} is neither cordoned nor banned and failed no check, it is {grade.value}")
    platform.mark_schedulable(machine)
    note = f"by {_who()}: {why[:WHY_CHARS_MAX] or 'no reason given'}"
    book.note(machine, NodeEvent(at=time.time(), kind=Kind.UNCORDONED, why=note))
    print(plain(f"machine {machine} may join jobs again, on probation for a day"))


def _open(state_dir: Path, platform_name: str) -> tuple[NodeBook, Platform]:
    state_dir = state_dir.expanduser()
    return NodeBook(state_dir / BOOK_NAME), open_platform(platform_name, state_dir)


def _summary(machine: str, events: list[NodeEvent], mark: Mark | None, now: float) -> MachineSummary:
    repute: Repute = judge(events, now, mark)
    faults = [e for e in uncleared(events) if e.kind is Kind.FAULT or (e.kind is Kind.CHECK_FAILED and e.weight)]
    return MachineSummary(
        machine=machine,
        grade=repute.grade,
        why=repute.why,
        score=round(add_up(events, now).score, 2),
        faults=len(faults),
        last_fault=faults[-1].fault if faults else "",
        last_fault_at=faults[-1].at if faults else None,
        mark=mark,
    )


def _table(found: list[MachineSummary], now: float) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("machine", "grade", "score", "faults", "last fault", "why"):
        table.add_column(column, overflow="fold")
    for one in found:
        last = f"{one.last_fault}, {duration(now - one.last_fault_at)} ago" if one.last_fault_at else "-"
        grade = Text(one.grade.value, style=STYLES.get(one.grade, ""))
        table.add_row(plain(one.machine), grade, f"{one.score:.1f}", str(one.faults), plain(last), plain(one.why))
    return table


def _line(event: NodeEvent, machine: str) -> str:
    what = f"{event.kind.value} {event.fault}".rstrip()
    where = f", job {event.job_id}" if event.job_id else ""
    return f"{moment(event.at)}  {machine}  {what}: {event.why or '-'}{where}"


def _who() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # containers often run as a user that no password file knows
        return f"user {os.getuid()}"


def _refuse(why: str) -> None:
    print(f"holdfast: {plain(why)}", file=sys.stderr)
    raise typer.Exit(exit_codes.WORKER_FAILED)
