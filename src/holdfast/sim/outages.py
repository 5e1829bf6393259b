"""Outages of machines: from a published trace, or from a table of one's own.

    trace   a JSON list of events in days, as published with InfiniteHBD: {"node_id", "event_time", "event_type":
            "fault_start" | "fault_end", "fault_type": {"Level", "Class", "Desc"}}
    table   CSV with the columns node, start, end (hours) and, if wanted, kind

A trace of fewer machines than are simulated is laid side by side: each copy is shifted in time, wraps round at the
trace's end, and has its machines in another order. So bursts, repeated faults and repairs stay as they are within a
copy, and copies know nothing of each other. What is in repair as the time begins comes to the job later. The first
copy of the first seed is the trace as it was recorded.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from holdfast.errors import UsageError

DAY_S = 86_400.0
HOUR_S = 3_600.0
TRACE_BYTES_MAX = 1 << 30


class OutageKind(StrEnum):
    """How an outage begins, as far as the job is concerned."""

    DIES = "dies"
    """The machine is gone; its connections break."""
    SILENT = "silent"
    """Nothing is heard of it any more: its network, or the machine hangs."""
    DEVICE = "device"
    """A worker fails by an error that is blamed on its machine."""
    PROCESS = "process"
    """A worker fails, and the machine is well."""
    LEAVES = "leaves"
    """The machine is asked to go: a test failed, maintenance."""


class Outage(msgspec.Struct, frozen=True, array_like=True):
    """A fault of a machine, and until when it is being repaired. Seconds from the start."""

    node: int
    start_s: float
    end_s: float
    kind: OutageKind


class Trace(msgspec.Struct, frozen=True):
    """The outages of some machines in some time."""

    outages: tuple[Outage, ...]
    nodes: int
    span_s: float


def read_trace(path: Path, nodes: int = 0) -> Trace:
    """Return the outages of a file. `nodes`: how many machines it is about, also those without an outage."""
    try:
        if path.stat().st_size > TRACE_BYTES_MAX:
            raise UsageError(f"--trace {path}: the file is larger than {TRACE_BYTES_MAX >> 30} GiB")
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--trace {path}: the file cannot be read: {error}") from None
    found = from_events(_events(path, text)) if text.lstrip().startswith("[") else _from_table(path, text)
    if not found.outages:
        raise UsageError(f"--trace {path}: the file has no outages")
    if nodes and nodes < found.nodes:
        raise UsageError(f"--trace-nodes {nodes}: the trace names {found.nodes} machines")
    return msgspec.structs.replace(found, nodes=nodes or found.nodes)


def _events(path: Path, text: str) -> list[dict[str, Any]]:
    try:
        events = json.loads(text)
        for event in events:
            float(event["event_time"]), str(event["node_id"]), str(event["event_type"])
    except (ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"--trace {path}: not a list of events with node_id, event_time (days) and event_type: {error!r}"
        ) from None
    return list(events)


def from_events(events: Iterable[dict[str, Any]]) -> Trace:
    """Return the times in which at least one fault of a machine was open. At equal times starts come first: a fault
    that ends as it starts would else stay open to the end of the trace."""
    in_order = sorted(events, key=lambda e: (e["event_time"], e["event_type"] == "fault_end"))
    numbers: dict[str, int] = {}
    begun: dict[int, list[tuple[float, OutageKind]]] = {}
    found: list[Outage] = []
    for event in in_order:
        node, at = numbers.setdefault(event["node_id"], len(numbers)), event["event_time"] * DAY_S
        open_ones = begun.setdefault(node, [])
        if event["event_type"] == "fault_start":
            open_ones.append((at, _kind(event.get("fault_type") or {})))
        elif len(open_ones) > 1:
            open_ones.pop()
        elif open_ones:
            started, kind = open_ones.pop()
            found.append(Outage(node, started, at, kind))
    last = in_order[-1]["event_time"] * DAY_S if in_order else 0.0
    for node, left in begun.items():
        if left:
            found.append(Outage(node, left[0][0], last, left[0][1]))
    return Trace(tuple(sorted(found, key=lambda o: (o.start_s, o.node))), len(numbers), last)


def _kind(fault_type: dict[str, Any]) -> OutageKind:
    """Return what a job sees of a fault of the published trace. Software faults took the machine away too."""
    match str(fault_type.get("Class", "")):
        case "GPU":
            return OutageKind.DEVICE
        case "NIC" | "Parameter Plane Cable":
            return OutageKind.SILENT
        case "Stress Test Failure" | "Training Task Troubleshooting" | "Change" | "Test":
            return OutageKind.LEAVES
        case _:
            return OutageKind.DIES


def _from_table(path: Path, text: str) -> Trace:
    rows = csv.DictReader(io.StringIO(text), skipinitialspace=True)
    if not {"node", "start", "end"} <= set(rows.fieldnames or ()):
        raise UsageError(f"--trace {path}: neither JSON nor CSV with a first line node,start,end,kind (times in hours)")
    numbers: dict[str, int] = {}
    found: list[Outage] = []
    for row in rows:
        try:
            start_s, end_s = float(row["start"]) * HOUR_S, float(row["end"]) * HOUR_S
            kind = OutageKind((row.get("kind") or OutageKind.DIES.value).strip())
        except (ValueError, TypeError) as error:
            raise UsageError(f"--trace {path}, line {rows.line_num}: {error}") from None
        if not 0.0 <= start_s <= end_s < math.inf:
            raise UsageError(f"--trace {path}, line {rows.line_num}: start and end are hours, the start first")
        found.append(Outage(numbers.setdefault(row["node"].strip(), len(numbers)), start_s, end_s, kind))
    span_s = max((one.end_s for one in found), default=0.0)
    return Trace(tuple(sorted(merged(found), key=lambda o: (o.start_s, o.node))), len(numbers), span_s)


def merged(outages: Iterable[Outage]) -> list[Outage]:
    """Return the outages of each machine without overlaps, sorted by their start: one that begins while another is
    being repaired makes the repair last longer, and is no fault of its own."""
    last: dict[int, int] = {}
    found: list[Outage] = []
    for one in sorted(outages, key=lambda o: (o.start_s, o.node)):
        before = last.get(one.node)
        if before is not None and one.start_s < found[before].end_s:
            found[before] = msgspec.structs.replace(found[before], end_s=max(found[before].end_s, one.end_s))
        else:
            last[one.node] = len(found)
            found.append(one)
    return found


def lay_out(trace: Trace, nodes: int, span_s: float, seed: int) -> list[Outage]:
    """Return the outages of this many machines in this much time."""
    random = Random(f"{seed} trace")
    copies = math.ceil(nodes / trace.nodes)
    found = []
    for copy in range(copies):
        is_recorded = copy == 0 and seed == 0
        shift_s = 0.0 if is_recorded else random.uniform(0.0, trace.span_s)
        order = list(range(trace.nodes)) if is_recorded else random.sample(range(trace.nodes), trace.nodes)
        for one in trace.outages:
            node = copy * trace.nodes + order[one.node]
            start_s = (one.start_s + shift_s) % trace.span_s
            left_s = start_s + one.end_s - one.start_s - trace.span_s
            if left_s > 0.0 and not is_recorded and node < nodes:  # it began before the time that is simulated
                found.append(Outage(node, 0.0, left_s, OutageKind.DIES))
            while node < nodes and start_s < span_s:
                found.append(Outage(node, start_s, start_s + one.end_s - one.start_s, one.kind))
                start_s += trace.span_s
    return merged(found)


def repair_share(outages: Iterable[Outage], nodes: int, span_s: float) -> float:
    """Return the share of the machines' time that they are in repair: lost to any job, whatever it does."""
    takes_machine = (one for one in outages if one.kind is not OutageKind.PROCESS)
    return sum(max(min(one.end_s, span_s) - one.start_s, 0.0) for one in takes_machine) / (nodes * span_s)
