"""`holdfast check`: nodes are checked and nothing is run. A job without a script, with the flags of `holdfast run`.

Alone it checks this machine. Several nodes are checked together by the flags by which they would meet for a job:

    holdfast check --nnodes 4 --rdzv-backend c10d --rdzv-endpoint node0:29400

on each. The table is printed where the master is, which has the journal; every node ends with exit code 0 if all
passed, and with 8 if a node or a link did not.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import msgspec

from holdfast.cli.console import set_up_logging
from holdfast.cli.run import check_options, run_agent
from holdfast.cli.run_flags import RunOptions, parse_run
from holdfast.errors import UsageError

NAME = "check"
"""Stands where a job has its script, and begins the name of the job."""
HELP = """\
usage: holdfast check [flags]

Check this node, or with the rendezvous flags of `holdfast run` several nodes together: devices and their counters,
matrix multiplication, memory, disk, then collectives in pairs. Exit code 0: all passed; 8: a node or a link did not.
Flags are those of `holdfast run`; of use here are

  --accelerator NAME   cpu, cuda, npu, xpu, mps or a plug-in's name; looked for if not given
  --nnodes, --node-rank, --node-id, --rdzv-backend, --rdzv-endpoint, --rdzv-id, --master-addr, --master-port,
  --token-file, --tls-cert, --tls-key, --tls-ca, --state-dir, --log-format
"""


def check(argv: list[str]) -> int:
    """Parse, check, print the table."""
    if {"-h", "--help"} & set(argv):
        print(HELP, end="")
        return 0
    parsed = parse_run([*argv, "--", NAME], os.environ)
    if parsed.script != NAME or parsed.script_args:
        raise UsageError(f"holdfast check runs no script, but was given {_surplus(parsed)!r:.100}: leave it out")
    options = msgspec.structs.replace(parsed, node_check=True, check_only=True)
    set_up_logging(options.log_format, "agent")
    check_options(options)
    began_at = time.time()
    code = asyncio.run(run_agent(options))
    _print_table(Path(options.state_dir), began_at)
    return code


def _surplus(parsed: RunOptions) -> str:
    """The word that was taken for a script; what comes after it would be the script's."""
    return parsed.script if parsed.script != NAME else parsed.script_args[0]


def _print_table(state_dir: Path, began_at: float) -> None:
    """From the journal of the job that this was, if it is here."""
    from holdfast.core.records import NodesChecked
    from holdfast.journal import read_entries
    from holdfast.observe.jobs import JOURNAL_NAME, active_at

    journals = sorted(state_dir.glob(f"jobs/*/{JOURNAL_NAME}"), key=active_at)
    if not journals or active_at(journals[-1]) < began_at:
        return
    found = [entry.record for entry in read_entries(journals[-1]) if isinstance(entry.record, NodesChecked)]
    if found and found[-1].at >= began_at:
        _show(found[-1])


def _show(record: object) -> None:
    from rich.console import Group

    from holdfast.cli.check_table import check_table
    from holdfast.cli.status import Screen
    from holdfast.core.records import NodesChecked

    assert isinstance(record, NodesChecked)
    sys.stderr.flush()
    Screen().print(Group(*check_table(record)))
