"""What commands print: tables and lines for people, JSON for programs, refusals; and how they run to their end."""

from __future__ import annotations

import asyncio
import getpass
import os
import sys
from collections.abc import Coroutine
from typing import Any, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from holdfast import exit_codes
from holdfast.observe.formatting import printable

PIPE_WIDTH_CHARS = 10_000
"""Lines for another program are not wrapped."""


class Screen(Console):
    """Standard output. Nothing in a text is markup; lines for another program are not wrapped."""

    def __init__(self) -> None:
        width = None if sys.stdout.isatty() else PIPE_WIDTH_CHARS
        super().__init__(markup=False, highlight=False, emoji=False, width=width)

    def on_broken_pipe(self) -> None:
        """Raise the error that rich is handling: `run_to_end` ends the command quietly."""
        raise


def make_table(*columns: str) -> Table:
    """Return an empty table without lines, whose cells fold."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_error(text: str) -> None:
    """Print a sentence about this command to stderr."""
    sys.stdout.flush()
    print(f"holdfast: {printable(text)}", file=sys.stderr)


def refuse(why: str) -> NoReturn:
    """End the command with a sentence and exit code 1."""
    print_error(why)
    raise typer.Exit(exit_codes.WORKER_FAILED)


def run_to_end(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run a command to its end. If the reader of its output goes away (`| head`), it ends quietly."""
    try:
        asyncio.run(coroutine)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python complains when it flushes at exit
        raise typer.Exit(0) from None


def user_name() -> str:
    """Return the name of the user who runs this command."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # containers often run as a user that no password file knows
        return f"user {os.getuid()}"
