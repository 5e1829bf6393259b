"""`holdfast nodes`: the fault history of machines across jobs, and which of them no job may use.

A cordon counts for nodes that join from now on; a node in a running job leaves it by `holdfast drain`.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from holdfast.cli.options import STATE_DIR_DEFAULT, Format, Output, StateDir
from holdfast.cli.terminal import Screen, make_table, print_json, refuse, user_name
from holdfast.core.health.reputation import (
    CordonMark,
    Grade,
    MachineEventKind,
    NodeEvent,
    Reputation,
    add_up,
    judge,
    uncleared,
)
from holdfast.journal import BOOK_NAME, MachineBook
from holdfast.observe.formatting import format_duration, format_time, printable
from holdfast.platforms.platform import ENVIRONMENT, LOCAL, Platform, open_platform
from holdfast.util.state_directory import state_directory

STYLES = {Grade.PROBATION: "yellow", Grade.BANNED: "red", Grade.CORDONED: "bold red"}
WHY_CHARS_MAX = 500
NAME_CHARS_MAX = 255
"""As for a host name with its domain."""

MachineName = Annotated[
    str, typer.Argument(metavar="MACHINE", help="Name of the machine, as `holdfast nodes ls` shows it.")
]
PlatformName = Annotated[
    str,
    typer.Option(
        "--platform", metavar="NAME", envvar=ENVIRONMENT, help="The platform that stores cordons; see docs/health.md."
    ),
]


class MachineSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A machine as `holdfast nodes ls -o json` prints it."""

    machine: str
    grade: Grade
    why: str
    score: float
    """The sum of its faults, each counted half after every two weeks; at 2.5 the machine is banned."""
    faults: int
    """Failed checks that count included."""
    last_fault: str
    last_fault_at: float | None
    mark: CordonMark | None


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    nodes = typer.Typer(help="List machines with their fault history, and keep machines out of jobs (cordon).")
    nodes.command("ls")(list_machines)
    nodes.command()(history)
    nodes.command()(cordon)
    nodes.command()(uncordon)
    app.add_typer(nodes, name="nodes", no_args_is_help=True)


def list_machines(
    output: Output = Format.TEXT, state_dir: StateDir = STATE_DIR_DEFAULT, platform_name: PlatformName = LOCAL
) -> None:
    """List machines with their grades and faults, the worst first."""
    book, platform = _open(state_dir, platform_name)
    marks, now = platform.unschedulable(), time.time()
    found = [_summary(name, book.history(name), marks.get(name), now) for name in {*book.machines(), *marks}]
    found.sort(key=lambda one: (-list(Grade).index(one.grade), one.machine))
    if output is Format.JSON:
        print_json(found)
    elif found:
        Screen().print(_table(found, now))
    else:
        print("no machine has a history yet")


def history(
    machine: Annotated[
        str | None, typer.Argument(metavar="MACHINE", help="Name of the machine; all of them if not given.")
    ] = None,
    output: Output = Format.TEXT,
    state_dir: StateDir = STATE_DIR_DEFAULT,
    platform_name: PlatformName = LOCAL,
) -> None:
    """Show what happened to a machine: faults, repairs, checks, cordons."""
    book, platform = _open(state_dir, platform_name)
    names = [machine] if machine else book.machines()
    if machine and machine not in {*book.machines(), *platform.unschedulable()}:
        refuse(f"machine {machine} has no history: `holdfast nodes ls` lists the machines that have one")
    lines = sorted(((event, name) for name in names for event in book.history(name)), key=lambda line: line[0].at)
    for event, name in lines:
        if output is Format.JSON:
            print(msgspec.json.encode({"machine": name} | msgspec.to_builtins(event)).decode())
        else:
            Screen().print(Text(printable(_line(event, name))), soft_wrap=True)


def cordon(
    machine: MachineName,
    why: Annotated[
        str, typer.Option("--why", metavar="TEXT", help="The reason, shown to everyone who lists the machines.")
    ] = "",
    state_dir: StateDir = STATE_DIR_DEFAULT,
    platform_name: PlatformName = LOCAL,
) -> None:
    """Keep a machine out of jobs until it is uncordoned."""
    if not 1 <= len(machine) <= NAME_CHARS_MAX or not machine.isprintable() or " " in machine:
        refuse(f"no machine is called {machine!r}: give its host's name, or the name that `--machine` gives it")
    book, platform = _open(state_dir, platform_name)
    why = why[:WHY_CHARS_MAX] or "no reason given"
    if machine not in book.machines():
        print(printable(f"machine {machine} was never seen here: is it the name that its agent gives (--machine)?"))
    platform.mark_unschedulable(CordonMark(machine=machine, at=time.time(), by=user_name(), why=why))
    book.note(machine, NodeEvent(at=time.time(), kind=MachineEventKind.CORDONED, why=f"by {user_name()}: {why}"))
    print(printable(f"machine {machine} is cordoned: nodes on it that join a job stand by as a last resort"))


def uncordon(
    machine: MachineName,
    why: Annotated[
        str, typer.Option("--why", metavar="TEXT", help="What was repaired; it goes into the machine's history.")
    ] = "",
    state_dir: StateDir = STATE_DIR_DEFAULT,
    platform_name: PlatformName = LOCAL,
) -> None:
    """Let a repaired machine join jobs again. It is on probation for a day; failed checks do not count any more."""
    book, platform = _open(state_dir, platform_name)
    events, mark = book.history(machine), platform.unschedulable().get(machine)
    record = add_up(events, time.time())
    if not (mark or record.is_lemon or record.failed_check):
        grade = judge(events, time.time()).grade
        refuse(f"machine {machine} is neither cordoned nor banned and failed no check, it is {grade.value}")
    platform.mark_schedulable(machine)
    note = f"by {user_name()}: {why[:WHY_CHARS_MAX] or 'no reason given'}"
    book.note(machine, NodeEvent(at=time.time(), kind=MachineEventKind.UNCORDONED, why=note))
    print(printable(f"machine {machine} may join jobs again, on probation for a day"))


def _open(state_dir: Path, platform_name: str) -> tuple[MachineBook, Platform]:
    state_dir = state_directory(state_dir)
    return MachineBook(state_dir / BOOK_NAME), open_platform(platform_name, state_dir)


def _summary(machine: str, events: list[NodeEvent], mark: CordonMark | None, now: float) -> MachineSummary:
    reputation: Reputation = judge(events, now, mark)
    faults = [
        e
        for e in uncleared(events)
        if e.kind is MachineEventKind.FAULT or (e.kind is MachineEventKind.CHECK_FAILED and e.weight)
    ]
    return MachineSummary(
        machine=machine,
        grade=reputation.grade,
        why=reputation.why,
        score=round(add_up(events, now).score, 2),
        faults=len(faults),
        last_fault=faults[-1].fault if faults else "",
        last_fault_at=faults[-1].at if faults else None,
        mark=mark,
    )


def _table(found: list[MachineSummary], now: float) -> Table:
    table = make_table("machine", "grade", "score", "faults", "last fault", "why")
    for one in found:
        last = f"{one.last_fault}, {format_duration(now - one.last_fault_at)} ago" if one.last_fault_at else "-"
        grade = Text(one.grade.value, style=STYLES.get(one.grade, ""))
        table.add_row(
            printable(one.machine), grade, f"{one.score:.1f}", str(one.faults), printable(last), printable(one.why)
        )
    return table


def _line(event: NodeEvent, machine: str) -> str:
    what = f"{event.kind.value} {event.fault}".rstrip()
    where = f", job {event.job_id}" if event.job_id else ""
    return f"{format_time(event.at)}  {machine}  {what}: {event.why or '-'}{where}"
