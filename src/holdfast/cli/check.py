"""`holdfast check`: checks nodes and runs no script. It is a job without a script, with the flags of `holdfast run`.

Without flags it checks this machine. Several nodes are checked together with the rendezvous flags of a job:

    holdfast check --nnodes 4 --rdzv-backend c10d --rdzv-endpoint node0:29400

on each node. The table is printed on the node that has the master and its journal. Every node ends with exit code 0 if
all passed, and with 8 if a node or a link did not.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import msgspec

from holdfast.cli.run import check_options, run_agent, with_directories
from holdfast.cli.run_flags import RunOptions, parse_run
from holdfast.errors import UsageError
from holdfast.util.logs import set_up_logging

NAME = "check"
"""The name in the place of a script; the job's name begins with it."""
HELP = """\
usage: holdfast check [flags]

Check this node, or with the rendezvous flags of `holdfast run` several nodes together: devices and their counters,
matrix multiplication, memory, disk, then collectives in pairs. Exit code 0: all passed; 8: a node or a link did not.
The flags are those of `holdfast run`. Useful here are

  --accelerator NAME   cpu, cuda, npu, xpu, mps or a plug-in's name; detected if not given
  --nnodes, --node-rank, --node-id, --rdzv-backend, --rdzv-endpoint, --rdzv-id, --master-addr, --master-port,
  --token-file, --tls-cert, --tls-key, --tls-ca, --state-dir, --log-format
"""


def check(argv: list[str]) -> int:
    """Parse the flags, check the nodes, print the table; return the exit code."""
    if {"-h", "--help"} & set(argv):
        print(HELP, end="")
        return 0
    parsed = parse_run([*argv, "--", NAME], os.environ)
    if parsed.script != NAME or parsed.script_args:
        raise UsageError(f"holdfast check runs no script, but was given {_script_word(parsed)!r:.100}: remove it")
    options = msgspec.structs.replace(parsed, node_check=True, check_only=True)
    set_up_logging(options.log_format, "agent", verbose=options.verbose)
    options = with_directories(options)
    check_options(options)
    began_at = time.time()
    code = asyncio.run(run_agent(options)).exit_code
    _print_table(Path(options.state_dir), began_at)
    return code


def _script_word(parsed: RunOptions) -> str:
    """Return the word that was taken for a script."""
    return parsed.script if parsed.script != NAME else parsed.script_args[0]


def _print_table(state_dir: Path, began_at: float) -> None:
    """Print the result of the check, if this node has the job's journal."""
    from holdfast.core.records import CheckConcluded
    from holdfast.journal import read_entries
    from holdfast.observe.jobs import JOURNAL_NAME, last_written_at

    journals = sorted(state_dir.glob(f"jobs/*/{JOURNAL_NAME}"), key=last_written_at)
    if not journals or last_written_at(journals[-1]) < began_at:
        return
    found = [entry.record for entry in read_entries(journals[-1]) if isinstance(entry.record, CheckConcluded)]
    if found and found[-1].at >= began_at:
        _show(found[-1])


def _show(record: object) -> None:
    from rich.console import Group

    from holdfast.cli.check_table import check_table
    from holdfast.cli.terminal import Screen
    from holdfast.core.records import CheckConcluded

    assert isinstance(record, CheckConcluded)
    sys.stderr.flush()
    Screen().print(Group(*check_table(record)))
