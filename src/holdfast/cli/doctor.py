"""`holdfast doctor --device`: tries out on this machine's devices what Holdfast relies on.

The tests are run by a process of its own, which imports torch and may hang in a driver: it has a time limit.
"""

from __future__ import annotations

import subprocess
from typing import Annotated

import msgspec
import typer

from holdfast import exit_codes
from holdfast.cli.options import Format, Output
from holdfast.cli.terminal import Screen, make_table, print_json
from holdfast.errors import UsageError
from holdfast.util.processes import module_command

MODULE = "holdfast.worker.device_doctor"
TIMEOUT_S = 180.0
MARKS = {True: "ok", False: "FAILED", None: ""}


class DoctorRow(msgspec.Struct, frozen=True):
    """A test and what it found (worker/device_doctor.py)."""

    name: str
    is_well: bool | None
    text: str


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(doctor)


def doctor(
    device: Annotated[bool, typer.Option("--device", help="Test the devices of this machine.")] = False,
    accelerator: Annotated[
        str, typer.Option("--accelerator", metavar="NAME", help="cpu, cuda, npu, xpu, mps or a plug-in's name.")
    ] = "",
    output: Output = Format.TEXT,
) -> int:
    """Try out on this machine's devices what Holdfast relies on: results, events, random numbers, copies, memory."""
    if not device:
        raise UsageError("say what to test: holdfast doctor --device; to compare nodes, use `holdfast check`")
    rows = _examined(accelerator)
    if output is Format.JSON:
        print_json(rows)
    else:
        table = make_table("test", "", "found")
        for row in rows:
            table.add_row(row.name, MARKS[row.is_well], row.text)
        Screen().print(table)
    return exit_codes.SUCCESS if all(row.is_well is not False for row in rows) else exit_codes.UNFIT


def _examined(accelerator: str) -> list[DoctorRow]:
    try:
        done = subprocess.run(
            [*module_command(MODULE), accelerator], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return [DoctorRow("processor", False, f"no answer within {TIMEOUT_S:.0f} s: a driver hangs")]
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return [DoctorRow("processor", False, f"the tests ended with exit code {done.returncode}: {last}")]
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=list[DoctorRow])
