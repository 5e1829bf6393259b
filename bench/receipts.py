"""recovery.py's tables: medians with their extremes, and how many times as long as Holdfast takes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median, quantiles
from typing import TYPE_CHECKING

from overhead import PLAIN, Block, ratios
from samples import markdown, spread

if TYPE_CHECKING:
    from recovery import Sample

FAULT_HEADER = (
    "fault", "contender", "goes on", "× ours", "whole again", "× ours", "recovered", "steps lost", "short", "replaced",
)  # fmt: skip
OVERHEAD_HEADER = ("contender", "step", "× plain, by means", "middle half", "× plain, by medians", "middle half")
OURS = ("holdfast, 1 spare", "holdfast, no spare")


def fault_table(samples: Sequence[Sample], ranks: int, missing: dict[str, str]) -> list[str]:
    """A row for each fault and contender; those that could not run have one too."""
    rows = []
    for measure in dict.fromkeys(sample.measure for sample in samples):
        of_measure = [sample for sample in samples if sample.measure == measure]
        rows += [
            _fault_row(measure, name, of_measure, ranks) for name in dict.fromkeys(one.contender for one in of_measure)
        ]
        rows += [(measure, name, f"not measured: {why}", *["–"] * 7) for name, why in missing.items()]
    return markdown(FAULT_HEADER, rows)


def _fault_row(measure: str, name: str, samples: list[Sample], ranks: int) -> tuple[str, ...]:
    mine = [sample for sample in samples if sample.contender == name]
    back = [sample.after for sample in mine if not sample.why]
    whole = times(mine, "whole_s")
    goes_on = spread(times(mine, "goes_on_s"), digits=2) if back else ", ".join({sample.why for sample in mine})
    whole_again = spread(whole, digits=2) if whole else "never" if back else "–"
    return (
        measure, name, goes_on, ratio(samples, name, "goes_on_s"), whole_again, ratio(samples, name, "whole_s"),
        f"{len(back)} of {len(mine)}", extremes([one.steps_lost or 0 for one in back]),
        extremes([one.short_steps for one in back]) if whole else "all" if back else "–",
        f"{extremes([one.replaced for one in back])} of {ranks}" if back else "–",
    )  # fmt: skip


def times(samples: Sequence[Sample], which: str) -> list[float]:
    found = [getattr(sample.after, which) for sample in samples if not sample.why]
    return [seconds for seconds in found if seconds is not None]


def ratio(samples: Sequence[Sample], name: str, which: str) -> str:
    """Against Holdfast with a spare if that was measured, else without one."""
    mine = times([sample for sample in samples if sample.contender == name], which)
    for reference in OURS:
        ours = times([sample for sample in samples if sample.contender == reference], which)
        if ours:
            return f"{median(mine) / median(ours):.1f}" if mine else "–"
    return "–"


def extremes(counts: Sequence[int]) -> str:
    if not counts:
        return "–"
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)}–{max(counts)}"


def _ratio_cells(found: Sequence[float]) -> tuple[str, str]:
    """The median with its extremes, and the quartiles: on a busy machine the extremes tell of the machine."""
    low, _, high = quantiles(found, n=4) if len(found) > 1 else (found[0],) * 3
    return spread(found, "", 3).strip(), f"{low:.3f}–{high:.3f}"


def overhead_table(blocks: Sequence[Block]) -> list[str]:
    rows = []
    in_order = sorted(blocks, key=lambda block: block.key != PLAIN)
    for key, name in dict.fromkeys((block.key, block.name) for block in in_order):
        step = spread([block.mean_ms for block in blocks if block.key == key], "ms", 1)
        by = [cell for value in ("mean_ms", "median_ms") for cell in _ratio_cells(ratios(blocks, key, value))]
        rows.append((name, step, *(("1", "–", "1", "–") if key == PLAIN else by)))
    return markdown(OVERHEAD_HEADER, rows)
