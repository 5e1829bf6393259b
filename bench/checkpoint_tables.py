"""The tables of checkpoint.py: medians over rounds, of times and of ratios between neighbours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from samples import markdown

Samples = Sequence[dict[str, Any]]
QUIET = 0.3
"""Cores that others may use in a turn that counts as undisturbed."""


def tables(samples: Samples, size_bytes: float) -> list[str]:
    lines: list[str] = []
    for table in (_first, _stall, _durable, _ours):
        if rows := table(samples, size_bytes):
            lines += [*rows, ""]
    errors = {(s["measure"], s["contender"], s["found"]["error"]) for s in samples if "error" in s["found"]}
    return lines + [f"{measure}, {contender}: {error}" for measure, contender, error in sorted(errors)]


def _of(samples: Samples, measure: str, **wanted: Any) -> list[dict[str, Any]]:
    return [
        s["found"] | {"round": s["round"]}
        for s in samples
        if s["measure"] == measure and "error" not in s["found"] and all(s[k] == v for k, v in wanted.items())
    ]


def _names(samples: Samples, measure: str) -> list[str]:
    return list(dict.fromkeys(s["contender"] for s in samples if s["measure"] == measure))


def _middle(found: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float], digits: int = 3) -> str:
    values = [value(one) for one in found]
    if not values:
        return "–"
    return f"{median(values):.{digits}f} [{min(values):.{digits}f}–{max(values):.{digits}f}]"


def _first(samples: Samples, size_bytes: float) -> list[str]:
    rows = []
    for name in _names(samples, "first"):
        for found in _of(samples, "first", contender=name):
            took = found.get("first_s", found.get("call_s", 0.0))
            rows.append((name, f"{took:.3f} s", f"{found.get('memory_bytes', 0.0) / size_bytes:.2f}"))
    return markdown(("first save", "keeps the training for", "memory beyond, × state"), rows) if rows else []


def _stall(samples: Samples, size_bytes: float) -> list[str]:
    header = (
        "threads",
        "save",
        "stall, ms",
        "stall × memcpy",
        "thread's own time × memcpy",
        "steps after it, × memcpy",
    )
    rows = []
    for threads in (1, 2):
        for name in _names(samples, "stall"):
            found = _of(samples, "stall", contender=name, threads=threads)
            rows.append(
                (
                    str(threads),
                    name,
                    _middle(found, lambda s: 1e3 * s["stall_s"], 1),
                    _middle(found, lambda s: s["stall_s"] / s["memcpy_s"]),
                    _middle(found, lambda s: s["stall_cpu_s"] / s["memcpy_cpu_s"]),
                    _middle(found, lambda s: s["extra_s"] / s["memcpy_s"], 2),
                )
            )
    return markdown(header, rows) if rows else []


def _durable(samples: Samples, size_bytes: float) -> list[str]:
    names = list(dict.fromkeys([*_names(samples, "durable"), *_names(samples, "load")]))
    writes = {one["round"]: _raw_write(one) for one in _of(samples, "persist")}
    rows = []
    for name in names:
        saved, loaded = _of(samples, "durable", contender=name), _of(samples, "load", contender=name)
        beside = [one for one in saved if one["round"] in writes]
        rows.append(
            (
                name,
                _middle(saved, lambda s: s["durable_s"], 2),
                _middle(beside, lambda s: s["durable_s"] / writes[s["round"]], 2),
                _middle(loaded, lambda s: s["load_s"], 2),
                _middle(loaded, lambda s: s["load_s"] / s["memcpy_s"], 1),
            )
        )
    header = ("save", "until durable, s", "× raw write", "load, cold, s", "× memcpy")
    return markdown(header, rows) if rows else []


def _ours(samples: Samples, size_bytes: float) -> list[str]:
    """What the goals are about."""
    persist, restore = _of(samples, "persist"), _of(samples, "restore")
    first = [one for one in _of(samples, "first", contender="session") if "first_s" in one]
    rows: list[tuple[str, str, str]] = []

    def add(what: str, found: Sequence[dict[str, Any]], value: Callable[[dict[str, Any]], float], goal: str) -> None:
        if found:
            rows.append((what, _middle(found, value), goal))

    for threads, goal in ((1, "≤ 0.01"), (2, "≤ 1: a copy in the open")):
        for name in ("session", "checkpointer"):
            found = _of(samples, "stall", contender=name, threads=threads)
            add(f"stall × memcpy, {name}, {threads} compute", found, lambda s: s["stall_s"] / s["memcpy_s"], goal)
            add("… processor time", found, lambda s: s["stall_cpu_s"] / s["memcpy_cpu_s"], goal)
            quiet = [one for one in found if one["others"] < QUIET]
            add(f"… of it, others used < {QUIET} cores", quiet, lambda s: s["stall_s"] / s["memcpy_s"], goal)
    add("first snapshot × memcpy", first, lambda s: s["first_s"] / s["memcpy_s"], "≤ 1.2")
    for threads in (1, 2):
        found = _of(samples, "cadence", threads=threads)
        add(f"step at the advised cadence × step, {threads} compute", found, _slowdown, "≤ 1.01")
        add("… advised: one in so many steps", found, lambda s: float(s["every"]), "")
        add("… its own account of the overhead", found, lambda s: s["stall_s"] / s["every"] / s["step_s"], "≤ 0.01")
    add(
        "persist × raw write", persist, lambda s: s["persist_s"] / min(s["raw_write_1_s"], s["raw_write_2_s"]), "≤ 1.15"
    )
    add("raw write, GB/s", persist, lambda s: s["size_bytes"] / 1e9 / min(s["raw_write_1_s"], s["raw_write_2_s"]), "")
    add("from shared memory × memcpy", restore, lambda s: s["recall_s"] / s["memcpy_s"], "≤ 1.2")
    add("… × memcpy by two threads", restore, lambda s: s["recall_s"] / s["memcpy_2_s"], "")
    add("from cold disk × raw read", restore, lambda s: s["load_cold_s"] / _raw_read(s), "≤ 1.3")
    add("raw read, GB/s", restore, lambda s: size_bytes / 1e9 / _raw_read(s), "")
    add("memcpy, GB/s", restore, lambda s: size_bytes / 1e9 / s["memcpy_s"], "")
    add("shared memory × state", first, lambda s: s["room"], "≤ 2.1")
    return markdown(("ours", "median [min–max]", "goal"), rows) if rows else []


def _slowdown(found: dict[str, Any]) -> float:
    return float(found["advised_s"] / found["plain_s"])


def _raw_write(found: dict[str, Any]) -> float:
    """By one thread or two, whichever is faster on this disk."""
    return float(min(found["raw_write_1_s"], found["raw_write_2_s"]))


def _raw_read(found: dict[str, Any]) -> float:
    return float(min(found["raw_read_1_s"], found["raw_read_2_s"]))
