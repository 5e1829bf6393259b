"""A check of nodes as a table: which node, which stage, what was measured, what was expected."""

from __future__ import annotations

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from holdfast.cli.terminal import make_table
from holdfast.core.health.findings import ALONE, PAIRED, Measured, NodeVerdict, Stage
from holdfast.core.health.verdicts import milliseconds
from holdfast.core.records import CheckConcluded
from holdfast.core.sentences import link_sentence
from holdfast.observe.formatting import format_time, printable

STYLES = {"fit": "green", "slow": "yellow", "unfit": "red"}
NODES_SHOWN_MAX = 100


def check_table(record: CheckConcluded) -> list[RenderableType]:
    """Return a head line, the table, and a line for each bad link and each node that is not fit."""
    head = printable(f"check of {format_time(record.at)} ({record.why}): {record.took_s:.1f} s, {record.accelerator}")
    bad = [verdict for verdict in record.nodes if verdict.fitness != "fit"]
    lines = [Text(printable(f"  {v.node_id}: {v.why}"), style=STYLES[v.fitness]) for v in bad]
    lines += [Text(printable(f"  {link_sentence(link)}"), style="yellow") for link in record.links]
    return [Text(head), _table(record), *lines]


def _table(record: CheckConcluded) -> Table:
    table = make_table("node", "verdict", *ALONE, *PAIRED)
    expected = _expected(record)
    table.add_row("expected", "", *(expected.get(stage, "-") for stage in (*ALONE, *PAIRED)), style="dim")
    worst_first = sorted(record.nodes, key=lambda verdict: verdict.fitness == "fit")
    for verdict in worst_first[:NODES_SHOWN_MAX]:
        cells = (_cell(verdict, stage, expected.get(stage, "-")) for stage in (*ALONE, *PAIRED))
        table.add_row(printable(verdict.node_id), _verdict(verdict), *cells)
    if len(record.nodes) > NODES_SHOWN_MAX:
        table.add_row(f"and {len(record.nodes) - NODES_SHOWN_MAX} more")
    return table


def _expected(record: CheckConcluded) -> dict[Stage, str]:
    """Return the expected times of the first round. Later rounds are compared with each other."""
    return {norm.stage: milliseconds(norm.expected_s) for norm in record.norms}


def _verdict(verdict: NodeVerdict) -> Text:
    left_out = ", left out" if verdict.is_left_out else ""
    return Text(f"{verdict.fitness}{left_out}", style=STYLES[verdict.fitness])


def _cell(verdict: NodeVerdict, stage: Stage, expected: str) -> Text:
    found = next((value for value in verdict.measured if value.stage == stage), None)
    if found is None:
        failed = any(problem.stage == stage for problem in verdict.problems)
        return Text("failed", style="red") if failed else Text("-")
    return Text(_value(found, expected), style="yellow" if found.is_slow else "")


def _value(value: Measured, expected: str) -> str:
    """Return a measured time, with the expected one if that is not the one in the head of the table."""
    norm = milliseconds(value.expected_s)
    return f"{milliseconds(value.value_s)} ({value.times:.2f}×{'' if expected in (norm, '-') else f' {norm}'})"
