"""Outages from traces and tables."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.sim.outages import DAY_S, HOUR_S, Outage, OutageKind, Trace, lay_out, merged, read_trace, repair_share


def event(node: str, day: float, what: str, kind: str = "CPU") -> dict[str, object]:
    fault_type = {"Level": "Hardware Failure", "Class": kind, "Desc": ""}
    return {"node_id": node, "event_time": day, "event_type": f"fault_{what}", "fault_type": fault_type}


def test_a_trace_is_read_with_starts_before_ends(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    events = [event("a", 1.0, "end"), event("a", 1.0, "start"), event("b", 2.0, "start", "GPU"), event("b", 4.0, "end")]
    path.write_text(json.dumps(events))
    found = read_trace(path, 10)
    assert found.nodes == 10 and found.span_s == 4.0 * DAY_S
    assert found.outages == (
        Outage(0, DAY_S, DAY_S, OutageKind.DIES),
        Outage(1, 2.0 * DAY_S, 4.0 * DAY_S, OutageKind.DEVICE),
    )
    assert repair_share(found.outages, 10, found.span_s) == pytest.approx(2.0 / 40.0)


def test_a_table_is_read_in_hours(tmp_path: Path) -> None:
    path = tmp_path / "faults.csv"
    path.write_text("node, start, end, kind\nn1, 0, 1, silent\nn2, 5, 6.5,\nn1, 0.5, 2, dies\n")
    found = read_trace(path)
    assert found.outages == (
        Outage(0, 0.0, 2 * HOUR_S, OutageKind.SILENT),
        Outage(1, 5 * HOUR_S, 6.5 * HOUR_S, OutageKind.DIES),
    ), "an outage within another makes it longer"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "neither JSON nor CSV"),
        ("node,start,end\n", "no outages"),
        ("node,start,end\na,2,1\n", "the start first"),
        ("node,start,end,kind\na,1,2,melts\n", "line 2"),
        ("[1]", "not a list of events"),
        ("[]", "no outages"),
    ],
)
def test_a_broken_file_is_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "faults"
    path.write_text(text)
    with pytest.raises(UsageError, match=sentence):
        read_trace(path)


def test_copies_of_a_trace_keep_its_faults_and_the_first_is_as_recorded() -> None:
    outages = tuple(Outage(n, n * DAY_S, n * DAY_S + HOUR_S, OutageKind.DIES) for n in range(4))
    trace = Trace(outages, nodes=4, span_s=10.0 * DAY_S)
    assert lay_out(trace, 4, trace.span_s, seed=0) == list(outages)
    laid = lay_out(trace, 12, 30.0 * DAY_S, seed=3)
    assert len([one for one in laid if one.start_s]) == 3 * 3 * 4 and {one.node for one in laid} == set(range(12))
    assert laid == lay_out(trace, 12, 30.0 * DAY_S, seed=3) != lay_out(trace, 12, 30.0 * DAY_S, seed=4)
    assert all(before.start_s <= after.start_s for before, after in pairwise(laid))
    assert merged(laid) == laid


def test_a_fleet_begins_with_what_is_in_repair() -> None:
    trace = Trace((Outage(0, 0.0, 5.0 * DAY_S, OutageKind.DEVICE),), nodes=1, span_s=10.0 * DAY_S)
    laid = lay_out(trace, 2_000, DAY_S, seed=1)
    in_repair = [one for one in laid if one.start_s == 0.0]
    assert len(in_repair) == pytest.approx(1_000, rel=0.1), "half of the machines, as at any moment"
    assert repair_share(laid, 2_000, DAY_S) == pytest.approx(0.5, abs=0.05)
