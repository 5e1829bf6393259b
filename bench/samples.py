"""Measured times, and the table that shows them: the median with its extremes, never an average."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

HEADER = ("measure", "launcher", "median [min–max]", "recovered", "× Holdfast")


@dataclass(frozen=True)
class Sample:
    """One measurement. Without a time, `why` says what happened instead."""

    measure: str
    launcher: str
    seconds: float | None
    why: str = ""
    split_s: dict[str, float] = field(default_factory=dict)
    """Where the time went, by phase."""


def spread(values: Sequence[float], unit: str = "s", digits: int = 3) -> str:
    if not values:
        return "–"
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), median(values), max(values)))
    return f"{middle} [{low}–{high}] {unit}"


def table(samples: Iterable[Sample], reference: str) -> list[str]:
    """A row for each measure and launcher, as Markdown."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.measure, sample.launcher), []).append(sample)
    measures = list(dict.fromkeys(measure for measure, _ in groups))
    in_order = sorted(groups, key=lambda group: measures.index(group[0]))
    return markdown(HEADER, [_row(groups, measure, launcher, reference) for measure, launcher in in_order])


def _row(groups: dict[tuple[str, str], list[Sample]], measure: str, launcher: str, reference: str) -> tuple[str, ...]:
    mine, theirs = (times(groups.get((measure, name), [])) for name in (launcher, reference))
    ratio = f"{median(mine) / median(theirs):.1f}" if mine and theirs else "–"
    count = len(groups[measure, launcher])
    return measure, launcher, spread(mine), f"{len(mine)} of {count}", ratio


def times(samples: Iterable[Sample]) -> list[float]:
    return [sample.seconds for sample in samples if sample.seconds is not None]


def split_table(samples: Iterable[Sample]) -> list[str]:
    """Where the time went: the median of each phase over all samples that have it."""
    phases: dict[str, list[float]] = {}
    for sample in samples:
        for phase, duration_s in sample.split_s.items():
            phases.setdefault(phase, []).append(duration_s * 1e3)
    return markdown(("phase", "median [min–max]"), [(name, spread(ms, "ms", 1)) for name, ms in phases.items()])


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]
